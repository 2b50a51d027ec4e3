"""`yolofleet selftest`: the same short training by one process, by several and by DataParallel, compared."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_selftest
from yolofleet.config.schema import SelftestConfig
from yolofleet.errors import ClusterError, ConfigError
from yolofleet.files.atomic import emit_json, storage_error
from yolofleet.launch.plan import is_worker
from yolofleet.report.console import aligned, duration
from yolofleet.report.folder import RunFolder
from yolofleet.system.signals import stoppable
from yolofleet.terminal import Progress
from yolofleet.text import echo, is_quiet, screen_line

if TYPE_CHECKING:
    from yolofleet.measure.selftest.checks import Leg, Record, Verdict
    from yolofleet.measure.selftest.minutes import Record as StageRecord
    from yolofleet.measure.selftest.minutes import Results
    from yolofleet.measure.selftest.stages import Machine, Stage


def run(given: dict[str, Any], config_file: str) -> int:
    if is_worker():
        raise ConfigError("selftest starts its processes itself", hint="start it without torchrun")
    config = resolve_selftest(given, config_file=config_file).value
    return minutes(config) if config.minutes else selftest(config)


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
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # before torch is loaded: copies of a process share its cores
    from yolofleet.measure.selftest.minutes import FOLDER, Reporter, chosen, run_stages

    out = sys.stderr if config.json_out == "-" else sys.stdout
    folder = config.out or FOLDER
    with Progress(out, shown=False if is_quiet() else None) as progress:

        def header(machine: Machine, results: Results) -> None:
            passed = sum(record.result == "passed" for record in results.records.values())
            told(
                f"yolofleet selftest: {machine.name}, --device {machine.device}, at most {config.minutes:g} minutes",
                out,
            )
            told(f"results: {folder}" + (f" ({passed} stages have passed before)" if passed else ""), out)

        def running(stage: Stage, elapsed_s: float, limit_s: float) -> None:
            if progress.is_due():
                times = f"{elapsed_s:.0f} of at most {limit_s:.0f} s"
                progress.draw(
                    f"running {stage.name}", min(elapsed_s / limit_s, 1.0), [(times,), (stage.what, "")]
                )

        def ended(record: StageRecord) -> None:
            progress.end()
            told(stage_line(record, folder), out)

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
        told("left out:", out)
    for name, reason in results.left_out.items():
        told(f"  {name:<14}  {screen_line(reason)}", out)
    told(f"table: {results.page}", out)
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


def stage_line(record: StageRecord, folder: Path) -> str:
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


def selftest(
    config: SelftestConfig,
    *,
    titles: Collection[str] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Run all legs, print a line after each, and the verdict.

    Args:
        titles: for tests: of all legs only these; the reference and a fast one are needed to hold.
        environments: for tests: by a leg's title, variables that only its processes get, to break the contract.
    Returns:
        0.
    Raises:
        ClusterError: the contract is broken here, or the reference failed; says why, as far as that can be told.
        YolofleetError: no such model or device; the disk refused; somebody stopped a run.
    """
    from yolofleet.measure.selftest.checks import Comparison, fleet_of, judge, lone_devices, plan
    from yolofleet.measure.selftest.runs import device_checks, killed_rank_check, run_legs

    began_at_s = time.monotonic()
    device = fleet_of(config.device)
    legs = [leg for leg in plan(device) if not titles or leg.title in titles]
    out = sys.stderr if config.json_out == "-" else sys.stdout
    records: list[Record] = []
    checks: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="yolofleet-selftest-", ignore_cleanup_errors=True) as temporary:
        try:
            comparison = Comparison(config, legs, Path(temporary))
        except OSError as refusal:
            raise storage_error(refusal, Path(temporary)) from None
        table = Table(legs)
        told(f"yolofleet selftest: {comparison.text}, on {device}\n{table.header}", out)
        for record in run_legs(comparison, legs, Path(temporary), environments=environments):
            records.append(record)
            told(table.line(record, records[0]), out)
        verdict = judge(records)
        for check in [] if titles else device_checks(lone_devices(device)):
            checks.append(check)
            told(check_line(check), out)
        many = next((leg for leg in legs if leg.processes > 1), None)
        if many is not None and sys.platform == "linux" and not titles:
            extra = {"YOLOFLEET_CACHE": str(Path(temporary, "cache"))}
            folder = RunFolder(Path(temporary, "killed"))
            settings = comparison.settings_of(many)
            checks.append(killed_rank_check(settings, device, many.processes, folder, extra))
            told(check_line(checks[-1]), out)
    elapsed_s = time.monotonic() - began_at_s
    write_figures(config, verdict, records, checks, elapsed_s)
    told(cost(records), out)
    if verdict.cause is not None:
        raise ClusterError(verdict.text, source=verdict.cause.what, hint=verdict.cause.hint)
    if failed := [check for check in checks if not check["passed"]]:
        raise ClusterError(
            f"{len(failed)} of {len(checks)} checks failed, first: {failed[0]['name']} on {failed[0]['device']}",
            source=failed[0]["detail"],
            hint="another torch build or driver; please report it with what --json FILE writes",
        )
    echo(f"{verdict.text} ({duration(elapsed_s)})", to=out)
    return 0


