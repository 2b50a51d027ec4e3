"""Detect a stalled run and name the rank that causes it, from the ranks' heartbeats and from what their processes show.

The rank that has started the fewest collectives is the missing one: the others wait for it. Each watchdog counts
seconds while its own process runs, and never subtracts the clocks of two machines. So a suspended machine, or a debugger
that stops all ranks, is not a stall.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.proc import child_states, started_ticks, state_of
from yolofleet.support.text import listed
from yolofleet.training.parallel.activity import Heartbeat

T = TypeVar("T")

LEFT_GRACE_S = 10.0  # time for the other ranks to notice by themselves that a rank failed
TIMEOUT_FRACTION = 0.9  # report at this fraction of --timeout-s: the collective's own error would say less


@dataclass(frozen=True)
class RankInfo:
    """The identity of a rank, published once.

    Attributes:
        machine: equal for ranks whose processes see each other (``support/system/proc.py: machine_id``).
        log: path of its log file on its own machine.
    """

    rank: int
    host: str
    device: str
    pid: int
    started_ticks: int
    machine: str
    log: str

    def text(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True)
class Verdict:
    """The cause of a stall.

    Attributes:
        missing: ranks that the others wait for; all ranks if they wait for each other.
        kind: "silent": no heartbeats; "stuck": heartbeats, but no progress; "waiting": all ranks wait for the same
            collective; "left": ended while another rank waits for them; "store-lost": the store of the heartbeats does
            not answer.
        limit_s: the limit that was exceeded.
    """

    missing: tuple[int, ...]
    kind: str
    limit_s: float


def judge(
    heartbeats: Mapping[int, Heartbeat], silent_s: Mapping[int, float], *, size: int, timeout_s: float
) -> Verdict | None:
    """Return the verdict from the ranks' last heartbeats, or None if there is no stall.

    Args:
        silent_s: seconds since the last new heartbeat of each rank.
        timeout_s: deadline of a collective.
    """
    live = {rank: heartbeat for rank, heartbeat in heartbeats.items() if not heartbeat.ended}
    if len(heartbeats) < size or not live:
        return None
    failed = tuple(rank for rank, heartbeat in heartbeats.items() if heartbeat.failed)
    if failed and any(
        heartbeat.age_s > LEFT_GRACE_S for heartbeat in live.values() if heartbeat.needs_others()
    ):
        return Verdict(failed, "left", LEFT_GRACE_S)
    if len(live) == 1:
        (heartbeat,) = live.values()
        waits = heartbeat.waiting and heartbeat.age_s > heartbeat.limit_s
        return (
            Verdict(tuple(sorted(heartbeats.keys() - live.keys())), "left", heartbeat.limit_s)
            if waits and size > 1
            else None
        )
    silent = [rank for rank, heartbeat in live.items() if silent_s[rank] > heartbeat.silence_s]
    speaking = {rank: heartbeat for rank, heartbeat in live.items() if rank not in silent}
    if silent:
        limit_s = min(live[rank].silence_s for rank in silent)
        # no other rank makes progress
        if all(heartbeat.age_s > limit_s / 2 for heartbeat in speaking.values()):
            return Verdict(tuple(silent), "silent", limit_s)
        return None
    fewest = min(heartbeat.collectives for heartbeat in live.values())
    behind = [rank for rank, heartbeat in live.items() if heartbeat.collectives == fewest]
    if len(behind) == len(live):
        behind = [rank for rank, heartbeat in live.items() if not heartbeat.waiting] or behind
    patience_s = TIMEOUT_FRACTION * timeout_s
    out_of_patience = any(heartbeat.waiting and heartbeat.age_s > patience_s for heartbeat in live.values())
    limit_s = patience_s if out_of_patience else min(live[rank].limit_s for rank in behind)
    is_stalled = all(live[rank].age_s > live[rank].limit_s for rank in behind) and all(
        # ranks that have just gone on: the newest heartbeat of the others, which waited for them, is on its way
        heartbeat.age_s > limit_s / 2
        for rank, heartbeat in live.items()
        if rank not in behind
    )
    if out_of_patience or is_stalled:
        all_wait = all(heartbeat.waiting for heartbeat in live.values())
        return Verdict(tuple(behind), "waiting" if all_wait else "stuck", limit_s)
    return None


@dataclass(frozen=True)
class RankSnapshot:
    """The process of a rank at the time of the report.

    Attributes:
        state: of its process, as the kernel shows it; "" if no other rank runs on its machine.
        letter: the state in /proc/PID/stat.
        stack: Python calls of its main thread, innermost first.
        children: states of its loader processes.
    """

    state: str = ""
    letter: str = ""
    stack: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def received(kind: type[T], values: Any) -> T | None:
    """Return a value of another rank as a :class:`RankInfo`, :class:`Heartbeat` or :class:`RankSnapshot`.

    None if it is not valid: any program that reaches the store can write anything there.
    """
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != types.keys():
        return None
    if not all(PUBLISHED[types[name]](value) for name, value in values.items()):
        return None
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def parsed(text: bytes) -> Any:
    """Return the value of a JSON text, None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


