"""The first stage of a training run: the settings, code, data and state that a rank reads before it builds a network.

It also has the caches and the augmented samples of the training images, which ``yolofleet data preview`` shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.listing import files_digest
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.cache import ImageCache, shared_file
from yolofleet.data.input.order import RectOrders, build_orders, fraction_of
from yolofleet.data.input.sample import Images, MicroBatchKey, TrainSamples, train_loader
from yolofleet.families.build import outline
from yolofleet.families.recipe_class import TrainingRecipe, load_recipe_class
from yolofleet.runs.checkpoint.memory_slots import PATHS
from yolofleet.runs.checkpoint.store import Snapshot
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import DataError
from yolofleet.support.system.proc import network_disk
from yolofleet.support.terminal import duration
from yolofleet.support.text import size_text
from yolofleet.tasks.table import task_of
from yolofleet.tasks.task import Task
from yolofleet.training.agreement import check_settings
from yolofleet.training.network import description_and_weights
from yolofleet.training.parallel.process import check_equal, fleet_precision
from yolofleet.training.parallel.world import World

if TYPE_CHECKING:
    from yolofleet.data.input.stage import StagedImages
    from yolofleet.families.networks.description import ModelDescription
    from yolofleet.families.weights.value import Weights
    from yolofleet.runs.checkpoint.restart_store import RestartStore

STRIDE = 32  # stride that a preview assumes; the built-in networks for 640 px have it
ROUND_S = 5.0  # ranks meet after this time, so a collective does not time out while a slower host copies


@dataclass(frozen=True)
class Data:
    """The index of each split, the notes of the data set's description, and its root, above the paths of most images."""

    train: DataIndex
    val: DataIndex
    notes: Sequence[str]
    root: Path

    @property
    def splits(self) -> tuple[DataIndex, DataIndex]:
        return self.train, self.val


Start: TypeAlias = "tuple[ModelDescription, Weights | None]"


@dataclass(frozen=True)
class Inputs:
    """Settings, code of the user, data and state of a run; equal on every rank.

    Attributes:
        recipe: of the user; the network's family may have another default.
        optimizer: a name of ``training.optimiser.KINDS``, or the class of the user.
        precision: the number format that every rank can use.
        start: the description of the network, and the weights to start from.
        stride: of the network, pixels.
        snapshot: the state to go on from; None: a new run.
        memory: of this host, which keeps states for ranks that are started again; None without one.
    """

    resolved: Resolved[TrainConfig]
    recipe: Resolved[Recipe]
    recipe_class: TrainingRecipe
    optimizer: str | type[torch.optim.Optimizer]
    precision: str
    start: Start
    stride: int
    data: Data
    snapshot: Snapshot | None
    memory: RestartStore | None

    @property
    def config(self) -> TrainConfig:
        return self.resolved.value


def read_inputs(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    folder: RunFolder,
    *,
    is_writer: bool,
) -> Inputs:
    """Read what the settings name. Collective: every rank."""
    config = resolved.value
    precision = fleet_precision(config.precision, world)
    check_settings(config, recipe.value, world)
    recipe_class = load_recipe_class(config.recipe_class)
    optimizer: str | type[torch.optim.Optimizer] = config.optimizer
    if config.optimizer_class:
        from yolofleet.training.users_optimizer import load_optimizer_class

        optimizer = load_optimizer_class(config.optimizer_class)
    # a run that goes on from another host must not fail here
    if world.is_main and not world.restarts and config.log:
        from yolofleet.config.loggers import check_usable

        check_usable(config)
    memory = snapshot = None
    if PATHS in os.environ:
        from yolofleet.runs.checkpoint.restart_store import RestartStore  # only a host with such memory

        memory = RestartStore.of(os.environ)
    if config.resume or world.restarts:
        from yolofleet.training.resume import snapshot_for_all  # a new run imports no part of a resume

        snapshot = snapshot_for_all(
            world,
            config.resume,
            folder.path,
            memory,
            is_writer=is_writer,
            is_of_run=folder.is_of_run,
            copied_to=config.checkpoint_to if world.restarts else "",
        )
    resumed = None
    if snapshot is not None:
        from yolofleet.training.resume import stored_description

        resumed = stored_description(snapshot)
    with world.activity.doing("weights"):
        start = description_and_weights(config, resumed, recipe_class.description)
    network = outline(start[0], 1)  # its task and strides are those of any number of classes
    data, stride = _data(resolved, recipe_class, start[0], task_of(network), world), max(network.strides)
    return Inputs(resolved, recipe, recipe_class, optimizer, precision, start, stride, data, snapshot, memory)


