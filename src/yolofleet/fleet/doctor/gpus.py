"""Judge the facts about the GPUs of one machine: are those that a run asks for there, and can torch use them?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_facts import Gpus, HostFacts
from yolofleet.fleet.resources import ResourceEstimate
from yolofleet.support.device_names import MIG_INSTEAD, mig_reason
from yolofleet.support.text import size_text

GPU_TAKEN_MIB = 1024
INSTALL = "install the build of torch that pytorch.org/get-started names for your driver"


def judge_gpus(facts: HostFacts, estimate: ResourceEstimate, host: str) -> list[Finding]:
    """Judge the GPUs that a run asks for: given ones, a number of them, or none."""
    found = list(_each(facts, facts.gpus, estimate, host)) if facts.gpus is not None else []
    if estimate.gpu_ids and facts.has_counted_gpus and not _has_fault(found):
        found += _requested(facts, estimate, host)
    if estimate.wanted.device.startswith("cpu"):  # the run uses no GPU
        found = [replace(one, level="note") if one.level != "ok" else one for one in found]
    return found


def _has_fault(found: Sequence[Finding]) -> bool:
    return any(one.level == "fault" for one in found)


def is_for_nvidia(version: str) -> bool:
    """Return whether a build of torch can use NVIDIA GPUs, or no GPU at all, by its version.

    PyPI's builds for Linux are for CUDA and have no tag. Tags are ``cu128``, ``cpu``, ``rocm6.4``, ``xpu``, or those of
    whoever built it (NVIDIA's containers: ``nv25.01``).
    """
    tag = version.partition("+")[2]
    return tag in ("", "cpu") or re.search(r"(^|\W)(cu|nv)\d", tag) is not None


# -- how many ------------------------------------------------------------------------------------------------


def visible_gpus(count: int | None, setting: str | None) -> int | None:
    """Return how many of ``count`` GPUs torch sees under a value of CUDA_VISIBLE_DEVICES; None if it is unknown.

    torch and CUDA read numbers up to the first that is invalid or too high, and a number that occurs twice hides all
    GPUs. UUIDs (GPU-..., MIG-...) are assumed to exist. Of several MIG instances, CUDA shows a process the first one.
    """
    if count is None or setting is None:
        return count
    names = [name.strip() for name in setting.split(",")]
    if setting.startswith("GPU-"):
        return len(set(names))
    if setting.startswith("MIG-"):
        return 1
    numbers: list[int] = []
    for name in names:
        match = re.match(r"\+?(\d+)", name)
        if match is None:
            break
        numbers.append(int(match[1]))
    if len(set(numbers)) < len(numbers):
        return 0
    return next((at for at, number in enumerate(numbers) if number >= count), len(numbers))


def _requested(facts: HostFacts, estimate: ResourceEstimate, host: str) -> list[Finding]:
    """Return a fault if a GPU that the run names by number is missing.

    If torch was not loaded, only the driver's count is known, which says nothing about GPUs that are not NVIDIA's.
    """
    torch, version = facts.torch, str(facts.software.torch)
    setting = facts.variables.get("CUDA_VISIBLE_DEVICES")
    nvidia = is_for_nvidia(version)
    count = facts.gpu_count if nvidia else None
    has_counted = torch is not None and (nvidia or torch.hip)  # torch.cuda is ROCm's name, too
    usable = len(torch.devices) if torch is not None and has_counted else visible_gpus(count, setting)
    asked = f"{_ids_text(estimate.gpu_ids)} {'are' if len(estimate.gpu_ids) > 1 else 'is'} asked for"
    if usable is None:
        return [finding("gpus-uncounted", asked=asked)]
    if count == 0 and not torch:
        return [_none(estimate, host)]
    if version.endswith("+cpu") and not torch:
        return [finding("torch-without-cuda", version=version, install=INSTALL)]
    if not usable:
        return [_hidden(setting, estimate, host)]
    if max(estimate.gpu_ids) < usable:
        return []
    is_hidden = setting is not None and usable != count
    there = f"there {'is 1 GPU' if usable == 1 else f'are {usable} GPUs'}"
    there += f" (CUDA_VISIBLE_DEVICES={setting})" if is_hidden else ""
    left = [i for i in estimate.gpu_ids if i < usable] or list(range(usable))
    fix = ("unset CUDA_VISIBLE_DEVICES; or " if is_hidden else "") + _instead(host, left)
    if only_one := mig_reason(setting):
        there, fix = f"{there}: {only_one}", f"{MIG_INSTEAD}; or {_instead(host, [0])}"
    return [finding("gpu-missing", there=there, asked=asked, fix=fix)]


def _ids_text(ids: Sequence[int]) -> str:
    """Return ``GPU 3``, ``GPUs 0 to 7`` or ``GPUs 0 and 2``."""
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"GPUs {ids[0]} to {ids[-1]}"
    *front, last = map(str, ids)
    return f"GPUs {', '.join(front)} and {last}" if front else f"GPU {last}"


def _instead(host: str, ids: Sequence[int]) -> str:
    """Return how to ask for these GPUs, or for the CPU if there are none."""
    device = ",".join(map(str, ids)) or "cpu"
    if not host:
        return f"--device {device}"
    first = list(ids) == list(range(len(ids)))
    short = str(len(ids)) if first else f"+{ids[0]}" if len(ids) == 1 else "+".join(map(str, ids))
    return f'{host}:{short if ids else "cpu"} in --hosts; in fleet.yaml: {{host: {host}, device: "{device}"}}'


def _none(estimate: ResourceEstimate, host: str) -> Finding:
    return finding("gpu-none", level="fault" if estimate.on_gpu else "note", instead=_instead(host, ()))


def _hidden(setting: str | None, estimate: ResourceEstimate, host: str) -> Finding:
    level = "fault" if setting is None or estimate.gpu_ids else "warn"
    return finding("gpus-hidden", level=level, setting=setting)


# -- one by one ----------------------------------------------------------------------------------------------


def _each(facts: HostFacts, gpus: Gpus, estimate: ResourceEstimate, host: str) -> Iterator[Finding]:
    """Judge the GPUs as nvidia-smi and torch see them."""
    torch = facts.torch
    devices = torch.devices if torch else []
    if gpus.state == "silent" and not devices:
        yield finding("driver-silent", said=gpus.said, cards=gpus.cards, fix=_revive(gpus.said))
        return
    if not gpus.gpus and not devices:
        if estimate.gpu_ids and not is_for_nvidia(str(facts.software.torch)):
            return  # nvidia-smi sees only NVIDIA's GPUs
        if torch or not estimate.gpu_ids:  # without torch, the driver's count tells more
            yield _none(estimate, host)
        return
    found = list(_torch_and_gpus(facts, gpus, estimate, host)) if torch else []
    yield from found
    # under CUDA_VISIBLE_DEVICES a run's numbers are not the driver's
    asked = () if "CUDA_VISIBLE_DEVICES" in facts.variables else estimate.gpu_ids
    for gpu in gpus.gpus:
        if asked and gpu.index not in asked:
            continue
        name = f"GPU {gpu.index} ({gpu.name})"
        if gpu.uncorrected_errors:
            yield finding("gpu-errors", name=name, errors=gpu.uncorrected_errors, index=gpu.index)
        if gpu.used_mib and gpu.used_mib > GPU_TAKEN_MIB:
            busy = f", {gpu.busy_percent} % busy" if gpu.busy_percent is not None else ""
            yield finding("gpu-taken", name=name, used=gpu.used_mib, total=gpu.memory_mib, busy=busy)
    kinds = sorted({gpu.name for gpu in gpus.gpus})
    if len(kinds) > 1:
        yield finding("gpus-unequal", kinds=", ".join(kinds))
    if devices and not _has_fault(found):
        shown = ", ".join(f"{device.name} {size_text(device.memory)}" for device in devices)
        yield finding("gpus", count=len(devices), gpus=shown)


def _torch_and_gpus(facts: HostFacts, gpus: Gpus, estimate: ResourceEstimate, host: str) -> Iterator[Finding]:
    """Judge whether this torch can compute on the GPUs."""
    torch = facts.torch
    assert torch is not None
    if torch.cuda is None and torch.hip is None:
        yield finding("torch-without-cuda", version=torch.version, install=INSTALL)
    elif torch.problem:
        values = {"problem": torch.problem, "install": INSTALL}
        yield finding("cuda-unusable", cuda=torch.cuda, driver=gpus.driver, **values)
    elif not torch.devices:
        yield _hidden(facts.variables.get("CUDA_VISIBLE_DEVICES"), estimate, host)
    for number, device in enumerate(torch.devices):
        name = f"GPU {number} ({device.name})"
        if device.problem:
            yield finding("gpu-broken", name=name, problem=device.problem)
        elif not _has_kernels(device.capability, torch.arch_list):
            values = {"capability": device.capability, "architectures": " ".join(torch.arch_list)}
            yield finding("gpu-kernels", name=name, install=INSTALL, **values)


def _has_kernels(capability: str, arch_list: list[str]) -> bool:
    """Return whether a build has code for a GPU.

    Binaries (sm) run on the same major version from their minor version on, intermediate code (compute) on all later
    versions.
    """
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