MOST_PUBLISHED = 10**15
PUBLISHED: dict[str, Callable[[Any], bool]] = {  # by the type of the field
    "int": lambda v: type(v) is int and 0 <= v < MOST_PUBLISHED,
    "float": lambda v: type(v) in (int, float) and (0 <= v < MOST_PUBLISHED or v == math.inf),  # not NaN
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "tuple[str, ...]": lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
}

FRAMES_SHOWN = 10
DUMP = "Timeout ("  # the first words of faulthandler.dump_traceback_later
SHOWN = 4  # ranks that are described one by one


@dataclass(frozen=True)
class Evidence:
    """The data of the report, by rank.

    Attributes:
        stalled_s: seconds without progress until now.
    """

    members: Mapping[int, RankInfo]
    heartbeats: Mapping[int, Heartbeat]
    stalled_s: Mapping[int, float]
    snapshots: Mapping[int, RankSnapshot]
    now_unix_s: float

    def since(self, rank: int) -> str:
        stalled_s = min(self.stalled_s[rank], self.now_unix_s)  # from another rank: it may be any number
        return time.strftime("%H:%M:%S", time.localtime(self.now_unix_s - stalled_s))

    def snapshot(self, rank: int) -> RankSnapshot:
        return self.snapshots.get(rank, RankSnapshot())


class PeerFailed(ClusterError):
    """Another rank failed; its own message has the reason."""


def stall_error(verdict: Verdict, evidence: Evidence, *, saved: str, resume: str) -> ClusterError:
    """Return the report of a stall.

    Args:
        saved: newest checkpoint; "" if there is none.
        resume: the command that continues the run from it; "" if the run cannot be resumed.
    """
    missing = verdict.missing
    others = [r for r, heartbeat in evidence.heartbeats.items() if r not in missing and not heartbeat.ended]
    lines = [_headline(verdict, evidence)]
    for rank in missing[:SHOWN]:
        lines += _about(rank, evidence, alone=len(missing) == 1)
    lines += _others(others, evidence)
    if resume:
        lines.append(f"  saved: {saved or 'nothing yet'}")
    again = resume if saved and resume else "the same command again"
    kind = PeerFailed if verdict.kind == "left" else ClusterError
    return kind("\n".join(lines), hint=f"{_advice(verdict, evidence)}; then {again}")


def stall_note(verdict: Verdict, evidence: Evidence) -> str:
    """Return the warning about a stalled run of one process: its position and the likely cause."""
    rank = verdict.missing[0]
    since = f"since {evidence.since(rank)} ({evidence.stalled_s[rank]:.0f} s; limit {verdict.limit_s:.0f} s)"
    first = f"warning: no progress {since}, in {evidence.heartbeats[rank].place_text()}"
    return "\n".join([first, *_about(rank, evidence, alone=True), f"  try  : {_advice(verdict, evidence)}"])


def _headline(verdict: Verdict, evidence: Evidence) -> str:
    rank = verdict.missing[0]
    heartbeat, seconds = evidence.heartbeats[rank], evidence.stalled_s[rank]
    names = listed([evidence.members[r].text() for r in verdict.missing], "; ")
    since = f"since {evidence.since(rank)} ({seconds:.0f} s; limit {verdict.limit_s:.0f} s)"
    if verdict.kind == "waiting":
        return f"all ranks wait in collective {heartbeat.collectives} ({heartbeat.last}) {since}: {names}"
    if verdict.kind == "store-lost":
        return f"ranks cannot reach the rendezvous store {since}; it belongs to {names} or its launcher"
    if verdict.kind == "left":
        what = "failed" if heartbeat.failed else "ended its work"
        return f"{names} {what} in {heartbeat.place_text()}; other ranks still wait for it"
    many = len(verdict.missing) > 1
    what = "no sign of life" if verdict.kind == "silent" else "no progress"
    verb = ("give" if verdict.kind == "silent" else "make") + ("" if many else "s")
    seen = "last seen " if verdict.kind == "silent" else ""
    return f"{names} {verb} {what} {since}, {seen}in {heartbeat.place_text()}"


