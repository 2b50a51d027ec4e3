"""What ``--device`` means, without asking any device."""

from __future__ import annotations

import re

from yolofleet.errors import ConfigError

MIG_INSTEAD = "one process for each MIG instance, started by torchrun or srun (docs/several-gpus.md)"
MOST_PROCESSES = 256  # on one machine
_GPU = "[0-9]{1,3}(:[1-9][0-9]{0,2})?"
GPUS = f"{_GPU}(,{_GPU})*"  # of the command line: 0,1 or 0:2


def processes_of(device: str) -> int:
    """Return how many processes ``--device`` asks for: ``cpu:2``, ``0,1`` and ``0:2`` are two.

    Raises:
        ConfigError: not a device.
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
    raise ConfigError(f"--device {device} is not a device", hint="auto, cpu, cpu:2, mps, 0 or 0,1")


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
