"""Processes of this machine, as /proc tells. Linux; elsewhere nothing is seen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from yolofleet.parallel.witness import PROC, stat_fields, stat_table

CONTROL_GROUPS = Path("/sys/fs/cgroup")
ENDED = "ZX"  # states


def started_at(pid: int) -> str:
    """Tells a process from a later one of the same number; "" when it does not run."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in ENDED else ""


def children(pid: int) -> list[int]:
    """Living processes that ``pid`` has started."""
    return _children().get(pid, [])


def descendants(pid: int) -> list[int]:
    """Living children of ``pid``, theirs, and so on."""
    of = _children()
    found = list(of.get(pid, []))
    for child in found:
        found += of.get(child, [])
    return found


def _children() -> dict[int, list[int]]:
    """Living processes, by the one that started them."""
    found: dict[int, list[int]] = {}
    for pid, fields in stat_table().items():
        if fields[0] not in ENDED:
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def variable(pid: int, name: str) -> str:
    """Of the environment that a process was started with; "" when it has none of that name, or has ended."""
    with suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key.decode("utf-8", "replace") == name:
                return value.decode("utf-8", "replace")
    return ""


@dataclass(frozen=True)
class OomKills:
    """How many processes the kernel's out-of-memory killer has ended; None = it does not say.

    Attributes:
        group: of this process's control group, which is that of what it starts: for lack of memory of the group, or
            of the whole machine.
        machine: all on this machine, those of other containers, too.
    """

    group: int | None = None
    machine: int | None = None

    def since(self, before: OomKills) -> OomKills:
        """How many more than ``before``."""
        return OomKills(_more(self.group, before.group), _more(self.machine, before.machine))


UNKNOWN = OomKills()


def oom_kills() -> OomKills:
    """Up to now."""
    groups = [_counted(file) for file in _group_counts()]
    group = next((count for count in groups if count is not None), None)
    return OomKills(group, _counted(PROC / "vmstat"))


def _group_counts() -> list[Path]:
    """Files that may have the count of this process's control group, the likeliest first."""
    found: list[Path] = []
    with suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):  # version 1; in a container its own group may be the root
                root = CONTROL_GROUPS / "memory"
                return [folder / "memory.oom_control" for folder in (root / path.lstrip("/"), root)]
            if not controllers:
                found = [CONTROL_GROUPS / path.lstrip("/") / "memory.events"]
    return found


def _counted(file: Path) -> int | None:
    """The value of ``oom_kill`` in a file of names and values."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _more(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def reap_orphans(but: int) -> None:
    """Let go of adopted processes of other sessions than this one that have ended; each would keep its number.

    Args:
        but: this one is waited for by who started it.
    """
    with suppress(OSError):  # there is no child at all
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but or os.getsid(ended.si_pid) == os.getsid(0):
                break
            os.waitpid(ended.si_pid, os.WNOHANG)


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
