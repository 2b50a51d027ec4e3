"""What can be asked of a host, by name: plain values in, plain values out. Standard library alone.

``PROBES`` is the whole list of what somebody at the other end of a connection may have done here. Everything
ends by itself within its deadline, and nothing is changed: the only writes are nameless files that measure the
disk, the index of a data set in the cache, and bytes to those who know the token of :func:`listen`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from yolofleet.fleet.doctor import machine_facts as seen
from yolofleet.fleet.doctor.machine import Machine, run_for, within
from yolofleet.fleet.doctor.network_interfaces import interfaces, neighbour_state, resolve, route_to
from yolofleet.fleet.doctor.ports import ephemeral_ports, firewall, port_facts
from yolofleet.parallel.listener import open_listener
from yolofleet.system.children import module_argv, module_environment

Json = dict[str, Any]

CHILD_S = {"libraries": 12.0, "data": 30.0, "all_reduce": 45.0}
DISK_S = 10.0  # measuring takes one, and what is on its way to a slow disk before
CONNECT_S = 2.5  # more than a lost packet that is sent again after a second
LONGEST_LISTEN_S = 120.0
MOST_ADDRESSES, MOST_PORTS, MOST_CALLERS = 32, 8, 32  # of a listener; callers at the same time on each socket
MEASURE_S, MEASURE_BYTES, PIECE_BYTES, ECHOES = 1.0, 32 << 20, 1 << 18, 15
# The bytes that a listener reads from one caller: _bandwidth doubles its messages up to MEASURE_BYTES.
MOST_BYTES = 2 * MEASURE_BYTES + 4096
PORT_TRIES = 5  # the kernel chose a port on one address that is taken on another
REFUSES_AT_ONCE_S = 0.8  # the kernel gives up a neighbour that does not answer after 3 s
# It remembers that for a second or two, though a cable has been plugged in meanwhile, a card or a machine is up again.
AGAIN_AFTER_S = (1.0, 2.0)
REACH_THREADS = 256  # they wait: for a fleet of 128 hosts with two cards each, not much longer than CONNECT_S
NO_WAY = ("prohibited", "silent", "no-route")  # outcomes that the kernel may know from memory
_TOKEN_BYTES = 16


def run_probe(name: str, arguments: Mapping[str, Any]) -> Any:
    """Raises LookupError: there is no such probe."""
    if name not in PROBES:
        raise LookupError(f"no probe {name[:40]!r}")
    return PROBES[name](arguments)


# -- what is here --------------------------------------------------------------------------------------------


def all_facts(arguments: Mapping[str, Any]) -> Json:
    """Everything about this computer that needs nobody else.

    Args:
        arguments: ``folders``: whose disks to look at; ``port`` of the rendezvous; ``quick``: only what takes
            a tenth of a second (no torch, no writing); ``count_gpus``: the run asks for GPUs (nvidia-smi takes
            up to two seconds).
    """
    machine, quick = Machine(), bool(arguments.get("quick"))
    host = socket.gethostname()
    folders = [Path(str(folder)) for folder in arguments.get("folders", ())]
    port = int(arguments.get("port") or 0)
    with ThreadPoolExecutor(8) as pool:
        waiting: dict[str, Any] = {
            "names": pool.submit(resolve, host, 0.5 if quick else 3.0),
            "disks": pool.submit(_disks, folders, quick),
            "software": pool.submit(seen.software),
        }
        if arguments.get("count_gpus"):
            waiting["gpu_count"] = pool.submit(seen.gpu_count, machine)
        if not quick:
            waiting |= {
                "libraries": pool.submit(in_child, "libraries", {}),
                "gpus": pool.submit(seen.gpus, machine),
                "firewall": pool.submit(firewall, machine),
                "clock": pool.submit(seen.clock, machine),
                "infiniband": pool.submit(seen.infiniband, machine),
            }
        found: Json = {
            "host": host,
            "platform": machine.platform,
            "network_id": seen.network_id(machine),
            "memory": seen.memory(machine),
            "shm": seen.shared_memory(machine),
            "cores": seen.cores(machine),
            "limits": seen.limits(),
            "variables": seen.variables(machine.environment),
            "cards": interfaces(machine),
            "port": port_facts(machine, port) if port else None,
            "ephemeral_ports": ephemeral_ports(machine),
        }
        return found | {name: value.result() for name, value in waiting.items()}


def _disks(folders: Sequence[Path], quick: bool) -> list[Json]:
    """Of the folders, and of the cache unless that takes an import."""
    if not quick:
        try:
            from yolofleet.files.caches import cache_root

            folders = [*folders, cache_root()]
        except ImportError:  # no numpy: said elsewhere
            pass
    return [_disk(folder, measure=not quick) for folder in folders]


def _disk(folder: Path, *, measure: bool) -> Json:
    late = {
        "folder": str(folder),
        "below": str(folder),
        "size": None,
        "free": None,
        "write_bytes_per_s": None,
    }
    problem = f"no answer within {DISK_S:g} s"  # a network disk whose server is gone holds who looks at it
    return within(DISK_S, lambda: seen.disk(folder, measure=measure)) or {**late, "problem": problem}


def firewall_here(_: Mapping[str, Any]) -> Json:
    return firewall(Machine())


def in_child(
    name: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> Json:
    """Run a probe in a child process, and return its answer.

    Args:
        name: the probe, of ``subprocess_probes.py`` unless ``command`` is given.
        command: a module that is started as ``python -m``, and its arguments.
    Returns:
        The answer. Without one, ``problem`` says why, and ``late`` whether the child process took too long.
    """
    try:
        code, out, errors = run_for(
            CHILD_S[name],
            module_argv(*(command or ("yolofleet.fleet.doctor.subprocess_probes", name))),
            json.dumps(arguments).encode(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # ids as nvidia-smi shows them, and as a run counts them
            env={
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                **module_environment(os.environ),
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {CHILD_S[name]:.0f} s", "late": True}
    except OSError as problem:
        return {"problem": f"{sys.executable}: {problem}", "late": False}
    for line in reversed(out.splitlines() if code == 0 else []):
        with suppress(ValueError):  # somebody else's last words, as of a library that is unloaded
            answer: Json = json.loads(line)
            if isinstance(answer, dict):
                return answer
    words = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"problem": f"{words[0] if words else 'nothing said'} ({ended})", "late": False}


def data(arguments: Mapping[str, Any]) -> Json:
    """Return digests of the data set ``data``, as the module ``module`` of this package computes them.

    Raises:
        LookupError: it is no module of this package.
    """
    module = str(arguments["module"])
    if not re.fullmatch(r"yolofleet(\.[a-z_]+)+", module):
        raise LookupError(f"no module {module[:40]!r}")
    wanted = {"data": str(arguments["data"]), "single_cls": bool(arguments.get("single_cls"))}
    return in_child("data", wanted, command=(module,))


def now(_: Mapping[str, Any]) -> Json:
    return {"time_s": time.time()}


def look_up(arguments: Mapping[str, Any]) -> Json:
    """Addresses of ``names`` as seen from here."""
    names = [str(name) for name in arguments["names"]]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(resolve, names), strict=True))


# -- can others be reached -----------------------------------------------------------------------------------


class _Listener:
    """Answers those who know the token, on some ports of some addresses, until its time is over.

    Each port is open on every address on which it is free. A socket serves MOST_CALLERS at the same time and lets
    others wait. A caller must send the token within CONNECT_S, and at most MOST_BYTES.
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
        while len(token) < _TOKEN_BYTES:  # all of it before the deadline, not each byte
            caller.settimeout(max(0.001, ends_at_s - time.monotonic()))
            piece = caller.recv(_TOKEN_BYTES - len(token))
            if not piece:
                return
            token += piece
        if not secrets.compare_digest(token, self.token):
            return
        caller.settimeout(CONNECT_S)
        caller.sendall(b"y")
        allowed = MOST_BYTES
        while (wish := caller.recv(1)) and time.monotonic() < self.ends_at_s:
            allowed -= 1
            if wish == b"s":  # a stream of so many bytes
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
    """Open one port (0: one that the kernel chooses) on all addresses; return the sockets, and why others are closed."""
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


