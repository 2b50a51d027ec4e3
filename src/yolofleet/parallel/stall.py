"""When is a run stuck, and through whom? Pure functions over what the ranks have published.

The rank that is missing is the one that has started the fewest collectives: the others wait for it. All times
are counted by the watchdog that measures them, second by second while its own process runs, and are never
differences of two clocks: so a machine that was suspended, or a debugger that stops all ranks, is no stall.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from yolofleet.errors import ClusterError
from yolofleet.parallel.activity import Activity
from yolofleet.text import listed

T = TypeVar("T")

USUAL_TIMES = 10  # a phase may last that many times its median
FIRST_STEPS = 5  # of this process: memory, choice of kernels; nothing usual is known yet
LONG_TIMES = 20  # phases and tasks that are not steps, in multiples of stall_s
TASK_TIMES = {
    "data set": math.inf,
    "weights": math.inf,
    "indexing": 60.0,
    "connecting": 10.0,  # so that a hang is named before --timeout-s ends the collective
}  # downloads have their own deadlines
LONG_SILENCE_TIMES = 4  # outside of steps, Python may be locked for a while (imports, large files)
LEFT_GRACE_S = 10.0  # after a rank failed, the others notice it themselves, or never
NEARLY = 0.9  # of --timeout-s: then the run is about to fail anyway, with less to say
WINDOW = 30  # steps that "usual" is taken over


@dataclass(frozen=True)
class Member:
    """Who a rank is; published once.

    Attributes:
        machine: equal for ranks whose processes see each other (``system/proc.py: machine_id``).
        log: its file, on its own disk.
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
class Beat:
    """What a rank publishes every second.

    Attributes:
        number: counts up.
        phase: of its clock, or its task.
        step: of the run.
        collectives: that it has started.
        waiting: for the last of them; last: what that one is.
        age_s: seconds without any progress.
        limit_s, silence_s: how long it may go without progress, and without a beat.
        ended: its work is over. failed: by an exception.
    """

    number: int
    phase: str
    step: int
    collectives: int
    waiting: bool
    last: str
    age_s: float
    limit_s: float
    silence_s: float
    ended: bool
    failed: bool = False

    def needs_others(self) -> bool:
        """Return whether it waits for other ranks, or will before it can end its work."""
        return self.waiting or self.phase in ("data", "compute", "comm", "evaluate")

    def place_text(self) -> str:
        return f"{self.phase!r}" + (f" after step {self.step}" if self.step else "")


