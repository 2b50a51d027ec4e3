"""The folder of a run, agreed on by all ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from yolofleet.config.load import Resolved, dump_config
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.errors import ClusterError, YolofleetError
from yolofleet.files.atomic import write_text
from yolofleet.parallel.world import World
from yolofleet.report.folder import RunFolder
from yolofleet.runs.plan import new_folder


def shared_folder(
    world: World, settings: TrainConfig | ValConfig, given: RunFolder | None, lock: ExitStack
) -> RunFolder:
    """Return the run's folder: given by our launcher, else made by rank 0. Collective: every rank.

    Args:
        lock: rank 0 holds the folder's lock until this ends.
    Raises:
        ConfigError: another process writes into the folder.
    """
    made, problem = given, None
    if world.is_main:
        try:
            made = given or new_folder(settings)
            lock.enter_context(made.locked())
        except YolofleetError as error:
            problem = error
    path = world.broadcast_bytes(os.fsencode(made.path) if made and not problem else b"")
    if problem is not None:
        raise problem
    if not path:
        raise ClusterError("rank 0 could not use the run's folder; its message says why")
    return made or RunFolder(Path(os.fsdecode(path)))


def write_config(
    world: World, folder: RunFolder, config: Resolved[Any], recipe: Resolved[Recipe] | None = None
) -> None:
    """Write ``config.yaml``, on rank 0."""
    if world.is_main:
        write_text(folder.config, dump_config(config, recipe))
