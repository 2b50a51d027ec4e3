"""Run the stages within a time limit: ``PYTHONPATH=tests python -m gpu_check --minutes 10``; ``make test-gpu STAGES=all`` does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from yolofleet.support.errors import ClusterError, YolofleetError
from yolofleet.support.system.signals import stoppable
from yolofleet.support.terminal import Progress
from yolofleet.support.text import echo, inform, screen_line

if TYPE_CHECKING:
    from gpu_check.machine import Machine
    from gpu_check.results import Record, Results
    from gpu_check.stages import Stage


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit (default: %(default)s)")
    parser.add_argument(
        "--device", default="auto", help="as --device of train (default: all GPUs, else cpu:2)"
    )
    parser.add_argument("--stages", default="", help="only these stages and groups, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="repeat stages that have passed in --out")
    return parser


@stoppable()
def run(args: argparse.Namespace) -> int:
    """Run the stages, and print a line after each.

    Returns:
        0: every stage that ran has passed.
    Raises:
        ClusterError: a stage did not pass; names it.
        YolofleetError: no such device or stage; the folder has other results; somebody stopped the command.
    """
    if args.device == "auto" or args.device.startswith("cpu"):
        # before torch is loaded: copies of a process share its cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gpu_check.minutes import Reporter, run_stages
    from gpu_check.stages import chosen

    with Progress(sys.stdout) as progress:

        def header(machine: Machine, results: Results) -> None:
            passed = sum(record.result == "passed" for record in results.records.values())
            inform(f"{machine.name}, --device {machine.device}, at most {args.minutes:g} minutes")
            inform(f"results: {args.out}" + (f" ({passed} stages have passed before)" if passed else ""))

        def running(stage: Stage, elapsed_s: float, limit_s: float) -> None:
            if progress.is_due():
                times = f"{elapsed_s:.0f} of at most {limit_s:.0f} s"
                progress.draw(
                    f"running {stage.name}", min(elapsed_s / limit_s, 1.0), [(times,), (stage.what, "")]
                )

        def ended(record: Record) -> None:
            progress.end()
            inform(stage_line(record, args.out))

        reporter = Reporter(header, running, ended)
        results = run_stages(
            args.device, args.minutes, args.out, chosen(args.stages), reporter, again=args.again
        )
    for name, reason in results.left_out.items():
        inform(f"left out: {name:<14}  {screen_line(reason)}")
    inform(f"table: {results.page}")
    records = list(results.records.values())
    if failed := [record for record in records if record.result != "passed"]:
        raise ClusterError(
            f"{len(failed)} of {len(records)} stages did not pass: {', '.join(record.name for record in failed)}",
            source=str(args.out / failed[0].log),
            hint=f"please report it with {results.page} and this log; the same command repeats these stages",
        )
    echo(f"all {len(records)} stages that ran have passed")
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


def main(argv: Sequence[str]) -> int:
    try:
        return run(parser().parse_args(argv))
    except YolofleetError as problem:
        echo(problem.render(), to=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
