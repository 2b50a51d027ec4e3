"""What ``--device`` means, without asking any device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from yolofleet.support.errors import ConfigError

MIG_INSTEAD = "one process for each MIG instance, started by torchrun or srun (docs/several-gpus.md)"
MOST_PROCESSES = 256  # on one machine
_GPU = "[0-9]{1,3}(:[1-9][0-9]{0,2})?"
GPUS = f"{_GPU}(,{_GPU})*"  # of the command line: 0,1 or 0:2
NO_GPU = "--device cpu, or cpu:2 for two processes; yolofleet doctor shows what torch finds"
ALL = "all"  # every GPU of the machine, one process each


def plain_device(value: Any) -> Any:
    """Return ``--device`` in its plain form: ``0-2`` is ``0,1,2``, ``cuda`` is ``0``, ``cuda:1`` and [1] are ``1``.

    Values of other types, and texts that name no devices, are returned for the check of the form.

    Raises:
        ValueError: a range goes from a higher to a lower number.
    """
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    text = value.lower().replace(" ", "").strip("[]").replace("cuda:", "")
    return ",".join(map(_plain, text.split(","))) or "auto"


def _plain(part: str) -> str:
    if part == "cuda":
        return "0"
    ends = re.fullmatch("([0-9]{1,3})-([0-9]{1,3})", part)
    if ends is None:
        return part
    first, last = int(ends[1]), int(ends[2])
    if first > last:
        raise ValueError(f"has a range from a higher to a lower number: write {last}-{first}")
    return numbered(range(first, last + 1))


def numbered(ids: Iterable[int]) -> str:
    """Return the ``--device`` that names these GPUs."""
    return ",".join(map(str, ids))


def processes_of(device: str) -> int:
    """Return how many processes ``--device`` asks for: ``cpu:2``, ``0,1`` and ``0:2`` are two.

    Raises:
        ConfigError: not a device; or ``all``, which a training and a validation replace by numbers.
    """
    if device in ("auto", "cpu", "mps", ""):
        return 1
    if match := re.fullmatch(r"cpu:(\d{1,9})", device):
        count = int(match[1])
        if 1 <= count <= MOST_PROCESSES:
            return count
        raise ConfigError(
            f"--device {device}: 1 to {MOST_PROCESSES} processes can run on CPUs", hint="--device cpu:2"
        )
    if re.fullmatch(GPUS, device):
        return len(gpu_ids(device))
    if device == ALL:
        raise ConfigError("--device all: this command does not count GPUs", hint="name them: --device 0-3")
    raise ConfigError(f"--device {device} is not a device", hint="auto, cpu, cpu:2, mps, all, 0 or 0-3")


def gpu_ids(device: str) -> list[int]:
    """Return the GPU of each process for a ``--device`` that names GPUs: ``0,1`` is [0, 1], ``0:2`` is [0, 0].

    Raises:
        ConfigError: a GPU is named twice, or has too many processes.
    """
    parts = [part.partition(":") for part in device.split(",")]
    ids = [int(number) for number, _, count in parts for _ in range(int(count or 1))]
    if len({int(number) for number, _, _ in parts}) < len(parts):
        hint = "name each GPU once; 0:2 starts two processes on GPU 0"
        raise ConfigError(f"--device {device}: a device is named twice", hint=hint)
    if len(ids) > MOST_PROCESSES:
        raise ConfigError(
            f"--device {device}: at most {MOST_PROCESSES} processes can run", hint="--device 0:2"
        )
    return ids


def mig_reason(visible: str | None) -> str:
    """Return why a process has one GPU under a value of CUDA_VISIBLE_DEVICES that names several MIG instances, or ""."""
    if visible is None or not visible.startswith("MIG-") or "," not in visible:
        return ""
    return "CUDA shows a process one MIG instance"
