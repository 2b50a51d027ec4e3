"""`yolofleet report`: the page of a run, and of a comparison. `yolofleet checkpoints`: the states to resume from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from yolofleet.cli.commands import Command, named_run, verb
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.text import echo

COMPARISON = "comparison.html"


@verb(
    "run",
    click.Argument(["runs"], nargs=-1, metavar="RUN"),
    click.Option(["--out"], default="", metavar="FILE", help="the page to write, instead of report.html"),
    help="Write report.html into the run folder RUN again, from its other files. This also works for a run that has not finished. "
    "RUN may be the address of --checkpoint-to; then the page is written here.",
)
def run_command(runs: tuple[str, ...], out: str) -> int:
    if len(runs) != 1:
        compare = ["yolofleet", "report", "compare", *runs, *(["--out", out] if out else [])]
        hint = shlex.join(compare) if runs else "yolofleet report runs/train/exp"
        raise ConfigError(
            f"yolofleet report takes one run folder, got {len(runs)}", source="command line", hint=hint
        )
    folder = RunFolder(named_run(runs[0]))
    from yolofleet.runs.report.page import write_report

    target = out or (f"{folder.name}-report.html" if "://" in runs[0] else "")
    echo(write_report(folder, Path(target) if target else None))
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


def _show_states(run: str, verify: bool) -> int:
    """List the states of a run or checkpoint folder, newest first; ``verify`` reads each and checks its digest."""
    path = named_run(run)
    inner = path / "checkpoints"
    folder = inner if inner.is_dir() else path  # RUN may be the folder of the checkpoints
    from yolofleet.runs.checkpoint.store import CheckpointStore, load_snapshot

    entries = CheckpointStore(folder).entries()
    if not entries:
        raise CheckpointError(f"{folder} has no checkpoint", hint="name a run folder, such as runs/train/exp")
    broken = 0
    for entry in entries:
        line = f"step {entry.step:>8}  {entry.bytes / 2**20:8.1f} MiB  {RunFolder(entry.path).shown}"
        if verify:
            try:
                load_snapshot(entry.path)
                line += "  whole"
            except CheckpointError as problem:
                broken += 1
                line += f"  BROKEN: {problem.what}"
        echo(line)
    if broken:
        echo(f"{broken} of {len(entries)} checkpoints are broken", to=sys.stderr)
    return CheckpointError.exit_code if broken else 0


list_command = Command(
    "list",
    params=[click.Argument(["run"])],
    callback=lambda run: _show_states(run, False),
    help="List the checkpoints of RUN, a run folder or the address of --checkpoint-to, newest first, without reading them.",
)
verify_command = Command(
    "verify",
    params=[click.Argument(["run"])],
    callback=lambda run: _show_states(run, True),
    help="Read every checkpoint of RUN, a run folder or the address of --checkpoint-to, and check its digest. The exit code is 3 if one is damaged.",
)
