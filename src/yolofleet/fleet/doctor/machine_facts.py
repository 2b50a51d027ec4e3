"""Read the facts of one machine, as plain values; ``local.py`` judges them.

The standard library alone; what needs torch runs in a child process. Sizes are bytes. None means that this system does not
show a value.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import yolofleet
from yolofleet.fleet.doctor.machine import Machine, run_for, within
from yolofleet.fleet.doctor.network_facts import ephemeral_ports, firewall, interfaces, port_facts, resolve
from yolofleet.support.errors import StorageError
from yolofleet.support.system.cgroup import available_bytes, cpu_quota
from yolofleet.support.system.children import module_argv, module_environment
from yolofleet.support.system.proc import entries_of, memory_info, text_of

Values = dict[str, Any]  # for JSON

# nvidia-smi takes 0.1 to 2 s, up to 9 s if it must load the driver for 8 GPUs; a driver that hangs never answers
GPU_QUERY_S = 10.0
WRITE_S, WRITE_BYTES, PIECE_BYTES = 1.0, 32 << 20, 4 << 20
LIBRARIES = {  # name of the import -> distributions that contain it
    "torch": ("torch",),
    "numpy": ("numpy",),
    "cv2": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "safetensors": ("safetensors",),
    "pydantic": ("pydantic",),
    "click": ("click",),
    "rich": ("rich",),
    "yaml": ("PyYAML",),
    "matplotlib": ("matplotlib",),
}  # fmt: skip
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
GPU_FIELDS = {  # -> the names of nvidia-smi
    "index": "index", "name": "name", "driver": "driver_version", "memory_mib": "memory.total",
    "used_mib": "memory.used", "busy_percent": "utilization.gpu",
    "uncorrected_errors": "ecc.errors.uncorrected.volatile.total",
}  # fmt: skip
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHELASTIC_", "OMP_", "CUDA_", "SLURM_", "OMPI_", "PMI_")
NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "LD_PRELOAD", "http_proxy", "https_proxy", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


def software() -> Values:
    """Return installed versions, without importing the libraries, and a digest of this package's files."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "yolofleet": yolofleet.__version__,
        "package_sha256": package_sha256(Path(yolofleet.__file__).parent),
        **{name: _version(packages) for name, packages in {"nccl": NCCL, **LIBRARIES}.items()},
    }


def _version(distributions: Sequence[str]) -> str | None:
    """Return the version of the first of ``distributions`` that is installed."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError, ValueError):
            return metadata.version(name)
    return None


SOURCES = (".py", ".yaml", ".html", ".css", ".js")  # suffixes of sources and data files


def package_sha256(package: Path) -> str:
    """Return a digest of the names and contents of a package's sources and data files."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        if file.suffix in SOURCES and file.is_file():
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def network_id(machine: Machine) -> str:
    """Return an identity of this boot of the machine and of its network; "" if it cannot be seen.

    Two names of one host have the same identity. Containers with their own addresses do not.
    """
    try:
        network = (machine.proc / "self" / "ns" / "net").readlink()
    except OSError:
        return ""
    boot = text_of(machine.proc / "sys" / "kernel" / "random" / "boot_id")
    return boot and f"{boot} {network}"


def memory(machine: Machine) -> Values:
    """Return main memory: of the machine, and what this process may still use under its control groups (v1 and v2).

    ``available`` is None if the kernel does not report it.
    """
    values = memory_info(machine.proc)
    return {
        "total": values.get("MemTotal"),
        "swap": values.get("SwapTotal"),
        "available": available_bytes(machine.proc, machine.groups) if "MemAvailable" in values else None,
        "machine_available": values.get("MemAvailable"),
    }


