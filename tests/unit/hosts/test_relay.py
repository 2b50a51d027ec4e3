"""The relay between hosts forwards a byte only for those who know the run's secret. Real sockets on loopback addresses,
which stand for hosts; in place of torch's store a server that answers in capitals."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from yolofleet.fleet.hosts import relay as relays
from yolofleet.fleet.hosts.agent_process import Rendezvous
from yolofleet.fleet.hosts.relay import Relay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")

DEADLINE_S = 900
SECRET = secrets.token_hex(32)
Make = Callable[..., Relay]


@pytest.fixture
def make() -> Iterator[Make]:
    """Relays of a run on three hosts; the host that owns the store gets one."""
    made: list[Relay] = []
    stores: list[socket.socket] = []
    held = socket.socket()  # nobody else is given this port by chance, and a relay can listen on it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]

    def one(
        node: int, *, secret: str = SECRET, store_node: int = 0, say: Callable[[str], None] = print
    ) -> Relay:
        meeting = Rendezvous(node, 3, "127.0.0.1", port, "lo", secret, store_node)
        relay = Relay(meeting, say)
        if relay.end.listener is not None:
            store = socket.socket(fileno=os.dup(relay.end.listener))
            stores.append(store)
            threading.Thread(target=capitals, args=(store,), daemon=True).start()
        relay.start()
        made.append(relay)
        return relay

    yield one
    for relay in made:
        relay.close()
    held.close()
    for store in stores:
        with suppress(OSError):
            store.shutdown(socket.SHUT_RDWR)
        store.close()


def capitals(store: socket.socket) -> None:
    """Answer each connection, one after the other, until the socket is shut down."""
    with suppress(OSError):
        while True:
            connection, _ = store.accept()
            with connection, suppress(OSError):
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece.upper())


def connect(port: int, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((address, port), DEADLINE_S)


def port_of(relay: Relay) -> int:
    return int(relay._listener.getsockname()[1])


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the other end closes."""
    got = b""
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            got += piece
    return got


@pytest.mark.parametrize("store_node", [0, 2])
def test_a_worker_of_another_host_speaks_with_the_store_of_any_host(make: Make, store_node: int) -> None:
    make(store_node, store_node=store_node)
    other = make(1, store_node=store_node)
    for _ in range(2):  # one connection after the other
        with connect(other.end.port) as worker:
            worker.sendall(b"set a key")
            assert worker.recv(100) == b"SET A KEY"
            big = b"x" * 3_000_000
            threading.Thread(target=worker.sendall, args=(big,), daemon=True).start()
            got = 0
            while got < len(big):
                got += len(worker.recv(1 << 16))


def test_a_host_that_comes_first_waits_for_the_stores_host(make: Make) -> None:
    other = make(1)
    with connect(other.end.port) as worker:
        worker.sendall(b"early")
        make(0)
        assert worker.recv(100) == b"EARLY"


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.0\r\n\r\n" * 10, bytes(64), b"x" * 100_000])
def test_a_stranger_gets_a_random_number_and_nothing_else(make: Make, words: bytes) -> None:
    host = make(0)
    with connect(port_of(host)) as stranger:
        with suppress(OSError):  # the relay may have closed the connection before all was sent
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        assert len(rest_of(stranger)) <= relays.NONCE_BYTES


def test_a_proof_is_good_for_one_connection_and_one_direction(make: Make) -> None:
    host = make(0)
    secret = bytes.fromhex(SECRET)
    with connect(port_of(host)) as first:
        challenge, mine = first.recv(32), bytes(32)
        proof = relays._proof(secret, b"caller", challenge, mine)
        first.sendall(mine + proof + b"hello")
        assert first.recv(32) == relays._proof(secret, b"store", challenge, mine)
        assert first.recv(100) == b"HELLO"
    with connect(port_of(host)) as replay:
        assert replay.recv(32) != challenge
        replay.sendall(mine + proof)
        assert rest_of(replay) == b""
    with connect(port_of(host)) as mirror:  # send back what the store's host sent
        challenge = mirror.recv(32)
        mirror.sendall(challenge + relays._proof(b"another", b"caller", challenge, challenge))
        assert rest_of(mirror) == b""


def test_a_worker_says_nothing_to_a_false_store(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "REACH_S", 0.0)
    said: list[str] = []
    other = make(1, say=said.append)
    with socket.create_server(("127.0.0.1", other._port)) as false, connect(other.end.port) as worker:
        worker.sendall(b"the weights")
        caller, _ = false.accept()
        with caller:
            caller.settimeout(DEADLINE_S)
            caller.sendall(bytes(32))
            got = b""
            while len(got) < 64:
                got += caller.recv(100)
            caller.sendall(bytes(32))
            assert len(got) == 64 and rest_of(caller) == b""
        assert rest_of(worker) == b""
    assert said == [
        f"cannot reach the run's store at 127.0.0.1:{other._port}: the process that listens there does not know the run's secret"
    ]


def test_another_runs_secret_is_none(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "REACH_S", 0.0)
    make(0)
    other = make(1, secret=secrets.token_hex(32))
    with connect(other.end.port) as worker:
        worker.sendall(b"hello")
        assert rest_of(worker) == b""


def test_silent_strangers_do_not_keep_the_fleet_out(make: Make) -> None:
    host, other = make(0), make(1)
    strangers = [connect(port_of(host)) for _ in range(relays.MOST_UNPROVED + 20)]
    try:
        with connect(other.end.port) as worker:
            worker.sendall(b"hello")
            assert worker.recv(100) == b"HELLO"
        assert len(rest_of(strangers[0])) <= 32, "the one that has waited longest is dropped"
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_proves_nothing_in_time_is_dropped(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "PROOF_S", 0.2)
    with connect(port_of(make(0))) as stranger:
        assert len(rest_of(stranger)) <= 32


def test_nothing_listens_once_it_is_closed(make: Make) -> None:
    host, other = make(0), make(1)
    with connect(other.end.port) as worker:
        worker.sendall(b"hello")
        assert worker.recv(100) == b"HELLO"
        ports = port_of(host), port_of(other)
        host.close()
        other.close()
        assert rest_of(worker) == b""
    for port in ports:
        with pytest.raises(OSError):
            connect(port)


def test_a_port_that_is_taken_is_an_error_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use"):
            Relay(Rendezvous(0, 2, "127.0.0.1", port, "lo", SECRET))


def test_the_secret_is_in_no_text_of_the_meeting() -> None:
    assert SECRET not in repr(Rendezvous(0, 2, "10.0.0.1", 29500, "lo", SECRET))
