"""An event simulation of a training: every rank, loader process, gradient bucket, link and disk, for up to 4,096 ranks.

The formula (``formula.py``) has one slowest rank, and queues that never run empty. Here each rank draws the time of each of its
steps, each loader process makes one micro-batch after the other, the ranks of a host share its disk, and each sum starts when
its last rank is ready. An event is an array over all ranks or hosts, so a step of 4,096 ranks takes milliseconds.

Legend: R ranks, H hosts, W loader processes of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yolofleet.config.schema import PREFETCH
from yolofleet.fleet.plan.formula import (
    RankShare,
    adding_s,
    count_exchange_s,
    image_costs,
    loader_count,
    predict,
    rank_shares,
    sum_stages,
)
from yolofleet.fleet.plan.inputs import Machine, Workload
from yolofleet.support.errors import ConfigError
from yolofleet.support.random_numbers import generator

MOST_RANKS = 4096
STEPS, FILLING = 100, 10  # simulated steps of an epoch, after those that fill the queues
LEAST_FACTOR = 0.2  # lower limit of a step's time, as a factor of its mean
SHOWN = 0.005  # share of a step: smaller parts are left out of the table
COLUMNS = ("fleet", "images/s", "against the formula", "step", "a rank's time")
Times = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """The figures of a simulated fleet: seconds, as means over ranks and steps."""

    # step_s, first_step_s: of later epochs, and of the first one, in which the image cache is empty
    step_s: float
    first_step_s: float
    rate_img_s: float  # images/s of training in later epochs
    # epoch_s, run_s: with validation, checkpoint and start, as ``formula.Prediction``
    epoch_s: float
    run_s: float
    # seconds of a step of later epochs: compute; loader and storage (own images); counts (the message, and other
    # ranks' images); slowest (a slower rank's gradients); all-reduce (the link). They add up to ``step_s``
    waits: dict[str, float]

    def row(self, name: str, predicted_img_s: float) -> list[str]:
        """Return the cells under ``COLUMNS``."""
        parts = sorted(self.waits.items(), key=lambda item: -item[1])
        return [
            name,
            f"{self.rate_img_s:,.1f}",
            f"{self.rate_img_s / predicted_img_s - 1:+.1%}",
            f"{1000 * self.step_s:,.0f} ms",
            ", ".join(
                f"{part} {seconds / self.step_s:.0%}"
                for part, seconds in parts
                if seconds >= SHOWN * self.step_s
            ),
        ]


def simulate(work: Workload, fleet: Sequence[Machine], *, seed: int = 0, steps: int = STEPS) -> Simulation:
    """Simulate ``steps`` steps of the first epoch and of a later one, and the rest of the run around them.

    Draws are functions of the seed and the epoch, so a fleet has one result.

    Raises:
        ConfigError: the fleet is empty, or has more than ``MOST_RANKS`` devices.
    """
    ranks = sum(machine.devices for machine in fleet)
    if not 0 < ranks <= MOST_RANKS:
        raise ConfigError(
            f"a simulation takes 1 to {MOST_RANKS} devices, got {ranks} on {len(fleet)} machines",
            hint="fewer --machines",
        )
    (first_s, _), (step_s, waits) = (
        _Epoch(work, fleet, first_epoch=number == 0).run(generator(seed, "plan", number), steps)
        for number in (0, 1)
    )
    formula = predict(work, fleet)  # its validations, checkpoints and start
    first_more_s, more_s = first_s - formula.first.total, step_s - formula.step.total
    return Simulation(
        step_s=step_s,
        first_step_s=first_s,
        rate_img_s=work.step_images / step_s,
        epoch_s=formula.epoch + work.steps * more_s,
        run_s=formula.run + work.steps * (first_more_s + (work.epochs - 1) * more_s),
        waits=waits,
    )


class _Epoch:
    """The ranks of a fleet in one epoch. Times are seconds since its start."""

    def __init__(self, work: Workload, fleet: Sequence[Machine], *, first_epoch: bool) -> None:
        shares = rank_shares(work, fleet)
        self.fleet, self.ranks = fleet, len(shares)
        devices = [machine.devices for machine in fleet]
        self.starts = np.cumsum([0, *devices[:-1]])  # [H] the first rank of each host
        self.host = np.repeat(np.arange(len(fleet)), devices)  # [R] the host of each rank
        self.loader = _Loader(work, shares, self.starts, self.host, first_epoch=first_epoch)
        self.update_s = np.array([s.machine.update_s for s in shares])
        self.spread = np.array([s.machine.spread for s in shares])
        self.passes_s = np.array([s.compute_s for s in shares]) - self.update_s + self.loader.beside_network_s
        self.backward_s = np.array([s.backward_s for s in shares])
        self.counts_s = count_exchange_s(fleet)
        self.buckets = work.buckets if self.ranks > 1 else ()
        self.stages = sum_stages(fleet)
        self.adding_s = adding_s(work, fleet) if self.ranks > 1 else 0.0
        self.free = np.zeros(self.ranks)  # [R] when each rank ends its last step

    def run(self, rng: np.random.Generator, steps: int) -> tuple[float, dict[str, float]]:
        """Return mean seconds of a step, and of its parts."""
        for _ in range(FILLING):
            self._step(_normal(rng, self.ranks))
        began_s = float(self.free.mean())
        every = [self._step(_normal(rng, self.ranks)) for _ in range(steps)]
        parts = {name: sum(found[name] for found in every) / steps for name in every[0]}
        return (float(self.free.mean()) - began_s) / steps, parts

    def _step(self, drawn: Times) -> dict[str, float]:
        """Do a step with [R] standard normal numbers: advance ``free``. Return mean seconds of its parts."""
        factor = np.maximum(1 + self.spread * drawn, LEAST_FACTOR)
        began = self.free
        loaded, storage = self.loader.take(began, factor)
        counted = np.full(self.ranks, loaded.max() + self.counts_s)
        computed = counted + factor * self.passes_s
        summed = self._sum_buckets(computed, factor * self.backward_s)
        ended = np.maximum(computed, summed) + self.adding_s
        self.free = ended + factor * self.update_s
        slowest = computed.max()
        found = {
            "compute": computed - counted + self.free - ended,
            "loader": loaded - began - storage,
            "storage": storage,
            "counts": counted - loaded,
            "slowest": np.minimum(slowest, ended) - computed,
            "all-reduce": np.maximum(ended - slowest, 0.0),
        }
        return {name: float(seconds.mean()) for name, seconds in found.items()}

    def _sum_buckets(self, computed: Times, backward: Times) -> Times:
        """Return [R] when each rank has the sum of the last bucket.

        A ring of messages of equal duration ends when all its hops are over after its last rank began: the same as if all
        ranks had begun with that one.
        """
        if not self.buckets:
            return computed
        hosts = len(self.fleet)
        inside, between, back = np.zeros(hosts), 0.0, np.zeros(hosts)
        link, members, _ = self.stages[len(self.stages) // 2]  # the stage between hosts, or the only one
        for count_bytes, ready_at in self.buckets:
            ready = computed - backward * (1 - ready_at)
            if len(self.stages) == 1:
                between = max(float(ready.max()), between) + link.all_reduce_s(count_bytes, members)
                continue
            half = np.array([0.5 * m.inside.all_reduce_s(count_bytes, m.devices) for m in self.fleet])
            inside = np.maximum(np.maximum.reduceat(ready, self.starts), inside) + half
            between = max(float(inside.max()), between) + link.all_reduce_s(count_bytes, members)
            back = np.maximum(between, back) + half
        return np.full(self.ranks, between) if len(self.stages) == 1 else back[self.host]


class _Loader:
    """The loader processes of all ranks. Each loads the images of every W-th pass of its rank, ``ahead`` at most before it is asked.

    A rank takes all passes of a step before it computes, as training/loop.py: a step of more passes than the processes load ahead
    waits for the others.
    """

    def __init__(
        self, work: Workload, shares: Sequence[RankShare], starts: Ints, host: Ints, *, first_epoch: bool
    ) -> None:
        self.starts, self.host, self.ranks = starts, host, np.arange(len(shares))
        machines = [share.machine for share in shares]
        self.workers = np.array([loader_count(work, m) for m in machines])
        self.image_s, self.read_s = np.array(
            [image_costs(work, m, first_epoch=first_epoch) for m in machines]
        ).T
        self.reads = bool(self.read_s.any())
        self.passes = np.array([share.passes for share in shares])
        self.full, self.last = work.per_pass * work.micro_batch, np.array([share.last for share in shares])
        self.ahead = math.ceil(PREFETCH / work.per_pass)
        cores = np.array([m.rank_cores for m in machines])
        self.sharing = np.maximum(self.workers / cores, 1.0)  # more processes than cores share them
        beside = np.array([m.on_cpu for m in machines]) & (self.workers > 0)
        # [R] by which loader processes slow the passes of a step, on a CPU
        self.beside_network_s = beside * self.image_s * [share.images for share in shares] / cores
        self.disk = np.zeros(len(starts))
        most = max(int(self.workers.max()), 1)
        self.busy = np.zeros((len(shares), most))  # until when, of each process
        self.taken = np.zeros((len(shares), most * self.ahead))  # when the last passes were taken
        self.number = np.zeros(len(shares), np.int64)  # number of the next pass

    def take(self, now: Times, factor: Times) -> tuple[Times, Times]:
        """Take the images of a step. Return [R] when each rank has them, and the part of its wait that is the disk's.

        Args:
            now: [R] when each rank asks. factor: [R] by which its process is slower, if it loads itself.
        """
        disk_wait = np.zeros(len(now))
        for ordinal in range(int(self.passes.max())):
            active = self.passes > ordinal
            images = np.where(self.passes == ordinal + 1, self.last, self.full)
            process = self.number % np.maximum(self.workers, 1)
            slot = self.number % np.maximum(self.workers * self.ahead, 1)
            alone = self.workers == 0
            begun = np.where(
                alone, now, np.maximum(self.busy[self.ranks, process], self.taken[self.ranks, slot])
            )
            made = begun + images * self.image_s * np.where(alone, factor, self.sharing)
            read = self._read(begun, np.where(active, images, 0)) if self.reads else begun
            done = np.maximum(made, read)
            arrived = np.where(active, np.maximum(now, done), now)
            disk_wait += np.where(active, arrived - np.maximum(now, np.minimum(made, arrived)), 0.0)
            self.busy[self.ranks, process] = np.where(active, done, self.busy[self.ranks, process])
            self.taken[self.ranks, slot] = np.where(active, arrived, self.taken[self.ranks, slot])
            self.number += active
            now = arrived
        return now, disk_wait

    def _read(self, begun: Times, images: Ints) -> Times:
        """Return [R] when the disk of each host has read [R] ``images`` for its ranks, one after the other."""
        first_begun = np.minimum.reduceat(np.where(images > 0, begun, math.inf), self.starts)
        seconds = images * self.read_s
        up_to = np.cumsum(seconds)
        before = np.concatenate([[0.0], up_to])[self.starts]
        begins = np.where(np.isfinite(first_begun), np.maximum(first_begun, self.disk), self.disk)
        self.disk = begins + np.add.reduceat(seconds, self.starts)
        return np.asarray(begins[self.host] + up_to - before[self.host])


def _normal(rng: np.random.Generator, count: int) -> Times:
    """Return standard normal numbers, from ``random`` only (see ``support/random_numbers.py``).

    Source: G. E. P. Box, M. E. Muller, "A note on the generation of random normal deviates" (1958).
    """
    radius: Times = np.sqrt(-2 * np.log(1 - rng.random(count)))
    return radius * np.cos(2 * np.pi * rng.random(count))
