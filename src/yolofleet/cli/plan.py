"""`yolofleet plan`: predict the speed, the time and the cost of a training on fleets, and compare with what happened."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from yolofleet.cli.bench import WITHOUT, measure
from yolofleet.cli.commands import JSON, Command, SchemaCommand, say
from yolofleet.config.load import resolve_train
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import PlanConfig, PlanProbeConfig
from yolofleet.errors import ConfigError
from yolofleet.files.atomic import emit_json
from yolofleet.hosts.fleet import named_fleet
from yolofleet.report.console import Console
from yolofleet.text import size_text

if TYPE_CHECKING:
    from yolofleet.plan.forecast import Forecast

USED = {  # settings that change a prediction
    "data", "model", "cfg", "img", "fraction", "epochs", "batch", "nominal_batch", "micro_batch", "per_device", "machine",
    "machines", "hosts", "fleet", "probe", "device", "network", "prices", "images", "val_images", "workers", "cache", "reduce",
    "precision", "shares", "micro_batches_per_pass", "val_period", "deadline", "budget", "picture",
    "simulate", "failures_per_hour", "replace_minutes", "seed",
}  # fmt: skip


def run(given: dict[str, Any], config_file: str, json_out: str) -> int:
    found, recipe = resolve_train(given, config_file=config_file, model=PlanConfig)
    config = cast(Resolved[PlanConfig], found)
    say([*config.notes, *recipe.notes])
    from yolofleet.plan.candidates import forecasts, seconds_of
    from yolofleet.plan.forecast import COLUMNS, another_machine, changes, choose

    c = config.value
    if not (c.model or c.cfg):
        raise ConfigError(
            "yolofleet plan needs a network to predict its speed", hint="--model yolov5s, or --cfg FILE"
        )
    if c.batch < 0:
        raise ConfigError(
            "yolofleet plan cannot predict --batch auto, which needs the devices of the run",
            source=config.sources["batch"],
            hint="--batch 64",
        )
    rows = forecasts(config)
    fitting = [row for row in rows if row.fits]
    if not fitting:
        raise ConfigError(
            rows[-1].memory_text(),
            source=rows[-1].fleet[0].source,
            hint="a smaller --micro-batch or --img, or devices with more memory",
        )
    deadline_s, budget = seconds_of(c.deadline), c.budget or math.inf
    if math.isfinite(budget) and all(math.isnan(row.likely.price_hour) for row in rows):
        raise ConfigError(
            f"--budget {budget:g}: no price is known for these machines",
            source=config.sources["budget"],
            hint="--prices FILE, with machines: {NAME: {price_hour: 2.5, ...}} (docs/plan.md)",
        )
    best, why = fitting[-1], ""
    if math.isfinite(deadline_s) or math.isfinite(budget):
        chosen, why = choose(fitting, deadline_s, budget)
        best = chosen or min(fitting, key=lambda row: row.likely.run)
        why = f"choose {best.name}: {why}" if chosen else f"none of these fleets fits: {why}"
    work, machine = best.work, best.fleet[0]
    helps = changes(work, best.fleet)
    more = another_machine(work, best.fleet)
    picture = _draw(c.picture, fitting, work.network.name) if c.picture else ""
    extra = _extra_tables(c, fitting, best)
    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        console.header(
            "yolofleet plan",
            {
                "training": f"{work.network.name}, {work.img} px, {work.images:,} images, {work.epochs} epochs",
                "step": f"{work.step_images} images as micro-batches of {work.micro_batch}, {work.precision}, "
                f"{work.reduce} sums",
                "machine": f"{machine.name}: {machine.devices} device{'s' if machine.devices > 1 else ''}, "
                f"{machine.cores:g} cores, {size_text(machine.memory_bytes)}",
                "figures": machine.source,
            },
        )
        console.table("predicted ranges", COLUMNS, [row.row(fitting[0]) for row in rows])
        for table in extra.values():
            console.table(table.title, table.columns, table.cells)
        for row in (*(row for row in rows if not row.fits), best):
            for text in row.notes():
                console.note(text)
        wasted = best.likely.wasted_share
        facts = {change.text: f"{change.factor:.1f} x" for change in helps}
        facts |= {more.text: more.text_of_worth()}
        if picture:
            console.fact(f"the picture is in {picture}")
        console.fact(
            f"{best.name}: {best.likely.device_hours:,.3g} device hours, of which the devices spend {wasted:.0%} on "
            "work other than steps"
        )
        if why:
            console.fact(why)
        console.summary(f"bottleneck of {best.name}: {best.binds}; changes that help", facts)
    emit_json(
        {
            "workload": asdict(work),
            "source": machine.source,
            "fleets": [row.figures() for row in rows],
            "best": best.name,
            "why": why,
            "changes": [asdict(change) for change in (*helps, more)],
            **{name: table.figures for name, table in extra.items()},
        },
        json_out,
        indent=2,
    )
    return 0


class Table(NamedTuple):
    """A table of the report, and the same as values for JSON."""

    title: str
    columns: Sequence[str]
    cells: list[list[str]]
    figures: list[dict[str, Any]]


def _extra_tables(c: PlanConfig, rows: Sequence[Forecast], best: Forecast) -> dict[str, Table]:
    """Return the tables of ``--failures-per-hour`` and ``--simulate``, by their names in the JSON file.

    Raises:
        ConfigError: more devices than a simulation takes; failures with which a run does not end.
    """
    found: dict[str, Table] = {}
    if c.failures_per_hour:
        from yolofleet.plan import failures

        failing = [
            failures.failure_forecast(row, c.failures_per_hour, 60 * c.replace_minutes) for row in rows
        ]
        title = f"with {c.failures_per_hour:g} failures an hour of each machine, replaced after {c.replace_minutes:g} minutes"
        cells = [one.row() for one in failing]
        found["failures"] = Table(title, failures.COLUMNS, cells, [one.figures() for one in failing])
    if c.simulate:
        from yolofleet.plan import scaling, simulation

        runs = [simulation.simulate(row.work, row.fleet, seed=c.seed) for row in rows]
        cells = [one.row(row.name, row.likely.rate_img_s) for one, row in zip(runs, rows, strict=True)]
        values = [{"fleet": row.name, **asdict(one)} for one, row in zip(runs, rows, strict=True)]
        found["simulation"] = Table("simulated", simulation.COLUMNS, cells, values)
        limits = scaling.what_breaks(best, grows=c.per_device)
        title = f"what stops scaling first, with more of {best.fleet[-1].name}"
        cells = [one.row() for one in limits]
        found["limits"] = Table(title, scaling.COLUMNS, cells, [asdict(one) for one in limits])
    return found


def _draw(path: Path, rows: list[Any], title: str) -> str:
    from yolofleet.report.plots import attempt, plot_forecasts

    likely = [row.likely for row in rows]
    drawn = attempt(
        lambda text: say([text]),
        path,
        plot_forecasts,
        [row.name for row in rows],
        [(row.slow.rate_img_s, row.likely.rate_img_s, row.fast.rate_img_s) for row in rows],
        {name: [one.parts[name] / 3600 for one in likely] for name in likely[0].parts},
        f"Predicted: {title}",
        path,
    )
    return str(path) if drawn else ""


fleets_command = SchemaCommand(
    "fleets",
    PlanConfig,
    run,
    spelled_as="train",
    without=set(PlanConfig.model_fields) - USED,
    unused="does not change the prediction of {verb}",
    extra_options=[JSON],
    help="Predict images per second, the time of an epoch and of the run, and the cost, for measured or published machines. "
    "Name the bottleneck, and the changes that would help most. The command starts no training.",
    epilog="Settings that are not listed here do not change the prediction. --config also takes the config.yaml of a run.",
)


def run_probe(given: dict[str, Any], config_file: str, out: str) -> int:
    from yolofleet.plan.candidates import probe_path
    from yolofleet.plan.probe import probe_of

    if out:
        config = resolve_train(given, config_file=config_file, model=PlanProbeConfig)[0]
        c = config.value
        hosts = named_fleet(
            c.hosts if config.is_given("hosts") else None,
            c.fleet if config.is_given("fleet") else None,
            c.device,
        )
        if hosts is not None and len(hosts.hosts) > 1:
            raise ConfigError(
                f"--out {out} is one file, and there are {len(hosts.hosts)} hosts with a probe each",
                source="command line",
                hint="leave out --out: the probes are then in the cache folder",
            )
    started_at = time.time()
    code, figures = measure("plan probe", given, config_file, PlanProbeConfig)
    if code:
        return code
    start_s = min(max(figures["ready_at"] - started_at, 0.0), 3600.0)
    probes = [probe_of({**values, "start_s": start_s}) for values in figures["probes"]]
    assert not (out and len(probes) > 1), "one file for several hosts"
    with Console() as console:
        console.header("yolofleet plan probe", {})
        for probe in probes:
            path = Path(out) if out else probe_path(probe.host)
            probe.write(path)
            pass_s, image_s = probe.pass_line()
            console.fact(
                f"{probe.host}: {probe.devices} x {probe.device}, {probe.model} at {probe.img} px: {1000 * image_s:.3g} ms an "
                f"image and {1000 * pass_s:.3g} ms a pass; loading takes a core {1000 * probe.load_s:.3g} ms, from a cache "
                f"{1000 * probe.cached_s:.3g} ms; the probe is in {path}"
            )
    return 0


probe_command = SchemaCommand(
    "probe",
    PlanProbeConfig,
    run_probe,
    spelled_as="train",
    without=(WITHOUT - {"hosts", "fleet", "sync_code"}) | {"epochs", "max_steps", "name"},
    extra_options=[
        click.Option(
            ["--out"], default="", metavar="FILE", help="write the probe there; default: the cache folder"
        )
    ],
    help="Measure for about a minute, with these settings, what a prediction needs: passes, loader, storage, sums over "
    "processes, a validation, a checkpoint and the start. With --hosts, measure all hosts and the link between them.",
    epilog="The other settings are those of `yolofleet train`.",
)


def run_compare(run: str, probe: tuple[str, ...], keep: bool, json_out: str) -> int:
    from yolofleet.plan.compare import COLUMNS, compare

    found = compare(Path(run), [Path(path) for path in probe], keep=keep)
    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        console.header("yolofleet plan compare", {"run": run, "figures": ", ".join(found.sources)})
        console.table("prediction and run", COLUMNS, found.rows())
        console.fact(f"bottleneck: {found.predicted_binds} in the prediction, {found.binds} in the run")
        if found.kept:
            console.fact(f"stored the error in {', '.join(found.kept)}: later ranges use it")
    emit_json(found.figures(), json_out, indent=2)
    return 0


compare_command = Command(
    "compare",
    params=[
        click.Argument(["run"], metavar="RUN"),
        click.Option(
            ["--probe"], multiple=True, metavar="FILE", help="probe of each host; default: the stored ones"
        ),
        click.Option(
            ["--keep/--no-keep"],
            default=True,
            help="store the error in the probe, to widen the ranges of later predictions  [on]",
        ),
        JSON,
    ],
    callback=run_compare,
    help="Predict a finished run from its settings and the probes of its hosts, and compare with what happened. RUN is its "
    "folder.",
)
