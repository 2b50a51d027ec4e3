"""The whole training loop with its validation, and its checkpoints, beside what limits them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from yolofleet.data.input.sample import MicroBatch, MicroBatchKey
from yolofleet.measure.steps import BareNetwork
from yolofleet.measure.timing import WARM_UP, Seconds, Turns
from yolofleet.training.loop import TrainingRun
from yolofleet.training.rank.train import BuiltRun

SAVES = 3  # checkpoints


@dataclass(frozen=True)
class Saved:
    """A checkpoint: size, seconds to write and verify it, seconds that training stands still, and bytes/s of writes."""

    bytes: int
    write_s: float
    standstill_s: float
    rate: float
    limit: float


def checkpoint_cost(training: TrainingRun) -> Saved:
    """Measure on rank 0. Collective: every rank."""
    world, saves = training.world, []
    if training.report.is_writer and world.is_main:
        for number in range(SAVES):
            began_s = time.perf_counter()
            snapshot = training.state.snapshot(
                {"fingerprint": training.fingerprint, "clock": training.report.clock.to_dict()}
            )
            copied_s = time.perf_counter()
            training.store.save(replace(snapshot, step=number))
            training.store.flush()
            written_s = time.perf_counter()
            path = training.store.entries()[0].path
            content = path.read_bytes()
            raw_s = time.perf_counter()
            raw = path.with_name("raw")
            with raw.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            done_s = time.perf_counter()
            raw.unlink()
            saves.append((len(content), written_s - copied_s, copied_s - began_s, done_s - raw_s))
        for entry in training.store.entries():
            entry.path.unlink()
    size, write_s, standstill_s, raw_s = (
        (statistics.median(column) for column in zip(*saves, strict=True)) if saves else [math.nan] * 4
    )
    size, write_s, standstill_s, raw_s = world.gather([size, write_s, standstill_s, raw_s])[0]
    return Saved(int(size), write_s, standstill_s, size / write_s, size / raw_s)


@dataclass(frozen=True)
class WholeRun:
    """Images/s of the training loop, and of the validation and its network.

    Attributes:
        turns: "step", and "bare" if steps of the bare network took turns with those of the loop; else None.
    """

    rate: float
    turns: Turns | None
    validation_rate: float
    validation_limit: float


class Interleaved:
    """Passes on the micro-batches of a loader, and times the steps of the loop in turns with steps of the bare network.

    A step lasts from the moment when its first micro-batch is ready to that of the next one. Only for a loop that has no
    loader processes and no other ranks: those would work on during the steps of the bare network.
    """

    def __init__(self, loader: Callable[[Iterable[MicroBatchKey]], Any], bare: Callable[[], object]) -> None:
        self.loader, self.bare = loader, bare
        self.seconds: dict[str, list[Seconds]] = {"step": [], "bare": []}
        self._batches: Any = None
        self._step, self._began = -1, Seconds.now()

    def __call__(self, keys: Iterable[MicroBatchKey]) -> Interleaved:
        self._batches = self.loader(keys)
        return self

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        made: MicroBatch = next(self._batches)
        if made.step != self._step:
            ready = Seconds.now()
            self.bare()
            done = Seconds.now()
            if self._step >= 0:
                self.seconds["step"].append(ready.since(self._began))
                self.seconds["bare"].append(done.since(ready))
            self._step, self._began = made.step, done
        return made

    def close(self) -> None:
        self._batches.close()

    def turns(self) -> Turns:
        """Return the turns after the warm-up."""
        return Turns({name: seconds[WARM_UP:] for name, seconds in self.seconds.items()})


def whole_run(run: BuiltRun, bare: BareNetwork | None, workers: int) -> WholeRun:
    """Train to the end of the run, with its validation. Collective: every rank."""
    training, world = run.training, run.training.world
    if bare is not None and workers == 0 and world.size == 1:
        training.loader = Interleaved(training.loader, bare.step)
    run.begin()
    training.train()
    rate, evaluation = training.report.clock.run_so_far().rate_img_s, training.report.last_evaluation
    assert evaluation is not None, "the last step of a run validates"
    turns = None
    if isinstance(training.loader, Interleaved):
        turns = training.loader.turns()
        rate = training.schedule.step_images / turns.median("step").wall
    return WholeRun(
        rate=min(row[0] for row in world.gather([rate])),
        turns=turns,
        validation_rate=evaluation.images_per_s,
        validation_limit=evaluation.images / max(evaluation.seconds["forward"], 1e-9),
    )
