"""Questions of the doctor to a host, by name. Standard library alone; arguments and answers are plain values.

``PROBES`` is the complete list of what the other end of a connection may ask. Every probe ends within its deadline and
changes nothing: it writes only unnamed files that measure the disk, the index of a data set in the cache, and bytes to
callers that know the token of :func:`listen`.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from yolofleet.fleet.doctor.machine import Machine
from yolofleet.fleet.doctor.machine_facts import all_facts, in_child
from yolofleet.fleet.doctor.network_facts import firewall, interfaces, neighbour_state, resolve, route_to
from yolofleet.support.listener import open_listener

Values = dict[str, Any]  # for JSON

CONNECT_S = 2.5  # more than a lost packet that is sent again after a second
LONG_BYTES = 64 << 10
LONG_S = 10.0  # for a long message: some lost packets delay it, a way that drops every long packet never lets it pass
LONGEST_LISTEN_S = 120.0
MOST_ADDRESSES, MOST_PORTS, MOST_CALLERS = 32, 8, 32  # of a listener; callers at a time on each socket
MEASURE_S, MEASURE_BYTES, PIECE_BYTES, ECHOES = 1.0, 32 << 20, 1 << 18, 15
# Bytes that a listener reads from one caller: _bandwidth doubles its messages up to MEASURE_BYTES.
MOST_BYTES = 2 * MEASURE_BYTES + 4096
PORT_TRIES = 5  # the kernel may choose a port on one address that is in use on another
REFUSES_AT_ONCE_S = 0.8  # after 3 s the kernel gives up a neighbour that does not answer
# It remembers that for a second or two, although a cable, an interface or a machine may be back.
AGAIN_AFTER_S = (1.0, 2.0)
REACH_THREADS = 256  # threads only wait: 128 hosts with two interfaces each take little longer than CONNECT_S
NO_ROUTE = ("prohibited", "silent", "no-route")  # outcomes that the kernel may remember
_TOKEN_BYTES = 16

# -- connections between hosts: listen for others, connect to them, and measure ------------------------------


class _Listener:
    """Answer callers that know the token, on some ports of some addresses, until its time is over.

    Each port is open on every address on which it is free. A socket serves MOST_CALLERS at a time; others wait. A
    caller must send the token within CONNECT_S, and at most MOST_BYTES in all.
    """

    def __init__(self, addresses: Sequence[str], ports: Sequence[int], token: bytes, seconds: float) -> None:
        self.token = token
        self.ends_at_s = time.monotonic() + min(seconds, LONGEST_LISTEN_S)
        self.sockets: list[socket.socket] = []
        self.ports: list[int] = []
        self.problems: dict[int, str] = {}
        for port in ports:
            opened, problems = _open_port(addresses, port)
            if not opened:
                self.problems[port] = "; ".join(problems)
                continue
            self.sockets += opened
            self.ports.append(int(opened[0].getsockname()[1]))
        for listening in self.sockets:
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def close(self) -> None:
        self.ends_at_s = 0.0
        for listening in self.sockets:
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        free = threading.BoundedSemaphore(MOST_CALLERS)
        with listening:
            listening.settimeout(0.2)
            while time.monotonic() < self.ends_at_s:
                if not free.acquire(timeout=0.2):
                    continue
                try:
                    caller, _ = listening.accept()
                except TimeoutError:
                    free.release()
                    continue
                except OSError:  # closed
                    return
                threading.Thread(target=self._serve, args=(caller, free), daemon=True).start()

    def _serve(self, caller: socket.socket, free: threading.BoundedSemaphore) -> None:
        try:
            with caller, suppress(OSError):
                self._answer(caller)
        finally:
            free.release()

    def _answer(self, caller: socket.socket) -> None:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        token, ends_at_s = b"", time.monotonic() + CONNECT_S
        while len(token) < _TOKEN_BYTES:  # one deadline for the whole token, not for each byte
            caller.settimeout(max(0.001, ends_at_s - time.monotonic()))
            piece = caller.recv(_TOKEN_BYTES - len(token))
            if not piece:
                return
            token += piece
        if not secrets.compare_digest(token, self.token):
            return
        caller.settimeout(LONG_S)
        caller.sendall(b"y")
        allowed = MOST_BYTES
        while (request := caller.recv(1)) and time.monotonic() < self.ends_at_s:
            allowed -= 1
            if request == b"s":  # a stream; its length follows
                left = int.from_bytes(_receive(caller, 8), "big")
                allowed -= 8 + left
                if allowed < 0:
                    return
                while left and (piece := caller.recv(min(left, PIECE_BYTES))):
                    left -= len(piece)
            if allowed < 0:
                return
            caller.sendall(b"y")


def _open_port(addresses: Sequence[str], port: int) -> tuple[list[socket.socket], list[str]]:
    """Open one port (0: chosen by the kernel) on all addresses. Return the sockets, and errors of the other addresses."""
    opened: list[socket.socket] = []
    problems: list[str] = []
    for _ in range(1 if port else PORT_TRIES):
        opened, problems, number, taken = [], [], port, False
        for address in addresses:
            try:
                opened.append(open_listener(address, number))
                number = int(opened[-1].getsockname()[1])
            except OSError as problem:
                problems.append(str(problem))
                taken = taken or problem.errno == errno.EADDRINUSE
        if port or not taken:
            return opened, problems
        for listening in opened:
            listening.close()
    return [], problems


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        data += piece
    return data


_listeners: dict[str, _Listener] = {}


def listen(arguments: Mapping[str, Any]) -> Values:
    """Listen on ``ports`` (0: chosen by the kernel) of ``addresses`` for ``seconds``, for callers with ``token``.

    Returns:
        ``ports`` that are open now on at least one address; ``problems``: port -> why it is not open.

    Raises:
        OSError: no port could be opened.
    """
    token = str(arguments["token"])
    ports = [int(port) for port in arguments["ports"]][:MOST_PORTS]
    addresses = [str(address) for address in arguments["addresses"]][:MOST_ADDRESSES]
    unlisten({"token": token})
    made = _Listener(addresses, ports, bytes.fromhex(token), float(arguments["seconds"]))
    if not made.ports:
        raise OSError(f"cannot listen on {'; '.join(made.problems.values()) or 'no address'}")
    _listeners[token] = made
    return {"ports": made.ports, "problems": {str(port): why for port, why in made.problems.items()}}


def unlisten(arguments: Mapping[str, Any]) -> Values:
    """Stop to listen for callers with ``token``."""
    listener = _listeners.pop(str(arguments["token"]), None)
    if listener is not None:
        listener.close()
    return {}


def reach(arguments: Mapping[str, Any]) -> list[Values]:
    """Try to connect to all ``targets`` (``address``, ``port``, ``token``, ``host``) at the same time.

    Those with ``long`` get a long message. If no address of a host is reachable, try those again that the kernel refused at once.

    Returns:
        For each target what :func:`reach_one` found.
    """
    targets = [dict(target) for target in arguments["targets"]]
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), REACH_THREADS)) as pool:
        found = list(pool.map(reach_one, targets))
        for pause_s in AGAIN_AFTER_S:
            met = {t["host"] for t, one in zip(targets, found, strict=True) if one["outcome"] == "connected"}
            again = [
                at
                for at, one in enumerate(found)
                if one["outcome"] in NO_ROUTE
                and one["elapsed_s"] < REFUSES_AT_ONCE_S
                and targets[at]["host"] not in met
            ]
            if not again:
                break
            time.sleep(pause_s)
            for at, one in zip(again, pool.map(reach_one, [targets[at] for at in again]), strict=True):
                found[at] = one
    return found


def reach_one(target: Mapping[str, Any]) -> Values:
    """Try to connect to a target of :func:`reach`, and return what happened.

    Returns:
        ``outcome``: connected; refused: the connection was refused; prohibited: a machine or router answered "no
        route", although there is one; dropped: no answer at all; silent: no machine with this address answers on its
        network; no-route: this machine has no route; self: the address is this machine's own; stalls: short
        messages pass, and the long one does not; other: something else answered. ``own``: own address; ``card``: its
        interface; ``elapsed_s``; ``said``: the system's message.
    """
    machine, address, port = Machine(), str(target["address"]), int(target["port"])
    own, no_route = route_to(address)
    name = next(
        (i["name"] for i in interfaces(machine) or () for a in i["addresses"] if a.partition("/")[0] == own),
        None,
    )
    found = {"address": address, "port": port, "own": own, "card": name, "said": no_route}
    if no_route:
        return {**found, "outcome": "no-route", "elapsed_s": 0.0}
    if own == address:
        return {**found, "outcome": "self", "elapsed_s": 0.0}
    began_s = time.monotonic()
    outcome, said = _try(address, port, str(target["token"]), LONG_BYTES if target.get("long") else 0)
    elapsed_s = time.monotonic() - began_s
    if outcome in ("dropped", "unreachable") and neighbour_state(machine, address) == "silent":
        outcome = "silent"
    elif outcome == "unreachable":
        outcome = "prohibited" if elapsed_s < REFUSES_AT_ONCE_S else "silent"
    return {**found, "outcome": outcome, "elapsed_s": elapsed_s, "said": said}


def _try(address: str, port: int, token: str, long_bytes: int) -> tuple[str, str]:
    try:
        connection = socket.create_connection((address, port), CONNECT_S)
    except ConnectionRefusedError as problem:
        return "refused", problem.strerror or str(problem)
    except TimeoutError:
        return "dropped", f"no answer within {CONNECT_S:.1f} s"
    except OSError as problem:
        return "unreachable", problem.strerror or str(problem)
    with connection:
        try:
            connection.sendall(bytes.fromhex(token))
            if connection.recv(1) != b"y":
                return "other", "it does not know the token"
        except OSError as problem:
            return "other", str(problem)
        if long_bytes:
            connection.settimeout(LONG_S)
            try:
                _timed(connection, _stream(long_bytes))
            except OSError as problem:
                return "stalls", str(problem)
    return "connected", ""


def measure(arguments: Mapping[str, Any]) -> Values:
    """Measure latency and bandwidth to a listener (``address``, ``port``, ``token``): a second, at most 32 MiB.

    Returns:
        ``round_trip_s``, the median; ``bytes_per_s``; ``problem``: "" or what broke.
    """
    found: Values = {"round_trip_s": None, "bytes_per_s": None, "problem": ""}
    address, port = str(arguments["address"]), int(arguments["port"])
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(str(arguments["token"])))
            _receive(connection, 1)
            found["round_trip_s"] = statistics.median(_timed(connection, b"e") for _ in range(ECHOES))
            found["bytes_per_s"] = _bandwidth(connection)
    except OSError as problem:
        found["problem"] = str(problem)
    return found


def _timed(connection: socket.socket, message: bytes) -> float:
    began_s = time.perf_counter()
    connection.sendall(message)
    _receive(connection, 1)
    return time.perf_counter() - began_s


def _stream(size: int) -> bytes:
    return b"s" + size.to_bytes(8, "big") + bytes(size)


def _bandwidth(connection: socket.socket) -> float:
    """Double the message until it takes a third of the time. Return bytes a second."""
    size = PIECE_BYTES
    while True:
        taken_s = _timed(connection, _stream(size))
        if taken_s > MEASURE_S / 3 or size >= MEASURE_BYTES:
            return size / taken_s
        size *= 2


def free_port(arguments: Mapping[str, Any]) -> Values:
    """Return a port that is free on ``address`` now."""
    with open_listener(str(arguments["address"])) as trial:
        return {"port": int(trial.getsockname()[1])}


# -- all probes ----------------------------------------------------------------------------------------------


def run_probe(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer of a probe. Raise LookupError if it does not exist."""
    if name not in PROBES:
        raise LookupError(f"no probe {name[:40]!r}")
    return PROBES[name](arguments)