class Table:
    """Lines of a table that grows: columns have the width of the longest run's title."""

    COLUMNS = ("run", "SHA-256", "result", "update off by", "losses off by", "s/step")

    def __init__(self, legs: Sequence[Leg]) -> None:
        self.widest = (max((leg.title for leg in legs), key=len), "0" * 12, "not judged", "", "", "0.0000")
        self.header = self._format(*self.COLUMNS)

    def _format(self, *cells: str) -> str:
        return aligned(self.COLUMNS, [self.widest, cells])[-1]

    def line(self, record: Record, reference: Record) -> str:
        from yolofleet.measure.selftest.checks import is_broken, short

        if record.problem:
            return self._format(record.leg.title, "", "FAILED", "", "", "")
        good = {"exact": "equal", "fast": "rounding", "default": "not judged"}[record.leg.kind]
        result = "reference" if record is reference else "DIFFERS" if is_broken(record, reference) else good
        off = [f"{x:.1e}" if x else "0" for x in (record.update_difference, record.loss_difference)]
        return self._format(record.leg.title, short(record.sha256), result, *off, f"{record.step_s:.3g}")


def cost(records: Sequence[Record]) -> str:
    """Return the step time of exact sums relative to fast sums on equal kernels and to a default run."""
    exact = {r.leg.name: r.step_s for r in records if r.leg.kind == "exact" and not r.problem}
    others = [r for r in records if r.leg.kind != "exact" and not r.problem and r.leg.name in exact]
    ratios = [f"{exact[r.leg.name] / r.step_s:.2f} ({r.leg.title})" for r in others]
    return f"seconds a step, exact / other: {', '.join(ratios)}"


def told(text: str, out: TextIO) -> None:
    """Print a detail of the verdict, unless ``--quiet``."""
    if not is_quiet():
        echo(text, to=out)


def check_line(check: Mapping[str, Any]) -> str:
    """Return a line of the table of checks: device, check, result, detail."""
    result = "passed" if check["passed"] else "FAILED"
    return "  ".join(
        (screen_line(check["device"]).ljust(6), check["name"].ljust(30), result, screen_line(check["detail"]))
    )


def write_figures(
    config: SelftestConfig,
    verdict: Verdict,
    records: Sequence[Record],
    checks: Sequence[Mapping[str, Any]],
    elapsed_s: float,
) -> None:
    """Write the figures for ``--json``."""
    figures = {
        "contract_holds": verdict.cause is None,
        "verdict": verdict.text,
        "cause": verdict.cause and asdict(verdict.cause),
        "settings": config.model_dump(),
        "runs": [asdict(record) for record in records],
        "checks": list(checks),
        "seconds": elapsed_s,
    }
    emit_json(figures, config.json_out)


command = SchemaCommand(
    "selftest",
    SelftestConfig,
    run,
    help="Test on the devices of this machine that the number of processes does not change the result. Train the same few "
    "steps with one process, several processes, unequal shares and DataParallel. With exact reduction the weights must be "
    "equal bit for bit, with fast reduction up to rounding. Then check each device: ten steps compared with the CPU, an fp16 "
    "overflow, resuming with each optimizer. Finally kill one process of a run: the others must end, and the run must "
    "resume. If a test fails, print the likely cause and end with exit code 4.",
    epilog="--minutes N runs the list of stages for the first minutes on a GPU (docs/selftest.md).",
)
