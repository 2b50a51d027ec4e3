"""`yolofleet render`: the files that schedulers take, on standard output; and `train` with a scheduler's option."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from yolofleet.cli.commands import SchemaCommand, job_option, print_notes
from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.launch.machines import scheduled_run
from yolofleet.fleet.launch.schedulers.scheduler import read_settings
from yolofleet.fleet.launch.schedulers.table import load
from yolofleet.support.text import echo


def rendered(scheduler: str, given: dict[str, Any], config_file: str, job: Sequence[str]) -> str:
    """Check a run and return the file of its job.

    Args:
        scheduler: a key of ``SCHEDULERS``.
        job: what the user typed behind the scheduler's option.
    """
    kind, option = load(scheduler), f"--{scheduler}"
    config, recipe = resolve_train(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    settings = read_settings(kind.settings, job, option)
    return kind.render(settings, scheduled_run(config, given, config_file, settings, option))


def run(scheduler: str, given: dict[str, Any], config_file: str, **job: Sequence[str]) -> int:
    _write(rendered(scheduler, given, config_file, job[scheduler]))
    return 0


def submit(scheduler: str, given: dict[str, Any], config_file: str, job: Sequence[str], dry_run: bool) -> int:
    """Submit a run for ``yolofleet train``, or print its file with ``--dry-run``."""
    text, send = rendered(scheduler, given, config_file, job), load(scheduler).submit
    if dry_run:
        _write(text)
    else:
        assert send is not None, scheduler
        echo(send(text))
    return 0


def _write(text: str) -> None:
    """Write to standard output: text on a terminal, bytes elsewhere, because file names may not be UTF-8."""
    if sys.stdout.isatty():
        echo(text, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()


def __getattr__(name: str) -> SchemaCommand:
    """Return the verb of a scheduler, as ``slurm_command``."""
    scheduler = name.removesuffix("_command")
    if scheduler == name:
        raise AttributeError(name)
    return SchemaCommand(
        scheduler,
        TrainConfig,
        partial(run, scheduler),
        spelled_as="train",
        extra_options=[job_option(scheduler, "settings of the job")],
        help=load(scheduler).help,
        epilog="The other options are those of `yolofleet train`.",
    )
