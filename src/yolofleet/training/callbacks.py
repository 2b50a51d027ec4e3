"""Code of the user that watches a training: ``--callbacks FILE.py:CLASS``. docs/extend.md has an example.

The loop reports to ``training/report.py`` by name, and the report calls the callbacks. So a callback runs between steps, never
between data and update. It gets values, not the objects of the run, unless it declares ``changes_training``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yolofleet.config.user_code import failure_of_code, identity_of, load_class
from yolofleet.support.errors import YolofleetError
from yolofleet.support.system.signals import request_stop
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState

FLAG = "--callbacks"


@dataclass(frozen=True)
class RunStart:
    """A run, when its training begins.

    Attributes:
        folder: of the run. settings, recipe: by name.
        rank, ranks: of this process, and their number.
        step, epoch: done so far; above 0 if ``resumed``.
        state: network, optimizer and moving average; None unless the callback declares ``changes_training``.
    """

    folder: Path
    settings: Mapping[str, Any]
    names: Sequence[str]
    rank: int
    ranks: int
    step: int
    epoch: int
    resumed: bool
    state: TrainState | None


@dataclass(frozen=True)
class StepEnd:
    """A finished step.

    Attributes:
        step: number of steps done. images_seen: since the beginning of the run.
        lr: learning rate of the step.
        losses: returns the mean of each loss term over this rank's images of the epoch so far; empty without any. It
            waits for the device, so call it seldom.
    """

    step: int
    images_seen: int
    lr: float
    losses: Callable[[], Mapping[str, float]]


class Callback:
    """Base of callbacks; override the methods that you need. An exception in a method ends the run with its line.

    Attributes:
        all_ranks: run in every process; False: on rank 0 only.
        changes_training: the callback changes the state of the run. It then runs on all ranks, where it must do the same,
            and becomes part of the run: a resumed run needs it, unchanged.
    """

    all_ranks = False
    changes_training = False

    def start(self, run: RunStart) -> None:
        """Called before the first step of a run, a resumed run or another attempt after a failure."""

    def step(self, step: StepEnd) -> None:
        """Called after each update of the weights."""

    def epoch(self, epoch: int, row: Mapping[str, float]) -> None:
        """Called after each epoch with its row of results.csv."""

    def validation(self, epoch: int, metrics: Mapping[str, float], per_class: Mapping[str, Any]) -> None:
        """Called after each validation; with ``--val-overlap`` an epoch later."""

    def save(self, file: Path, step: int) -> None:
        """Called on ranks that write files: weights after they are written, a checkpoint when its writing begins."""

    def stop(self, reason: str, step: int) -> None:
        """Called when the run ends: "finished", or the error. Not called if the process is killed."""

    @staticmethod
    def request_stop(reason: str) -> None:
        """Ask the run to stop as a signal would: the ranks agree, save the state, and exit with code 75."""
        request_stop(f"callback: {reason}")


class Callbacks:
    """The callbacks of one rank."""

    def __init__(self, names: Sequence[str], world: World) -> None:
        self._world = world
        self._mine: list[Callback] = []
        self._changing = [name for name in names if load_class(name, Callback, FLAG).changes_training]
        for name in names:
            kind = load_class(name, Callback, FLAG)
            if world.is_main or kind.all_ranks or kind.changes_training:
                try:
                    self._mine.append(kind())
                except Exception as problem:
                    raise failure_of_code(f"{FLAG} {name} cannot be made", problem) from None

    def identity(self) -> str:
        """Return what identifies the callbacks that change the training, for the fingerprint of the run."""
        if not self._changing:
            return ""
        return ", ".join(identity_of(name, FLAG) for name in self._changing)

    def start(self, state: TrainState, **values: Any) -> None:
        """Tell the callbacks that the training begins; ``values``: those of :class:`RunStart`."""
        run = RunStart(**values, state=None)
        for callback in self._mine:
            given = replace(run, state=state) if callback.changes_training else run
            self._call(callback, "start", given)

    def step(self, plan: StepPlan, losses: Callable[[], Mapping[str, float]], state: TrainState) -> None:
        """Tell the callbacks of the step of ``plan``."""
        self.call("step", StepEnd(plan.step + 1, plan.end_image, plan.lr, losses))
        if self._changing:
            state.replicas.copy_to_devices()

    @contextmanager
    def ending(self, state: TrainState) -> Iterator[None]:
        """Tell the callbacks how the block, which is the training, ended."""
        try:
            yield
        except YolofleetError as problem:
            with suppress(YolofleetError):  # the first failure is the cause
                self.call("stop", problem.what, state.step)
            raise
        self.call("stop", "finished", state.step)

    def call(self, event: str, *values: Any) -> None:
        """Call the method ``event`` of every callback of this rank.

        Raises:
            ConfigError: a callback raised an exception.
        """
        for callback in self._mine:
            self._call(callback, event, *values)

    def _call(self, callback: Callback, event: str, *values: Any) -> None:
        try:
            with self._world.activity.doing("callback"):
                getattr(callback, event)(*values)
        except YolofleetError:
            raise
        except Exception as problem:
            what = f"the callback {type(callback).__name__}.{event} failed"
            raise failure_of_code(what, problem) from None