def _about(rank: int, evidence: Evidence, *, alone: bool) -> list[str]:
    found, heartbeat = evidence.snapshot(rank), evidence.heartbeats[rank]
    who = "" if alone else f"rank {rank} in {heartbeat.place_text()} since {evidence.since(rank)}: "
    lines = [f"  state: {who}{found.state or 'no other rank can look at its process'}"]
    lines += [f"  stack: {call}" if i == 0 else f"         {call}" for i, call in enumerate(found.stack)]
    lines += [f"  child: {child}" for child in found.children[:SHOWN]]
    return lines


def _others(others: Sequence[int], evidence: Evidence) -> list[str]:
    """Return a line for each group of ranks in the same state."""
    groups: dict[str, list[int]] = {}
    for rank in others:
        heartbeat = evidence.heartbeats[rank]
        place = (
            f"waits in collective {heartbeat.collectives} ({heartbeat.last})" if heartbeat.waiting else "is"
        )
        groups.setdefault(f"{place} in {heartbeat.place_text()}", []).append(rank)
    return [
        f"  other: rank {listed([str(r) for r in ranks])} {doing} since {evidence.since(ranks[0])}"
        for doing, ranks in groups.items()
    ]


def _advice(verdict: Verdict, evidence: Evidence) -> str:
    """Return the most likely cause, or a command that shows it."""
    rank = verdict.missing[0]
    member, heartbeat, found = evidence.members[rank], evidence.heartbeats[rank], evidence.snapshot(rank)
    if verdict.kind == "left":
        return f"its own message says why, also in {member.log}"
    if found.letter == "T":
        return (
            f"a signal or a paused container stopped it; kill -CONT {member.pid} continues a stopped process"
        )
    if found.letter == "t":
        return "a debugger holds it"
    if found.letter in ("X", "Z"):
        return f"see why it died: dmesg | tail on {member.host} (out of memory?)"
    if found.letter == "D" or any("(state D)" in child for child in found.children):
        return f"a disk or network file system of {member.host} does not answer: see dmesg and the mount"
    if verdict.kind == "silent" and found.state:
        return "a call into native code does not return and holds the GIL (Python's lock); the stack names it"
    if verdict.kind in ("silent", "store-lost"):
        return (
            f"{member.host} is down or stopped, or the network to it is lost: ping {member.host}, and there "
            f"ps -o pid,stat,wchan:30,args -p {member.pid}"
        )
    if verdict.kind == "waiting":
        return (
            "the network between them drops packets, perhaps only long ones (MTU), or a rank uses a network interface "
            "that others cannot reach (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); yolofleet doctor --hosts names it"
        )
    if heartbeat.phase == "data":
        return (
            "its data loader does not deliver: see the stack, and check the disk of the images (--cache ram)"
        )
    if member.device != "cpu" and heartbeat.phase in ("compute", "comm"):
        return f"its GPU or NCCL hangs: nvidia-smi, and dmesg (Xid) on {member.host}"
    return "the stack shows what it is doing; if that is expected, raise --stall-s"


# -- snapshots of processes --------------------------------------------------------------------------------


def own_snapshot() -> RankSnapshot:
    """Return the snapshot of this process."""
    pid = os.getpid()
    state = state_of(pid, started_ticks(pid))
    children = tuple(child.text() for child in child_states(pid))
    return RankSnapshot(state.text(), state.letter, tuple(main_stack()), children)


def answer_of(text: bytes, size: int) -> tuple[str, dict[int, RankSnapshot]]:
    """Return another rank's newest checkpoint, and its snapshots of ranks below ``size``; both empty if not valid."""
    match parsed(text):
        case {"saved": str(saved), "found": dict(found)}:
            known = {r: received(RankSnapshot, found.get(str(r))) for r in range(size)}
            return saved, {r: what for r, what in known.items() if what}
    return "", {}


def short_path(path: str) -> str:
    """Return the part of the path after ``site-packages`` or ``src``."""
    parts = Path(path).parts
    for landmark in ("site-packages", "src"):
        if landmark in parts:
            return "/".join(parts[parts.index(landmark) + 1 :])
    return path


def main_stack() -> list[str]:
    """Return the call stack of this process's main thread, innermost call first: ``file:line function``."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
    return [f"{short_path(call.filename)}:{call.lineno} {call.name}" for call in calls[:FRAMES_SHOWN]]


def dumped_stack(log: Path, within_s: float) -> list[str]:
    """Return the stack that faulthandler wrote at the end of a log, for a process that cannot run Python code.

    Args:
        within_s: ignore an older dump.
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