def _data(
    resolved: Resolved[TrainConfig],
    recipe_class: TrainingRecipe,
    description: ModelDescription,
    task: Task,
    world: World,
) -> Data:
    """Index both splits, and check that all ranks have equal ones. Collective: every rank."""
    config = resolved.value
    with world.activity.doing("data set"):
        spec = recipe_class.dataset(config.data)
    with world.activity.doing("indexing"):
        progress = partial(world.console.progress, "reading labels", unit="images")
        build = partial(
            build_index,
            spec,
            single_cls=config.single_cls,
            masks=task.reads_masks,
            ranks=world,
            on_progress=progress,
        )
        index = build("train")
        val_index = build("val") if spec.has_val else index.none_of("val")
        if not spec.has_val:
            from yolofleet.config.checks import check_without_validation

            check_without_validation(resolved)
    if task.reads_masks:
        from yolofleet.training.rank.masks import check_masks, way_to_boxes

        check_masks(index, val_index, instead=way_to_boxes(resolved, description))
    if index.is_mirrored:
        from yolofleet.storage.object_store import OUTAGE_S

        world.activity.store_s = 2 * OUTAGE_S  # of one micro-batch: it may need many files
    check_equal(world, "the data set", " ".join(files_digest(one) for one in (index, val_index) if len(one)))
    part = used_part(index, config)
    left = f"--fraction {config.fraction:g} trains on {len(part)} of {len(index)} images"
    return Data(part, val_index, spec.notes + (left,) * (len(part) < len(index)), spec.root)


# -- images ------------------------------------------------------------------------------------------


def used_part(index: DataIndex, config: TrainConfig) -> DataIndex:
    """Return the index of the images that ``--fraction`` keeps.

    Raises:
        DataError: none of them has a label.
    """
    if config.fraction == 1:
        return index
    part = index.part(fraction_of(len(index), config.fraction, config.seed))
    if not len(part.classes):
        raise DataError(
            f"--fraction {config.fraction:g} leaves {len(part)} training images, none with a label",
            hint="a larger --fraction, or another --seed",
        )
    return part


def open_caches(
    config: TrainConfig, data: Data, img: int, world: World, caches: ExitStack
) -> tuple[ImageCache, ImageCache]:
    """Open the caches of decoded images, which the processes of a machine share. Collective: every rank."""
    token = world.broadcast_bytes(os.urandom(8).hex().encode()).decode()
    staged: list[StagedImages | None] = [None, None]
    if config.stage is not None:
        splits = [index for index in data.splits if len(index)]
        staged[: len(splits)] = stage_images(config.stage, splits, world)
    val_mode = "auto" if config.cache == "jpeg" else config.cache  # a validation sees the images as they are
    opened = [
        caches.enter_context(
            closing(
                ImageCache(
                    index,
                    img,
                    mode,
                    token=f"{token}-{index.split}",
                    quick=index is data.train,
                    staged=copies,
                    shared=shared_file(os.environ, "train" if index is data.train else "val"),
                )
            )
        )
        for index, mode, copies in ((data.train, config.cache, staged[0]), (data.val, val_mode, staged[1]))
    ]
    world.barrier()  # every process of this machine has opened the files, so they can be unlinked
    for cache in opened:
        world.console.to_log(f"note: {cache.index.split} images: {cache.note}")
        cache.unlink()
    return opened[0], opened[1]


