"""What ``--device`` means, without asking any device."""

from __future__ import annotations

import re

from yolofleet.errors import ConfigError

MOST_PROCESSES = 256  # on the CPUs of one machine


def processes_of(device: str) -> int:
    """How many processes ``--device`` asks for: ``cpu:2`` and ``0,1`` are two.

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
    if re.fullmatch(r"\d+(,\d+)*", device):
        ids = device.split(",")
        if len(set(ids)) != len(ids):
            raise ConfigError(f"--device {device}: a device is named twice")
        return len(ids)
    raise ConfigError(f"--device {device} is not a device", hint="auto, cpu, cpu:2, mps, 0 or 0,1")
