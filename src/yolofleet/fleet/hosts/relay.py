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

from yolofleet.fleet.hosts.agent_process import Rendezvous, StoreEnd
from yolofleet.support.listener import LOOPBACK, open_listener

NONCE_BYTES = 32
PROOF_BYTES = 32  # of SHA-256
PROOF_S = 10.0  # deadline of a caller's proof
MOST_UNPROVED = 64  # callers without a proof; one more, and the oldest is dropped
REACH_S = 60.0  # for attempts to reach the store's host, which may start its relay later
RETRY_S = 0.2
PIECE_BYTES = 1 << 16


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
        self._tasks: set[asyncio.Task[None]] = set()
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
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        try:
            await self._accept()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                caller, _ = await loop.sock_accept(self._listener)
            except OSError:  # too many open files, or the caller has closed already
                await asyncio.sleep(RETRY_S)
                continue
            task = asyncio.ensure_future(self._guarded(caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _guarded(self, caller: socket.socket) -> None:
        """Serve one connection to its end. A failure of it must not end the relay."""
        with caller, suppress(OSError, asyncio.TimeoutError):
            await self._handle(caller)

    async def _admit(self, caller: socket.socket) -> None:
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
        with await _connect(LOOPBACK, self._store_port) as store:
            await _join(caller, store)

    async def _connect_worker(self, caller: socket.socket) -> None:
        """On another host: connect a worker of this host with the store."""
        loop = asyncio.get_running_loop()
        gives_up_at_s = loop.time() + REACH_S
        while True:
            try:
                store = await asyncio.wait_for(self._reach(), PROOF_S)
                break
            except (OSError, asyncio.TimeoutError) as problem:
                if loop.time() > gives_up_at_s:
                    why = "it does not answer" if isinstance(problem, asyncio.TimeoutError) else str(problem)
                    self._say(f"cannot reach the run's store at {self._address}:{self._port}: {why}")
                    raise
                await asyncio.sleep(RETRY_S)
        with store:
            await _join(caller, store)

    async def _reach(self) -> socket.socket:
        store = await _connect(self._address, self._port)
        try:
            await prove_to_store(store, self._secret)
        except BaseException:
            store.close()
            raise
        return store


async def prove_to_caller(caller: socket.socket, secret: bytes) -> None:
    """Prove the secret as the store's host, after the caller has proved it.

    Raises:
        OSError: the caller does not know the secret, or has closed the connection.
    """
    loop = asyncio.get_running_loop()
    caller.setblocking(False)
    mine = os.urandom(NONCE_BYTES)
    await loop.sock_sendall(caller, mine)
    theirs = await _exactly(caller, NONCE_BYTES)
    proof = await _exactly(caller, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", mine, theirs)):
        raise NoProof("the caller does not know the run's secret")
    await loop.sock_sendall(caller, _proof(secret, b"store", mine, theirs))


async def prove_to_store(store: socket.socket, secret: bytes) -> None:
    """Prove the secret as a caller, and check the proof of the store's host.

    Raises:
        OSError: the store's host does not know the secret, or has closed the connection.
    """
    loop = asyncio.get_running_loop()
    theirs, mine = await _exactly(store, NONCE_BYTES), os.urandom(NONCE_BYTES)
    await loop.sock_sendall(store, mine + _proof(secret, b"caller", theirs, mine))
    if not hmac.compare_digest(await _exactly(store, PROOF_BYTES), _proof(secret, b"store", theirs, mine)):
        raise NoProof("the process that listens there does not know the run's secret")


def _proof(secret: bytes, label: bytes, stores: bytes, callers: bytes) -> bytes:
    return hmac.new(secret, label + stores + callers, hashlib.sha256).digest()


async def _exactly(source: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    got = b""
    while len(got) < count:
        piece = await loop.sock_recv(source, count - len(got))
        if not piece:
            raise NoProof("the other end closed the connection before it proved the secret")
        got += piece
    return got


async def _connect(address: str, port: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _join(one: socket.socket, other: socket.socket) -> None:
    """Forward in both directions until either end closes."""
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small requests that wait for answers
    ways = [asyncio.ensure_future(_forward(one, other)), asyncio.ensure_future(_forward(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _forward(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(source, PIECE_BYTES):
        await loop.sock_sendall(target, piece)
