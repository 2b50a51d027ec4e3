"""The first stage of a training run: what a rank reads before it builds a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from yolofleet.checkpoint.state_in_memory import StateMemory
from yolofleet.checkpoint.store import Snapshot
from yolofleet.config.load import Resolved
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.extend.recipe_class import TrainingRecipe, load_recipe_class
from yolofleet.parallel.process import check_equal, fleet_precision
from yolofleet.parallel.world import World
from yolofleet.rank.training_data import used_part
from yolofleet.report.console import NullConsole
from yolofleet.report.folder import RunFolder
from yolofleet.train.agreement import check_settings
from yolofleet.train.optimiser import load_optimizer_class
from yolofleet.train.resume import snapshot_for_all


@dataclass(frozen=True)
class Data:
    """The index of each split, and the notes of the data set's description."""

    train: DataIndex
    val: DataIndex
    notes: Sequence[str]


@dataclass(frozen=True)
class Inputs:
    """Settings, code of the user, data and state of a run; equal on every rank.

    Attributes:
        recipe: of the user; the network's family may have another default.
        optimizer: a name of ``train.optimiser.KINDS``, or the class of the user.
        precision: the number format that every rank can use.
        snapshot: the state to go on from; None: a new run.
        memory: of this host, which keeps states for ranks that are started again; None without one.
    """

    resolved: Resolved[TrainConfig]
    recipe: Resolved[Recipe]
    recipe_class: TrainingRecipe
    optimizer: str | type[torch.optim.Optimizer]
    precision: str
    data: Data
    snapshot: Snapshot | None
    memory: StateMemory | None

    @property
    def config(self) -> TrainConfig:
        return self.resolved.value


def read_inputs(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    folder: RunFolder,
    console: NullConsole,
    *,
    is_writer: bool,
) -> Inputs:
    """Read what the settings name. Collective: every rank."""
    config = resolved.value
    precision = fleet_precision(config.precision, world)
    check_settings(config, recipe.value, world)
    recipe_class = load_recipe_class(config.recipe_class)
    optimizer = load_optimizer_class(config.optimizer_class) or config.optimizer
    data = _data(config, recipe_class, world, console)
    memory = StateMemory.of(os.environ)
    snapshot = snapshot_for_all(world, config.resume, folder.path, memory, console, is_writer=is_writer)
    return Inputs(resolved, recipe, recipe_class, optimizer, precision, data, snapshot, memory)


def _data(config: TrainConfig, recipe_class: TrainingRecipe, world: World, console: NullConsole) -> Data:
    """Index both splits, and check that all ranks have equal ones. Collective: every rank."""
    with world.activity.doing("data set"):
        spec = recipe_class.dataset(config.data)
    with world.activity.doing("indexing"):
        progress = partial(console.progress, "reading labels", unit="images")
        index = build_index(spec, "train", single_cls=config.single_cls, ranks=world, on_progress=progress)
        val_index = build_index(spec, "val", single_cls=config.single_cls, ranks=world, on_progress=progress)
    check_equal(world, "the data set", f"{index.digest} {val_index.digest}")
    return Data(used_part(index, config), val_index, spec.notes)
