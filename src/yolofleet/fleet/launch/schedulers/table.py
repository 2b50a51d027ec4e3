"""The table of schedulers: a module of this folder for each, whose ``SCHEDULER`` has what the command line needs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from yolofleet.fleet.launch.schedulers.scheduler import Scheduler


class Row(NamedTuple):
    """What help texts say of a scheduler whose module is not imported."""

    file: str  # what ``yolofleet render`` writes
    submits: bool = False  # whether ``yolofleet train`` has an option that submits the job


SCHEDULERS = {
    "slurm": Row("a batch script for SLURM", submits=True),
    "kubernetes": Row("a Job for Kubernetes"),
}


def load(name: str) -> Scheduler[Any]:
    """Return a scheduler of the table, and import its module."""
    scheduler: Scheduler[Any] = import_module(f"yolofleet.fleet.launch.schedulers.{name}").SCHEDULER
    return scheduler
