"""Processes of this machine, as /proc tells. Linux; elsewhere nothing is seen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def started_at(pid: int) -> str:
    """Tells a process from a later one of the same number; "" when it does not run."""
    fields = _stat(PROC / str(pid))
    return fields[19] if fields else ""


def descendants(pid: int) -> list[int]:
    """Living children of ``pid``, theirs, and so on."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for folder in PROC.iterdir():
            fields = _stat(folder) if folder.name.isdecimal() else []
            if fields:
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def _stat(folder: Path) -> list[str]:
    """State, parent and what follows in proc(5); [] for what has ended."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def variable(pid: int, name: str) -> str:
    """Of the environment that a process was started with; "" when it has none of that name, or has ended."""
    with suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key.decode("utf-8", "replace") == name:
                return value.decode("utf-8", "replace")
    return ""


def oom_kills() -> int | None:
    """How many processes the kernel has ended on this machine for lack of memory, of the machine or of a control
    group, since it was started; None = it does not say."""
    with suppress(OSError, ValueError):
        for line in (PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def oom_kills_since(before: int | None) -> int | None:
    """How many more than ``before``."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def end_descendants(pid: int, deadline_s: float = 5.0) -> list[int]:
    """SIGKILL to all of them until none is left; returns those that are after ``deadline_s`` (stuck in the
    kernel)."""
    gives_up_at_s = time.monotonic() + deadline_s
    while left := descendants(pid):
        if time.monotonic() > gives_up_at_s:
            return left
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
    return []
