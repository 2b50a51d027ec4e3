"""What every rank does now, for people: the table below the bar of rank 0, and ``yolofleet fleet status``.

The figures travel in the heartbeats of the watchdog, so they cost no collective. Rank 0 writes them to a small file in
the run folder, which another process can read. No torch, because launchers read it too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from yolofleet.storage.atomic import write_unsynced

MOST_STATUS_BYTES = 64 << 20  # a larger file is refused; a rank takes about 300 bytes


@dataclass(frozen=True)
class RankStatus:
    """What one rank does."""

    rank: int
    host: str
    device: str
    phase: str  # phase of the rank's clock, or its task
    step: int  # step of the run
    quiet_s: float  # seconds without progress
    rate_img_s: float  # images a second of its own part, without waiting for other ranks; 0: unknown
    waits: float  # share of its training time in which it waits for other ranks, 0..1
    memory_gib: float  # peak on its device in the epoch, or resident memory of its process on a CPU
    temperature_c: float  # temperature of the device, or of the processors of the host; 0: unknown


def write_status(path: Path, ranks: Sequence[RankStatus]) -> None:
    """Write the status of a run. Raise OSError if the disk refuses."""
    rows = [list(asdict(rank).values()) for rank in ranks]
    write_unsynced(path, json.dumps({"time": round(time.time(), 3), "ranks": rows}).encode())


def parsed_status(content: bytes) -> tuple[float, list[RankStatus]]:
    """Return the time (seconds since 1970) and the ranks of a status file. It may come from another person's machine.

    Raises:
        ValueError: it is not a status file.
    """
    kinds: list[type] = [
        {"int": int, "str": str, "float": float}[str(field.type)] for field in fields(RankStatus)
    ]
    try:
        found = json.loads(content)
        rows = [
            RankStatus(*(_checked(value, kind) for value, kind in zip(row, kinds, strict=True)))
            for row in found["ranks"]
        ]
        return _checked(found["time"], float), rows
    except (LookupError, TypeError, RecursionError, OverflowError) as problem:
        raise ValueError(f"it is not the status of a run: {problem}") from None


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"expected {kind.__name__}, got {str(value)[:40]!r}")
    if isinstance(value, (int, float)) and not abs(value) < 1e15:  # NaN too
        raise ValueError(f"{value} is not a number of a status")
    return value
