"""Small text files of /proc and /sys, the file system of a folder, and the processes of this machine.

On other systems than Linux all results are empty.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NETWORK = (  # types of file systems on other machines
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "pvfs2", "smb3",
    "smbfs", "wekafs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.rclone",
    "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip


def text_of(path: Path) -> str:
    """Return the text of a file without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # for example EINVAL for the speed of a network interface that is down
        return ""


def number_of(path: Path) -> int | None:
    """Return the whole number that a file holds; None if it holds none or cannot be read."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; [] if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def network_disk(folder: Path, proc: Path = Path("/proc")) -> str:
    """Return the type of the network file system that a folder is on, such as nfs4; "" if it is local or unknown."""
    try:
        path = os.path.realpath(folder)
    except OSError:
        return ""
    found = ("", "")
    for line in text_of(proc / "self" / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        # with the escapes of the kernel (\040 is a space) replaced
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):  # of equal points, the last one covers the others
            found = (point, source.split()[0])
    return found[1] if found[1] in NETWORK else ""


PROC = Path("/proc")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
STATES = {
    "T": "is stopped (state T: SIGSTOP, Ctrl-Z or a paused container)",
    "t": "is held by a debugger (state t)",
    "D": "waits in the kernel for a disk, a network file system or a driver (state D)",
    "Z": "has died (state Z)",
    "R": "is running (state R)",
    "S": "is asleep (state S)",
}
STOPPED = "Tt"  # states of processes that cannot react
ENDED = "ZX"  # states of processes that have ended
GONE = "X"
# of thermal zones that measure processors: Intel, AMD and virtual machines, ARM
CPU_ZONES = ("x86_pkg_temp", "k10temp", "zenpower", "acpitz", "cpu-thermal", "cpu_thermal", "soc-thermal")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, from the kernel."""

    pid: int
    letter: str  # the state in /proc/PID/stat; "X" if the process is gone
    wait_channel: str = ""  # the kernel function that it sleeps in; "" if unknown

    def text(self) -> str:
        what = STATES.get(self.letter, f"has state {self.letter}")
        if self.letter == GONE:
            what = "is gone: it was killed or crashed (dmesg shows whether memory ran out)"
        where = f", in {self.wait_channel}" if self.wait_channel and self.letter in "DS" else ""
        return f"process {self.pid} {what}{where}"


def memory_info(proc: Path = PROC) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes, by name."""
    return sizes_in(proc / "meminfo")


def sizes_in(file: Path) -> dict[str, int]:
    """Return the sizes of a file with lines such as ``VmSize: 8 kB`` in bytes, by name."""
    found = {}
    for line in text_of(file).splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split() or [""]
        if number.isdecimal() and unit == ["kB"]:
            found[name] = int(number) * 1024
    return found


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM, bytes; 0 if the system does not say."""
    words = text_of(PROC / "self" / "statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def host_temperature_c(thermal: Path = Path("/sys/class/thermal")) -> float:
    """Return the temperature of the warmest processor of this machine, degrees Celsius; 0 if the kernel does not say."""
    zones = [zone for zone in entries_of(thermal) if zone.name.startswith("thermal_zone")]
    found = [number_of(zone / "temp") or 0 for zone in zones if text_of(zone / "type") in CPU_ZONES]
    return max(found, default=0) / 1000


def release_heap() -> None:
    """Return freed memory of this process to the system (glibc)."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def reuse_freed_memory() -> None:
    """Keep up to 64 MiB of freed memory in this process, for its next blocks of at most 32 MiB (glibc).

    Else each block of the size of an image gets new pages, which the kernel must zero. A loader process, which does little but
    allocate images, would spend up to a quarter of its time on that.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 << 20)
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 64 << 20)


def machine_id() -> str:
    """Return a text that is equal for processes that see each other in /proc; "" without /proc."""
    with suppress(OSError):
        boot = text_of(PROC / "sys/kernel/random/boot_id")
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return ""


