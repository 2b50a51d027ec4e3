"""Collect the facts about this machine. The standard library alone; what needs torch runs in a child process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from yolofleet.fleet.doctor import machine_facts
from yolofleet.fleet.doctor.machine import Machine, run_for, within
from yolofleet.fleet.doctor.network_interfaces import interfaces, resolve
from yolofleet.fleet.doctor.ports import ephemeral_ports, firewall, port_facts
from yolofleet.support.errors import StorageError
from yolofleet.support.system.children import module_argv, module_environment

Values = dict[str, Any]  # for JSON

CHILD_S = {"libraries": 12.0, "data": 30.0, "all_reduce": 45.0}
DISK_S = 10.0  # a measurement takes 1 s; a slow disk first writes what is in its queue


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
            from yolofleet.support.files.caches import cache_root

            folders = [*folders, cache_root()]
        # ImportError: no numpy, which another finding reports. StorageError: no folder for a cache.
        except (ImportError, StorageError):
            pass
    unknown = {"free": None, "write_bytes_per_s": None, "problem": f"no answer within {DISK_S:g} s"}
    return [  # a network disk without its server blocks every reader
        within(DISK_S, partial(machine_facts.disk, folder, measure=not quick))
        or {"folder": str(folder), "below": str(folder), **unknown}
        for folder in folders
    ]


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
            module_argv(*(command or ("yolofleet.fleet.doctor.subprocess_probes", name))),
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
