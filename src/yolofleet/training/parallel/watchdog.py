"""Within a minute, name a rank that hangs and end the run, so that the other ranks do not wait for ever.

Each rank has two threads. One measures this rank's progress once a second. The other exchanges heartbeats with the other
ranks through the rendezvous store, over its own connection, and judges them. They are separate because the store itself
may hang (it is in the process of rank 0 or of torchrun's agent). The training step only sets variables.

When ranks detect a stall, the lowest one that is not missing reports it. If it does not within REPORTER_S, the next one
does. The reporter collects the stacks of all ranks, and the process states of missing ranks from other ranks on their
machines. It prints the report and waits until the checkpoint being written is complete. Then every rank ends its process.
A missing rank cannot end itself, so ranks of the same machine and parent process kill it. In a run of one process the
watchdog only prints a warning: no other rank waits, and the user may want to debug the process.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from torch.distributed import Store

from yolofleet.runs.rank_status import RankStatus, write_status
from yolofleet.storage.atomic import open_append
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.proc import child_states, kill_sibling, machine_id, started_ticks, state_of
from yolofleet.support.text import announce
from yolofleet.training.parallel.activity import ActivityMonitor, Gauges, Heartbeat
from yolofleet.training.parallel.stall import (
    Evidence,
    RankInfo,
    RankSnapshot,
    Verdict,
    answer_of,
    dumped_stack,
    judge,
    own_snapshot,
    parsed,
    received,
    stall_error,
    stall_note,
)
from yolofleet.training.parallel.world import World

INTERVAL_S = 1.0
HEARTBEATS_PER_S = 16  # in the whole run: with more ranks each one publishes less often
HEARTBEATS_MISSED = 4  # a rank is silent only after this many, because heartbeats travel through the store
STATUS_S = 2.0  # between two writings of the status file
MEET_INTERVAL_S = 0.2  # between two looks for the other ranks at the start
CLOCK_JUMP_S = 3.0  # count at most this for one interval: in a longer one this process did not run
DUMP_AT = 0.7  # fraction of the permitted silence after which faulthandler dumps the stack into the log
ANSWER_WAIT_S = 5.0
REPORTER_S = 10.0  # until the next rank reports a stall
WRITING_WAIT_S = 60.0  # for a checkpoint being written
CLOSE_WAIT_S = 2.0
KINDS = ("silent", "stuck", "waiting", "left", "store-lost")  # see Verdict
DEAD = ("T", "t", "X", "Z")  # states of a process that will not answer


class Watchdog:
    """Watches all ranks of a run from this one; a context manager.

    Collective: every rank enters.

    Args:
        stall_s: smallest time without progress that counts as a stall; 0: no watchdog.
        timeout_s: deadline of a collective.
        status: file in which rank 0 writes what every rank does, while the run lasts; None: no file.
        resume: the command that resumes the run; "" if it cannot be resumed.
        say: prints the report. One rank calls it; then every process ends with exit code 4.
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
        status: Path | None = None,
    ) -> None:
        self.world, self.timeout_s, self.log, self.checkpoints = world, timeout_s, log, checkpoints
        self.resume, self.say, self.status = resume, say, status
        self._gauges = Gauges(world.device)
        self.stall_s = stall_s
        self.members: dict[int, RankInfo] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self._silent_s = dict.fromkeys(range(world.size), 0.0)  # since each rank's last new heartbeat
        self._seen: dict[int, int] = {}  # number of each rank's last heartbeat
        self._store_silent_s = 0.0  # since the store's last answer
        self._every_s = max(INTERVAL_S, world.size / HEARTBEATS_PER_S)
        self._monitor = ActivityMonitor(
            world.activity, stall_s, least_silence_s=HEARTBEATS_MISSED * self._every_s
        )
        self._failed = False
        self._closing, self._ending = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._dump: BinaryIO | None = None
        self._arm_dump_at_s = 0.0

    def __enter__(self) -> Watchdog:
        alone = self.world.size == 1
        store = None if alone else self.world.store("watchdog", timeout_s=self.timeout_s)
        # a missing rank stays missing in `members`, so no rank judges
        if self.stall_s == 0 or (store is None and not alone):
            return self
        rank = self.world.rank
        self._mine = RankInfo(
            rank,
            self.world.host,
            str(self.world.device),
            os.getpid(),
            started_ticks(os.getpid()),
            machine_id(),
            str(self.log.resolve()),
        )
        self.members[rank] = self._mine
        self.heartbeats[rank] = self._monitor.heartbeat(0.0)
        works: list[Callable[[], None]] = [self._watch_alone]
        if store is not None:
            works = [self._watch, lambda: self._exchange(store)]
            if rank == 0:
                self.world.activity.ranks = self.ranks
                works.append(self._write_status)
            with suppress(RuntimeError):
                store.set(f"member/{rank}", json.dumps(vars(self._mine)))
                store.set(f"heartbeat/{rank}", json.dumps(vars(self.heartbeats[rank])))
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
        if self._ending.is_set():  # the report is being made, and ends the process
            time.sleep(2 * ANSWER_WAIT_S + 2 * WRITING_WAIT_S)
        if self._dump is not None:
            faulthandler.cancel_dump_traceback_later()
            self._dump.close()

    # -- threads -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Thread: measure this rank's progress, and the silence of the other ranks and of the store."""
        rank, then_s = self.world.rank, time.monotonic()
        while not self._closing.wait(INTERVAL_S) and not self._ending.is_set():
            now_s = time.monotonic()
            elapsed_s, then_s = min(now_s - then_s, CLOCK_JUMP_S), now_s
            mine = self._monitor.heartbeat(elapsed_s)
            mine = replace(mine, **self._gauges.read(self.world.activity.clock))
            self.heartbeats[rank] = mine
            self._rearm_dump(mine)
            for other, heartbeat in list(self.heartbeats.items()):
                if other == rank or heartbeat.number != self._seen.get(other):
                    self._seen[other], self._silent_s[other] = heartbeat.number, 0.0
                else:
                    self._silent_s[other] += elapsed_s
            self._store_silent_s += elapsed_s
            met = len(self.members) == self.world.size
            if met and self._store_silent_s > mine.silence_s and mine.age_s > mine.silence_s / 2:
                self._end_without_store(mine)

    def ranks(self) -> list[RankStatus]:
        """Return what each rank does, as far as its last heartbeat says; [] until all ranks have met."""
        members, heartbeats = self.members, dict(self.heartbeats)
        if len(members) < self.world.size or len(heartbeats) < self.world.size:
            return []
        return [
            RankStatus(
                rank,
                members[rank].host,
                members[rank].device,
                "exchange"
                if heartbeat.waiting and heartbeat.phase in ("data", "compute", "comm")
                else heartbeat.phase,
                heartbeat.step,
                round(heartbeat.age_s + self._silent_s[rank], 1),
                *(heartbeat.rate_img_s, heartbeat.waits, heartbeat.memory_gib, heartbeat.temperature_c),
            )
            for rank, heartbeat in sorted(heartbeats.items())
        ]

    def _write_status(self) -> None:
        """Thread of rank 0: write the status file, and remove it at the end. Not the thread of the heartbeats: the
        disk may make it wait.
        """
        if self.status is None:
            return
        while not self._closing.wait(max(STATUS_S, self._every_s)):
            if ranks := self.ranks():
                with suppress(OSError, ClusterError):  # another attempt has taken over the folder
                    write_status(self.status, ranks)
        with suppress(OSError):
            self.status.unlink(missing_ok=True)

    def _watch_alone(self) -> None:
        """Thread of a run of one process: print a warning when it stalls."""
        then_s, said = time.monotonic(), False
        while not self._closing.wait(INTERVAL_S):
            now_s = time.monotonic()
            mine = self._monitor.heartbeat(min(now_s - then_s, CLOCK_JUMP_S))
            then_s, stalled = now_s, mine.age_s > mine.limit_s
            if stalled and not said:
                evidence = Evidence(
                    self.members, {0: mine}, {0: mine.age_s}, {0: own_snapshot()}, time.time()
                )
                note = stall_note(Verdict((0,), "stuck", mine.limit_s), evidence)
                announce(f"\n{note}")
            said = stalled

    def _rearm_dump(self, mine: Heartbeat) -> None:
        """Postpone faulthandler's dump. If another thread holds the GIL too long, nothing postpones it any more."""
        now_s = time.monotonic()
        if self._dump is not None and now_s >= self._arm_dump_at_s:
            faulthandler.dump_traceback_later(DUMP_AT * mine.silence_s, file=self._dump)
            self._arm_dump_at_s = now_s + 0.1 * mine.silence_s

    def _exchange(self, store: Store) -> None:
        """Thread: publish heartbeats, fetch those of the others and judge them. The last one has ``ended`` set."""
        rank, ranks = self.world.rank, range(self.world.size)
        verdict_at_s = math.inf
        with suppress(RuntimeError):  # the store is gone: `_watch` measures its silence
            every_s = MEET_INTERVAL_S
            while not self._closing.wait(every_s):
                store.set(f"heartbeat/{rank}", json.dumps(vars(self.heartbeats[rank])))
                if len(self.members) == len(ranks):
                    self._fetch_heartbeats(store)
                elif store.check([f"{kind}/{r}" for r in ranks for kind in ("member", "heartbeat")]):
                    texts = store.multi_get([f"member/{r}" for r in ranks])
                    found = {r: received(RankInfo, parsed(text)) for r, text in enumerate(texts)}
                    members = {r: member for r, member in found.items() if member and member.rank == r}
                    if len(members) == len(ranks):
                        self.members, every_s = members, self._every_s
                self._store_silent_s = 0.0
                if store.check(["question"]):
                    self._answer(store)
                verdict = judge(self.heartbeats, self._silent_s, size=len(ranks), timeout_s=self.timeout_s)
                if verdict is None:
                    verdict_at_s = math.inf
                    continue
                verdict_at_s = min(verdict_at_s, time.monotonic())
                if time.monotonic() - verdict_at_s >= REPORTER_S * self._turn(verdict):
                    self._report(store, verdict)
            store.set(
                f"heartbeat/{rank}",
                json.dumps(vars(self._monitor.heartbeat(0.0, ended=True, failed=self._failed))),
            )
            store.check(["question"])  # the answer shows that the heartbeat has arrived

    def _turn(self, verdict: Verdict) -> int:
        """Return how many ranks may report the stall before this one.

        Each rank computes it alone, because any other user of this machine could change a counter in the store.
        """
        live = sorted(r for r, heartbeat in self.heartbeats.items() if not heartbeat.ended)
        return sorted(live, key=lambda r: r in verdict.missing).index(self.world.rank)

    def _fetch_heartbeats(self, store: Store) -> None:
        others = [r for r in self.members if r != self.world.rank]
        texts = store.multi_get([f"heartbeat/{r}" for r in others])
        heartbeats = {r: received(Heartbeat, parsed(text)) for r, text in zip(others, texts, strict=True)}
        # keep the last valid one
        self.heartbeats |= {r: heartbeat for r, heartbeat in heartbeats.items() if heartbeat}
        if any(self.heartbeats[r].stop_requested for r in others if r in self.heartbeats):
            self.world.activity.stop_requested = True

    # -- report and end ----------------------------------------------------------------------------------

    def _report(self, store: Store, verdict: Verdict) -> NoReturn:
        """Collect the snapshots of all ranks, print the report, and make every rank end. One rank calls this."""
        self._ending.set()
        found = {self.world.rank: own_snapshot()} | self._inspect(verdict.missing)
        saved = {newest(self.checkpoints)}
        able = {r for r, heartbeat in self.heartbeats.items() if not heartbeat.ended} - {self.world.rank}
        if verdict.kind == "silent":
            able -= set(verdict.missing)
        with suppress(RuntimeError):
            store.set("question", json.dumps([verdict.missing, verdict.kind]))
            for r in self._arrivals(store, "answer", able, ANSWER_WAIT_S):
                there_saved, there_found = answer_of(store.get(f"answer/{r}"), self.world.size)
                saved.add(there_saved)
                for of, what in there_found.items():
                    if of == r or of not in found:  # prefer a rank's snapshot of itself
                        found[of] = what
        self._print_report(verdict, found, max(saved))
        self._finish_writing()
        with suppress(RuntimeError):
            for _ in self._arrivals(store, "written", able, WRITING_WAIT_S):
                pass
            store.set("end", "")
            store.check(["end"])  # the answer shows that the key has arrived
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
        found = {rank: own_snapshot()} | self._inspect(verdict.missing)
        answer = {"found": {r: vars(what) for r, what in found.items()}, "saved": newest(self.checkpoints)}
        with suppress(RuntimeError):
            store.set(f"answer/{rank}", json.dumps(answer))
            self._finish_writing()
            store.set(f"written/{rank}", "")
            for _ in self._arrivals(store, "end", {None}, ANSWER_WAIT_S + WRITING_WAIT_S):
                pass
        self._end(verdict)

    def _end_without_store(self, mine: Heartbeat) -> NoReturn:
        """End without the store: the first rank of each machine reports what that machine shows."""
        self._ending.set()
        neighbours = [r for r, m in self.members.items() if r != self.world.rank and self._shares_machine(m)]
        found = {self.world.rank: own_snapshot()} | self._inspect(neighbours)
        lost = tuple(r for r in neighbours if found[r].letter in DEAD)
        verdict = Verdict(lost or (0,), "silent" if lost else "store-lost", mine.silence_s)
        if self.world.rank == min(set(neighbours) - set(lost) | {self.world.rank}):
            self._print_report(verdict, found, newest(self.checkpoints))
        else:
            time.sleep(ANSWER_WAIT_S)  # time for the reporting rank
        self._finish_writing()
        self._end(verdict)

    def _arrivals(self, store: Store, kind: str, ranks: set[Any], wait_s: float) -> Iterator[Any]:
        """Yield ranks as their key ``kind/RANK`` appears in the store; None stands for the key ``kind``."""
        deadline_s = time.monotonic() + wait_s
        expected = set(ranks)
        while expected and time.monotonic() < deadline_s:
            for r in [r for r in expected if store.check([kind if r is None else f"{kind}/{r}"])]:
                expected.remove(r)
                yield r
            time.sleep(0.1)

    def _shares_machine(self, member: RankInfo) -> bool:
        return bool(member.machine) and member.machine == self._mine.machine

    def _inspect(self, ranks: Iterable[int]) -> dict[int, RankSnapshot]:
        """Return snapshots of those ``ranks`` that run on this machine."""
        found = {}
        for r in set(ranks) & self.members.keys() & self.heartbeats.keys():
            member = self.members[r]
            if r != self.world.rank and self._shares_machine(member):
                state = state_of(member.pid, member.started_ticks)
                stack = dumped_stack(Path(member.log), self.heartbeats[r].silence_s)
                children = child_states(member.pid) if state.letter not in DEAD else []
                found[r] = RankSnapshot(
                    state.text(), state.letter, tuple(stack), tuple(child.text() for child in children)
                )
        return found

    def _print_report(self, verdict: Verdict, found: Mapping[int, RankSnapshot], saved: str) -> None:
        stalled_s = {r: heartbeat.age_s + self._silent_s[r] for r, heartbeat in self.heartbeats.items()}
        evidence = Evidence(self.members, self.heartbeats, stalled_s, found, time.time())
        self.say(stall_error(verdict, evidence, saved=saved, resume=self.resume))

    def _finish_writing(self) -> None:
        """Wait until the checkpoint being written is complete, at most ``WRITING_WAIT_S``."""
        writing = threading.Thread(target=self.world.activity.finish_writing, daemon=True)
        writing.start()
        writing.join(WRITING_WAIT_S)

    def _end(self, verdict: Verdict) -> NoReturn:
        """End this process, and kill silent ranks of this machine."""
        if verdict.kind == "silent":
            for r in set(verdict.missing) & self.members.keys():
                if self._shares_machine(self.members[r]):
                    kill_sibling(self.members[r].pid, self.members[r].started_ticks)
        sys.stdout.flush()
        sys.stderr.flush()
        # no exception can reach the main thread, which waits in a collective
        os._exit(ClusterError.exit_code)


def newest(checkpoints: Path) -> str:
    """Return the file name of the newest complete checkpoint of this machine, or ""."""
    return max((path.name for path in checkpoints.glob("step-*.safetensors")), default="")