def listen(arguments: Mapping[str, Any]) -> Json:
    """Listen on ``ports`` (0: one that the kernel chooses) of ``addresses`` for ``seconds``, for who sends ``token``.

    Returns:
        ``ports`` that are open now on one address or more; ``problems``: port -> why it is not.

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


def unlisten(arguments: Mapping[str, Any]) -> Json:
    listener = _listeners.pop(str(arguments["token"]), None)
    if listener is not None:
        listener.close()
    return {}


def reach(arguments: Mapping[str, Any]) -> list[Json]:
    """Try to connect to every one of ``targets`` (``address``, ``port``, ``token``, ``host``), at the same time.

    A host that cannot be reached at any of its addresses is tried again where the kernel itself said so, at once.

    Returns:
        for each target its ``address`` and ``port`` and what :func:`reach_one` found.
    """
    targets = [dict(target) for target in arguments["targets"]]
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), REACH_THREADS)) as pool:
        found = list(pool.map(_reach, targets))
        for pause_s in AGAIN_AFTER_S:
            met = {t["host"] for t, one in zip(targets, found, strict=True) if one["outcome"] == "connected"}
            again = [at for at, one in enumerate(found) if _may_pass(one) and targets[at]["host"] not in met]
            if not again:
                break
            time.sleep(pause_s)
            for at, one in zip(again, pool.map(_reach, [targets[at] for at in again]), strict=True):
                found[at] = one
    return found


def _may_pass(attempt: Json) -> bool:
    return attempt["outcome"] in NO_WAY and bool(attempt["elapsed_s"] < REFUSES_AT_ONCE_S)


def _reach(target: Mapping[str, Any]) -> Json:
    return reach_one(str(target["address"]), int(target["port"]), str(target["token"]))


def reach_one(address: str, port: int, token: str) -> Json:
    """``outcome``, one of

    connected; refused: somebody answered "no"; prohibited: a machine or router answered "no way", though there is
    a route; dropped: no answer at all; silent: no machine with this address answers on its network; no-route:
    this machine knows no way; self: the address is this machine's own; other: something else answered.

    And ``own``, the own address, ``card``, its card, ``elapsed_s``, and ``said``, the system's words.
    """
    machine = Machine()
    own, no_way = route_to(address)
    name = next(
        (i["name"] for i in interfaces(machine) or () for a in i["addresses"] if a.partition("/")[0] == own),
        None,
    )
    found = {"address": address, "port": port, "own": own, "card": name, "said": no_way}
    if no_way:
        return {**found, "outcome": "no-route", "elapsed_s": 0.0}
    if own == address:
        return {**found, "outcome": "self", "elapsed_s": 0.0}
    began_s = time.monotonic()
    outcome, said = _try(address, port, token)
    elapsed_s = time.monotonic() - began_s
    if outcome in ("dropped", "unreachable") and neighbour_state(machine, address) == "silent":
        outcome = "silent"
    elif outcome == "unreachable":
        outcome = "prohibited" if elapsed_s < REFUSES_AT_ONCE_S else "silent"
    return {**found, "outcome": outcome, "elapsed_s": elapsed_s, "said": said}


def _try(address: str, port: int, token: str) -> tuple[str, str]:
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            try:
                connection.sendall(bytes.fromhex(token))
                return ("connected", "") if connection.recv(1) == b"y" else ("other", "it does not know us")
            except OSError as problem:
                return "other", str(problem)
    except ConnectionRefusedError as problem:
        return "refused", problem.strerror or str(problem)
    except TimeoutError:
        return "dropped", f"no answer within {CONNECT_S:.1f} s"
    except OSError as problem:
        return "unreachable", problem.strerror or str(problem)


def measure(arguments: Mapping[str, Any]) -> Json:
    """Latency and bandwidth to a listener (``address``, ``port``, ``token``): a second, at most 32 MiB.

    Returns:
        ``round_trip_s``, the median; ``bytes_per_s``; ``problem``: "" or what broke; ``stalled``: short messages
        pass and long ones do not.
    """
    found: Json = {"round_trip_s": None, "bytes_per_s": None, "problem": "", "stalled": False}
    address, port = str(arguments["address"]), int(arguments["port"])
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(str(arguments["token"])))
            _receive(connection, 1)
            taken = sorted(_timed(connection, b"e") for _ in range(ECHOES))
            found["round_trip_s"] = taken[len(taken) // 2]
            try:
                found["bytes_per_s"] = _bandwidth(connection)
            except OSError as problem:
                found |= {"problem": str(problem), "stalled": isinstance(problem, TimeoutError)}
    except OSError as problem:
        found["problem"] = str(problem)
    return found


def _timed(connection: socket.socket, message: bytes) -> float:
    began_s = time.perf_counter()
    connection.sendall(message)
    _receive(connection, 1)
    return time.perf_counter() - began_s


def _bandwidth(connection: socket.socket) -> float:
    """Doubles what it sends until that takes a third of the time there is."""
    size = PIECE_BYTES
    while True:
        payload = b"s" + size.to_bytes(8, "big") + bytes(size)
        taken_s = _timed(connection, payload)
        if taken_s > MEASURE_S / 3 or size >= MEASURE_BYTES:
            return size / taken_s
        size *= 2


def free_port(arguments: Mapping[str, Any]) -> Json:
    """A port that is free on ``address`` now."""
    address = str(arguments["address"])
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.bind((address, 0))
        return {"port": int(trial.getsockname()[1])}


def all_reduce(arguments: Mapping[str, Any]) -> Json:
    """One rank of a sum over all hosts through torch's gloo, bound to ``card`` ("": gloo's choice); see ``subprocess_probes.py``."""
    wanted = {name: arguments[name] for name in ("address", "port", "rank", "size", "deadline_s")}
    card = str(arguments["card"])
    return in_child("all_reduce", wanted, {"GLOO_SOCKET_IFNAME": card} if card else {})


PROBES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "facts": all_facts,
    "data": data,
    "time": now,
    "look_up": look_up,
    "firewall": firewall_here,
    "listen": listen,
    "unlisten": unlisten,
    "reach": reach,
    "measure": measure,
    "free_port": free_port,
    "all_reduce": all_reduce,
}
