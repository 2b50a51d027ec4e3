"""`yolofleet plan`: predict the speed, the time and the cost of a training on fleets."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from yolofleet.cli.bench import measure
from yolofleet.cli.commands import JSON, SchemaCommand, print_notes
from yolofleet.config.load import resolve_workload
from yolofleet.config.schema.measure import PlanConfig, PlanProbeConfig, ProbeRun
from yolofleet.fleet.hosts.fleet import given_fleet
from yolofleet.runs.report.console import Console
from yolofleet.storage.atomic import emit_json
from yolofleet.support.errors import ConfigError


def run(given: dict[str, Any], config_file: str, json_out: str) -> int:
    config, recipe = resolve_workload(PlanConfig, given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    from yolofleet.fleet.plan import simulation
    from yolofleet.fleet.plan.forecast import COLUMNS, forecasts

    fleets = forecasts(config)
    fitting = [one for one in fleets if one.fits]
    if not fitting:
        raise ConfigError(
            fleets[-1].memory_text(),
            source=fleets[-1].fleet[0].source,
            hint="a smaller --micro-batch or --img, or devices with more memory",
        )
    best = fitting[-1]
    is_simulated, seed = config.value.simulate, config.value.seed
    runs = [(one, simulation.simulate(one.work, one.fleet, seed=seed)) for one in fitting if is_simulated]
    likely = best.likely
    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        console.header("yolofleet plan", best.header())
        console.table("predicted ranges", COLUMNS, [one.row(fitting[0]) for one in fleets])
        if runs:
            cells = [run.row(one.name, one.likely.rate_img_s) for one, run in runs]
            console.table("simulated", simulation.COLUMNS, cells)
        for one in (*(one for one in fleets if not one.fits), best):
            for note in one.notes():
                console.note(note)
        if "://" in config.value.data and not config.value.store:
            console.note("the store of --data is not counted: --store 1gbit,20ms adds its limits")
        console.fact(
            f"{best.name}: {likely.device_hours:,.3g} device hours, of which the devices spend {likely.wasted_share:.0%} on "
            "work other than steps"
        )
        console.fact(f"bottleneck of {best.name}: {best.binds}")
    figures: dict[str, Any] = {"workload": asdict(best.work), "source": best.fleet[0].source}
    figures |= {"fleets": [one.figures() for one in fleets], "best": best.name}
    if runs:
        figures["simulation"] = [{"fleet": one.name, **asdict(run)} for one, run in runs]
    emit_json(figures, json_out, indent=2)
    return 0


fleets_command = SchemaCommand(
    "fleets",
    PlanConfig,
    run,
    spelled_as="train",
    unused="does not change the prediction of {verb}",
    extra_options=[JSON],
    help="Predict images per second, the time of an epoch and of the run, and the cost, for measured or published machines. "
    "Name the bottleneck. The command starts no training.",
    epilog="Settings that are not listed here do not change the prediction. --config also takes the config.yaml of a run.",
)


def run_probe(given: dict[str, Any], config_file: str, out: str) -> int:
    from yolofleet.fleet.plan.forecast import probe_path
    from yolofleet.fleet.plan.probe import probe_of

    if out:
        config = resolve_workload(PlanProbeConfig, given, config_file=config_file)[0]
        hosts = given_fleet(config)
        if hosts is not None and len(hosts.hosts) > 1:
            raise ConfigError(
                f"--out {out} is one file, and there are {len(hosts.hosts)} hosts with a probe each",
                source="command line",
                hint="leave out --out: the probes are then in the cache folder",
            )
    started_at = time.time()
    code, figures = measure(PlanProbeConfig, ProbeRun, given, config_file)
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
    extra_options=[
        click.Option(
            ["--out"], default="", metavar="FILE", help="write the probe there; default: the cache folder"
        )
    ],
    help="Measure for about a minute, with these settings, what a prediction needs: passes, loader, storage, sums over "
    "processes, a validation, a checkpoint and the start. With --hosts, measure all hosts and the link between them.",
    epilog="The other settings are those of `yolofleet train`.",
)