def shared_memory(machine: Machine) -> Values | None:
    """Return the space of /dev/shm, and its largest files; None on a system that has no such folder."""
    space = _space(machine.shm)
    if space is None:
        is_missing = machine.platform == "linux"
        return {"size": 0, "free": 0, "largest": [], "read_only": True} if is_missing else None
    largest = []
    for file in entries_of(machine.shm):
        try:
            largest.append((file.stat().st_blocks * 512, file.name))
        except OSError:
            continue
    largest.sort(reverse=True)
    named = [[name, size] for size, name in largest[:3] if size > 1 << 20]
    is_read_only = os.statvfs(machine.shm).f_flag & os.ST_RDONLY or not os.access(machine.shm, os.W_OK)
    return {**space, "largest": named, "read_only": bool(is_read_only)}


def cores(machine: Machine) -> Values:
    """Return how many cores this machine has, how many this process may use, and its quota of their time."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"visible": os.cpu_count(), "usable": affinity, "quota": cpu_quota(machine.proc, machine.groups)}


def limits() -> Values:
    """Return the limits of this process; None means unlimited or unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return {"open_files": None, "open_files_hard": None, "locked_memory": None}

    def value(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = getattr(resource, "RLIMIT_MEMLOCK", None)
    locked = value(resource.getrlimit(memlock)[0]) if memlock is not None else None
    return {"open_files": value(soft), "open_files_hard": value(hard), "locked_memory": locked}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that launchers, NCCL, gloo and threads read."""
    return {k: v for k, v in sorted(environment.items()) if k in NAMES or k.startswith(PREFIXES)}


def disk(folder: Path, *, measure: bool = True) -> Values:
    """Return space and writing speed of a folder's disk, or of the disk where it would be made.

    The measurement writes an unnamed file, at most 32 MiB in about a second.
    """
    asked, folder = folder, folder.absolute()
    while not os.path.isdir(folder) and folder != folder.parent:  # noqa: PTH112 (Path.is_dir raises if it may not read)
        folder = folder.parent
    found: Values = {"folder": str(asked), "below": str(folder), "write_bytes_per_s": None, "problem": None}
    found |= _space(folder) or {"size": None, "free": None}
    if measure and (found["free"] is None or found["free"] > 2 * WRITE_BYTES):
        try:
            found["write_bytes_per_s"] = _write_speed(folder)
        except OSError as problem:
            found["problem"] = problem.strerror or str(problem)
    elif not os.access(folder, os.W_OK):
        found["problem"] = "not writable"
    return found


def _write_speed(folder: Path) -> float:
    piece, written, began_s = os.urandom(PIECE_BYTES), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        while written < WRITE_BYTES and time.perf_counter() - began_s < WRITE_S:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            written += len(piece)
    return written / (time.perf_counter() - began_s)


def _space(folder: Path) -> Values | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"size": usage.total, "free": usage.free}


def gpus(machine: Machine) -> Values:
    """Return NVIDIA GPUs as the driver and nvidia-smi show them.

    ``state``: ok; none: no GPU and no driver; silent: there is a GPU, but nvidia-smi does not answer or is missing, and
    ``said`` is its output.
    """
    cards = [
        folder.name
        for folder in entries_of(machine.system / "bus" / "pci" / "devices")
        if text_of(folder / "vendor") == "0x10de" and text_of(folder / "class").startswith("0x03")
    ]
    driver = text_of(machine.proc / "driver" / "nvidia" / "version").splitlines()
    answer = machine.run(
        ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"],
        GPU_QUERY_S,
    )
    found: Values = {"state": "ok", "said": "", "cards": len(cards), "driver": None, "gpus": []}
    if answer.code == 0:
        rows = [[part.strip() for part in line.split(",")] for line in answer.out.splitlines()]
        found["gpus"] = [_gpu(row) for row in rows if len(row) == len(GPU_FIELDS)]
        found["driver"] = next((gpu["driver"] for gpu in found["gpus"]), None)
        found["state"] = "ok" if found["gpus"] else "none"
    elif answer.code is None and not answer.late and not cards and not driver:
        found["state"] = "none"
    else:
        said = answer.out.strip().splitlines()[:1]
        late = f"no answer within {GPU_QUERY_S:.0f} s" if answer.late else "nvidia-smi is not installed"
        found |= {
            "state": "silent",
            "said": said[0] if said else late,
            "driver": driver[0] if driver else None,
        }
    return found


def gpu_count(machine: Machine) -> int | None:
    """Return the number of GPUs that CUDA can use, without torch and without CUDA_VISIBLE_DEVICES.

    None means unknown: AMD's GPUs, Jetson and WSL have no NVIDIA driver in /proc, and mostly no nvidia-smi; CUDA uses
    only one part of a GPU (MIG); and a package may add torch devices of another kind.
    """
    answer = machine.run(["nvidia-smi", "-L"], GPU_QUERY_S)
    lines = answer.out.splitlines() if answer.code == 0 else []
    if any(line.lstrip().startswith("MIG ") for line in lines):
        return None
    count = sum(line.startswith("GPU ") for line in lines)
    count = count or len(entries_of(machine.proc / "driver" / "nvidia" / "gpus"))
    if count:
        return count
    other = any(
        file.name in ("kfd", "dxg") or file.name.startswith(("nvidia", "nvhost"))
        for file in entries_of(machine.dev)
    )
    other = other or bool(metadata.entry_points(group="torch.backends"))  # torch loads these packages itself
    return None if other or machine.platform != "linux" else 0


def _gpu(row: list[str]) -> Values:
    return {
        field: text if field in ("name", "driver") else int(text) if text.isdecimal() else None
        for field, text in zip(GPU_FIELDS, row, strict=True)
    }


def clock(machine: Machine) -> Values:
    """Return this machine's time of day, and whether a time server keeps its clock."""
    answer = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 2.0)
    said = answer.out.strip() if answer.code == 0 else ""
    return {"time_s": time.time(), "synchronised": {"yes": True, "no": False}.get(said)}


