"""The report of ``yolofleet plan``: forecasts of all fleets, the fleet to take, and further tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import PlanConfig
from yolofleet.errors import ConfigError
from yolofleet.plan import failures, simulation
from yolofleet.plan.candidates import forecasts, seconds_of
from yolofleet.plan.failures import failure_forecast
from yolofleet.plan.forecast import Forecast, choose
from yolofleet.text import size_text


class Table(NamedTuple):
    """A further table of the report, and the same as values for JSON."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    figures: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PlanReport:
    """The predictions for all fleets.

    Attributes:
        fleets: all forecasts; fitting: those whose devices can hold a micro-batch, at least one.
        best: the fleet to take; why: the choice in one sentence, "" without ``--deadline`` and ``--budget``.
        tables: of ``--failures-per-hour`` and ``--simulate``, by their names in the JSON file.
    """

    fleets: Sequence[Forecast]
    fitting: Sequence[Forecast]
    best: Forecast
    why: str
    tables: Mapping[str, Table]

    def header(self) -> dict[str, str]:
        """Return what was predicted, for which machine, by name."""
        work, machine = self.best.work, self.best.fleet[0]
        return {
            "training": f"{work.network.name}, {work.img} px, {work.images:,} images, {work.epochs} epochs",
            "step": f"{work.step_images} images as micro-batches of {work.micro_batch}, {work.precision}, {work.reduce} sums",
            "machine": f"{machine.name}: {machine.devices} device{'s' if machine.devices > 1 else ''}, "
            f"{machine.cores:g} cores, {size_text(machine.memory_bytes)}",
            "figures": machine.source,
        }

    def notes(self) -> list[str]:
        """Return the notes on fleets that are too small, and on the best one."""
        too_small = [one for one in self.fleets if not one.fits]
        return [note for one in (*too_small, self.best) for note in one.notes()]

    def figures(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "workload": asdict(self.best.work),
            "source": self.best.fleet[0].source,
            "fleets": [one.figures() for one in self.fleets],
            "best": self.best.name,
            "why": self.why,
            **{name: table.figures for name, table in self.tables.items()},
        }


def plan_report(config: Resolved[PlanConfig]) -> PlanReport:
    """Predict the training on each fleet that the settings name, and choose one.

    Raises:
        ConfigError: no probe or machine; no fleet has enough memory; a budget without prices; more devices than a
            simulation takes; failures with which a run does not end.
    """
    c = config.value
    fleets = forecasts(config)
    fitting = [one for one in fleets if one.fits]
    if not fitting:
        raise ConfigError(
            fleets[-1].memory_text(),
            source=fleets[-1].fleet[0].source,
            hint="a smaller --micro-batch or --img, or devices with more memory",
        )
    deadline_s, budget = seconds_of(c.deadline), c.budget or math.inf
    if math.isfinite(budget) and all(math.isnan(one.likely.price_hour) for one in fleets):
        raise ConfigError(
            f"--budget {budget:g}: no price is known for these machines",
            source=config.sources["budget"],
            hint="--prices FILE, with machines: {NAME: {price_hour: 2.5, ...}} (docs/plan.md)",
        )
    best, why = fitting[-1], ""
    if math.isfinite(deadline_s) or math.isfinite(budget):
        chosen, reason = choose(fitting, deadline_s, budget)
        best = chosen or min(fitting, key=lambda one: one.likely.run)
        why = f"choose {best.name}: {reason}" if chosen else f"none of these fleets fits: {reason}"
    return PlanReport(fleets, fitting, best, why, _tables(c, fitting))


def _tables(c: PlanConfig, fleets: Sequence[Forecast]) -> dict[str, Table]:
    """Return the tables of ``--failures-per-hour`` and ``--simulate``, by name."""
    tables = {}
    if c.failures_per_hour:
        title = f"with {c.failures_per_hour:g} failures an hour of each machine, replaced after {c.replace_minutes:g} minutes"
        rows = [failure_forecast(one, c.failures_per_hour, 60 * c.replace_minutes) for one in fleets]
        tables["failures"] = Table(title, failures.COLUMNS, *zip(*rows, strict=True))
    if c.simulate:
        runs = [(one, simulation.simulate(one.work, one.fleet, seed=c.seed)) for one in fleets]
        cells = [run.row(one.name, one.likely.rate_img_s) for one, run in runs]
        figures = [{"fleet": one.name, **asdict(run)} for one, run in runs]
        tables["simulation"] = Table("simulated", simulation.COLUMNS, cells, figures)
    return tables
