"""Examine this machine, wholly or quickly before a run, and judge the facts about any machine.

Each judge takes the facts and what the run needs, and reads nothing else. Facts that are None cannot be seen on this
system, or were not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.gpus import judge_gpus
from yolofleet.fleet.doctor.host_facts import HostFacts, read_answer
from yolofleet.fleet.doctor.machine_facts import all_facts
from yolofleet.fleet.doctor.network import judge_network, matches
from yolofleet.fleet.resources import ResourceEstimate, RunResources, by_number, estimate_of
from yolofleet.fleet.strict import HERE
from yolofleet.support.place import TORCHRUN
from yolofleet.support.text import size_text

TORCH = (2, 6), (2, 15)  # from, and before; as pyproject.toml
DOCKER_SHM = 64 << 20
DISK_FULL, DISK_LOW, DISK_SLOW = 512 << 20, 5 << 30, 20e6  # bytes, bytes, bytes a second
LEAST_OPEN_FILES = 1024
QUICK = (  # findings that a run reports before it starts
    "shm-small",
    "shm-read-only",
    "memory-short",
    "disk-low",
    "disk-refuses",
    "open-files",
    "stray-variables",
    "gpu-none",
    "gpu-missing",
    "gpus-hidden",
    "torch-without-cuda",
)


def examine_here(wanted: RunResources, *, port: int = 0, quick: bool = False) -> list[Finding]:
    """Examine this machine alone.

    Args:
        port: that a rendezvous would use here; 0 = none.
        quick: only what takes a tenth of a second; two seconds if the run asks for GPUs.
    """
    folders = [str(wanted.results)]
    question = {"folders": folders, "port": port, "quick": quick, "count_gpus": by_number(wanted.device)}
    facts = read_answer(HERE, "facts", question, all_facts(question))
    return judge_host(facts, estimate_for(wanted, facts))


def preflight(wanted: RunResources) -> list[Finding]:
    """Return what would end or slow a run on this machine."""
    return [one for one in examine_here(wanted, quick=True) if one.code in QUICK]


def estimate_for(wanted: RunResources, facts: HostFacts) -> ResourceEstimate:
    """Return what the run needs of the machine with these facts."""
    cores = facts.cores.usable or facts.cores.visible or 1
    return estimate_of(wanted, cores, gpus=len(facts.gpus.gpus) if facts.gpus else 0)


def judge_host(facts: HostFacts, estimate: ResourceEstimate, host: str = "") -> list[Finding]:
    """Return all findings that need no other host.

    Args:
        host: as the user calls it; "" = this machine.
    """
    found = chain(
        _software(facts),
        judge_gpus(facts, estimate, host),
        _cores(facts, estimate),
        _memory(facts, estimate),
        _shm(facts, estimate),
        _disks(facts),
        _open_files(facts, estimate),
        _place_variables(facts),
        _variables(facts),
        _system(facts),
        judge_network(facts),
    )
    return [replace(one, where=host) for one in found]


def _software(facts: HostFacts) -> Iterator[Finding]:
    software, libraries, torch = facts.software, facts.libraries, facts.torch
    shown: dict[str, Any] = {
        "yolofleet": software.yolofleet,
        "python": software.python,
        "torch": (torch and torch.version) or software.torch or "none",
        "CUDA": torch and torch.cuda,
        "NCCL": (torch and torch.nccl) or software.nccl,
        "driver": facts.gpus and facts.gpus.driver,
    }
    shown = {name: value for name, value in shown.items() if value} | {"on": software.system}
    yield finding("versions", versions=", ".join(f"{name} {value}" for name, value in shown.items()))
    for library, problem in ((libraries and libraries.problems) or {}).items():
        fix = _repair(library, problem)
        yield finding("library-broken", library=library, problem=problem, fix=fix)
    if libraries is not None and libraries.problems is None:
        level = "note" if libraries.late else "fault"
        yield finding("libraries-unanswered", level=level, problem=libraries.problem)
    version = tuple(int(part) for part in str(shown["torch"]).split(".")[:2] if part.isdecimal())
    if len(version) == 2 and not TORCH[0] <= version < TORCH[1]:
        least, below = (".".join(map(str, bound)) for bound in TORCH)
        yield finding("torch-version", version=shown["torch"], least=least, below=below)


def _repair(library: str, problem: str) -> str:
    package = {"cv2": "opencv-python-headless", "yaml": "PyYAML"}.get(library, library)
    if library == "cv2" and "libGL" in problem:
        return "pip uninstall opencv-python; pip install --force-reinstall opencv-python-headless"
    if "No module named" in problem:
        return f"pip install {package}"
    if "numpy" in problem.lower() and library != "numpy":
        return f"pip install --upgrade {package} numpy"
    return f"pip install --force-reinstall {package}"


# -- cores, memory, disks ------------------------------------------------------------------------------------


def _cores(facts: HostFacts, estimate: ResourceEstimate) -> Iterator[Finding]:
    usable, quota = facts.cores.usable or facts.cores.visible or 1, facts.cores.quota
    cores = f"{usable} cores may be used of {facts.cores.visible}"
    processes = estimate.ranks * max(1, estimate.workers)
    if quota is not None and quota < usable:
        threads = max(1, int(quota // estimate.ranks))
        yield finding("cores-quota", cores=cores, quota=quota, threads=threads)
    elif processes > 2 * usable:
        fix = (
            f"--workers {max(0, usable // estimate.ranks)}"
            if estimate.workers
            else "fewer processes: --device"
        )
        yield finding("cores-crowded", cores=cores, processes=processes, run=estimate.text, fix=fix)
    else:
        yield finding("cores", cores=cores)


def _memory(facts: HostFacts, estimate: ResourceEstimate) -> Iterator[Finding]:
    memory = facts.memory
    if memory.available is None or memory.machine_available is None or memory.total is None:
        return
    is_limited = memory.machine_available - memory.available > 256 << 20
    shown = f"{size_text(memory.available)} available of {size_text(memory.total)}"
    if is_limited:
        shown += f" (a control group's limit; the machine itself has {size_text(memory.machine_available)})"
    wanted = f"a run takes about {size_text(estimate.memory_bytes)} here ({estimate.text})"
    is_short = estimate.memory_bytes > memory.available
    limit = "; docker run --memory, or resources.limits.memory of the pod" if is_limited else ""
    yield finding("memory-short" if is_short else "memory", memory=shown, wanted=wanted, limit=limit)


def _shm(facts: HostFacts, estimate: ResourceEstimate) -> Iterator[Finding]:
    shm = facts.shm
    if shm is None:
        return
    if shm.read_only and (estimate.workers or estimate.ranks > 1):
        yield finding("shm-read-only")
        return
    space = f"/dev/shm: {size_text(shm.free)} free of {size_text(shm.size)}"
    if shm.largest:
        space += ", largest " + ", ".join(f"{name} {size_text(size)}" for name, size in shm.largest)
    wanted = f"loader processes need {size_text(estimate.shm_bytes)} ({estimate.text})"
    if not estimate.workers:
        wanted = "nothing needed: no loader processes"
    if estimate.shm_bytes > shm.free:
        gib = max(1, -(-(2 * estimate.shm_bytes + shm.size - shm.free) // 2**30))
        level = "fault" if estimate.train_shm_bytes > shm.free else "warn"
        yield finding("shm-small", level=level, space=space, wanted=wanted, gib=gib)
    else:
        code = "shm-default" if shm.size <= DOCKER_SHM else "shm"
        yield finding(code, space=space, wanted=wanted)


def _disks(facts: HostFacts) -> Iterator[Finding]:
    for disk in facts.disks:
        free, speed = disk.free, disk.write_bytes_per_s
        shown = f"{disk.folder}: {'?' if free is None else size_text(free)} free"
        shown += f", writes {speed / 1e6:.0f} MB/s" if speed else ""
        if disk.problem:
            yield finding("disk-refuses", folder=disk.folder, below=disk.below, problem=disk.problem)
        elif free is not None and free < DISK_LOW:
            yield finding("disk-low", level="fault" if free < DISK_FULL else "warn", disk=shown)
        else:
            yield finding("disk-slow" if speed and speed < DISK_SLOW else "disk", disk=shown)


def _open_files(facts: HostFacts, estimate: ResourceEstimate) -> Iterator[Finding]:
    soft, hard = facts.limits.open_files, facts.limits.open_files_hard
    wanted = max(LEAST_OPEN_FILES, estimate.open_files)
    if soft is None or soft >= wanted:
        return
    fix = f"ulimit -n {max(wanted, 65536) if hard is None else min(hard, 65536)}"
    if hard is not None and hard < wanted:
        fix = f"'* hard nofile 65536' in /etc/security/limits.conf, or docker run --ulimit nofile=65536 (now at most {hard})"
    yield finding("open-files", limit=soft, wanted=wanted, fix=fix)


# -- variables, system ---------------------------------------------------------------------------------------


def _place_variables(facts: HostFacts) -> Iterator[Finding]:
    variables = facts.variables
    place = [name for name in TORCHRUN if name in variables]
    if place:
        is_whole = {*place, "LOCAL_RANK"} == {*TORCHRUN} and variables["WORLD_SIZE"] != "1"
        yield finding(
            "stray-variables",
            level="fault" if is_whole else "warn",
            variables=", ".join(f"{name}={variables[name]}" for name in place),
            rank=variables.get("RANK"),
            size=variables.get("WORLD_SIZE"),
            names=" ".join(place),
        )


def _variables(facts: HostFacts) -> Iterator[Finding]:
    variables = facts.variables
    present = [one.name for one in facts.interfaces or ()]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name)
        if not (value and present) or value.startswith("^"):
            continue
        if name.startswith("GLOO"):  # gloo needs all of them
            absent = [part for part in value.split(",") if part not in present]
        else:  # NCCL uses those that exist
            absent = [] if matches(present, value) else [value.removeprefix("=")]
        if absent:
            lists = {"absent": ", ".join(absent), "present": ", ".join(present)}
            yield finding("card-setting", name=name, value=value, **lists)
    if variables.get("NCCL_IB_DISABLE") == "1" and facts.infiniband:
        yield finding("infiniband-unused")
    others = {k: v for k, v in variables.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
    if others:
        shown = ", ".join(f"{name}={value}" for name, value in others.items())
        yield finding("communication-variables", variables=shown)
    if "OMP_NUM_THREADS" in variables:
        yield finding("threads", threads=variables["OMP_NUM_THREADS"])


def _system(facts: HostFacts) -> Iterator[Finding]:
    if facts.clock is not None and facts.clock.synchronised is False:
        yield finding("clock-unkept")
    values = {
        "main memory": facts.memory.available,
        "shared memory": facts.shm,
        "network interfaces": facts.interfaces,
    }
    absent = [name for name, value in values.items() if value is None]
    if facts.platform in ("win32", "darwin"):
        absent += ["firewall", "which process uses a port"]
    if absent:
        is_linux = facts.platform == "linux"
        why = "" if is_linux else "several machines are supported on Linux; here one, with gloo"
        yield finding("unseen", platform=facts.platform, absent=", ".join(absent), why=why)
