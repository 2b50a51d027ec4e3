"""Questions of the doctor to a host, by name. Standard library alone; arguments and answers are plain values.

``PROBES`` is the complete list of what the other end of a connection may ask. Every probe ends within its deadline and
changes nothing: it writes only unnamed files that measure the disk, the index of a data set in the cache, and bytes to
callers that know the token of :func:`connections.listen`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from yolofleet.doctor import machine_facts
from yolofleet.doctor.connections import free_port, listen, measure, reach, unlisten
from yolofleet.doctor.machine import Machine, run_for, within
from yolofleet.doctor.network_interfaces import interfaces, resolve
from yolofleet.doctor.ports import ephemeral_ports, firewall, port_facts
from yolofleet.errors import StorageError
from yolofleet.system.children import module_argv, module_environment

Values = dict[str, Any]  # for JSON

CHILD_S = {"libraries": 12.0, "data": 30.0, "all_reduce": 45.0}
DISK_S = 10.0  # a measurement takes 1 s; a slow disk first writes what is in its queue


def run_probe(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer of a probe. Raise LookupError if it does not exist."""
    if name not in PROBES:
        raise LookupError(f"no probe {name[:40]!r}")
    return PROBES[name](arguments)


def all_facts(arguments: Mapping[str, Any]) -> Values:
    """Return all facts about this machine that need no other.

    Args:
        arguments: ``folders``: their disks are examined; ``port``: of the rendezvous; ``quick``: only what takes a
            tenth of a second (no torch, no writing); ``count_gpus``: the run asks for GPUs (nvidia-smi takes up to
            two seconds).
    """
    machine, quick = Machine(), bool(arguments.get("quick"))
    host = socket.gethostname()
    folders = [Path(str(folder)) for folder in arguments.get("folders", ())]
    port = int(arguments.get("port") or 0)
    with ThreadPoolExecutor(8) as pool:
        waiting: dict[str, Any] = {
            "names": pool.submit(resolve, host, 0.5 if quick else 3.0),
            "disks": pool.submit(_disks, folders, quick),
            "software": pool.submit(machine_facts.software),
        }
        if arguments.get("count_gpus"):
            waiting["gpu_count"] = pool.submit(machine_facts.gpu_count, machine)
        if not quick:
            waiting |= {
                "libraries": pool.submit(in_child, "libraries", {}),
                "gpus": pool.submit(machine_facts.gpus, machine),
                "firewall": pool.submit(firewall, machine),
                "clock": pool.submit(machine_facts.clock, machine),
                "infiniband": pool.submit(machine_facts.infiniband, machine),
            }
        found: Values = {
            "host": host,
            "platform": machine.platform,
            "network_id": machine_facts.network_id(machine),
            "memory": machine_facts.memory(machine),
            "shm": machine_facts.shared_memory(machine),
            "cores": machine_facts.cores(machine),
            "limits": machine_facts.limits(),
            "variables": machine_facts.variables(machine.environment),
            "cards": interfaces(machine),
            "port": port_facts(machine, port) if port else None,
            "ephemeral_ports": ephemeral_ports(machine),
        }
        return found | {name: value.result() for name, value in waiting.items()}


def _disks(folders: Sequence[Path], quick: bool) -> list[Values]:
    """Return facts about the disks of the folders; unless ``quick`` also of the cache, which needs an import."""
    if not quick:
        try:
            from yolofleet.files.caches import cache_root

            folders = [*folders, cache_root()]
        # ImportError: no numpy, which has a finding of its own. StorageError: no folder for a cache.
        except (ImportError, StorageError):
            pass
    return [_disk(folder, measure=not quick) for folder in folders]


def _disk(folder: Path, *, measure: bool) -> Values:
    late = {
        "folder": str(folder),
        "below": str(folder),
        "size": None,
        "free": None,
        "write_bytes_per_s": None,
    }
    problem = f"no answer within {DISK_S:g} s"  # a network disk without its server blocks every reader
    return within(DISK_S, lambda: machine_facts.disk(folder, measure=measure)) or {**late, "problem": problem}


def firewall_here(_: Mapping[str, Any]) -> Values:
    """Return what stands between this machine and connections from others."""
    return firewall(Machine())


def in_child(
    name: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> Values:
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
            module_argv(*(command or ("yolofleet.doctor.subprocess_probes", name))),
            json.dumps(arguments).encode(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**module_environment(os.environ), "OMP_NUM_THREADS": "1", **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {CHILD_S[name]:.0f} s", "late": True}
    except OSError as problem:
        return {"problem": f"{sys.executable}: {problem}", "late": False}
    for line in reversed(out.splitlines() if code == 0 else []):
        with suppress(ValueError):  # output of a library after the answer
            answer: Values = json.loads(line)
            if isinstance(answer, dict):
                return answer
    words = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"problem": f"{words[0] if words else 'nothing said'} ({ended})", "late": False}


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


def now(_: Mapping[str, Any]) -> Values:
    """Return this machine's time of day."""
    return {"time_s": time.time()}


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
