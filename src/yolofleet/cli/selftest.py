"""`yolofleet selftest`: the runs of the contract, or the stages of --minutes."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_selftest
from yolofleet.config.schema import SelftestConfig
from yolofleet.errors import ClusterError, ConfigError
from yolofleet.files.atomic import emit_json
from yolofleet.launch.plan import is_worker
from yolofleet.system.signals import stoppable
from yolofleet.terminal import Progress
from yolofleet.text import echo, inform, is_quiet, screen_line

if TYPE_CHECKING:
    from yolofleet.measure.selftest.machine import Machine
    from yolofleet.measure.selftest.results import Record, Results
    from yolofleet.measure.selftest.stages import Stage


def run(given: dict[str, Any], config_file: str) -> int:
    if is_worker():
        raise ConfigError("selftest starts its processes itself", hint="start it without torchrun")
    config = resolve_selftest(given, config_file=config_file).value
    if config.minutes:
        return minutes(config)
    from yolofleet.measure.selftest.contract import run_contract

    return run_contract(config)


@stoppable()
def minutes(config: SelftestConfig) -> int:
    """Run the stages of ``--minutes``, and print a line after each.

    Returns:
        0: every stage that ran has passed.
    Raises:
        ClusterError: a stage did not pass; names it.
        YolofleetError: no such device or stage; the folder has other results; somebody stopped the command.
    """
    if config.device == "auto" or config.device.startswith("cpu"):
        # before torch is loaded: copies of a process share its cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from yolofleet.measure.selftest.minutes import FOLDER, Reporter, run_stages
    from yolofleet.measure.selftest.stages import chosen

    out = sys.stderr if config.json_out == "-" else sys.stdout
    folder = config.out or FOLDER
    with Progress(out, shown=False if is_quiet() else None) as progress:

        def header(machine: Machine, results: Results) -> None:
            passed = sum(record.result == "passed" for record in results.records.values())
            inform(
                f"yolofleet selftest: {machine.name}, --device {machine.device}, at most {config.minutes:g} minutes",
                to=out,
            )
            inform(
                f"results: {folder}" + (f" ({passed} stages have passed before)" if passed else ""), to=out
            )

        def running(stage: Stage, elapsed_s: float, limit_s: float) -> None:
            if progress.is_due():
                times = f"{elapsed_s:.0f} of at most {limit_s:.0f} s"
                progress.draw(
                    f"running {stage.name}", min(elapsed_s / limit_s, 1.0), [(times,), (stage.what, "")]
                )

        def ended(record: Record) -> None:
            progress.end()
            inform(stage_line(record, folder), to=out)

        stages = chosen(config.stages)
        results = run_stages(
            config.device,
            config.minutes,
            folder,
            stages,
            Reporter(header, running, ended),
            again=config.again,
        )
    if results.left_out:
        inform("left out:", to=out)
    for name, reason in results.left_out.items():
        inform(f"  {name:<14}  {screen_line(reason)}", to=out)
    inform(f"table: {results.page}", to=out)
    figures = {"machine": results.facts, "stages": [asdict(r) for r in results.records.values()]}
    emit_json({**figures, "left_out": results.left_out}, config.json_out)
    records = list(results.records.values())
    if failed := [record for record in records if record.result != "passed"]:
        raise ClusterError(
            f"{len(failed)} of {len(records)} stages did not pass: {', '.join(record.name for record in failed)}",
            source=str(folder / failed[0].log),
            hint=f"please report it with {results.page} and this log; the same command repeats these stages",
        )
    echo(f"all {len(records)} stages that ran have passed", to=out)
    return 0


def stage_line(record: Record, folder: Path) -> str:
    """Return a line of the list of stages: name, result, seconds, what was found, and the log of a failure."""
    parts = [
        f"{record.name:<14}",
        f"{record.result:<6}",
        f"{record.seconds:>5.0f} s",
        screen_line(record.text),
    ]
    if record.missed:
        parts.append(f"goals missed: {screen_line('; '.join(record.missed))}")
    if record.result != "passed":
        parts.append(str(folder / record.log))
    return "  ".join(parts)


command = SchemaCommand(
    "selftest",
    SelftestConfig,
    run,
    help="Test on the devices of this machine that the number of processes does not change the result. Train the same few "
    "steps with one process, several processes, unequal shares and DataParallel. With exact reduction the weights must be "
    "equal bit for bit, with fast reduction up to rounding. Then check each device: ten steps compared with the CPU, an fp16 "
    "overflow, resuming with each optimizer. Finally kill one process of a run: the others must end, and the run must "
    "resume. If a test fails, print the likely cause and end with exit code 4.",
    epilog="--minutes N runs the list of stages for the first minutes on a GPU (docs/doctor.md).",
)
