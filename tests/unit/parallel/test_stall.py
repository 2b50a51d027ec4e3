"""When is it a stall, through whom, and what is said of it: no processes here, see tests/multiprocess."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import wait_until

from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.system.proc import child_states, started_ticks, state_of
from yolofleet.training import pages
from yolofleet.training.parallel.activity import FIRST_STEPS, Activity, ActivityMonitor, Heartbeat
from yolofleet.training.parallel.stall import (
    Evidence,
    RankInfo,
    RankSnapshot,
    Verdict,
    dumped_stack,
    judge,
    main_stack,
    stall_error,
)
from yolofleet.training.parallel.watchdog import Watchdog
from yolofleet.training.parallel.world import World

STALL_S, TIMEOUT_S = 30.0, 600.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WAITS = Heartbeat(1, "comm", 40, 200, True, "all_reduce float32 [9]", 31.0, 30.0, 30.0, ended=False)
LOADS = replace(WAITS, phase="data", collectives=199, waiting=False)


def verdict_on(*beats: Heartbeat, silent_s: tuple[float, ...] = ()) -> Verdict | None:
    silent = dict(enumerate(silent_s or [0.0] * len(beats)))
    return judge(dict(enumerate(beats)), silent, size=len(beats), timeout_s=TIMEOUT_S)


def test_the_rank_that_has_not_come_to_the_collective_is_missing() -> None:
    assert verdict_on(WAITS, LOADS, WAITS) == Verdict((1,), "stuck", 30.0)


def test_ranks_that_wait_for_one_that_is_within_its_limit_are_no_stall() -> None:
    assert verdict_on(WAITS, replace(LOADS, age_s=29.0)) is None
    assert verdict_on(WAITS, replace(LOADS, age_s=299.0, limit_s=300.0)) is None
    assert verdict_on(WAITS, LOADS, replace(LOADS, age_s=0.0)) is None, "one that is behind still moves"


def test_a_silent_rank_is_a_stall_only_when_the_others_stand_still() -> None:
    assert verdict_on(WAITS, LOADS, silent_s=(0, 31)) == Verdict((1,), "silent", 30.0)
    assert verdict_on(WAITS, LOADS, silent_s=(0, 29)) == Verdict((1,), "stuck", 30.0)
    assert verdict_on(replace(LOADS, age_s=1.0), LOADS, silent_s=(0, 31)) is None


def test_ranks_that_all_wait_in_the_same_collective_wait_for_the_network() -> None:
    assert verdict_on(WAITS, WAITS) == Verdict((0, 1), "waiting", 30.0)
    assert verdict_on(WAITS, replace(WAITS, age_s=10.0)) is None


def test_a_rank_is_not_blamed_when_the_others_go_on_before_its_newest_heartbeat_arrives() -> None:
    """Rank 0 loaded for a minute, with leave, and rank 1 waited for it; rank 0 has just begun the next collective."""
    goes_on = replace(WAITS, collectives=201, age_s=0.1)
    waited = replace(WAITS, age_s=62.0)
    assert verdict_on(goes_on, waited) is None
    later = replace(goes_on, age_s=16.0), replace(waited, age_s=78.0)
    assert verdict_on(*later) == Verdict((1,), "waiting", 30.0), "but it is if they wait for it"


def test_a_wait_is_reported_before_the_collective_fails_by_itself() -> None:
    patient = replace(LOADS, phase="indexing", limit_s=1800.0, age_s=541.0)
    assert verdict_on(replace(WAITS, age_s=539.0), patient) is None
    assert verdict_on(replace(WAITS, age_s=541.0), patient) == Verdict((1,), "stuck", 540.0)


def test_ranks_that_are_done_are_not_missed() -> None:
    assert verdict_on(replace(WAITS, waiting=False), replace(LOADS, ended=True), silent_s=(0, 99)) is None
    assert verdict_on(replace(WAITS, age_s=29.0), replace(LOADS, ended=True)) is None
    assert judge({0: WAITS}, {0: 0.0}, size=2, timeout_s=TIMEOUT_S) is None, "not all have been heard of"


def test_a_rank_that_failed_is_the_cause_whatever_the_others_are_stuck_in() -> None:
    """GPU ranks wait in the driver, not in a collective, and no error reaches them there."""
    failed = replace(LOADS, ended=True, failed=True)
    stuck = replace(WAITS, phase="compute", waiting=False, age_s=11.0)
    assert verdict_on(stuck, failed) == Verdict((1,), "left", 10.0)
    assert verdict_on(stuck, failed, stuck, stuck) == Verdict((1,), "left", 10.0)
    assert verdict_on(replace(stuck, age_s=9.0), failed) is None, "it may notice by itself"
    assert verdict_on(replace(stuck, phase="checkpoint"), failed) is None, "it can still end its work"


def test_a_lone_rank_that_waits_for_ranks_that_ended_is_a_stall() -> None:
    assert verdict_on(WAITS, replace(LOADS, ended=True)) == Verdict((1,), "left", 30.0)
    assert judge({0: WAITS}, {0: 0.0}, size=1, timeout_s=TIMEOUT_S) is None, "alone from the start"


class Hand:
    """A clock hand that the test moves."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


