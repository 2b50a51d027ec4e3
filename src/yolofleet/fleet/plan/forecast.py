"""Compare fleets for a workload: ranges, notes and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yolofleet.fleet.plan.formula import Prediction, cached_share, predict, rank_shares, store_limit
from yolofleet.fleet.plan.inputs import Machine, Workload
from yolofleet.support.terminal import duration
from yolofleet.support.text import size_text

Fleet = Sequence[Machine]
COLUMNS = ("fleet", "ranks", "images/s", "gain", "epoch", "run", "$", "binds")


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
        return self.likely.binds if self.fits else "memory"

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
        return found + self._store_notes()

    def _store_notes(self) -> list[str]:
        """Return what the store costs and which of its limits binds in the first epoch, in which all files are read."""
        slowest = max(self.fleet, key=lambda m: store_limit(self.work, m)[0] if m.store is not None else 0.0)
        if slowest.store is None:
            return []
        image_s, limit = store_limit(self.work, slowest)
        first, waits_s = self.likely.first, self.work.steps * self.likely.first.storage
        found = f"a machine reads {1 / image_s:,.0f} images/s from the store, limited by its {limit}"
        if first.storage >= 0.1 * first.total:
            found += f": it binds in the first epoch, which waits {duration(waits_s)} for it"
        else:
            found += ": the first epoch waits less than a tenth of its time for it"
        price = self.likely.store_price
        return [found + (f"; the requests cost ${price:,.2f}" if price else "")]

    def header(self) -> dict[str, str]:
        """Return what was predicted, for which machine, by name."""
        work, machine = self.work, self.fleet[0]
        return {
            "training": f"{work.network.name}, {work.img} px, {work.images:,} images, {work.epochs} epochs",
            "step": f"{work.step_images} images as micro-batches of {work.micro_batch}, {work.precision}, {work.reduce} sums",
            "machine": f"{machine.name}: {machine.devices} device{'s' if machine.devices > 1 else ''}, "
            f"{machine.cores:g} cores, {size_text(machine.memory_bytes)}",
            "figures": machine.source,
        }

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
        names = ("images_per_s", "epoch_s", "run_s", "cost")

        def of(one: Prediction) -> dict[str, Any]:
            values = (one.rate_img_s, one.epoch, one.run, one.cost)
            return dict(
                zip(names, (v if self.fits and not math.isnan(v) else None for v in values), strict=True)
            )

        likely = self.likely
        return {
            "fleet": self.name,
            "machines": len(self.fleet),
            "devices": likely.devices,
            **of(likely),
            "fast": of(self.fast),
            "slow": of(self.slow),
            "store_price": likely.store_price,
            "binds": self.binds,
            "fits": self.fits,
            "device_hours": likely.device_hours if self.fits else None,
            "wasted_share": likely.wasted_share if self.fits else None,
            "seconds": likely.parts if self.fits else {},
        }


def forecast(name: str, work: Workload, fleet: Fleet) -> Forecast:
    """Return the forecast of ``fleet``, with its plausible range."""
    fast, slow = ([machine.changed(direction) for machine in fleet] for direction in (-1, 1))
    return Forecast(name, work, fleet, predict(work, fleet), predict(work, fast), predict(work, slow))


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
