"""Judge the measured parts of a training: the share of each part's limit, the bottleneck, and what to change. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yolofleet.support.text import size_text
from yolofleet.training.requests import MOST_COST

NOTABLE = 0.05  # of a step's time: a smaller loss needs no advice


@dataclass(frozen=True)
class PartSpeed:
    """One part of a training, measured alone.

    Attributes:
        rate, limit: in ``unit``; NaN if unknown.
        share: of the limit, as a rule rate / limit.
    """

    name: str
    rate: float
    limit: float
    unit: str
    limited_by: str
    share: float = math.nan

    @property
    def of_limit(self) -> float:
        return self.rate / self.limit if math.isnan(self.share) else self.share

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table under ``COLUMNS``."""
        share = "" if math.isnan(self.of_limit) else f"{self.of_limit:.2f}"
        limit = "" if math.isnan(self.limit) else f"{self.limit:,.4g} {self.unit}"
        return self.name, f"{self.rate:,.4g} {self.unit}", limit, share, self.limited_by


def part_of(figures: Mapping[str, Any]) -> PartSpeed:
    """Return a part from the values of its JSON, in which NaN is null."""
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in figures.items()}
    return PartSpeed(**values)


COLUMNS = ("part", "measured", "limit", "of limit", "limit is")


@dataclass(frozen=True)
class Setup:
    """What the measured run used, as far as it decides what to change.

    Attributes:
        processes: of the run. workers, cores: loader processes and usable cores of each of them.
        cached: images of the training split that the cache covers. images: all of them.
        cache: what is in use: none, ram or disk.
        on_cpu: the CPU trains, so a loader process takes a core from the network.
        precision: fp32 | tf32 | fp16 | bf16. reduce: fast | exact | ...
        micro_batch, batch, step_images: images.
    """

    processes: int
    workers: int
    cores: int
    cache: str
    cached: int
    images: int
    on_cpu: bool
    precision: str
    reduce: str
    micro_batch: int
    batch: int
    step_images: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, split by what causes them.

    Attributes:
        network: forward, backward and update of the bare network.
        around: the rest of the step: loss, clipping, moving average, statistics.
        all_reduce: that the step waits for other ranks.
        load: that the loader needs for the images of a step.
    """

    network: float
    around: float
    all_reduce: float
    load: float

    @property
    def compute(self) -> float:
        return self.network + self.around + self.all_reduce

    def exposed(self, workers: int) -> dict[str, float]:
        """Return the seconds that each part adds to a step; loader processes work while the network does."""
        waits = self.load if workers == 0 else max(self.load - self.compute, 0.0)
        parts = {"network": self.network, "step": self.around, "all-reduce": self.all_reduce, "loader": waits}
        return {name: max(seconds, 0.0) for name, seconds in parts.items()}


@dataclass(frozen=True)
class Verdict:
    """What binds, and what to change for each part that costs a notable share of a step's time, the largest first."""

    binds: str
    text: str
    advice: Mapping[str, str]

    def lines(self) -> list[str]:
        return [self.text, *(f"{name}: {advice}" for name, advice in self.advice.items())]


def judge(time: StepTime, setup: Setup) -> Verdict:
    """Return the bottleneck: the loader if its processes are slower than the step, else the part with most of the time."""
    exposed = time.exposed(setup.workers)
    total = sum(exposed.values())
    is_starved = setup.workers > 0 and time.load > time.compute
    binds = "loader" if is_starved else max(exposed, key=lambda name: exposed[name])
    shares = {name: seconds / total for name, seconds in exposed.items()}
    notable = [name for name in sorted(shares, key=lambda n: -shares[n]) if shares[name] >= NOTABLE]
    advice = {name: ", ".join(_advice(name, time, setup)) for name in dict.fromkeys([binds, *notable])}
    if is_starved:
        text = f"the loader binds: a step takes {time.compute:.3g} s, and the loader {time.load:.3g} s for its images"
    else:
        what = {
            "network": "the network",
            "step": "the work around the network",
            "all-reduce": "the all-reduce",
        }
        text = f"{what.get(binds, 'the loader')} binds: {shares[binds]:.0%} of the time of a step"
    return Verdict(binds, text, advice)


def _advice(name: str, time: StepTime, setup: Setup) -> list[str]:
    """Return the settings that make a part cheaper, the most useful first."""
    if name == "loader":
        found = []
        if setup.cached < setup.images:
            found.append("--cache disk" if setup.cache == "ram" else "--cache ram")
        workers = wanted_workers(time, setup)
        if workers > setup.workers:
            found.append(f"--workers {workers}")
        return found or ["more cores, or a smaller --img"]
    if name == "all-reduce":
        fewer = f"--nominal-batch {2 * setup.step_images} (half as many updates an image)"
        smaller = {"exact": ["--reduce fast"], "fast": ["--reduce fast16"]}
        return [*smaller.get(setup.reduce, []), fewer]
    if name == "step":
        sizes = (2 * setup.micro_batch, setup.batch)
        fits = [n for n in sizes if setup.batch % n == 0 and setup.step_images // n >= setup.processes]
        larger = [f"--micro-batch {n}" for n in fits if n > setup.micro_batch][:1]
        return (["--reduce fast"] if setup.reduce == "exact" else []) + (larger or ["a larger --batch"])
    half = ["--precision bf16"] if setup.precision in ("fp32", "tf32") and not setup.on_cpu else []
    return [*half, "more devices, or a smaller --img or --model"]


def wanted_workers(time: StepTime, setup: Setup) -> int:
    """Return the loader processes of a rank that would keep up with the step, as far as the cores allow.

    The result is 0 where the CPU trains, because its cores are busy with the network.
    """
    if setup.on_cpu:
        return 0
    needed = math.ceil(max(setup.workers, 1) * 1.1 * time.load / time.compute)  # a tenth in reserve
    return min(needed, max(setup.cores - 1, 1))


def in_turn(rates: Sequence[float]) -> float:
    """Return the rate of several parts that work one after another."""
    return 1 / sum(1 / rate for rate in rates)


def checkpoint_line(size_bytes: int, write_s: float, standstill_s: float) -> str:
    """Return what a checkpoint costs, and how far apart saves must be to cost little."""
    return (
        f"a checkpoint has {size_text(size_bytes)}: written and verified in {write_s:.3g} s in the background; training "
        f"stands still {1000 * standstill_s:.3g} ms, which is under {MOST_COST:.0%} if saves are "
        f"{standstill_s / MOST_COST:.2g} s apart"
    )