class Progress:
    """Watches the activity of this process: beats.

    Args:
        stall_s: shortest limit.
        least_silence_s: that beats may be apart.
    """

    def __init__(self, activity: Activity, stall_s: float, least_silence_s: float = 0.0) -> None:
        self.activity, self.stall_s, self.least_silence_s = activity, stall_s, least_silence_s
        self._mark: tuple[Any, ...] = ()
        self._age_s = 0.0
        self._steps = -1
        self._longest: dict[str, float] = {}  # of the step under way, by phase
        self._recent: dict[str, deque[float]] = {}
        self._number = 0

    def look(self, elapsed_s: float, *, ended: bool = False, failed: bool = False) -> Beat:
        """Once a second: ``elapsed_s`` of this process's own running time have passed."""
        a, clock = self.activity, self.activity.clock
        phase = clock.phase if clock else "start"
        steps, steps_here = (clock.steps, clock.steps_here) if clock else (0, 0)
        mark = (phase, clock.since_s if clock else 0.0, steps, a.task, a.ticks, a.collectives, a.waiting)
        if mark != self._mark:
            self._mark, self._age_s = mark, 0.0
        else:
            self._age_s += elapsed_s
        if steps != self._steps:
            self._steps = steps
            for name, longest in self._longest.items():
                self._recent.setdefault(name, deque(maxlen=WINDOW)).append(longest)
            self._longest = {}
        self._longest[phase] = max(self._longest.get(phase, 0.0), self._age_s)
        self._number += 1
        steady = not a.task and phase in ("data", "compute", "comm") and steps_here >= FIRST_STEPS
        return Beat(
            number=self._number,
            phase=a.task or phase,
            step=steps,
            collectives=a.collectives,
            waiting=a.waiting,
            last=a.last_text(),
            age_s=self._age_s,
            limit_s=self._limit_s(phase) if steady else self.stall_s * TASK_TIMES.get(a.task, LONG_TIMES),
            silence_s=max(self.stall_s * (1 if steady else LONG_SILENCE_TIMES), self.least_silence_s),
            ended=ended,
            failed=failed,
        )

    def _limit_s(self, phase: str) -> float:
        recent = self._recent.get(phase)
        return max(self.stall_s, USUAL_TIMES * statistics.median(recent) if recent else 0.0)


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    missing: ranks that the others wait for; all of them when they wait for each other.
    kind: "silent": without a sign of life; "stuck": alive, in one place; "waiting": everybody waits for the
        same collective; "left": ended, while another waits for them; "blind": the place where ranks leave
        their beats does not answer.
    limit_s: that was exceeded.
    """

    missing: tuple[int, ...]
    kind: str
    limit_s: float


def judge(
    beats: Mapping[int, Beat], silent_s: Mapping[int, float], *, size: int, timeout_s: float
) -> Verdict | None:
    """The verdict over the ranks' last beats, or None while there is no stall.

    Args:
        silent_s: for each rank, since its last new beat.
        timeout_s: after which a collective fails.
    """
    live = {rank: beat for rank, beat in beats.items() if not beat.ended}
    if len(beats) < size or not live:
        return None
    failed = tuple(rank for rank, beat in beats.items() if beat.failed)
    if failed and any(beat.age_s > LEFT_GRACE_S for beat in live.values() if beat.needs_others()):
        return Verdict(failed, "left", LEFT_GRACE_S)
    if len(live) == 1:
        (beat,) = live.values()
        waits = beat.waiting and beat.age_s > beat.limit_s
        return (
            Verdict(tuple(sorted(beats.keys() - live.keys())), "left", beat.limit_s)
            if waits and size > 1
            else None
        )
    silent = [rank for rank, beat in live.items() if silent_s[rank] > beat.silence_s]
    speaking = {rank: beat for rank, beat in live.items() if rank not in silent}
    if silent:
        limit_s = min(live[rank].silence_s for rank in silent)
        if all(beat.age_s > limit_s / 2 for beat in speaking.values()):  # nobody gets on without them
            return Verdict(tuple(silent), "silent", limit_s)
        return None
    fewest = min(beat.collectives for beat in live.values())
    behind = [rank for rank, beat in live.items() if beat.collectives == fewest]
    if len(behind) == len(live):
        behind = [rank for rank, beat in live.items() if not beat.waiting] or behind
    patience_s = NEARLY * timeout_s
    out_of_patience = any(beat.waiting and beat.age_s > patience_s for beat in live.values())
    if out_of_patience or all(live[rank].age_s > live[rank].limit_s for rank in behind):
        all_wait = all(beat.waiting for beat in live.values())
        limit_s = patience_s if out_of_patience else min(live[rank].limit_s for rank in behind)
        return Verdict(tuple(behind), "waiting" if all_wait else "stuck", limit_s)
    return None


@dataclass(frozen=True)
class Findings:
    """What was found out about a rank at the end.

    Attributes:
        state: of its process, as its machine shows it; "" = nobody can look.
        stack: Python calls of its main thread, innermost first.
        children: states of its loader processes.
    """

    state: str = ""
    letter: str = ""
    stack: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def received(kind: type[T], values: Any) -> T | None:
    """Return what another rank has published as a :class:`Member`, :class:`Beat` or :class:`Findings`.

    None if it is nothing of the kind: whoever reaches the store can write anything there.
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


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_PUBLISHED


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and (0 <= value < MOST_PUBLISHED or value == math.inf)  # not NaN


MOST_PUBLISHED = 10**15
PUBLISHED: dict[str, Callable[[Any], bool]] = {  # by the type of the field
    "int": is_count,
    "float": _is_seconds,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "tuple[str, ...]": are_texts,
}

SHOWN = 4  # ranks that are described one by one


@dataclass(frozen=True)
class Evidence:
    """All that the report is written from, by rank.

    Attributes:
        still_s: seconds without progress until now.
    """

    members: Mapping[int, Member]
    beats: Mapping[int, Beat]
    still_s: Mapping[int, float]
    findings: Mapping[int, Findings]
    now_unix_s: float

    def since(self, rank: int) -> str:
        still_s = min(self.still_s[rank], self.now_unix_s)  # another rank said so: it may be any number
        return time.strftime("%H:%M:%S", time.localtime(self.now_unix_s - still_s))

    def found(self, rank: int) -> Findings:
        return self.findings.get(rank, Findings())


class PeerFailed(ClusterError):
    """Another rank failed; its own message says why."""


