"""Shares that follow the speed of the ranks (``--shares auto``).

First, each device takes the place of the next one with every step, until all are measured. From then on the ranks compare
the times of their passes at the end of each epoch, and about once a minute inside it. They gather the times, and a pure
function, :func:`next_counts`, decides, so every rank decides the same. Shares decide which rank computes a micro-batch and
nothing else, so no result and no checkpoint depends on them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from yolofleet.runs.report.results import EventLog
from yolofleet.support.devices import is_host
from yolofleet.support.text import listed
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import TRIAL_STEPS, StepPlan, StepSplitter

# steps with work that are measured on each device at the start; the first ones are slower
MEASURED_TURNS = range(3, 10)
SLOW_STEPS = 3  # steps after a change that are not measured, for the same reason
SAMPLES = range(3, 17)  # least and most steps of a measurement
# On an accelerator one step of so many is measured, because the host then waits for the device.
MEASURED_EVERY = 8
COMPARED_EVERY_S = 60.0  # inside an epoch
# Least part of a step that a change saves. Times that differ by up to 10 % change nothing.
LEAST_GAIN = 0.05
LEAST_GAIN_INSIDE = 0.2  # in an epoch: the loader starts again, and what it has read ahead is lost
# Most part of the time that trials of ranks without work may cost, and the fewest steps from one trial to the next.
MOST_FOR_TRIALS, LEAST_TRIAL_PERIOD = 0.02, 50


def fastest_counts(times_s: Sequence[float], count: int) -> list[int]:
    """Return how many of ``count`` micro-batches each device computes if the last one ends as early as possible.

    A device that would end later with a single one than the others with all of them gets none.

    Args:
        times_s: of a micro-batch, for each device; > 0.
    """
    counts = [0] * len(times_s)
    ends = [(time_s, device) for device, time_s in enumerate(times_s)]  # with one more micro-batch
    heapq.heapify(ends)
    for _ in range(count):
        device = ends[0][1]
        counts[device] += 1
        heapq.heapreplace(ends, (times_s[device] * (counts[device] + 1), device))
    return counts


def step_s(counts: Sequence[int], times_s: Sequence[float]) -> float:
    """Return the seconds until the last device has computed its micro-batches."""
    return max(count * time_s for count, time_s in zip(counts, times_s, strict=True))


def next_counts(counts: Sequence[int], times_s: Sequence[float], least_gain: float) -> list[int]:
    """Return the micro-batches of a step that each device computes from now on.

    Args:
        times_s: of a micro-batch, for each device; 0: not known, taken as the mean of the others.
        least_gain: part of a step that a change must save, 0..1; else ``counts`` stay.
    """
    known = [time_s for time_s in times_s if time_s]
    if not known:
        return list(counts)
    filled = [time_s or sum(known) / len(known) for time_s in times_s]
    fastest = fastest_counts(filled, sum(counts))
    pays = step_s(fastest, filled) < (1 - least_gain) * step_s(counts, filled)
    return fastest if pays else list(counts)


def trial_counts(counts: Sequence[int]) -> list[int]:
    """Return ``counts`` with one micro-batch for each device that has none, as far as others have several."""
    trial = list(counts)
    for device, count in enumerate(counts):
        busiest = trial.index(max(trial))
        if not count and trial[busiest] > 1:
            trial[busiest] -= 1
            trial[device] = 1
    return trial


def trial_period(counts: Sequence[int], times_s: Sequence[float]) -> int:
    """Return after how many steps the devices without work are measured again; 0 if all have work."""
    idle_s = [time_s for count, time_s in zip(counts, times_s, strict=True) if not count]
    if not idle_s:
        return 0
    lost_steps = TRIAL_STEPS * (max(idle_s) / (step_s(counts, times_s) or 1.0) - 1)
    return max(math.ceil(lost_steps / MOST_FOR_TRIALS), LEAST_TRIAL_PERIOD)


def mean_s(samples: Sequence[float]) -> float:
    """Return the mean without the slowest sample, which may be an accident; 0 for less than two."""
    return (sum(samples) - max(samples)) / (len(samples) - 1) if len(samples) > 1 else 0.0


class SpeedShares:
    """Measures this rank's passes, and decides the shares together with the other ranks.

    Args:
        replicas: of this rank; this object decides which of their steps are timed.
        step_images: of a step after the warm-up.
    """

    def __init__(self, world: World, replicas: Replicas, step_images: int, events: EventLog) -> None:
        self.world, self.replicas, self.step_images, self.events = world, replicas, step_images, events
        self.replicas.timed = True
        self._samples: deque[float] = deque(maxlen=SAMPLES.stop - 1)  # s for each micro-batch of a step
        self._turns = 0  # at the start: steps with work that the devices have had, together
        self._unmeasured = 0  # steps that are not to be measured
        self._costs_nothing = True  # to time a step
        self._compared_at_s = time.monotonic()
        self._names: list[str] = []  # of the ranks
        self._times_s = [0.0] * world.size  # of a micro-batch, of each rank, as last measured
        self._decided_s = self._times_s  # those that the last change followed

    def is_due(self) -> bool:
        """Return whether the ranks should compare their times inside an epoch. Rank 0 decides: clocks of ranks differ."""
        return time.monotonic() - self._compared_at_s >= COMPARED_EVERY_S

    def after(
        self, plan: StepPlan, splitter: StepSplitter, *, ends_epoch: bool, is_asked: bool
    ) -> StepSplitter | None:
        """Measure a finished step; return how the next ones are divided if that changes, else None.

        Collective: every rank, after each step, with equal arguments but for the rank of ``splitter``.

        Args:
            is_asked: rank 0 has asked for a comparison.
        """
        self._measure(plan, splitter)
        if not splitter.rotates:
            self.replicas.timed = self._costs_nothing or (plan.step + 1) % MEASURED_EVERY == 0
        if splitter.rotates:
            if self._turns < MEASURED_TURNS.stop * len(splitter.partition.shares):
                return None
        elif not (ends_epoch or is_asked):
            return None
        return self._compare(
            plan, splitter, LEAST_GAIN if splitter.rotates or ends_epoch else LEAST_GAIN_INSIDE
        )

    def _measure(self, plan: StepPlan, splitter: StepSplitter) -> None:
        passes_s, self.replicas.passes_s = self.replicas.passes_s, 0.0
        micro_batches = splitter.most_of(plan)
        is_warm = self._unmeasured == 0
        self._unmeasured = max(self._unmeasured - 1, 0)
        if splitter.rotates:
            devices = len(splitter.partition.shares)
            is_warm = self._turns >= MEASURED_TURNS.start * devices
            self._turns += min(splitter.divided(plan.images), devices)
        if is_warm and passes_s and micro_batches:
            self._samples.append(passes_s / micro_batches)

    def _compare(self, plan: StepPlan, splitter: StepSplitter, least_gain: float) -> StepSplitter | None:
        """Gather the times of the ranks and decide. Collective: every rank, after the same step."""
        is_first, count = splitter.rotates, splitter.divided(self.step_images)
        own_s = mean_s(self._samples) if is_first or len(self._samples) >= SAMPLES.start else 0.0
        if own_s:
            self._samples.clear()
        if is_first:
            self._names = self.world.gather(f"{self.world.host}, {self.world.device}")
        gathered = zip(self.world.gather(own_s), self._times_s, strict=True)
        self._times_s = [new or before for new, before in gathered]
        self._compared_at_s = time.monotonic()
        before = [len(part) for part in splitter.partition.ranges(count)]
        times_s = [time_s for time_s in self._times_s for _ in range(splitter.replicas)]
        counts = next_counts(before, times_s, least_gain)
        if counts == before and not is_first:
            return None
        period = trial_period(counts, times_s)
        self._tell(plan, self._of_ranks(before), self._of_ranks(counts), period, is_first=is_first)
        self._decided_s, self._unmeasured = self._times_s, SLOW_STEPS
        is_idle = not self._of_ranks(counts)[self.world.rank]
        self._costs_nothing = is_idle or is_host(self.replicas.lead.device)
        return replace(
            splitter,
            partition=Partition(tuple(map(float, counts))),
            rotates=False,
            trial=Partition(tuple(map(float, trial_counts(counts)))),
            trial_period=period,
        )

    def _of_ranks(self, counts: Sequence[int]) -> list[int]:
        """Return the micro-batches of each rank from those of each device."""
        replicas = len(self.replicas.all)
        return [sum(counts[at : at + replicas]) for at in range(0, len(counts), replicas)]

    def _tell(
        self, plan: StepPlan, before: list[int], counts: list[int], period: int, *, is_first: bool
    ) -> None:
        """Print which rank gets how much work, and why; write the event ``shares``."""
        of_step = f"of the {sum(counts)} micro-batches of a step"
        if is_first:
            what = f"shares of the ranks by measured speed: {', '.join(map(str, counts))} {of_step}"
        else:
            pairs = list(zip(self._decided_s, self._times_s, strict=True))
            ratios = [max(then / now, now / then) if then and now else 1.0 for then, now in pairs]
            changed = [rank for rank, count in enumerate(counts) if count != before[rank]]
            rank = max(changed, key=ratios.__getitem__)
            then, now = pairs[rank]
            what = (
                f"shares follow the speed: rank {rank} ({self._names[rank]}) computes {counts[rank]} instead of "
                f"{before[rank]} {of_step}: one takes {now:.3g} s, {then:.3g} s before"
            )
        if idle := [str(rank) for rank, count in enumerate(counts) if not count]:
            ranks, get, are = ("ranks", "get", "are") if len(idle) > 1 else ("rank", "gets", "is")
            what += f"; {ranks} {listed(idle)} {get} none, and {are} measured again every {period} steps"
        self.world.console.note(what)
        if self.world.is_main:
            seconds = [round(time_s, 6) for time_s in self._times_s]
            self.events.write("shares", step=plan.step + 1, micro_batches=counts, seconds=seconds, why=what)
