"""The way from one host of a run to the run's store on another, for those who know the run's secret.

The store listens on 127.0.0.1 of its host. There the host agent listens on the fleet's network interface, and forwards
a connection to the store once both ends have proved that they know the secret. On every other host the host agent
listens on 127.0.0.1, proves the secret, and forwards what its own workers say. The secret itself never travels between
hosts, and no process but the host agents has it. Standard library alone.

The proof, with H(label, a, b) = HMAC-SHA256(secret, label + a + b) and a fresh random number of 32 bytes from each end:

    store's host -> other host: A
    other host -> store's host: B, H("caller", A, B)
    store's host -> other host: H("store", A, B)

What follows is not encrypted: a private network or a VPN is still needed against those who can change packets.
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

from yolofleet.fleet.job import Meeting, StoreEnd
from yolofleet.parallel.listener import LOOPBACK, open_listener

NONCE_BYTES = 32
PROOF_BYTES = 32  # of SHA-256
PROOF_S = 10.0  # a caller must have proved the secret by then
MOST_UNPROVED = 64  # callers at a time; one more, and the one that has waited longest is dropped
REACH_S = 60.0  # how long the way to the store's host is tried: that host may start its relay later
RETRY_S = 0.2
PIECE_BYTES = 1 << 16


class NoProof(OSError):
    """The other end does not know the secret, or is no relay."""


class Relay:
    """This host's end of the run's store, while the run lasts.

    The sockets are open once it is made; call :meth:`start` when the agent has been started, and :meth:`close` at the
    end.

    Args:
        say: takes a line about a connection that failed; called in the relay's thread.
    Raises:
        OSError: an address or port cannot be used.
        ValueError: the secret is not hexadecimal, or empty.
    """

    def __init__(self, meeting: Meeting, say: Callable[[str], None] = lambda _: None) -> None:
        self._secret = bytes.fromhex(meeting.secret)
        if not self._secret:
            raise ValueError("a run on several hosts needs a secret")
        self._address, self._port, self._say = meeting.address, meeting.port, say
        self._store: socket.socket | None = None
        self._unproved: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        if meeting.node == meeting.store_node:
            self._handle = self._admit
            self._listener = open_listener(meeting.address, meeting.port)
            try:
                self._store = open_listener(LOOPBACK)
            except OSError:
                self._listener.close()
                raise
            self._store_port = self._store.getsockname()[1]
            self.end = StoreEnd(self._store_port, self._store.fileno())
        else:
            self._handle = self._lead
            self._listener = open_listener(LOOPBACK)
            self.end = StoreEnd(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Forward connections from now on, in a thread. The agent has inherited the store's socket by now."""
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
            except OSError:  # too many open files, or the caller has left already
                await asyncio.sleep(RETRY_S)
                continue
            task = asyncio.ensure_future(self._guarded(caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _guarded(self, caller: socket.socket) -> None:
        """One connection to its end, whatever happens to it."""
        with caller, suppress(OSError, asyncio.TimeoutError):
            await self._handle(caller)

    async def _admit(self, caller: socket.socket) -> None:
        """On the store's host: let a caller that proves the secret speak with the store."""
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

    async def _lead(self, caller: socket.socket) -> None:
        """On another host: lead a worker of this host to the store."""
        loop = asyncio.get_running_loop()
        gives_up_at_s = loop.time() + REACH_S
        while True:
            try:
                store = await asyncio.wait_for(self._reach(), PROOF_S)
                break
            except (OSError, asyncio.TimeoutError) as problem:
                if loop.time() > gives_up_at_s:
                    why = "it does not answer" if isinstance(problem, asyncio.TimeoutError) else str(problem)
                    self._say(f"no way to the run's store at {self._address}:{self._port}: {why}")
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
    """Prove the secret, as the store's host, to a caller that proves it first.

    Raises:
        OSError: it does not know the secret, or has left.
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
    """Prove the secret, as a caller, and let the store's host prove it.

    Raises:
        OSError: it does not know the secret, or has left.
    """
    loop = asyncio.get_running_loop()
    theirs, mine = await _exactly(store, NONCE_BYTES), os.urandom(NONCE_BYTES)
    await loop.sock_sendall(store, mine + _proof(secret, b"caller", theirs, mine))
    if not hmac.compare_digest(await _exactly(store, PROOF_BYTES), _proof(secret, b"store", theirs, mine)):
        raise NoProof("what listens there does not know the run's secret")


def _proof(secret: bytes, label: bytes, stores: bytes, callers: bytes) -> bytes:
    return hmac.new(secret, label + stores + callers, hashlib.sha256).digest()


async def _exactly(source: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    got = b""
    while len(got) < count:
        piece = await loop.sock_recv(source, count - len(got))
        if not piece:
            raise NoProof("what listens there, or calls, closed the connection before it proved the secret")
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
    """Forward both ways until either end closes."""
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small questions that wait for answers
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
