"""How much memory this process may still use: the machine's, and the limit of its control groups."""

from __future__ import annotations

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the kernel says is available and what is left below each cgroup's limit (v1 and v2);
    pages that the kernel can drop count as free. None where the system does not say (not Linux)."""
    found = [_machine(proc), *_limits(proc, groups)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _machine(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _limits(proc: Path, groups: Path) -> list[int | None]:
    left: list[int | None] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = groups / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:  # a limit of any parent counts; in a container the path may not exist, its root does
            left.append(_left(folder, *names))
            if folder == root:
                break
            folder = folder.parent
    return left


def _left(folder: Path, limit_name: str, used_name: str, droppable_name: str) -> int | None:
    limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
    if not limit.isdecimal() or not used.isdecimal():  # "max"
        return None
    droppable = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == droppable_name and value.isdecimal():
            droppable = int(value)
    return max(0, int(limit) - int(used) + droppable)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
