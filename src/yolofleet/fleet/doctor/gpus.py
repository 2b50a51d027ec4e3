"""What the facts about the GPUs of one computer mean: are those that a run asks for there, and can torch use them?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from yolofleet.config.resource_estimate import Need
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.text import size_text

Facts = Mapping[str, Any]

GPU_TAKEN_MIB = 1024
GET_STARTED = "install the build of torch that pytorch.org/get-started names for your driver"


def judge_gpus(facts: Facts, need: Need, where: str) -> list[Finding]:
    """What was looked at in ``facts``: every GPU, the number of them, or nothing."""
    found = _each(facts, need, where) if "gpus" in facts else []
    if need.gpu_ids and "gpu_count" in facts and not any(finding.level == "fault" for finding in found):
        found += _asked_for(facts, need, where)
    if need.on_cpu:  # whatever is wrong with them
        found = [replace(finding, level="note") if finding.level != "ok" else finding for finding in found]
    return found


def is_for_nvidia(version: str) -> bool:
    """Return whether a build of torch can use NVIDIA GPUs, or no GPU at all, by its version.

    PyPI's builds for Linux are for CUDA and have no tag. Tags are ``cu128``, ``cpu``, ``rocm6.4``, ``xpu``, or those of
    whoever built it (NVIDIA's containers: ``nv25.01``).
    """
    tag = version.partition("+")[2]
    return tag in ("", "cpu") or re.search(r"(^|\W)(cu|nv)\d", tag) is not None


# -- how many ------------------------------------------------------------------------------------------------


def visible_gpus(count: int | None, setting: str | None) -> int | None:
    """How many of ``count`` GPUs torch sees under a value of CUDA_VISIBLE_DEVICES; None: not known.

    Numbers count up to the first that is none or too high, and one that stands there twice hides all; UUIDs (GPU-...,
    MIG-...) are taken to be there. As torch and CUDA read it.
    """
    if count is None or setting is None:
        return count
    names = [name.strip() for name in setting.split(",")]
    if setting.startswith(("GPU-", "MIG-")):
        return len(set(names))
    numbers: list[int] = []
    for name in names:
        match = re.match(r"\+?(\d+)", name)
        if match is None:
            break
        numbers.append(int(match[1]))
    if len(set(numbers)) < len(numbers):
        return 0
    return next((at for at, number in enumerate(numbers) if number >= count), len(numbers))


def _asked_for(facts: Facts, need: Need, where: str) -> list[Finding]:
    """Return a fault if a GPU that is asked for by number is missing.

    Where torch was not loaded, the driver's count has to do; it says nothing about GPUs that are not NVIDIA's.
    """
    torch, version = facts.get("libraries", {}).get("torch"), str(facts["software"]["torch"])
    setting = facts["variables"].get("CUDA_VISIBLE_DEVICES")
    nvidia = is_for_nvidia(version)
    count = facts["gpu_count"] if nvidia else None
    has_counted = torch and (nvidia or torch["hip"])  # the probe asks torch.cuda, which is ROCm's name, too
    usable = len(torch["devices"]) if has_counted else visible_gpus(count, setting)
    asked = f"{_ids_text(need.gpu_ids)} {'are' if len(need.gpu_ids) > 1 else 'is'} asked for"
    if usable is None:
        seen = (
            f"{asked}, and how many there are shows only when torch is loaded (AMD, Intel, Jetson, MIG ...)"
        )
        return [Finding("gpus-uncounted", "note", where, seen)]
    if count == 0 and not torch:
        return [_none(need, where)]
    if version.endswith("+cpu") and not torch:
        return [_without_cuda(version, where)]
    if not usable:
        return [_hidden(setting, need, where)]
    if max(need.gpu_ids) < usable:
        return []
    hidden = setting is not None and usable != count
    there = f"there {'is 1 GPU' if usable == 1 else f'are {usable} GPUs'}"
    shown = f" (CUDA_VISIBLE_DEVICES={setting})" if hidden else ""
    left = [i for i in need.gpu_ids if i < usable] or list(range(usable))
    return [
        Finding(
            "gpu-missing",
            "fault",
            where,
            f"{there}{shown}, and {asked}",
            "a process that has no GPU ends at once, and the others with it",
            ("unset CUDA_VISIBLE_DEVICES; or " if hidden else "") + _instead(where, left),
        )
    ]


def _ids_text(ids: Sequence[int]) -> str:
    """``GPU 3``, ``GPUs 0 to 7``, ``GPUs 0 and 2``."""
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"GPUs {ids[0]} to {ids[-1]}"
    *front, last = map(str, ids)
    return f"GPUs {', '.join(front)} and {last}" if front else f"GPU {last}"


def _instead(where: str, ids: Sequence[int]) -> str:
    """How to ask for these GPUs, or for the CPU where there are none."""
    device = ",".join(map(str, ids)) or "cpu"
    if not where:
        return f"--device {device}"
    first = list(ids) == list(range(len(ids)))
    short = str(len(ids)) if first else f"+{ids[0]}" if len(ids) == 1 else "+".join(map(str, ids))
    return (
        f'{where}:{short if ids else "cpu"} in --hosts; in fleet.yaml: {{host: {where}, device: "{device}"}}'
    )


def _none(need: Need, where: str) -> Finding:
    if not need.on_gpu:
        return Finding("gpu-none", "note", where, "no NVIDIA GPU here", "runs use the CPU: gloo")
    fix = f"{_instead(where, ())}; in a container: docker run --gpus all"
    return Finding("gpu-none", "fault", where, "no NVIDIA GPU here", "the run asks for one", fix)


def _without_cuda(version: str, where: str) -> Finding:
    return Finding(
        "torch-without-cuda",
        "fault",
        where,
        f"there are GPUs, but torch {version} is built for CPUs",
        "runs would use the CPU alone",
        f"pip uninstall torch, then {GET_STARTED}",
    )


def _hidden(setting: str | None, need: Need, where: str) -> Finding:
    return Finding(
        "gpus-hidden",
        "fault" if setting is None or need.gpu_ids else "warn",
        where,
        f"there are GPUs, but torch sees none (CUDA_VISIBLE_DEVICES={setting!r})",
        "runs would use the CPU alone",
        "unset CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all",
    )


# -- one by one ----------------------------------------------------------------------------------------------


def _each(facts: Facts, need: Need, where: str) -> list[Finding]:
    """As nvidia-smi and torch see them."""
    gpus = facts["gpus"]
    torch = facts["libraries"].get("torch")
    devices = torch["devices"] if torch else []
    if gpus["state"] == "silent" and not devices:
        return [
            Finding(
                "driver-silent",
                "fault",
                where,
                f"nvidia-smi: {gpus['said']}; NVIDIA cards on the bus: {gpus['cards']}",
                "no GPU can be used",
                _revive(gpus["said"]),
            )
        ]
    if not gpus["gpus"] and not devices:
        if need.gpu_ids and not is_for_nvidia(str(facts["software"]["torch"])):
            return []  # this function sees no GPUs but NVIDIA's
        # without torch's word, the driver's count tells more
        return [_none(need, where)] if torch or not need.gpu_ids else []
    found = _torch_and_gpus(facts, torch, need, where)
    # under CUDA_VISIBLE_DEVICES a run's numbers are not the driver's
    asked = () if "CUDA_VISIBLE_DEVICES" in facts["variables"] else need.gpu_ids
    for gpu in gpus["gpus"]:
        if asked and gpu["index"] not in asked:
            continue
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if gpu["uncorrected_errors"]:
            found.append(
                Finding(
                    "gpu-errors",
                    "warn",
                    where,
                    f"{name}: {gpu['uncorrected_errors']} uncorrected memory errors since it was reset",
                    "results may be wrong, and the next one ends the run",
                    f"leave it out with --device, and nvidia-smi -q -d ECC -i {gpu['index']}",
                )
            )
        if gpu["used_mib"] and gpu["used_mib"] > GPU_TAKEN_MIB:
            busy = f", {gpu['busy_percent']} % busy" if gpu["busy_percent"] is not None else ""
            found.append(
                Finding(
                    "gpu-taken",
                    "warn",
                    where,
                    f"{name}: {gpu['used_mib']} of {gpu['memory_mib']} MiB are taken{busy}",
                    "a run beside it is slow, or out of memory",
                    "nvidia-smi --query-compute-apps=gpu_uuid,pid,name,used_memory --format=csv",
                )
            )
    kinds = sorted({gpu["name"] for gpu in gpus["gpus"]})
    if len(kinds) > 1:
        found.append(
            Finding(
                "gpus-unequal",
                "note",
                where,
                f"different GPUs: {', '.join(kinds)}",
                "with equal shares the fast ones wait for the slow ones",
                "--shares auto",
            )
        )
    if devices and not any(finding.level == "fault" for finding in found):
        shown = ", ".join(f"{d['name']} {size_text(d['memory'])}" for d in devices)
        found.append(Finding("gpus", "ok", where, f"{len(devices)} usable: {shown}"))
    return found


def _torch_and_gpus(facts: Facts, torch: Mapping[str, Any] | None, need: Need, where: str) -> list[Finding]:
    """There are GPUs: can this torch compute on them?"""
    if torch is None:
        return []
    if torch["cuda"] is None and torch["hip"] is None:
        return [_without_cuda(torch["version"], where)]
    if torch["problem"]:
        return [
            Finding(
                "cuda-unusable",
                "fault",
                where,
                f"torch (CUDA {torch['cuda']}, driver {facts['gpus']['driver']}): {torch['problem']}",
                "most likely the driver is older than torch's CUDA needs, or another CUDA library is found first",
                f"update the driver, or {GET_STARTED}; look into LD_LIBRARY_PATH",
            )
        ]
    if not torch["devices"]:
        return [_hidden(facts["variables"].get("CUDA_VISIBLE_DEVICES"), need, where)]
    found = []
    for number, device in enumerate(torch["devices"]):
        name = f"GPU {number} ({device['name']})"
        if device["problem"]:
            found.append(
                Finding(
                    "gpu-broken",
                    "fault",
                    where,
                    f"{name} does not compute: {device['problem']}",
                    "a run on it fails at its first step",
                    "leave it out with --device; sudo dmesg | grep -i xid shows what the driver said",
                )
            )
        elif not _has_kernels(device["capability"], torch["arch_list"]):
            found.append(
                Finding(
                    "gpu-kernels",
                    "fault",
                    where,
                    f"{name} has compute capability {device['capability']}; torch is built for "
                    f"{' '.join(torch['arch_list'])}",
                    "'no kernel image is available for execution on the device'",
                    GET_STARTED,
                )
            )
    return found


def _has_kernels(capability: str, arch_list: list[str]) -> bool:
    """Binaries (sm) run on the same major version from their minor on, intermediate code (compute) on all later."""
    major, minor = (int(part) for part in capability.split("."))
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        digits = "".join(c for c in number if c.isdecimal())
        if len(digits) < 2:
            return True  # not CUDA's scheme
        theirs = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and theirs[0] == major and theirs[1] <= minor:
            return True
        if kind == "compute" and theirs <= (major, minor):
            return True
    return not arch_list


def _revive(said: str) -> str:
    if "mismatch" in said:
        return "the driver was updated under the running system: sudo reboot"
    if "not installed" in said:
        return "in a container: docker run --gpus all; else install NVIDIA's driver"
    return "sudo modprobe nvidia; sudo dmesg | grep -iE 'nvrm|xid'; then install the driver again, or sudo reboot"
