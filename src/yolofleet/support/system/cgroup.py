"""Memory and processor time that this process may use, within the limits of its control groups (cgroups).

Reads versions 1 and 2 of control groups. On systems other than Linux all values are unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from yolofleet.support.system.proc import PROC, memory_info, sizes_in, text_of

if sys.platform != "win32":
    import resource

GROUPS = Path("/sys/fs/cgroup")
MEMORY_FILES = {  # limit, use, and the part of the use that the kernel can drop (a name in memory.stat)
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return how many more bytes of memory this process may use; None if unknown.

    That is the minimum of the machine's available memory, of the rest below the limit of each control group, and of the rest
    below the process's own limits. Pages that the kernel can drop count as free.
    """
    found = [memory_info(proc).get("MemAvailable"), *_below_own_limits(proc)]
    found += [_memory_left(version, folder) for version, folder in group_folders("memory", proc, groups)]
    return min((value for value in found if value is not None), default=None)


def _below_own_limits(proc: Path) -> list[int]:
    """Return how many bytes are left below the limits (``ulimit``) of this process on its address space and its data."""
    left = []
    if sys.platform == "linux":
        sizes = sizes_in(proc / "self" / "status")
        for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY and name in sizes:
                left.append(max(most - sizes[name], 0))
    return left


def cpu_quota(proc: Path = PROC, groups: Path = GROUPS) -> float | None:
    """Return the limit of the control groups on processor time, in cores; None if there is no limit or it is unknown."""
    found = []
    for _, folder in group_folders("cpu", proc, groups):
        quota, period = (*text_of(folder / "cpu.max").split(), "", "")[:2]  # version 2
        if not quota:
            quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def group_folders(controller: str, proc: Path = PROC, groups: Path = GROUPS) -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of this process's control group for ``controller``, then of each parent.

    In a container, the path of this process's group may not exist, but the root does.
    """
    for line in text_of(proc / "self" / "cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            version, root = 2, groups
        elif controller in controllers.split(","):
            version, root = 1, groups / controller
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            yield version, folder
            if folder == root:
                break
            folder = folder.parent


def _memory_left(version: int, folder: Path) -> int | None:
    limit_name, used_name, droppable_name = MEMORY_FILES[version]
    limit, used = text_of(folder / limit_name), text_of(folder / used_name)
    if not limit.isdecimal() or not used.isdecimal():  # "max"
        return None
    droppable = _counts(folder / "memory.stat").get(droppable_name, 0)
    return max(0, int(limit) - int(used) + droppable)


@dataclass(frozen=True)
class OomKills:
    """The number of processes that the kernel's out-of-memory killer has ended; None: unknown."""

    # in this process's control group, which its children share; because the group or the whole machine was
    # out of memory
    group: int | None = None
    machine: int | None = None  # on this machine, including other containers

    def since(self, before: OomKills) -> OomKills:
        """Return the difference to ``before``."""
        return OomKills(_more(self.group, before.group), _more(self.machine, before.machine))


UNKNOWN = OomKills()


def oom_kills(proc: Path = PROC, groups: Path = GROUPS) -> OomKills:
    """Return the number of processes that the out-of-memory killer has ended until now."""
    found = list(group_folders("memory", proc, groups))
    old = [folder / "memory.oom_control" for version, folder in found if version == 1]
    new = [folder / "memory.events" for version, folder in found if version == 2]
    # in a container with version 1, this group may be the root; with version 2, a parent counts other groups too
    files = [old[0], old[-1]] if old else new[:1]
    counts = (_counts(file).get("oom_kill") for file in files)
    group = next((count for count in counts if count is not None), None)
    return OomKills(group, _counts(proc / "vmstat").get("oom_kill"))


def _counts(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    pairs = (line.split() for line in text_of(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _more(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