def stat_fields(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on: state, parent, ..., [19] = start time in ticks; [] if it has ended."""
    fields = text_of(PROC / str(pid) / "stat").rpartition(")")[2].split()  # its name may have any bytes
    return fields if len(fields) > 19 else []


def is_forked() -> bool:
    """Return whether this process is a copy of another one, with none of its threads: forked, and nothing executed since."""
    return any(int(flags) & 0x40 for flags in stat_fields(os.getpid())[6:7])  # Linux's PF_FORKNOEXEC


def stat_table() -> dict[int, list[str]]:
    """Return :func:`stat_fields` of all processes of this machine, by process number."""
    pids = [int(folder.name) for folder in PROC.glob("[0-9]*")] if PROC.is_dir() else []
    return {pid: fields for pid in pids if (fields := stat_fields(pid))}


def started_ticks(pid: int) -> int:
    """Return the start time of a process in the kernel's ticks; 0 if unknown. PID and start time identify a process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def started_at(pid: int) -> str:
    """Return the start time of a running process as text; "" if it does not run. It differs if a PID is used again."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in ENDED else ""


def state_of(pid: int, started: int) -> ProcessState:
    """Return the state of the process ``pid`` with the start time ``started`` (see :func:`started_ticks`)."""
    fields = stat_fields(pid)
    if not fields or int(fields[19]) != started:
        return ProcessState(pid, GONE)
    channel = text_of(PROC / str(pid) / "wchan").replace("\0", "")
    return ProcessState(pid, fields[0], "" if channel == "0" else channel)


def child_states(pid: int) -> list[ProcessState]:
    """Return the states of the children of ``pid``, including those that have ended."""
    found = {child: int(fields[19]) for child, fields in stat_table().items() if int(fields[1]) == pid}
    return [state_of(child, started) for child, started in sorted(found.items())]


def children(pid: int) -> list[int]:
    """Return the running children of ``pid``."""
    return _children().get(pid, [])


def descendants(pid: int) -> list[int]:
    """Return the running children of ``pid``, their children, and so on."""
    of = _children()
    found = list(of.get(pid, []))
    for child in found:
        found += of.get(child, [])
    return found


def _children() -> dict[int, list[int]]:
    """Return the running children of each process, by its PID."""
    found: dict[int, list[int]] = {}
    for pid, fields in stat_table().items():
        if fields[0] not in ENDED:
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def environment_variable(pid: int, name: str) -> str:
    """Return a variable of the initial environment of a process; "" if it is not set."""
    entries = text_of(PROC / str(pid) / "environ").split("\0")
    return next((entry[len(name) + 1 :] for entry in entries if entry.startswith(f"{name}=")), "")


def rank_of(pid: int) -> int | None:
    """Return the rank of a worker; None for any other process.

    Our workers set the process name ``yolofleet-RANK`` (``worker.main``), because a forked process shows the environment
    of the process that it was forked from. Workers of other launchers have the variable RANK.
    """
    name = text_of(PROC / str(pid) / "comm")
    is_ours = name.startswith("yolofleet-")
    rank = name.removeprefix("yolofleet-") if is_ours else environment_variable(pid, "RANK")
    return int(rank) if rank.isdecimal() else None


def is_sibling(pid: int) -> bool:
    """Return whether ``pid`` has the same parent and the same executable as this process.

    torchrun's agent, srun and mpirun start all ranks of a machine in this way.
    """
    fields = stat_fields(pid)
    try:
        same = (PROC / str(pid) / "exe").readlink() == (PROC / "self/exe").readlink()
    except OSError:  # it has ended, or belongs to another user
        return False
    return same and bool(fields) and int(fields[1]) == os.getppid()


def kill_sibling(pid: int, started: int) -> None:
    """Kill another rank of this machine that does not respond, if it is a sibling.

    Its PID came through the store, where another program may have written the PID of any process.
    """
    if sys.platform != "win32" and is_sibling(pid) and state_of(pid, started).letter not in ENDED:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def reap_orphans(but: int) -> None:
    """Reap adopted processes of other sessions that have ended, except ``but``, whose parent reaps it."""
    with suppress(OSError):  # this process has no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but or os.getsid(ended.si_pid) == os.getsid(0):
                break
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(pid: int, deadline_s: float = 5.0) -> list[int]:
    """Kill all descendants of ``pid``; return those that still exist after ``deadline_s`` (stuck in the kernel)."""
    gives_up_at_s = time.monotonic() + deadline_s
    while left := descendants(pid):
        if time.monotonic() > gives_up_at_s:
            return left
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
    return []
