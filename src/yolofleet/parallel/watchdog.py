"""A rank that hangs is named within a minute, and the run ended, instead of everybody waiting for it.

Each rank has two threads. One looks at this rank's activity once a second; the other exchanges beats with the
other ranks through the store where they met, over a connection of its own, and judges them. Two, because the
store may be what hangs (it lives in rank 0, or in torchrun's agent). The step itself only sets variables.

When ranks see a stall, the lowest one that is not missing reports it. If it asks nothing within REPORTER_S, the next
one takes over. The reporter asks all ranks for their stacks, and those on a machine with a missing one for what that
machine shows of it; tells the report; waits until the checkpoint being written is done; and then every rank ends its
process. Ranks that the same parent started on the machine kill a missing one, since it cannot end itself. A run of one
process is not ended: nobody waits for it, and who debugs it may want to look around.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from yolofleet.errors import ClusterError
from yolofleet.files.atomic import open_append
from yolofleet.parallel.stacks import dumped_stack, main_stack
from yolofleet.parallel.stall import (
    Beat,
    Evidence,
    Findings,
    Member,
    Progress,
    Verdict,
    judge,
    parsed,
    received,
    stall_error,
    stall_note,
)
from yolofleet.parallel.world import Store, World
from yolofleet.system.proc import child_states, kill_sibling, machine_id, started_ticks, state_of
from yolofleet.text import echo

LOOK_S = 1.0
RANKS_PER_S = 16  # beats are exchanged each second by that few ranks, more rarely by more
BEATS_MISSED = 4  # at least, before a rank counts as silent: its beats are stored and fetched at that pace
MEET_S = 0.2  # until it is known who they are
CLOCK_JUMP_S = 3.0  # no more than this is counted for one look: this process was stopped, or starved
DUMP_AT = 0.7  # of the permitted silence: the stack of a process whose Python is locked goes to its log
ANSWER_WAIT_S = 5.0
REPORTER_S = 10.0  # until the next rank reports a stall
SETTLE_WAIT_S = 60.0  # for a checkpoint being written
CLOSE_WAIT_S = 2.0
KINDS = ("silent", "stuck", "waiting", "left", "blind")  # of a verdict
DEAD = ("T", "t", "X", "Z")  # states of a process that will not answer


class Watchdog:
    """Watches all ranks of a run from this one; a context manager.

    Collective: every rank enters.

    Args:
        stall_s: shortest time without progress that is a stall; 0 = no watchdog.
        timeout_s: after which a collective fails.
        log: this rank's log file.
        checkpoints: where they lie.
        resume: the command that continues the run from one of them, "" = it cannot be.
        say: shows the report. Called in one rank; right after it, every process ends with exit code 4.
    """

    def __init__(
        self,
        world: World,
        *,
        stall_s: float,
        timeout_s: float,
        log: Path,
        checkpoints: Path,
        resume: str,
        say: Callable[[ClusterError], None],
    ) -> None:
        self.world, self.timeout_s, self.log, self.checkpoints = world, timeout_s, log, checkpoints
        self.resume, self.say = resume, say
        self.stall_s = stall_s
        self.members: dict[int, Member] = {}
        self.beats: dict[int, Beat] = {}
        self._silent_s = dict.fromkeys(range(world.size), 0.0)  # since a rank's last new beat
        self._seen: dict[int, int] = {}  # numbers of beats
        self._blind_s = 0.0  # since the store answered
        self._every_s = max(LOOK_S, world.size / RANKS_PER_S)
        self._progress = Progress(world.activity, stall_s, least_silence_s=BEATS_MISSED * self._every_s)
        self._failed = False
        self._closing, self._ending = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._dump: BinaryIO | None = None
        self._arm_dump_at_s = 0.0

    def __enter__(self) -> Watchdog:
        alone = self.world.size == 1
        store = None if alone else self.world.store("watchdog")
        if self.stall_s == 0 or (store is None and not alone):  # a rank without switches it off for all
            return self
        rank = self.world.rank
        self._mine = Member(
            rank,
            self.world.host,
            str(self.world.device),
            os.getpid(),
            started_ticks(os.getpid()),
            machine_id(),
            str(self.log.resolve()),
        )
        self.members[rank] = self._mine
        self.beats[rank] = self._progress.look(0.0)
        works: list[Callable[[], None]] = [self._watch_alone]
        if store is not None:
            works = [self._watch, lambda: self._exchange(store)]
            with suppress(RuntimeError):
                store.set(f"member/{rank}", json.dumps(vars(self._mine)))
                store.set(f"beat/{rank}", json.dumps(vars(self.beats[rank])))
            with suppress(OSError):
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self._dump = open_append(self.log)
        for work in works:
            thread = threading.Thread(target=work, name="watchdog", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        self._closing.set()
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)
        if self._ending.is_set():  # a report is on its way; it ends with the process
            time.sleep(2 * ANSWER_WAIT_S + 2 * SETTLE_WAIT_S)
        if self._dump is not None:
            faulthandler.cancel_dump_traceback_later()
            self._dump.close()

    # -- looking -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Thread: look at this rank once a second, and count how long nothing came from the others."""
        rank, then_s = self.world.rank, time.monotonic()
        while not self._closing.wait(LOOK_S) and not self._ending.is_set():
            now_s = time.monotonic()
            elapsed_s, then_s = min(now_s - then_s, CLOCK_JUMP_S), now_s
            mine = self._progress.look(elapsed_s)
            self.beats[rank] = mine
            self._rearm_dump(mine)
            for other, beat in list(self.beats.items()):
                if other == rank or beat.number != self._seen.get(other):
                    self._seen[other], self._silent_s[other] = beat.number, 0.0
                else:
                    self._silent_s[other] += elapsed_s
            self._blind_s += elapsed_s
            met = len(self.members) == self.world.size
            if met and self._blind_s > mine.silence_s and mine.age_s > mine.silence_s / 2:
                self._end_blind(mine)

    def _watch_alone(self) -> None:
        """Thread, of a run of one process: say where it is when it gets no further."""
        then_s, said = time.monotonic(), False
        while not self._closing.wait(LOOK_S):
            now_s = time.monotonic()
            mine = self._progress.look(min(now_s - then_s, CLOCK_JUMP_S))
            then_s, stalled = now_s, mine.age_s > mine.limit_s
            if stalled and not said:
                evidence = Evidence(
                    self.members, {0: mine}, {0: mine.age_s}, {0: own_findings()}, time.time()
                )
                echo(f"\n{stall_note(Verdict((0,), 'stuck', mine.limit_s), evidence)}", to=sys.stderr)
            said = stalled

    def _rearm_dump(self, mine: Beat) -> None:
        """This goes on while Python's lock can be had; once it cannot, a thread of C dumps the stack."""
        now_s = time.monotonic()
        if self._dump is not None and now_s >= self._arm_dump_at_s:
            faulthandler.dump_traceback_later(DUMP_AT * mine.silence_s, file=self._dump)
            self._arm_dump_at_s = now_s + 0.1 * mine.silence_s

    # -- talking -----------------------------------------------------------------------------------------

    def _exchange(self, store: Store) -> None:
        """Thread: beats out and in, and the verdict on them. The last beat says that this rank is done."""
        rank, ranks = self.world.rank, range(self.world.size)
        verdict_at_s = math.inf
        with suppress(RuntimeError):  # the store is gone: `_watch` counts how long nothing comes
            every_s = MEET_S
            while not self._closing.wait(every_s):
                store.set(f"beat/{rank}", json.dumps(vars(self.beats[rank])))
                if len(self.members) == len(ranks):
                    self._fetch_beats(store)
                elif store.check([f"{kind}/{r}" for r in ranks for kind in ("member", "beat")]):
                    texts = store.multi_get([f"member/{r}" for r in ranks])
                    found = {r: received(Member, parsed(text)) for r, text in enumerate(texts)}
                    members = {r: member for r, member in found.items() if member and member.rank == r}
                    if len(members) == len(ranks):
                        self.members, every_s = members, self._every_s
                self._blind_s = 0.0
                if store.check(["question"]):
                    self._answer(store)
                verdict = judge(self.beats, self._silent_s, size=len(ranks), timeout_s=self.timeout_s)
                if verdict is None:
                    verdict_at_s = math.inf
                    continue
                verdict_at_s = min(verdict_at_s, time.monotonic())
                if time.monotonic() - verdict_at_s >= REPORTER_S * self._turn(verdict):
                    self._report(store, verdict)
            store.set(
                f"beat/{rank}", json.dumps(vars(self._progress.look(0.0, ended=True, failed=self._failed)))
            )
            store.check(["question"])  # it has been answered: the beat has arrived

    def _turn(self, verdict: Verdict) -> int:
        """Return how many ranks come before this one in reporting a stall.

        Each rank counts for itself: a counter in the store could be raised by any other user of this machine.
        """
        live = sorted(r for r, beat in self.beats.items() if not beat.ended)
        return sorted(live, key=lambda r: r in verdict.missing).index(self.world.rank)

    def _fetch_beats(self, store: Store) -> None:
        others = [r for r in self.members if r != self.world.rank]
        texts = store.multi_get([f"beat/{r}" for r in others])
        beats = {r: received(Beat, parsed(text)) for r, text in zip(others, texts, strict=True)}
        self.beats |= {r: beat for r, beat in beats.items() if beat}  # the last good one stays

    # -- the end -----------------------------------------------------------------------------------------

    def _report(self, store: Store, verdict: Verdict) -> NoReturn:
        """Ask all ranks what they see, show the report, and let every rank end its process. One rank calls this."""
        self._ending.set()
        found = {self.world.rank: own_findings()} | self._inspect(verdict.missing)
        saved = {newest(self.checkpoints)}
        able = {r for r, beat in self.beats.items() if not beat.ended} - {self.world.rank}
        if verdict.kind == "silent":
            able -= set(verdict.missing)
        with suppress(RuntimeError):
            store.set("question", json.dumps([verdict.missing, verdict.kind]))
            for r in self._arrivals(store, "answer", able, ANSWER_WAIT_S):
                there_saved, there_found = answer_of(store.get(f"answer/{r}"), self.world.size)
                saved.add(there_saved)
                for of, what in there_found.items():
                    if of == r or of not in found:  # what a rank says of itself counts most
                        found[of] = what
        self._tell(verdict, found, max(saved))
        self._settle()
        with suppress(RuntimeError):
            for _ in self._arrivals(store, "settled", able, SETTLE_WAIT_S):
                pass
            store.set("end", "")
            store.check(["end"])  # it has been answered: it has arrived
        self._end(verdict)

    def _answer(self, store: Store) -> None:
        """Answer the reporter's question and end this process; return only if the question is malformed."""
        match parsed(store.get("question")):
            case [[*missing], str(kind)] if kind in KINDS and all(
                r in range(self.world.size) for r in missing
            ):
                verdict = Verdict(tuple(missing), kind, 0.0)
            case _:
                return
        self._ending.set()
        rank = self.world.rank
        found = {rank: own_findings()} | self._inspect(verdict.missing)
        answer = {"found": {r: vars(what) for r, what in found.items()}, "saved": newest(self.checkpoints)}
        with suppress(RuntimeError):
            store.set(f"answer/{rank}", json.dumps(answer))
            self._settle()
            store.set(f"settled/{rank}", "")
            for _ in self._arrivals(store, "end", {None}, ANSWER_WAIT_S + SETTLE_WAIT_S):
                pass
        self._end(verdict)

    def _end_blind(self, mine: Beat) -> NoReturn:
        """Without the store: each machine's first rank tells what can be seen from there."""
        self._ending.set()
        neighbours = [r for r, m in self.members.items() if r != self.world.rank and self._sees(m)]
        found = {self.world.rank: own_findings()} | self._inspect(neighbours)
        lost = tuple(r for r in neighbours if found[r].letter in DEAD)
        verdict = Verdict(lost or (0,), "silent" if lost else "blind", mine.silence_s)
        if self.world.rank == min(set(neighbours) - set(lost) | {self.world.rank}):
            self._tell(verdict, found, newest(self.checkpoints))
        else:
            time.sleep(ANSWER_WAIT_S)  # the other one tells it
        self._settle()
        self._end(verdict)

    def _arrivals(self, store: Store, kind: str, ranks: set[Any], wait_s: float) -> Iterator[Any]:
        """Ranks as their key of a kind appears; None = the one key of that name."""
        deadline_s = time.monotonic() + wait_s
        expected = set(ranks)
        while expected and time.monotonic() < deadline_s:
            for r in [r for r in expected if store.check([kind if r is None else f"{kind}/{r}"])]:
                expected.remove(r)
                yield r
            time.sleep(0.1)

    def _sees(self, member: Member) -> bool:
        return bool(member.machine) and member.machine == self._mine.machine

    def _inspect(self, ranks: Iterable[int]) -> dict[int, Findings]:
        """What this machine shows of those of its processes."""
        found = {}
        for r in set(ranks) & self.members.keys() & self.beats.keys():
            member = self.members[r]
            if r != self.world.rank and self._sees(member):
                state = state_of(member.pid, member.started_ticks)
                stack = dumped_stack(Path(member.log), self.beats[r].silence_s)
                children = child_states(member.pid) if state.letter not in DEAD else []
                found[r] = Findings(
                    state.text(), state.letter, tuple(stack), tuple(child.text() for child in children)
                )
        return found

    def _tell(self, verdict: Verdict, found: Mapping[int, Findings], saved: str) -> None:
        still_s = {r: beat.age_s + self._silent_s[r] for r, beat in self.beats.items()}
        evidence = Evidence(self.members, self.beats, still_s, found, time.time())
        self.say(stall_error(verdict, evidence, saved=saved, resume=self.resume))

    def _settle(self) -> None:
        """Let what is being written be written."""
        writing = threading.Thread(target=self.world.activity.settle, daemon=True)
        writing.start()
        writing.join(SETTLE_WAIT_S)

    def _end(self, verdict: Verdict) -> NoReturn:
        """End this process, and those of this machine that cannot do it themselves."""
        if verdict.kind == "silent":
            for r in set(verdict.missing) & self.members.keys():
                if self._sees(self.members[r]):
                    kill_sibling(self.members[r].pid, self.members[r].started_ticks)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ClusterError.exit_code)  # the main thread waits where no exception reaches it


def own_findings() -> Findings:
    """Of a process that runs this."""
    pid = os.getpid()
    state = state_of(pid, started_ticks(pid))
    children = tuple(child.text() for child in child_states(pid))
    return Findings(state.text(), state.letter, tuple(main_stack()), children)


def answer_of(text: bytes, size: int) -> tuple[str, dict[int, Findings]]:
    """Return another rank's newest checkpoint, and what it found about which of ``size`` ranks.

    Nothing if that is no answer.
    """
    match parsed(text):
        case {"saved": str(saved), "found": dict(found)}:
            known = {r: received(Findings, found.get(str(r))) for r in range(size)}
            return saved, {r: what for r, what in known.items() if what}
    return "", {}


def newest(checkpoints: Path) -> str:
    """File name of the newest whole checkpoint here, or ""."""
    return max((path.name for path in checkpoints.glob("step-*.safetensors")), default="")
