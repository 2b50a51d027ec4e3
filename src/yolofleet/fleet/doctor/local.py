"""What the facts about one computer mean for a run on it: software, memory, disks, limits, variables.

Each function takes what ``machine_facts.py`` saw and what the run needs, and touches nothing. Facts that are absent
were not asked for; facts that are None cannot be seen on this system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from yolofleet.config.resource_estimate import Need
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.gpus import judge_gpus
from yolofleet.fleet.doctor.network_interfaces import matches
from yolofleet.text import size_text

Facts = Mapping[str, Any]

TORCH = (2, 6), (2, 15)  # from, and before; as pyproject.toml
DOCKER_SHM = 64 << 20
DISK_FULL, DISK_LOW, DISK_SLOW = 512 << 20, 5 << 30, 20e6  # bytes, bytes, bytes a second
LEAST_OPEN_FILES = 1024
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them all


def judge_host(facts: Facts, need: Need, where: str = "") -> list[Finding]:
    """All findings that need no other host and no network."""
    parts: list[Callable[[Facts, Need, str], list[Finding]]] = [
        _software, judge_gpus, _cores, _memory, _shm, _disks, _open_files, _variables, _clock, _unseen,
    ]  # fmt: skip
    return list(chain.from_iterable(part(facts, need, where) for part in parts))


# -- software ------------------------------------------------------------------------------------------------


def _software(facts: Facts, need: Need, where: str) -> list[Finding]:
    if "software" not in facts:
        return []
    software = facts["software"]
    libraries = facts.get("libraries", {"problems": {}})  # absent: nothing was imported
    torch = libraries.get("torch") or {}
    shown = {
        "yolofleet": software["yolofleet"],
        "python": software["python"],
        "torch": torch.get("version") or software["torch"] or "none",
        "CUDA": torch.get("cuda"),
        "NCCL": torch.get("nccl") or software["nccl"],
        "driver": facts.get("gpus", {}).get("driver"),
    }
    shown = {name: value for name, value in shown.items() if value} | {"on": software["system"]}
    found = [Finding("versions", "ok", where, ", ".join(f"{name} {value}" for name, value in shown.items()))]
    for library, why in libraries.get("problems", {}).items():
        found.append(
            Finding(
                "library-broken",
                "fault",
                where,
                f"{library} cannot be loaded: {why}",
                "no run can start without it",
                _repair(library, why),
            )
        )
    if "problems" not in libraries:
        level = "note" if libraries.get("late") else "fault"
        found.append(
            Finding(
                "libraries-unanswered",
                level,  # type: ignore[arg-type]
                where,
                f"loading the libraries in a process of its own: {libraries['problem']}",
                "a slow disk or a crowded machine, or a library that crashes",
                'python -c "import torch, cv2, numpy"',
            )
        )
    version = tuple(int(part) for part in str(shown["torch"]).split(".")[:2] if part.isdecimal())
    if len(version) == 2 and not TORCH[0] <= version < TORCH[1]:
        found.append(
            Finding(
                "torch-version",
                "warn",
                where,
                f"torch {shown['torch']} is not one that this version of yolofleet is tested with",
                "it may work",
                f'pip install "torch>={TORCH[0][0]}.{TORCH[0][1]},<{TORCH[1][0]}.{TORCH[1][1]}"',
            )
        )
    return found


def _repair(library: str, why: str) -> str:
    package = {"cv2": "opencv-python-headless", "yaml": "PyYAML"}.get(library, library)
    if library == "cv2" and "libGL" in why:
        return "pip uninstall opencv-python; pip install --force-reinstall opencv-python-headless"
    if "No module named" in why:
        return f"pip install {package}"
    if "numpy" in why.lower() and library != "numpy":
        return f"pip install --upgrade {package} numpy"
    return f"pip install --force-reinstall {package}"


# -- cores, memory, disks ------------------------------------------------------------------------------------


def _cores(facts: Facts, need: Need, where: str) -> list[Finding]:
    cores = facts["cores"]
    usable = cores["usable"] or cores["visible"] or 1
    quota = cores["quota"]
    seen = f"{usable} cores may be used of {cores['visible']}"
    if quota is not None and quota < usable:
        threads = max(1, int(quota // need.ranks))
        return [
            Finding(
                "cores-quota",
                "warn",
                where,
                f"{seen}, for the time of {quota:g} (control group)",
                "threads by the number of cores are stopped most of the time",
                f"--threads {threads}, or a larger CPU limit of the container",
            )
        ]
    processes = need.ranks * max(1, need.workers)
    if processes > 2 * usable:
        return [
            Finding(
                "cores-crowded",
                "warn",
                where,
                f"{seen}; a run would have {processes} busy processes ({need.text})",
                "they wait for each other",
                f"--workers {max(0, usable // need.ranks)}" if need.workers else "fewer processes: --device",
            )
        ]
    return [Finding("cores", "ok", where, seen)]


def _memory(facts: Facts, need: Need, where: str) -> list[Finding]:
    memory = facts["memory"]
    available = memory["available"]
    if available is None:
        return []
    limited = memory["machine_available"] - available > 256 << 20
    seen = f"{size_text(available)} available of {size_text(memory['total'])}"
    if limited:
        seen += f" (a control group's limit; the machine itself has {size_text(memory['machine_available'])})"
    wants = f"a run takes about {size_text(need.memory_bytes)} here ({need.text})"
    if need.memory_bytes > available:
        return [
            Finding(
                "memory-short",
                "warn",  # how much it is depends on the network: an estimate refuses no run
                where,
                f"{seen}; {wants}",
                "the kernel kills a process: exit code -9",
                "--micro-batch, --workers or --img lower"
                + ("; docker run --memory, or resources.limits.memory of the pod" if limited else ""),
            )
        ]
    return [Finding("memory", "ok", where, f"{seen}; {wants}")]


def _shm(facts: Facts, need: Need, where: str) -> list[Finding]:
    shm = facts["shm"]
    if shm is None:
        return []
    seen = f"/dev/shm: {size_text(shm['free'])} free of {size_text(shm['size'])}"
    if shm["largest"]:
        seen += ", largest " + ", ".join(f"{name} {size_text(size)}" for name, size in shm["largest"])
    wants = f"loader processes need {size_text(need.shm_bytes)} ({need.text})"
    if not need.workers:
        wants = "nothing needed: no loader processes"
    if need.shm_bytes > shm["free"]:
        others = shm["size"] - shm["free"]
        gib = max(1, -(-(2 * need.shm_bytes + others) // 2**30))
        return [
            Finding(
                "shm-small",
                "fault" if need.train_shm_bytes > shm["free"] else "warn",
                where,
                f"{seen}; {wants}",
                "a bus error, exit code -7, in the middle of a run",
                f"docker run --shm-size={gib}g; Kubernetes: an emptyDir with medium Memory at /dev/shm;\n"
                f"sudo mount -o remount,size={gib}G /dev/shm; or --prefetch 1, or --workers 0",
            )
        ]
    if shm["size"] <= DOCKER_SHM:
        return [
            Finding(
                "shm-default",
                "warn",
                where,
                f"{seen}; {wants}",
                "the default of containers: NCCL and --cache ram want more",
                "docker run --shm-size=8g, or --ipc=host",
            )
        ]
    return [Finding("shm", "ok", where, f"{seen}; {wants}")]


def _disks(facts: Facts, need: Need, where: str) -> list[Finding]:
    found = []
    for disk in facts["disks"]:
        free, speed = disk["free"], disk["write_bytes_per_s"]
        seen = f"{disk['folder']}: {'?' if free is None else size_text(free)} free"
        seen += f", writes {speed / 1e6:.0f} MB/s" if speed else ""
        if disk["problem"]:
            found.append(
                Finding(
                    "disk-refuses",
                    "fault",
                    where,
                    f"{disk['folder']} cannot be written ({disk['below']}): {disk['problem']}",
                    "checkpoints and results have nowhere to go",
                    "another folder: --project FOLDER; for the cache: YOLOFLEET_CACHE=FOLDER",
                )
            )
        elif free is not None and free < DISK_LOW:
            found.append(
                Finding(
                    "disk-low",
                    "fault" if free < DISK_FULL else "warn",
                    where,
                    seen,
                    "a checkpoint is up to four times the weights, and several are kept",
                    "make room, or another folder: --project FOLDER; for the cache: YOLOFLEET_CACHE=FOLDER",
                )
            )
        elif speed and speed < DISK_SLOW:
            found.append(
                Finding(
                    "disk-slow",
                    "warn",
                    where,
                    seen,
                    "checkpoints take long: a step may have to wait for them",
                    "a local disk: --project FOLDER; checkpoints less often: --save-minutes",
                )
            )
        else:
            found.append(Finding("disk", "ok", where, seen))
    return found


def _open_files(facts: Facts, need: Need, where: str) -> list[Finding]:
    soft, hard = facts["limits"]["open_files"], facts["limits"]["open_files_hard"]
    wanted = max(LEAST_OPEN_FILES, need.open_files)
    if soft is None or soft >= wanted:
        return []
    fix = f"ulimit -n {max(wanted, 65536) if hard is None else min(hard, 65536)}"
    if hard is not None and hard < wanted:
        fix = f"'* hard nofile 65536' in /etc/security/limits.conf, or docker run --ulimit nofile=65536 (now at most {hard})"
    return [
        Finding(
            "open-files",
            "warn",
            where,
            f"a process may open {soft} files; a run can need {wanted}",
            "'Too many open files' in a loader process",
            fix,
        )
    ]


# -- variables, clock ----------------------------------------------------------------------------------------


def _variables(facts: Facts, need: Need, where: str) -> list[Finding]:
    variables: Mapping[str, str] = facts["variables"]
    found = []
    place = [name for name in PLACE if name in variables]
    if place:
        whole = len(place) == len(PLACE) and variables["WORLD_SIZE"] != "1"
        found.append(
            Finding(
                "stray-variables",
                "fault" if whole else "warn",
                where,
                ", ".join(f"{name}={variables[name]}" for name in place),
                f"a run would take itself for rank {variables['RANK']} of {variables['WORLD_SIZE']}, and wait"
                if whole
                else "left by some launcher; yolofleet ignores an incomplete set, other programs do not",
                f"unset {' '.join(place)}",
            )
        )
    names = [card["name"] for card in facts.get("cards") or ()]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name)
        if not (value and names) or value.startswith("^"):
            continue
        if name.startswith("GLOO"):  # it wants all of them
            absent = [part for part in value.split(",") if part not in names]
        else:  # NCCL takes those that are there
            absent = [] if matches(names, value) else [value.removeprefix("=")]
        if absent:
            found.append(
                Finding(
                    "card-setting",
                    "fault",
                    where,
                    f"{name}={value}, and there is no card {', '.join(absent)}; there are {', '.join(names)}",
                    "'no socket interface found', or 'Unable to find address for'",
                    f"unset {name}",
                )
            )
    if variables.get("NCCL_IB_DISABLE") == "1" and facts.get("infiniband"):
        found.append(
            Finding(
                "infiniband-unused",
                "warn",
                where,
                "NCCL_IB_DISABLE=1, and there is InfiniBand",
                "gradients travel over the slower network",
                "unset NCCL_IB_DISABLE",
            )
        )
    others = {k: v for k, v in variables.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
    if others:
        found.append(
            Finding(
                "communication-variables", "note", where, ", ".join(f"{k}={v}" for k, v in others.items())
            )
        )
    threads = variables.get("OMP_NUM_THREADS")
    if threads is not None:
        found.append(
            Finding(
                "threads",
                "note",
                where,
                f"OMP_NUM_THREADS={threads}",
                "not used: a run divides the cores among its processes",
                "--threads N says otherwise",
            )
        )
    return found


def _clock(facts: Facts, need: Need, where: str) -> list[Finding]:
    if facts.get("clock", {}).get("synchronised") is not False:
        return []
    return [
        Finding(
            "clock-unkept",
            "note",
            where,
            "this machine does not keep its clock by a time server",
            "logs of several machines do not fit together",
            "sudo timedatectl set-ntp true",
        )
    ]


def _unseen(facts: Facts, need: Need, where: str) -> list[Finding]:
    values = {
        "main memory": facts["memory"]["available"],
        "shared memory": facts["shm"],
        "network cards": facts["cards"],
    }
    absent = [name for name, value in values.items() if value is None]
    if facts["platform"] in ("win32", "darwin"):
        absent += ["firewall", "who holds a port"]
    if not absent:
        return []
    why = (
        "" if facts["platform"] == "linux" else "several machines are supported on Linux; here one, with gloo"
    )
    return [
        Finding(
            "unseen", "note", where, f"cannot be seen here ({facts['platform']}): {', '.join(absent)}", why
        )
    ]
