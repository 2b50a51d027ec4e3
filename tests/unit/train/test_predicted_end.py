"""A training tells when it will end: after a hundred steps, and again when that changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from yolofleet.config.schema import TrainConfig
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.console import NullConsole, StepView
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.training.parallel.world import World
from yolofleet.training.report import TrainReport
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import Progress, Tally


class Told(NullConsole):
    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.facts: list[str] = []

    def fact(self, text: str) -> None:
        self.facts.append(text)

    def step(self, images_done: int, view: Callable[[], StepView]) -> None:
        self.view = view


def tally(loss: float, own_images: int) -> Tally:
    """Of one step of 64 images."""
    found = Tally(1, Progress(), World.single())
    found.add(StepPlan(0, 0, 64, 0.01, 0.01, 0.9), torch.tensor([loss]), own_images)
    return found


class Run:
    """Steps of 64 images that each take ``step_s`` seconds of a clock that nobody waits for."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.now_s, self.at = 0.0, 0
        self.console = Told(folder / "log")
        self.clock = Clock(now=lambda: self.now_s)
        world, split, nothing = World.single(), cast(Any, range(6400)), cast(Any, None)
        world.console = self.console
        state = cast(
            Any, SimpleNamespace(replicas=SimpleNamespace(all=[SimpleNamespace(device=world.device)]))
        )
        self.report = TrainReport(
            world, TrainConfig(data="shapes", plots=False, **settings), state, [split], ["box"], RunFolder(folder),
            EventLog(folder / "events", rank=0, warn=print), self.clock, callbacks=None,
            loggers=None, status=None, header=nothing, is_writer=False,
        )  # fmt: skip
        self.clock.training()

    def steps(self, count: int, step_s: float) -> StepPlan:
        for _ in range(count):
            self.now_s += step_s
            plan = StepPlan(self.at, 64 * self.at, 64, 0.01, 0.01, 0.9)
            self.at += 1
            self.report.step(plan, [], tally(0.0, 0))
        return plan

    def tell_end(self, plan: StepPlan) -> None:
        self.report.forecast.tell_end(plan, self.console, self.report.events)


def test_the_end_is_told_after_a_hundred_steps_and_corrected(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=10)
    run.steps(99, 1.0)
    assert not run.console.facts
    plan = run.steps(1, 1.0)
    # 900 steps of 1 s are left
    assert run.console.facts[0].startswith("the run will end in about 15:00, ")
    run.tell_end(plan)
    run.tell_end(run.steps(20, 1.9))
    assert len(run.console.facts) == 1  # 13 % later: less than a quarter of what is left
    plan = run.steps(100, 3.0)  # the first five do not count: (95 + 38 + 300) s / 215 steps, 780 are left
    run.tell_end(plan)
    assert run.console.facts[1].startswith("corrected: the run will end in about 26:11, ")


def test_validations_and_checkpoints_so_far_count_for_the_rest(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=2)
    with run.clock("evaluate"):
        run.now_s += 50
    run.steps(100, 1.0)
    assert run.console.facts[0].startswith("the run will end in about 2:30, ")


def test_a_run_by_steps_ends_with_them_and_one_by_minutes_says_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=10, max_steps=130)
    run.steps(100, 1.0)
    assert run.console.facts[0].startswith("the run will end in about 30.0 s")
    (tmp_path / "b").mkdir()
    timed = Run(tmp_path / "b", epochs=10, minutes=60)
    timed.steps(100, 1.0)
    assert not timed.console.facts


def test_the_loss_of_a_step_is_the_mean_over_the_images_of_this_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=2)
    plan = StepPlan(0, 0, 64, 0.01, 0.01, 0.9)
    run.report.step(plan, [], tally(0.75, 48), own_images=48)  # rank 0 has shares 3,1
    assert run.console.view().losses == {"box": 1.0} and "box 1.0000" in run.console.view().text()
    run.report.step(plan, [], tally(0.0, 0))  # all images are on other ranks
    assert run.console.view().losses == {} and "box" not in run.console.view().text()