def stepping(compute_s: float) -> tuple[ActivityMonitor, Clock, Hand]:
    """After ten steps of ``compute_s`` seconds, seen once a second."""
    hand, activity = Hand(), Activity()
    activity.clock = clock = Clock(now=hand)
    monitor = ActivityMonitor(activity, STALL_S)
    clock.training()
    for _ in range(2 * FIRST_STEPS):
        for _ in range(int(compute_s)):
            monitor.heartbeat(1.0)
            hand.at += 1
        with clock("comm"):
            hand.at += 0.1
        clock.step(8)
    return monitor, clock, hand


def test_the_limit_of_a_phase_is_ten_times_what_is_usual_and_at_least_the_setting() -> None:
    monitor, _, _ = stepping(compute_s=1)
    assert monitor.heartbeat(1.0).limit_s == STALL_S
    monitor, clock, hand = stepping(compute_s=20)
    beat = monitor.heartbeat(1.0)
    assert 10 * 18 <= beat.limit_s <= 10 * 20 and beat.silence_s == STALL_S
    with clock("data"):
        hand.at += 1
        assert monitor.heartbeat(1.0).limit_s == STALL_S, "each phase has its own"


def test_first_steps_long_phases_and_tasks_have_their_own_limits() -> None:
    activity = Activity()
    monitor = ActivityMonitor(activity, STALL_S)
    assert monitor.heartbeat(0.0).limit_s == 20 * STALL_S
    with activity.doing("indexing"):
        assert monitor.heartbeat(0.0).limit_s == 60 * STALL_S
    with activity.doing("data set"):
        assert monitor.heartbeat(0.0).limit_s == float("inf"), "downloads have deadlines of their own"
    activity.clock = clock = Clock()
    clock.training()
    assert monitor.heartbeat(0.0).limit_s == 20 * STALL_S, "the first steps"
    monitor, clock, _ = stepping(compute_s=1)
    for phase in ("evaluate", "checkpoint"):
        with clock(phase):
            assert monitor.heartbeat(0.0).limit_s == 20 * STALL_S


def test_drawing_the_pictures_of_a_run_is_named_and_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (monitor, clock, _), world = stepping(compute_s=1), World.single()
    world.activity, seen = monitor.activity, list[tuple[str, float]]()

    def drawn(*_: object) -> None:
        beat = monitor.heartbeat(100 * STALL_S)
        seen.append((beat.phase, beat.limit_s))

    for name in ("draw_labels", "plot_results", "write_report"):
        monkeypatch.setattr(pages, name, drawn)
    index: Any = None
    drawing = pages.RunPages(RunFolder(tmp_path), world, clock, [index])
    monkeypatch.setattr(drawing, "_write_figures", lambda *_: None)
    drawing.begin(resumed=False)
    drawing.draw_end(None)
    drawing.write_page()
    assert seen == [("plots", float("inf"))] * 3
    assert monitor.heartbeat(0.0).phase == "compute"


def test_any_change_is_progress_and_only_seconds_of_ones_own_running_count() -> None:
    monitor, clock, hand = stepping(compute_s=1)
    monitor.heartbeat(1.0)
    # however long the process was suspended: the caller counts 3 s
    assert monitor.heartbeat(3.0).age_s == 3.0
    monitor.activity.tick()
    assert monitor.heartbeat(1.0).age_s == 0.0
    monitor.activity.started("all_reduce", (9,), "torch.float32")
    beat = monitor.heartbeat(1.0)
    assert (beat.age_s, beat.collectives, beat.last) == (0.0, 1, "all_reduce float32 [9]")
    hand.at += 1
    clock.switch("data")
    assert monitor.heartbeat(1.0).age_s == 0.0 and monitor.heartbeat(1.0).age_s == 1.0


