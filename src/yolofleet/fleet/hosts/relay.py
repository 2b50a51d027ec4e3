"""Authenticated connections from the hosts of a run to the run's store on one of them.

The store listens on 127.0.0.1 of its host. There the host agent listens on the fleet's network interface, and forwards
a connection to the store once both ends have proved that they know the run's secret. On every other host the host agent
listens on 127.0.0.1, proves the secret, and forwards the connections of its own workers. The secret itself is never sent
between hosts, and only the host agents have it. Standard library alone.

The proof, with H(label, a, b) = HMAC-SHA256(secret, label + a + b) and a fresh random number of 32 bytes from each end:

    store's host -> other host: A
    other host -> store's host: B, H("caller", A, B)
    store's host -> other host: H("store", A, B)

The data after that is not encrypted. Against an attacker who can change packets, use a private network or a VPN.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from yolofleet.fleet.hosts.agent_process import Rendezvous, StoreEnd
from yolofleet.support.listener import LOOPBACK, open_listener

NONCE_BYTES = 32
PROOF_BYTES = 32  # of SHA-256
PROOF_S = 10.0  # deadline of a caller's proof
MOST_UNPROVED = 64  # callers without a proof; one more, and the oldest is dropped
REACH_S = 60.0  # for attempts to reach the store's host, which may start its relay later
RETRY_S = 0.2
PIECE_BYTES = 1 << 16


class Connection(NamedTuple):
    """The two ends of a stream socket, as asyncio gives them."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class NoProof(OSError):
    """The other end does not know the secret, or is not a relay."""


class Relay:
    """This host's end of the run's store, while the run lasts.

    The constructor opens the sockets. Call :meth:`start` after the agent has started, and :meth:`close` at the end.

    Args:
        say: takes a line about a connection that failed; the relay's thread calls it.
    Raises:
        OSError: an address or port cannot be used.
        ValueError: the secret is not hexadecimal, or empty.
    """

    def __init__(self, place: Rendezvous, say: Callable[[str], None] = lambda _: None) -> None:
        self._secret = bytes.fromhex(place.secret)
        if not self._secret:
            raise ValueError("a run on several hosts needs a secret")
        self._address, self._port, self._say = place.address, place.port, say
        self._store: socket.socket | None = None
        self._unproved: dict[asyncio.Task[None], None] = {}
        if place.node == place.store_node:
            self._handle = self._admit
            self._listener = open_listener(place.address, place.port)
            try:
                self._store = open_listener(LOOPBACK)
            except OSError:
                self._listener.close()
                raise
            self._store_port = self._store.getsockname()[1]
            self.end = StoreEnd(self._store_port, self._store.fileno())
        else:
            self._handle = self._connect_worker
            self._listener = open_listener(LOOPBACK)
            self.end = StoreEnd(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Forward connections from now on, in a thread. The agent has inherited the store's socket before."""
        if self._store is not None:
            self._store.close()
        self._thread.start()

    def close(self) -> None:
        """Close all sockets."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._serving.cancel)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join(1.0)
        for opened in (self._listener, self._store):
            if opened is not None:
                opened.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # such as too many open files; asyncio tries again
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._guarded, sock=self._listener)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            tasks = asyncio.all_tasks() - {self._serving}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # for the connections to close

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end. A failure of it must not end the relay."""
        try:
            with suppress(OSError, asyncio.TimeoutError):
                await self._handle(Connection(reader, writer))
        finally:
            writer.close()

    async def _admit(self, caller: Connection) -> None:
        """On the store's host: connect a caller that proves the secret with the store."""
        task = asyncio.current_task()
        assert task is not None
        while len(self._unproved) >= MOST_UNPROVED:
            longest = next(iter(self._unproved))
            del self._unproved[longest]
            longest.cancel()
        self._unproved[task] = None
        try:
            await asyncio.wait_for(prove_to_caller(caller, self._secret), PROOF_S)
        finally:
            self._unproved.pop(task, None)
        await _join(caller, Connection(*await asyncio.open_connection(LOOPBACK, self._store_port)))

    async def _connect_worker(self, caller: Connection) -> None:
        """On another host: connect a worker of this host with the store."""
        gives_up_at_s = self._loop.time() + REACH_S
        while True:
            try:
                store = await asyncio.wait_for(self._reach(), PROOF_S)
                break
            except (OSError, asyncio.TimeoutError) as problem:
                if self._loop.time() > gives_up_at_s:
                    why = "it does not answer" if isinstance(problem, asyncio.TimeoutError) else str(problem)
                    self._say(f"cannot reach the run's store at {self._address}:{self._port}: {why}")
                    raise
                await asyncio.sleep(RETRY_S)
        await _join(caller, store)

    async def _reach(self) -> Connection:
        store = Connection(*await asyncio.open_connection(self._address, self._port))
        try:
            await prove_to_store(store, self._secret)
        except BaseException:
            store.writer.close()
            raise
        return store


async def prove_to_caller(caller: Connection, secret: bytes) -> None:
    """Prove the secret as the store's host, after the caller has proved it.

    Raises:
        OSError: the caller does not know the secret, or has closed the connection.
    """
    mine = os.urandom(NONCE_BYTES)
    caller.writer.write(mine)
    theirs, proof = await _exactly(caller, NONCE_BYTES), await _exactly(caller, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", mine, theirs)):
        raise NoProof("the caller does not know the run's secret")
    caller.writer.write(_proof(secret, b"store", mine, theirs))


async def prove_to_store(store: Connection, secret: bytes) -> None:
    """Prove the secret as a caller, and check the proof of the store's host.

    Raises:
        OSError: the store's host does not know the secret, or has closed the connection.
    """
    theirs, mine = await _exactly(store, NONCE_BYTES), os.urandom(NONCE_BYTES)
    store.writer.write(mine + _proof(secret, b"caller", theirs, mine))
    if not hmac.compare_digest(await _exactly(store, PROOF_BYTES), _proof(secret, b"store", theirs, mine)):
        raise NoProof("the process that listens there does not know the run's secret")


def _proof(secret: bytes, label: bytes, stores: bytes, callers: bytes) -> bytes:
    return hmac.new(secret, label + stores + callers, hashlib.sha256).digest()


async def _exactly(source: Connection, count: int) -> bytes:
    try:
        return await source.reader.readexactly(count)
    except asyncio.IncompleteReadError:
        raise NoProof("the other end closed the connection before it proved the secret") from None


async def _join(one: Connection, other: Connection) -> None:
    """Forward in both directions until either end closes."""
    ways = [asyncio.ensure_future(_forward(*way)) for way in ((one, other), (other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        other.writer.close()


async def _forward(source: Connection, target: Connection) -> None:
    while piece := await source.reader.read(PIECE_BYTES):
        target.writer.write(piece)
        await target.writer.drain()