def infiniband(machine: Machine) -> list[Values]:
    """Return the ports of InfiniBand and RoCE adapters."""
    found = []
    for adapter in entries_of(machine.system / "class" / "infiniband"):
        for port in entries_of(adapter / "ports"):
            state = text_of(port / "state").partition(":")[2].strip() or "unknown"
            found.append(
                {
                    "adapter": adapter.name,
                    "port": port.name,
                    "state": state,
                    "rate": text_of(port / "rate"),
                    "layer": text_of(port / "link_layer"),
                }
            )
    return found


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
            "software": pool.submit(software),
        }
        if arguments.get("count_gpus"):
            waiting["gpu_count"] = pool.submit(gpu_count, machine)
        if not quick:
            waiting |= {
                "libraries": pool.submit(in_child, "libraries", {}),
                "gpus": pool.submit(gpus, machine),
                "firewall": pool.submit(firewall, machine),
                "clock": pool.submit(clock, machine),
                "infiniband": pool.submit(infiniband, machine),
            }
        found: Values = {
            "host": host,
            "platform": machine.platform,
            "network_id": network_id(machine),
            "memory": memory(machine),
            "shm": shared_memory(machine),
            "cores": cores(machine),
            "limits": limits(),
            "variables": variables(machine.environment),
            "cards": interfaces(machine),
            "port": port_facts(machine, port) if port else None,
            "ephemeral_ports": ephemeral_ports(machine),
        }
        return found | {name: value.result() for name, value in waiting.items()}


def _disks(folders: Sequence[Path], quick: bool) -> list[Values]:
    """Return facts about the disks of the folders; unless ``quick`` also of the cache, which needs an import."""
    if not quick:
        try:
            from yolofleet.storage.caches import cache_root

            folders = [*folders, cache_root()]
        # ImportError: no numpy, which another finding reports. StorageError: no folder for a cache.
        except (ImportError, StorageError):
            pass
    unknown = {"free": None, "write_bytes_per_s": None, "problem": f"no answer within {DISK_S:g} s"}
    return [  # a network disk without its server blocks every reader
        within(DISK_S, partial(disk, folder, measure=not quick))
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