@pytest.mark.parametrize(("ranks", "least_s"), [(2, STALL_S), (64, STALL_S), (1024, 2 * 64)])
def test_a_rank_of_a_large_world_is_not_silent_between_two_beats(ranks: int, least_s: float) -> None:
    """Beats of 1024 ranks are stored every 64 s and fetched every 64 s: nothing new for 128 s is no silence."""
    world = World(0, ranks, 0, 1, torch.device("cpu"))
    nothing = dict(log=Path("log"), checkpoints=Path("none"), resume="", say=lambda error: None)
    watchdog = Watchdog(world, stall_s=STALL_S, timeout_s=TIMEOUT_S, **nothing)  # type: ignore[arg-type]
    world.activity.clock = clock = Clock()
    clock.training()
    for _ in range(FIRST_STEPS):
        clock.step(1)
    assert watchdog._monitor.heartbeat(1.0).silence_s >= least_s


# -- what is said ------------------------------------------------------------------------------------------------


def said(verdict: Verdict, found: dict[int, RankSnapshot], device: str = "cpu") -> str:
    members = {r: RankInfo(r, f"node-{r}", device, 70 + r, 5, "", "log") for r in range(3)}
    evidence = Evidence(
        members, {0: WAITS, 1: LOADS, 2: WAITS}, {0: 31.0, 1: 32.0, 2: 31.0}, found, time.time()
    )
    error = stall_error(
        verdict, evidence, saved="step-00000030.safetensors", resume="yolofleet train --resume r"
    )
    assert error.exit_code == 4
    return error.render()


def test_the_report_says_who_where_since_when_what_the_others_wait_for_and_what_to_type() -> None:
    found = RankSnapshot(
        "process 71 is stopped (state T)", "T", ("loader.py:3 next",), ("process 80 is asleep",)
    )
    text = said(Verdict((1,), "silent", 30.0), {1: found})
    first = text.splitlines()[0]
    assert first.startswith("ClusterError: rank 1 (node-1, cpu) gives no sign of life since ")
    assert first.endswith("(32 s; limit 30 s), last seen in 'data' after step 40")
    for part in (
        "state: process 71 is stopped",
        "stack: loader.py:3 next",
        "child: process 80",
        "other: rank 0, 2 waits in collective 200 (all_reduce float32 [9])",
        "saved: step-00000030.safetensors",
        "kill -CONT 71",
        "; then yolofleet train --resume r",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("kind", "found", "device", "advice"),
    [
        ("silent", RankSnapshot(), "cpu", "ping node-1"),
        ("silent", RankSnapshot("process 71 is gone", "X"), "cpu", "out of memory?"),
        ("silent", RankSnapshot("process 71 is running (state R)", "R"), "cpu", "holds the GIL"),
        ("silent", RankSnapshot("process 71 is held by a debugger", "t"), "cpu", "a debugger holds it"),
        ("stuck", RankSnapshot("x", "S", (), ("process 9 waits for a disk (state D)",)), "cpu", "network file system"),
        ("stuck", RankSnapshot("x", "S"), "cpu", "its data loader does not deliver"),
        ("waiting", RankSnapshot("x", "S"), "cuda:0", "NCCL_SOCKET_IFNAME"),
        ("store-lost", RankSnapshot(), "cpu", "the network to it is lost"),
    ],
)  # fmt: skip
def test_the_likely_reason_follows_from_what_was_found(
    kind: str, found: RankSnapshot, device: str, advice: str
) -> None:
    assert advice in said(Verdict((1,), kind, 30.0), {1: found}, device).splitlines()[-1]


# -- what a machine can tell of a process ----------------------------------------------------------------------------


@linux
def test_states_of_processes_and_of_their_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = started_ticks(child.pid)
        assert state_of(child.pid, began).letter in "RSD"
        assert child.pid in [found.pid for found in child_states(os.getpid())]
        os.kill(child.pid, 19)
        wait_until(lambda: state_of(child.pid, began).letter == "T")
        assert "is stopped" in state_of(child.pid, began).text()
        assert state_of(child.pid, began + 1).letter == "X", "the number belongs to another process now"
        child.kill()
    assert "is gone" in state_of(child.pid, began).text()


def test_stacks_innermost_call_first(tmp_path: Path) -> None:
    assert "main_stack" in main_stack()[0] and "test_stacks_innermost" in main_stack()[1]
    log = tmp_path / "log"
    with log.open("a") as file:
        file.write("what it said before\n")
        file.flush()
        faulthandler.dump_traceback_later(0.01, file=file)
        time.sleep(0.2)
        faulthandler.cancel_dump_traceback_later()
    assert "test_stacks_innermost" in dumped_stack(log, within_s=900)[0]
    os.utime(log, (1, 1))
    assert dumped_stack(log, within_s=60) == [], "of another moment"
    assert dumped_stack(tmp_path / "none", within_s=60) == []