def data(arguments: Mapping[str, Any]) -> Values:
    """Return digests of the data set ``data``, as the module ``module`` of this package computes them.

    Raises:
        LookupError: it is no module of this package.
    """
    module = str(arguments["module"])
    if not re.fullmatch(r"yolofleet(\.[a-z_]+)+", module):
        raise LookupError(f"no module {module[:40]!r}")
    wanted = {"data": str(arguments["data"]), "single_cls": bool(arguments.get("single_cls"))}
    return in_child("data", wanted, command=(module,))


def look_up(arguments: Mapping[str, Any]) -> Values:
    """Return the addresses that this machine resolves ``names`` to."""
    names = [str(name) for name in arguments["names"]]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(resolve, names), strict=True))


def all_reduce(arguments: Mapping[str, Any]) -> Values:
    """Run one rank of a sum over all hosts through torch's gloo, on the interface ``card`` ("": gloo's choice)."""
    wanted = {name: arguments[name] for name in ("address", "port", "rank", "size", "deadline_s")}
    interface = str(arguments["card"])
    return in_child("all_reduce", wanted, {"GLOO_SOCKET_IFNAME": interface} if interface else {})


PROBES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "facts": all_facts,
    "data": data,
    "time": lambda _: {"time_s": time.time()},
    "look_up": look_up,
    "firewall": lambda _: firewall(Machine()),
    "listen": listen,
    "unlisten": unlisten,
    "reach": reach,
    "measure": measure,
    "free_port": free_port,
    "all_reduce": all_reduce,
}