def stage_images(folder: Path, indexes: Sequence[DataIndex], world: World) -> list[StagedImages]:
    """Copy the image files of each index into ``folder`` on every host; return the copies.

    Images that are there already are not copied again. Collective: every rank.

    Raises:
        StorageError: the folder cannot be written, or its disk is too small.
    """
    # only a run with --stage needs it
    from yolofleet.data.input.stage import StagedImages, check_room

    with world.activity.doing("staging"):
        if kind := network_disk(folder):
            world.console.warn(
                f"--stage {folder} is itself on a network disk ({kind}): reading from it may not be faster"
            )
        staged = [StagedImages(index, folder) for index in indexes]
        check_room(staged, folder)
        for images in staged:
            _copy(images, world)
    return staged


def _copy(images: StagedImages, world: World) -> None:
    """Copy the images that are missing, divided among the ranks of each host. Collective: every rank."""
    from yolofleet.data.input.stage import copy_for

    # By number and not by place in the list: another rank may see fewer missing ones, because one has begun to copy.
    mine = [n for n in images.missing().tolist() if n % world.local_size == world.local_rank]
    source, left = iter(mine), len(mine)
    began_s = time.monotonic()
    total = 0.0
    while True:
        (left_everywhere,) = world.sum_rows([float(left)])
        total = total or left_everywhere
        now_s = time.monotonic()
        if left_everywhere == 0:
            break
        what = f"copying {images.index.split} images"
        world.console.progress(what, total - left_everywhere, total, "images")
        left -= copy_for(ROUND_S, images, source)
        world.activity.tick()
    size = size_text(float(images.index.stamps[:, 0].sum()))
    took = f"copied in {duration(now_s - began_s)}" if total else "there already"
    world.console.note(
        f"staged {len(images.index)} {images.index.split} images, {size}, in {images.file}: {took}"
    )
    failures = [why for theirs in world.gather(list(images.failures.values())) for why in theirs]
    if failures:
        world.console.warn(
            f"{len(failures)} images could not be copied and are read from the data set: {failures[0]}"
        )


def training_samples(
    config: TrainConfig,
    recipe: Recipe,
    index: DataIndex,
    cache: Images,
    *,
    img: int,
    stride: int,
    labels: Callable[[Any, int], Shapes] | None = None,
) -> TrainSamples:
    """Return the augmented images of a run.

    Args:
        config: with the micro-batch of the run.
        img: training size in pixels, a multiple of ``stride``.
    Raises:
        ConfigError: albumentations is not usable.
    """
    orders = build_orders(index, config.seed, config.sampler, recipe.repeat_threshold)
    if config.rect:
        orders = RectOrders(orders, index, config.micro_batch, stride)
    run = {"img": img, "seed": config.seed, "epochs": config.epochs}
    return TrainSamples(index, cache, recipe, **run, orders=orders, labels=labels)


def write_preview(
    config: TrainConfig, recipe: Recipe, index: DataIndex, out: Path, *, count: int, epoch: int
) -> None:
    """Write a sheet of the first ``count`` training images of an epoch with their boxes and masks, as JPEG or PNG by the suffix.

    Args:
        epoch: from 1.
    Raises:
        YolofleetError: an image cannot be read, or the file cannot be written.
    """
    from yolofleet.runs.report.plots import plot_pictures, training_pictures
    from yolofleet.tasks.masks.task import MASKS

    index, img = used_part(index, config), -(-config.img // STRIDE) * STRIDE
    cache = ImageCache(index, img, "none", quick=True)
    labels = MASKS.labels if index.has_runs else None
    samples = training_samples(config, recipe, index, cache, img=img, stride=STRIDE, labels=labels)
    together, images = config.micro_batch, len(index)
    first = -(-(epoch - 1) * images // together) * together  # micro-batches begin at multiples of their size
    positions = [divmod(at, images) for at in range(first, first + count)]
    keys = [MicroBatchKey(0, 0, tuple(positions[at : at + together])) for at in range(0, count, together)]
    pictures = []
    with train_loader(samples, keys, lambda *_: None, workers=0) as loader:
        for key, batch in zip(keys, loader, strict=True):
            names = [Path(index.path(samples.orders.image_of(*at))).name for at in key.samples]
            shown = batch.images_on(torch.device("cpu"))
            pictures += training_pictures(shown, batch.labels, names, most=together)
    plot_pictures(pictures, index.names, out, most=count)
