"""`yolofleet report`: the page of a run, and of a comparison."""

from __future__ import annotations

from pathlib import Path

import click

from yolofleet.cli.commands import named_run, verb
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import echo, shown

COMPARISON = "comparison.html"


@verb(
    "run",
    click.Argument(["runs"], nargs=-1, metavar="RUN"),
    help="Write report.html into the run folder RUN again, from its other files. This also works for a run that has not finished. "
    "RUN may be the address of --checkpoint-to; then the page is written here.",
)
def run_command(runs: tuple[str, ...]) -> int:
    if len(runs) != 1:
        hint = (
            f"yolofleet report compare {' '.join(map(shown, runs))}"
            if runs
            else "yolofleet report runs/train/exp"
        )
        raise ConfigError(
            f"yolofleet report takes one run folder, got {len(runs)}", source="command line", hint=hint
        )
    folder = RunFolder(named_run(runs[0]))
    from yolofleet.runs.report.page import write_report

    echo(write_report(folder, Path(f"{folder.name}-report.html") if "://" in runs[0] else None))
    return 0


@verb(
    "compare",
    click.Argument(["runs"], nargs=-1, metavar="RUN RUN ..."),
    click.Option(["--out"], default=COMPARISON, metavar="FILE", show_default=True, help="the page to write"),
    help="Compare run folders on one page: different settings, curves, figures, and images on which the runs disagree.",
)
def compare_command(runs: tuple[str, ...], out: str) -> int:
    folders = [RunFolder(named_run(name)) for name in runs]
    from yolofleet.runs.report.compare import write_comparison

    write_comparison(folders, Path(out))
    echo(out)
    return 0
