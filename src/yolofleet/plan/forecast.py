"""Compare fleets for a workload: ranges, the changes that help most, and the fleet for a deadline or a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yolofleet.plan.formula import Prediction, cached_share, loader_count, predict, rank_shares
from yolofleet.plan.machine import RAM_SHARE, Link, Machine
from yolofleet.plan.workload import Workload
from yolofleet.terminal import duration
from yolofleet.text import size_text

Fleet = Sequence[Machine]
WORTH = 1.05  # a change that helps less is not shown
SHOWN_CHANGES = 3
WORTH_A_MACHINE = 1.2
COLUMNS = ("fleet", "ranks", "images/s", "gain", "epoch", "run", "$", "binds")
NAMES = {"all_reduce": "all-reduce"}


@dataclass(frozen=True)
class Forecast:
    """The predicted figures of a fleet.

    Attributes:
        name: of the fleet, short. likely: with the figures as they are; fast, slow: if all doubts come true.
    """

    name: str
    work: Workload
    fleet: Fleet
    likely: Prediction
    fast: Prediction
    slow: Prediction

    @property
    def fits(self) -> bool:
        """Return whether a micro-batch may fit into the memory of each device."""
        return all(machine.fits for machine in self.fleet)

    @property
    def binds(self) -> str:
        return NAMES.get(self.likely.binds, self.likely.binds) if self.fits else "memory"

    def memory_text(self) -> str:
        """Return what a micro-batch needs, and what the first device that is too small has."""
        worst = next(machine for machine in self.fleet if not machine.fits)
        return (
            f"a micro-batch of {self.work.micro_batch} images of {self.work.img} px needs at least "
            f"{size_text(worst.needed_bytes)}, and a device of {worst.name} has {size_text(worst.device_bytes)}"
        )

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        if not self.fits:
            return [f"{self.name} is too small: {self.memory_text()}"]
        found = []
        idle = [part for part in rank_shares(self.work, self.fleet) if not part.images]
        if idle:
            found.append(
                f"{len(idle)} of {self.likely.devices} devices have nothing to do: a step has "
                f"{self.work.step_images // self.work.micro_batch} micro-batches; --per-device, or a larger --nominal-batch"
            )
        if self.work.cache != "none" and (share := min(cached_share(self.work, m) for m in self.fleet)) < 1:
            found.append(f"the image cache of a machine holds {share:.0%} of the images")
        return found

    def row(self, first: Forecast) -> list[str]:
        """Return the cells under ``COLUMNS``; the gain is the speed-up over ``first``."""
        likely, priced = self.likely, not math.isnan(self.likely.price_hour)
        if not self.fits:
            return [self.name, str(likely.devices), "too small", "-", "-", "-", "-", self.binds]
        return [
            self.name,
            str(likely.devices),
            span(self.slow.rate_img_s, self.fast.rate_img_s),
            f"{likely.rate_img_s / first.likely.rate_img_s:.2f}",
            duration_span(self.fast.epoch, self.slow.epoch),
            duration_span(self.fast.run, self.slow.run),
            span(self.fast.cost, self.slow.cost) if priced else "-",
            self.binds,
        ]

    def figures(self) -> dict[str, Any]:
        """Return values for JSON."""

        def of(one: Prediction) -> dict[str, Any]:
            values = {
                "images_per_s": one.rate_img_s,
                "epoch_s": one.epoch,
                "run_s": one.run,
                "cost": one.cost,
            }
            return {
                name: value if self.fits and not math.isnan(value) else None for name, value in values.items()
            }

        likely = self.likely
        return {
            "fleet": self.name,
            "machines": len(self.fleet),
            "devices": likely.devices,
            **of(likely),
            "fast": of(self.fast),
            "slow": of(self.slow),
            "binds": self.binds,
            "fits": self.fits,
            "device_hours": likely.device_hours if self.fits else None,
            "wasted_share": likely.wasted_share if self.fits else None,
            "seconds": {
                NAMES.get(name, name): seconds for name, seconds in likely.parts.items() if self.fits
            },
        }


def forecast(name: str, work: Workload, fleet: Fleet) -> Forecast:
    """Return the forecast of ``fleet``, with its plausible range."""
    fast, slow = ([machine.changed(direction) for machine in fleet] for direction in (-1, 1))
    return Forecast(name, work, fleet, predict(work, fleet), predict(work, fast), predict(work, slow))


@dataclass(frozen=True)
class Change:
    """A change of the workload or of the fleet, and the factor by which the run gets faster."""

    text: str
    factor: float

    def text_of_worth(self) -> str:
        """Return the factor of another machine as text, and whether it is worth its price."""
        return f"{self.factor:.2f} x" + ("" if self.factor >= WORTH_A_MACHINE else ": not worth it")


def changes(work: Workload, fleet: Fleet) -> list[Change]:
    """Return the changes that speed the run up most, best first, without those below ``WORTH``."""
    before = predict(work, fleet).run
    found = [Change(text, before / predict(*changed).run) for text, changed in _possible(work, fleet)]
    worth = [change for change in found if change.factor >= WORTH]
    return sorted(worth, key=lambda change: -change.factor)[:SHOWN_CHANGES]


def _possible(work: Workload, fleet: Fleet) -> Iterator[tuple[str, tuple[Workload, Fleet]]]:
    """Yield changes that the settings or the machines allow."""
    if not any(cached_share(work, machine) for machine in fleet):
        fits = all(work.cached_bytes <= RAM_SHARE * machine.memory_bytes for machine in fleet)
        mode: Any = "ram" if fits else "disk"
        yield f"--cache {mode}", (replace(work, cache=mode), fleet)
    cores = min(int(machine.cores / machine.devices) for machine in fleet)
    if cores - 1 > max(loader_count(work, machine) for machine in fleet) and not fleet[0].on_cpu:
        yield f"--workers {cores - 1}", (replace(work, workers=cores - 1), fleet)
    if work.reduce != "fast16" and sum(machine.devices for machine in fleet) > 1:
        yield "--reduce fast16", (replace(work, reduce="fast16"), fleet)
    ranks = sum(machine.devices for machine in fleet)
    doubled = replace(work, step_images=2 * work.step_images)
    yield f"--nominal-batch {2 * work.step_images} (half as many updates an image)", (doubled, fleet)
    room = all(replace(machine, needed_bytes=2 * machine.needed_bytes).fits for machine in fleet)
    if work.step_images // (2 * work.micro_batch) >= ranks and work.per_pass == 1 and room:
        yield (
            f"--micro-batch {2 * work.micro_batch}",
            (replace(work, micro_batch=2 * work.micro_batch), fleet),
        )
    if work.val_period == 1 and work.epochs > 5:
        yield "--val-period 5", (replace(work, val_period=5), fleet)
    if len({machine.image_s for machine in fleet}) > 1 and not work.auto_shares:
        yield "--shares auto", (replace(work, auto_shares=True, shares=()), fleet)
    if len(fleet) > 1:
        faster = [
            replace(m, between=Link(m.between.latency_s, 10 * m.between.bytes_s, m.between.tree))
            for m in fleet
        ]
        yield "a link between the machines that is ten times as fast", (work, faster)
    more = [replace(machine, cores=2 * machine.cores) for machine in fleet]
    if not fleet[0].on_cpu:
        yield "twice as many CPU cores", (work, more)


def another_machine(work: Workload, fleet: Fleet) -> Change:
    """Return the gain of one more machine like the last one."""
    factor = predict(work, fleet).run / predict(work, [*fleet, fleet[-1]]).run
    return Change(f"{len(fleet) + 1} machines", factor)


def choose(found: Sequence[Forecast], deadline_s: float, budget: float) -> tuple[Forecast | None, str]:
    """Return the fleet to take, and why; None if no fleet fits.

    Within a deadline it is the cheapest fleet (that with the fewest device hours if prices are unknown), within a budget
    the fastest. A fleet that fits even in the slow case wins over one that only likely fits.

    Args:
        deadline_s: inf = none. budget: US dollars; inf = none.
    """

    def cost(one: Prediction) -> float:
        return one.device_hours if math.isnan(one.cost) else one.cost

    def fits(one: Prediction) -> bool:
        return one.run <= deadline_s and (math.isinf(budget) or one.cost <= budget)

    by: Callable[[Forecast], float] = (
        (lambda f: cost(f.likely)) if math.isfinite(deadline_s) else (lambda f: f.likely.run)
    )
    for case, why in (("slow", "even in the slow case"), ("likely", "likely, but not in the slow case")):
        fitting = [f for f in found if fits(getattr(f, case))]
        if fitting:
            best = min(fitting, key=by)
            return best, f"it fits {why}: {duration(best.likely.run)}" + (
                "" if math.isnan(best.likely.cost) else f", ${best.likely.cost:,.0f}"
            )
    fastest, cheapest = min(found, key=lambda f: f.likely.run), min(found, key=lambda f: cost(f.likely))
    why = f"the fastest of these fleets, {fastest.name}, needs {duration(fastest.likely.run)}"
    if math.isfinite(budget) and not math.isnan(cheapest.likely.cost):
        why += f"; the cheapest, {cheapest.name}, costs ${cheapest.likely.cost:,.0f}"
    return None, why


def rounded(value: float) -> str:
    """Return a number with two significant digits, three from 100 on."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = (2 if abs(value) < 100 else 3) - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def span(low: float, high: float) -> str:
    """Return a range such as ``410-600``."""
    one, other = rounded(low), rounded(high)
    return one if one == other else f"{one}-{other}"


def duration_span(low_s: float, high_s: float) -> str:
    """Return a range of durations in one unit, such as ``5.1-7.4 h``."""
    unit, name = next(
        (u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")) if high_s >= 2 * u or u == 1
    )
    return f"{span(low_s / unit, high_s / unit)} {name}"
