"""What this machine can tell of one of its processes that does not answer (Linux's /proc), and Python stacks."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from yolofleet.files.foreign import open_foreign

PROC = Path("/proc")
STATES = {
    "T": "is stopped (state T: SIGSTOP, Ctrl-Z or a paused container)",
    "t": "is held by a debugger (state t)",
    "D": "waits in the kernel for a disk, a network file system or a driver (state D)",
    "Z": "has died (state Z)",
    "R": "is running (state R)",
    "S": "is asleep (state S)",
}
STOPPED = "Tt"  # states of processes that cannot react
FRAMES_SHOWN = 10
DUMP = "Timeout ("  # how faulthandler.dump_traceback_later begins


@dataclass(frozen=True)
class ProcessState:
    """Attributes:
    letter: of /proc/PID/stat, "X" when the process is gone.
    wait_channel: kernel function that it sleeps in, "" where that is not told.
    """

    pid: int
    letter: str
    wait_channel: str = ""

    def text(self) -> str:
        what = STATES.get(self.letter, f"has state {self.letter}")
        if self.letter == "X":
            what = "is gone: it was killed or crashed (dmesg tells whether memory ran out)"
        where = f", in {self.wait_channel}" if self.wait_channel and self.letter in "DS" else ""
        return f"process {self.pid} {what}{where}"


def machine_id() -> str:
    """Equal for processes that see each other in /proc; "" where there is none."""
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return ""


def stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat from the state on: state, parent, ..., [19] = start time in ticks; [] for what is gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()  # a process may have any bytes in its name
    except OSError:
        return []
    fields = stat.rpartition(b")")[2].decode("ascii", "replace").split()
    return fields if len(fields) > 19 else []


def stat_table() -> dict[int, list[str]]:
    """:func:`stat_fields` of all processes of this machine, by number."""
    pids = [int(folder.name) for folder in PROC.glob("[0-9]*")] if PROC.is_dir() else []
    return {pid: fields for pid in pids if (fields := stat_fields(pid))}


def started_ticks(pid: int) -> int:
    """When a process of this machine began, in the kernel's ticks: with its number, its identity. 0 = unknown."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int, started: int) -> ProcessState:
    """State of a process of this machine that began at ``started``."""
    fields = stat_fields(pid)
    if not fields or int(fields[19]) != started:
        return ProcessState(pid, "X")
    channel = ""
    with suppress(OSError):
        channel = (PROC / str(pid) / "wchan").read_text().strip().replace("\0", "")
    return ProcessState(pid, fields[0], "" if channel == "0" else channel)


def children_of(pid: int) -> list[ProcessState]:
    """Processes that ``pid`` started: those of its loader."""
    found = {child: int(fields[19]) for child, fields in stat_table().items() if int(fields[1]) == pid}
    return [state_of(child, started) for child, started in sorted(found.items())]


def is_sibling(pid: int) -> bool:
    """Whether the parent of this process also started ``pid``, from the same executable.

    torchrun's agent, srun and mpirun start all ranks of a machine in this way.
    """
    fields = stat_fields(pid)
    try:
        same = (PROC / str(pid) / "exe").readlink() == (PROC / "self/exe").readlink()
    except OSError:  # it has ended, or belongs to another user
        return False
    return same and bool(fields) and int(fields[1]) == os.getppid()


def kill_sibling(pid: int, started: int) -> None:
    """End another rank of this machine that does not answer.

    Its number came through the store, where somebody else may have written that of any process: only siblings end.
    """
    if sys.platform != "win32" and is_sibling(pid) and state_of(pid, started).letter not in "XZ":
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def short_path(path: str) -> str:
    """From the package's name on."""
    parts = Path(path).parts
    for landmark in ("site-packages", "src"):
        if landmark in parts:
            return "/".join(parts[parts.index(landmark) + 1 :])
    return path


def main_stack() -> list[str]:
    """Of this process's main thread, innermost call first: ``file:line function``."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
    return [f"{short_path(call.filename)}:{call.lineno} {call.name}" for call in calls[:FRAMES_SHOWN]]


def dumped_stack(log: Path, within_s: float) -> list[str]:
    """Of a process that cannot run Python code: what faulthandler left at the end of its log.

    Args:
        within_s: a dump that is older is of another moment.
    """
    try:
        if time.time() - log.stat().st_mtime > within_s:
            return []
        with open_foreign(log, follow=False) as file:
            file.seek(max(log.stat().st_size - 100_000, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    _, found, dump = text.rpartition(DUMP)
    threads = re.split(r"^(?:Current t|T)hread .*$", dump, flags=re.MULTILINE) if found else []
    calls = re.findall(r'^  File "(.*?)", line (\d+) in (.*)$', threads[-1] if threads else "", re.MULTILINE)
    return [f"{short_path(path)}:{line} {name}" for path, line, name in calls[:FRAMES_SHOWN]]
