"""The folder of a run: rank 0 creates it, all ranks get its path."""

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
    """Return the run's folder, which the launcher or rank 0 creates. Collective: every rank.

    Args:
        given: the launcher's folder; None: rank 0 creates one.
        lock: rank 0 holds the folder's lock until this stack closes.
    Raises:
        ConfigError: another process uses the folder.
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
        raise ClusterError("rank 0 could not use the run's folder", hint="read the message of rank 0")
    return made or RunFolder(Path(os.fsdecode(path)))


def write_config(
    world: World, folder: RunFolder, config: Resolved[Any], recipe: Resolved[Recipe] | None = None
) -> None:
    """Write ``config.yaml``, on rank 0."""
    if world.is_main:
        write_text(folder.config, dump_config(config, recipe))
