"""Measure the time of each phase of a run: one clock per rank, always in exactly one phase.

Phases are ``start``, ``data`` (waiting for the loader), ``compute``, ``comm`` (waiting for other ranks), ``evaluate`` and
``checkpoint``. The clock measures the host. On a GPU, ``comm`` is the time that the host waits; communication that
overlaps with the backward pass, or that only the device waits for, counts as ``compute``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TRAINING = ("data", "compute", "comm")  # the divisor of rates and shares
PHASES = ("start", *TRAINING, "evaluate", "checkpoint")


@dataclass(frozen=True)
class Times:
    """The times of an epoch or a run."""

    seconds: Mapping[str, float]  # by phase
    # steps, images: totals, including warm-up
    steps: int
    images: int
    # images per second of data + compute + comm, without the first steps of the process (warm-up); NaN
    # without other steps. The divisor excludes evaluation and checkpoints
    rate_img_s: float

    @property
    def elapsed_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def training_s(self) -> float:
        return sum(self.seconds[phase] for phase in TRAINING)

    def share(self, phase: str) -> float:
        """Return the fraction of ``phase`` in data + compute + comm, 0..1."""
        return self.seconds[phase] / self.training_s if self.training_s > 0 else 0.0


def slowest(times: Iterable[Times]) -> Times:
    """Return the times of the rank that the others waited for: the one with the fewest seconds in ``comm``."""
    return min(times, key=lambda t: t.seconds["comm"])


class _Phase:
    """The context manager of ``clock(phase)``; made once per phase, because each step enters it twice."""

    __slots__ = ("clock", "name", "outer")

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name, self.outer = clock, name, ""

    def __enter__(self) -> None:
        assert self.clock.phase != self.name, f"phase {self.name} inside itself"
        self.outer = self.clock.switch(self.name)

    def __exit__(self, *_: object) -> None:
        self.clock.switch(self.outer)


class Clock:
    """Splits a run's time into phases.

    ``with clock("data"):`` adds the time of its block to ``data``, except for the time of inner ``with`` blocks. Outside of
    all blocks, time belongs to ``start`` until :meth:`training`, and to ``compute`` after it.

    Args:
        warmup_steps: first steps of this process, excluded from rates (allocation, kernel choice).
        now: seconds, monotonic.
    """

    def __init__(self, *, warmup_steps: int = 5, now: Callable[[], float] = time.perf_counter) -> None:
        self.warmup_steps = warmup_steps
        self._now = now
        self.phase, self.since_s = "start", now()  # the watchdog reads them from another thread
        self._contexts = {phase: _Phase(self, phase) for phase in PHASES}
        self.steps_here = 0  # of this process
        self._own_images = 0  # likewise
        self._training_at_step = 0.0  # training seconds at the end of the last step
        self._run, self._epoch = _Tally(), _Tally()

    def __call__(self, phase: str) -> _Phase:
        """Return the context manager of a phase. It costs about 0.5 microseconds."""
        return self._contexts[phase]

    def switch(self, phase: str) -> str:
        """Add the time since the last switch to the current phase, switch to ``phase``, return the old phase."""
        now = self._now()
        self._epoch.seconds[self.phase] += now - self.since_s
        self.since_s = now
        left, self.phase = self.phase, phase
        return left

    def training(self) -> None:
        """End the start-up, before the first step. Its time belongs to the run but to no epoch."""
        self.switch("compute")
        self._run.seconds["start"] += self._epoch.seconds["start"]
        self._epoch.seconds["start"] = 0.0
        self._training_at_step = self._training_s()

    def step(self, images: int, own: int = 0) -> None:
        """Record the end of a step of ``images`` images of all ranks, of which ``own`` are of this rank."""
        self.switch(self.phase)
        self._own_images += own
        training_s = self._training_s()
        self.steps_here += 1
        self._epoch.steps += 1
        self._epoch.images += images
        if self.steps_here > self.warmup_steps:
            self._epoch.rated_images += images
            self._epoch.rated_s += training_s - self._training_at_step
        self._training_at_step = training_s

    @property
    def steps(self) -> int:
        """Steps of the run, over all restarts."""
        return self._run.steps + self._epoch.steps

    def spent(self) -> tuple[int, float, float]:
        """Return this rank's own images, its seconds of work on them, and its seconds of waiting for other ranks.

        The watchdog's thread calls this.
        """
        seconds = {phase: self._run.seconds[phase] + self._epoch.seconds[phase] for phase in TRAINING}
        return self._own_images, seconds["data"] + seconds["compute"], seconds["comm"]

    def _training_s(self) -> float:
        return sum(self._run.seconds[phase] + self._epoch.seconds[phase] for phase in TRAINING)

    def epoch_so_far(self) -> Times:
        self.switch(self.phase)
        return self._epoch.times()

    def end_epoch(self) -> Times:
        """Return the times since the last call (or since the first step, over all restarts); start the next epoch."""
        times = self.epoch_so_far()
        self._run.add(self._epoch)
        self._epoch = _Tally()
        return times

    def run_so_far(self) -> Times:
        self.switch(self.phase)
        both = _Tally()
        both.add(self._run)
        both.add(self._epoch)
        return both.times()

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON, for the checkpoint: the times of the run and of the current epoch."""
        self.switch(self.phase)
        return {"run": asdict(self._run), "epoch": asdict(self._epoch)}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Continue from :meth:`to_dict`. The start-up of this process counts, the time between the processes does not.

        The time between a checkpoint and a crash is lost, like its steps.
        """
        self.switch(self.phase)
        started_s = self._epoch.seconds["start"]
        self._run, self._epoch = _Tally.of(stored["run"]), _Tally.of(stored["epoch"])
        self._epoch.seconds["start"] += started_s
        self._training_at_step = self._training_s()


@dataclass
class _Tally:
    """The sums behind :class:`Times`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    images: int = 0
    rated_images: int = 0
    rated_s: float = 0.0

    def add(self, other: _Tally) -> None:
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds
        self.steps += other.steps
        self.images += other.images
        self.rated_images += other.rated_images
        self.rated_s += other.rated_s

    def times(self) -> Times:
        rate = self.rated_images / self.rated_s if self.rated_s > 0 else math.nan
        return Times(dict(self.seconds), self.steps, self.images, rate)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> _Tally:
        seconds = {phase: float(stored["seconds"].get(phase, 0.0)) for phase in PHASES}
        return cls(**{**stored, "seconds": seconds})