def stall_error(verdict: Verdict, evidence: Evidence, *, saved: str, resume: str) -> ClusterError:
    """Return the one report.

    Args:
        saved: newest checkpoint, "" = none.
        resume: the command that continues the run from it.
    """
    missing = verdict.missing
    others = [r for r, beat in evidence.beats.items() if r not in missing and not beat.ended]
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
    """Of a run of one process, which nobody waits for: where it is, and what that most likely means."""
    rank = verdict.missing[0]
    since = f"since {evidence.since(rank)} ({evidence.still_s[rank]:.0f} s; limit {verdict.limit_s:.0f} s)"
    first = f"warning: no progress {since}, in {evidence.beats[rank].place_text()}"
    return "\n".join([first, *_about(rank, evidence, alone=True), f"  try  : {_advice(verdict, evidence)}"])


def _headline(verdict: Verdict, evidence: Evidence) -> str:
    rank = verdict.missing[0]
    beat, seconds = evidence.beats[rank], evidence.still_s[rank]
    names = listed([evidence.members[r].text() for r in verdict.missing], "; ")
    since = f"since {evidence.since(rank)} ({seconds:.0f} s; limit {verdict.limit_s:.0f} s)"
    if verdict.kind == "waiting":
        return f"all ranks wait in collective {beat.collectives} ({beat.last}) {since}: {names}"
    if verdict.kind == "blind":
        return f"ranks cannot reach the place where they met any more, {since}; it is held by {names} or its launcher"
    if verdict.kind == "left":
        what = "failed" if beat.failed else "ended its work"
        return f"{names} {what} in {beat.place_text()}; other ranks still wait for it"
    many = len(verdict.missing) > 1
    what = "no sign of life" if verdict.kind == "silent" else "no progress"
    verb = ("give" if verdict.kind == "silent" else "make") + ("" if many else "s")
    seen = "last seen " if verdict.kind == "silent" else ""
    return f"{names} {verb} {what} {since}, {seen}in {beat.place_text()}"


def _about(rank: int, evidence: Evidence, *, alone: bool) -> list[str]:
    found, beat = evidence.found(rank), evidence.beats[rank]
    who = "" if alone else f"rank {rank} in {beat.place_text()} since {evidence.since(rank)}: "
    lines = [f"  state: {who}{found.state or 'no other rank can look at its process'}"]
    lines += [f"  stack: {call}" if i == 0 else f"         {call}" for i, call in enumerate(found.stack)]
    lines += [f"  child: {child}" for child in found.children[:SHOWN]]
    return lines


def _others(others: Sequence[int], evidence: Evidence) -> list[str]:
    """Ranks that do the same thing stand on one line."""
    groups: dict[str, list[int]] = {}
    for rank in others:
        beat = evidence.beats[rank]
        place = f"waits in collective {beat.collectives} ({beat.last})" if beat.waiting else "is"
        groups.setdefault(f"{place} in {beat.place_text()}", []).append(rank)
    return [
        f"  other: rank {listed([str(r) for r in ranks])} {doing} since {evidence.since(ranks[0])}"
        for doing, ranks in groups.items()
    ]


def _advice(verdict: Verdict, evidence: Evidence) -> str:
    """What most likely happened, and what to type."""
    rank = verdict.missing[0]
    member, beat, found = evidence.members[rank], evidence.beats[rank], evidence.found(rank)
    if verdict.kind == "left":
        return f"its own message says why, also in {member.log}"
    if found.letter == "T":
        return f"somebody or something stopped it; kill -CONT {member.pid} would have let it go on"
    if found.letter == "t":
        return "a debugger holds it"
    if found.letter in ("X", "Z"):
        return f"see why it died: dmesg | tail on {member.host} (out of memory?)"
    if found.letter == "D" or any("(state D)" in child for child in found.children):
        return f"a disk or network file system of {member.host} does not answer: see dmesg and the mount"
    if verdict.kind == "silent" and found.state:
        return "a call outside of Python does not return and holds Python's lock; the stack names it"
    if verdict.kind in ("silent", "blind"):
        return (
            f"{member.host} is down or stopped, or the network to it is lost: ping {member.host}, and there "
            f"ps -o pid,stat,wchan:30,args -p {member.pid}"
        )
    if verdict.kind == "waiting":
        return (
            "the network between them loses what is sent, or a card was chosen that not all can reach "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        )
    if beat.phase == "data":
        return "its loader does not deliver: see the stack, and the disk that the images are on (--cache ram)"
    if member.device != "cpu" and beat.phase in ("compute", "comm"):
        return f"its GPU or NCCL hangs: nvidia-smi, and dmesg (Xid) on {member.host}"
    return "the stack says what it is busy with; if that is right, --stall-s with a higher number"
