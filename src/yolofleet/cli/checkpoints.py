"""`yolofleet checkpoints`: the states that a run can resume from."""

from __future__ import annotations

import sys

import click

from yolofleet.cli.commands import Command, named_run
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import CheckpointError
from yolofleet.support.text import echo


def show(run: str, verify: bool) -> int:
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
    callback=lambda run: show(run, False),
    help="List the checkpoints of RUN, a run folder or the address of --checkpoint-to, newest first, without reading them.",
)
verify_command = Command(
    "verify",
    params=[click.Argument(["run"])],
    callback=lambda run: show(run, True),
    help="Read every checkpoint of RUN, a run folder or the address of --checkpoint-to, and check its digest. The exit code is 3 if one is damaged.",
)
