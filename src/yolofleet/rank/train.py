"""Build the parts of a training run from its settings, and train.

The order is that of :func:`built_run`: data, network, state, caches, loop, report. Every rank builds the same parts.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from yolofleet import devices
from yolofleet.checkpoint.state_in_memory import StateMemory
from yolofleet.checkpoint.store import CheckpointStore, Snapshot, set_aside
from yolofleet.checkpoint.weights import WeightsHeader
from yolofleet.config.load import Resolved
from yolofleet.config.recipe import with_default
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.errors import ConfigError, StorageError
from yolofleet.evaluate.run import EvaluationSettings, OnBatch, Validation
from yolofleet.extend.callbacks import Callbacks
from yolofleet.extend.recipe_class import TrainingRecipe, load_recipe_class
from yolofleet.extend.user_code import identity_of
from yolofleet.families import build_model, family_of, outline
from yolofleet.files.caches import cache_root
from yolofleet.input.cache import ImageCache, shared_file
from yolofleet.input.loader import Loader, MicroBatch, MicroBatchKey, train_loader
from yolofleet.input.pixels import COMPILED
from yolofleet.input.stage import StagedImages
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.cost import images_within_index
from yolofleet.models.detector import Detector, square_of
from yolofleet.models.fuse import fuse
from yolofleet.parallel.batchnorm import with_sync_batchnorm
from yolofleet.parallel.partition import Partition
from yolofleet.parallel.process import (
    check_equal,
    fleet_precision,
    loader_processes,
    place_text,
    replica_devices,
    set_kernels,
    versions,
)
from yolofleet.parallel.replicas import Replicas
from yolofleet.parallel.world import World
from yolofleet.rank.autobatch import with_measured_batch
from yolofleet.rank.device_memory import (
    LargestPass,
    check_pass,
    is_out_of_memory,
    memory_of_validation,
    most_labels,
    probed_micro_batch,
    probed_per_pass,
)
from yolofleet.rank.folder import file_writers, run_console, write_config
from yolofleet.rank.staging import stage_images
from yolofleet.rank.training_data import training_samples, used_part
from yolofleet.rank.val import validation_progress
from yolofleet.report.clock import Clock
from yolofleet.report.console import NullConsole
from yolofleet.report.events import EventLog
from yolofleet.report.folder import RunFolder
from yolofleet.report.loggers.running import check_usable, started_loggers
from yolofleet.system.preempt_notice import preempt_notices
from yolofleet.system.signals import request_stop
from yolofleet.train.advice import rate_notes
from yolofleet.train.agreement import check_settings, have_equal_kernels
from yolofleet.train.loop import PrepareValidation, StepSplitter, TrainingRun
from yolofleet.train.network import (
    build_network,
    description_and_weights,
    freeze,
    lr_factors,
    with_fitting_anchors,
)
from yolofleet.train.report import TrainReport
from yolofleet.train.resume import check_resume, fingerprint, snapshot_for_all, stored_description
from yolofleet.train.schedule import Schedule, lr_factor
from yolofleet.train.state import TrainState
from yolofleet.train.status import RunStatus, published_status
from yolofleet.train.stop import NOTICE


def train(
    resolved: Resolved[TrainConfig], recipe: Resolved[Recipe], world: World, clock: Clock, folder: RunFolder
) -> None:
    """Do one rank's part of a training run. Collective: every rank.

    Args:
        clock: of this rank; its watchdog reads it.
    Raises:
        YolofleetError: any expected failure.
    """
    with (
        ExitStack() as lock,
        run_console(resolved.value, world, folder) as console,
        EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
        preempt_notices(
            resolved.value.preempt_notice if world.local_rank == 0 else "",
            notice=lambda: request_stop(f"{NOTICE}{world.host}"),
            log=lambda text: NullConsole.note(console, text),  # to the log only
            warn=console.warn,
        ),
    ):
        is_writer = world.rank in file_writers(world, folder, resolved.value.checkpoint_copies, lock)
        with (
            _status(folder, clock, world) as status,
            built_run(
                resolved, recipe, world, clock, folder, console, events, is_writer=is_writer, status=status
            ) as run,
        ):
            run.begin()
            with run.callbacks.ending(run.training.state):
                run.training.train()
                run.training.report.finish(run.training.state)


def _status(
    folder: RunFolder, clock: Clock, world: World
) -> AbstractContextManager[RunStatus] | AbstractContextManager[None]:
    """Return the status of the run on rank 0, else a context of None."""
    if not world.is_main:
        return nullcontext()
    values = {"host": world.host, "ranks": world.size, "restarts": world.restarts}
    return published_status(folder, clock, values, lambda: request_stop("a request in the run folder"))


@dataclass(frozen=True)
class BuiltRun:
    """All parts of one rank's run. :meth:`begin` comes before ``training.train()``.

    Attributes:
        callbacks: of this rank.
        data: the index of each split.
        cache: of the training images.
        begin: prints the header and starts the clock of the training.
    """

    training: TrainingRun
    callbacks: Callbacks
    network: _Network
    data: _Data
    cache: ImageCache
    begin: Callable[[], None]


@contextmanager
def built_run(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    clock: Clock,
    folder: RunFolder,
    console: NullConsole,
    events: EventLog,
    *,
    is_writer: bool,
    status: RunStatus | None = None,
) -> Iterator[BuiltRun]:
    """Build the parts of one rank's run; close its caches at the end. Collective: every rank.

    Args:
        status: of the run, on rank 0 of a training.
    """
    config = resolved.value
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    precision = fleet_precision(config.precision, world)
    check_settings(config, recipe.value, world)
    recipe_class = load_recipe_class(config.recipe_class)
    data = _data(config, recipe_class, world, console)
    levels = world.sum_in_levels() if config.hierarchical else ""

    memory = StateMemory.of(os.environ)
    snapshot = snapshot_for_all(world, config.resume, folder.path, memory, console, is_writer=is_writer)
    resolved = _with_measured_batch(resolved, recipe, recipe_class, data, snapshot, precision, world, console)
    config = resolved.value
    network = _network(config, recipe, recipe_class, data.train, snapshot, world, console)
    # kernels cannot be timed for the training alone while a validation runs beside it
    sizes_vary = network.sizes != (1, 1) or config.rect or config.val_overlap
    set_kernels(config, sizes_vary=sizes_vary, tf32=precision == "tf32")
    header = WeightsHeader.of(network.model, img=network.img)
    state, schedule, frozen = _state(config, network, len(data.train), precision, world)
    config, splitter = _split(config, network, state, schedule, data.train, snapshot, precision, world)
    callbacks = Callbacks(config.callbacks, world)
    if world.is_main and not world.restarts:  # a run that goes on from another host must not fail here
        check_usable(config)
    code = {"callbacks": callbacks.identity()}
    if config.recipe_class:
        code["recipe_class"] = identity_of(config.recipe_class, "--recipe-class")
    identity = fingerprint(config, network.recipe.value, data.train, network.model, world, code)
    augmentation = network.recipe.value
    if augmentation.copy_paste or augmentation.albumentations:
        versions_here = f"{identity['data']} {identity['kernels'].get('albumentations')}"
        check_equal(world, "the polygons, or the version of albumentations,", versions_here)
    if augmentation.copy_paste and not len(data.train.points):
        console.note("copy_paste has no effect: no training label is a polygon")
    averaged = _averaged(network.model, state)
    if snapshot is not None:
        check_resume(snapshot.values["fingerprint"], identity, config, console)
        state.restore(snapshot)
        clock.restore(snapshot.values["clock"])
    if is_writer:
        try:
            _claim(folder, resolved, network.recipe, console, is_resumed=snapshot is not None)
        except StorageError as problem:
            if world.is_main:
                raise
            is_writer = False
            console.warn(f"{world.host} keeps no copy of the run: {problem.what}")

    with ExitStack() as caches:
        if memory is not None:
            caches.callback(memory.close)
        cache, val_cache = _caches(config, data, network.img, world, caches, console)
        loggers = caches.enter_context(
            started_loggers(config, folder, console, world, resumed=snapshot is not None)
        )
        report = TrainReport(
            folder,
            console,
            events,
            world,
            config,
            clock,
            terms=network.loss.terms,
            header=header,
            dataset_images=len(data.train),
            is_writer=is_writer,
            callbacks=callbacks,
            loggers=loggers,
            status=status,
        )
        store = CheckpointStore(folder.checkpoints, keep=config.keep_last)
        world.activity.finish_writing = store.finish_writing
        splitter.check()
        training = TrainingRun(
            config=config,
            state=state,
            schedule=schedule,
            splitter=splitter,
            loader=_loader(config, network, data.train, cache, splitter.per_pass, world),
            loss=network.loss,
            clip_norm=network.recipe.value.clip_norm,
            precision=precision,
            world=world,
            report=report,
            store=store,
            memory=memory if world.local_rank == 0 else None,
            validation=_validation(config, network, averaged, data.val, val_cache, precision, world, console),
            fingerprint=identity,
            newest_state=partial(
                snapshot_for_all, world, str(folder.path), folder.path, None, console, is_writer=is_writer
            ),
            equal_kernels=have_equal_kernels(world),
        )

        def begin() -> None:
            report.begin(
                state,
                data.train,
                data.val,
                data_notes=data.notes,
                facts={
                    **_header_lines(
                        config, network, schedule, splitter, frozen, precision, cache.note, world
                    ),
                    **({"network": levels} if levels else {}),
                },
                settings=_given(resolved),
                versions=versions(),
                resumed=snapshot is not None,
            )
            if idle := splitter.idle_note(schedule.step_images):
                console.warn(idle)
            if snapshot is None:
                for note in rate_notes(config, network.recipe, schedule):
                    console.note(note)

        yield BuiltRun(training, callbacks, network, data, cache, begin)


def _claim(
    folder: RunFolder,
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    console: NullConsole,
    *,
    is_resumed: bool,
) -> None:
    """Move the files of an earlier run in the folder aside, and write ``config.yaml``."""
    for kept in () if is_resumed else set_aside(folder.path):
        console.note(f"an earlier run in this folder: its files are in {kept}")
    write_config(folder, resolved, recipe)


# -- parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """The index of each split, and the notes of the data set's description."""

    train: DataIndex
    val: DataIndex
    notes: Sequence[str]


def _data(config: TrainConfig, recipe_class: TrainingRecipe, world: World, console: NullConsole) -> _Data:
    """Index both splits, and check that all ranks have equal ones. Collective: every rank."""
    with world.activity.doing("data set"):
        spec = recipe_class.dataset(config.data)
    with world.activity.doing("indexing"):
        told = partial(console.progress, "reading labels", unit="images")
        index = build_index(spec, "train", single_cls=config.single_cls, ranks=world, on_progress=told)
        val_index = build_index(spec, "val", single_cls=config.single_cls, ranks=world, on_progress=told)
    check_equal(world, "the data set", f"{index.digest} {val_index.digest}")
    index = used_part(index, config)
    return _Data(index, val_index, spec.notes)


@dataclass(frozen=True)
class _Network:
    """The network on the host, with values derived from it.

    Attributes:
        recipe: the recipe of the user, or the default of the network's family.
        img: training size in pixels, a multiple of ``stride``.
        sizes: smallest and largest training size, as fractions of ``img``.
        anchors: text about the anchors for the header; "" without anchors.
    """

    model: Detector
    loss: DetectionLoss
    recipe: Resolved[Recipe]
    img: int
    stride: int
    sizes: tuple[float, float]
    anchors: str


def _network(
    config: TrainConfig,
    recipe: Resolved[Recipe],
    recipe_class: TrainingRecipe,
    index: DataIndex,
    snapshot: Snapshot | None,
    world: World,
    console: NullConsole,
) -> _Network:
    resumed = stored_description(snapshot) if snapshot else None
    with world.activity.doing("weights"):
        description, weights = description_and_weights(config, resumed, recipe_class.description)
    family = family_of(description)
    recipe = with_default(recipe, family.recipe_name)
    stride = max(outline(description, len(index.names)).strides)
    img = -(-config.img // stride) * stride
    anchors = ""
    if config.autoanchor and not resumed:
        threshold = recipe.value.anchor_t
        description, anchors = with_fitting_anchors(description, index, threshold, img, config.seed)
    model = build_network(description, weights, index.names, config.seed, console)
    sizes = (0.5, 1.5) if config.multi_scale else (recipe.value.size_low, recipe.value.size_high)
    loss = recipe_class.loss(model, recipe.value, img)
    return _Network(model, loss, recipe, img, stride, sizes, anchors)


def _state(
    config: TrainConfig, network: _Network, images: int, precision: str, world: World
) -> tuple[TrainState, Schedule, list[str]]:
    """Move the network to its devices; return the training state, the schedule and the names of frozen parameters."""
    model, recipe = network.model, network.recipe.value
    model.to(world.device)
    if config.channels_last:
        cast(Any, model).to(memory_format=torch.channels_last)  # torch's stub lacks memory_format
    model.train()
    frozen = freeze(model, config.freeze)
    synced = config.sync_bn and world.size > 1
    if synced:
        with_sync_batchnorm(model, world)
    schedule = Schedule(recipe, images, config.batch, config.nominal_batch, config.epochs, config.lr_decay)
    factor = lr_factor(config.lr_scale, schedule.step_images, recipe.reference_batch)
    schedule = replace(schedule, lr_factor=factor)
    on_devices = replica_devices(config, world)
    state = TrainState.build(
        Replicas.build(model, on_devices, world, reduce=config.reduce, synced=synced),
        recipe,
        optimizer=config.optimizer,
        weight_decay=schedule.weight_decay,
        precision=precision,
        lr_factors=lr_factors(model, recipe),
    )
    return state, schedule, frozen


def _split(
    config: TrainConfig,
    network: _Network,
    state: TrainState,
    schedule: Schedule,
    index: DataIndex,
    snapshot: Snapshot | None,
    precision: str,
    world: World,
) -> tuple[TrainConfig, StepSplitter]:
    """Probe the memory with the largest pass. Collective: every rank.

    Returns:
        The settings with the micro-batch of the run, and how this rank passes its share of a step.
    """
    if snapshot is not None and config.micro_batch < 0:
        stored = snapshot.values["fingerprint"]["settings"].get("micro_batch")
        config = config.model_copy(update={"micro_batch": stored})
    with world.activity.doing("memory probe"):
        largest = _largest_pass(config, network, state, index, precision)
        one_pass = _splitter(config, network, len(index), world).largest_pass(schedule.step_images)
        check_pass(config, largest, one_pass if config.micro_batch >= 0 else 1)
        with memory_of_validation(config, largest, world):
            config = config.model_copy(update={"micro_batch": probed_micro_batch(config, largest, world)})
            splitter = _splitter(config, network, len(index), world)
            per_pass = probed_per_pass(config, largest, splitter.largest_share(schedule.step_images))
    if config.compile:
        _compile(network, largest, per_pass * splitter.micro_batch, world)
    return config, replace(splitter, per_pass=per_pass)


def _with_measured_batch(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    recipe_class: TrainingRecipe,
    data: _Data,
    snapshot: Snapshot | None,
    precision: str,
    world: World,
    console: NullConsole,
) -> Resolved[TrainConfig]:
    """Replace ``--batch auto`` by a number, with a network of its own for the trials. Collective: every rank."""
    images = len(data.train)

    def build(config: TrainConfig) -> LargestPass:
        config = config.model_copy(update={"autoanchor": False})
        network = _network(config, recipe, recipe_class, data.train, None, world, NullConsole())
        set_kernels(config, sizes_vary=True, tf32=precision == "tf32")
        state, _, _ = _state(config, network, images, precision, world)
        return _largest_pass(config, network, state, data.train, precision)

    cached_bytes = (images + len(data.val)) * 3 * resolved.value.img**2
    return with_measured_batch(resolved, build, images, cached_bytes, snapshot, world, console)


def _compile(network: _Network, largest: LargestPass, images: int, world: World) -> None:
    """Compile the network for passes of ``images`` images. No collective.

    Raises:
        ConfigError: the recipe changes the image size, or torch cannot compile the network here.
    """
    if network.sizes != (1, 1):
        source = network.recipe.sources["size_high" if network.sizes[1] != 1 else "size_low"]
        raise ConfigError(
            "--compile and a recipe with images of {:g} to {:g} x --img are mutually exclusive: each image size would be "
            "compiled".format(*network.sizes),
            source=source,
            hint="--set size_low=1 --set size_high=1, or leave out --compile",
        )
    # torch's default is a folder in /tmp with a known name: another user could put code there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))
    try:
        with world.activity.doing("compiling"):
            largest.state.replicas.compile(images)
            largest.run(images)
    except (RuntimeError, ImportError, OSError) as problem:
        if is_out_of_memory(problem):
            raise
        raise ConfigError(
            f"--compile: torch {torch.__version__} cannot compile the network on {world.device}",
            source=" ".join(str(problem).split())[:300],
            hint="leave out --compile; it needs a C++ compiler such as g++, the header files of Python, on a GPU Triton, and a "
            "cache folder (YOLOFLEET_CACHE) without spaces in its path",
        ) from None


def _largest_pass(
    config: TrainConfig, network: _Network, state: TrainState, index: DataIndex, precision: str
) -> LargestPass:
    side = max(round(network.img * network.sizes[1] / network.stride), 1) * network.stride
    most_images, evaluation = sys.maxsize, _evaluation_settings(config, network, precision)
    if not devices.is_host(state.replicas.lead.device):
        shape = outline(network.model.description, network.model.nc).eval()
        fit = {px: images_within_index(shape, px) for px in {side, network.img}}
        most_images = fit[side]
        batch = min(config.val_batch, max(fit[network.img], 1))
        evaluation = replace(evaluation, config=evaluation.config.model_copy(update={"batch": batch}))
    return LargestPass(
        state,
        network.loss,
        precision,
        side,
        most_labels(index, network.recipe.value),
        most_images,
        evaluation,
        partial(_averaged, network.model, state),
    )


def _averaged(model: Detector, state: TrainState) -> Detector:
    """Return a network whose tensors are those of the moving average, for validation."""
    averaged = build_model(model.description, model.nc)
    averaged.load_state_dict(state.weights(), strict=False, assign=True)
    averaged.names = model.names
    averaged.eval()
    return averaged


def _caches(
    config: TrainConfig, data: _Data, img: int, world: World, caches: ExitStack, console: NullConsole
) -> tuple[ImageCache, ImageCache]:
    """Open the caches of decoded images, which the processes of a machine share. Collective: every rank."""
    token = world.broadcast_bytes(os.urandom(8).hex().encode()).decode()
    staged: list[StagedImages | None] = [None, None]
    if config.stage is not None:
        staged[:] = stage_images(config.stage, (data.train, data.val), world, console)
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
        for index, mode, copies in (
            (data.train, config.cache, staged[0]),
            (data.val, val_mode, staged[1]),
        )
    ]
    world.barrier()  # every process of this machine has opened the files, so they can be unlinked
    for cache in opened:
        NullConsole.note(console, f"{cache.index.split} images: {cache.note}")  # to the log only
        cache.unlink()
    return opened[0], opened[1]


def _loader(
    config: TrainConfig,
    network: _Network,
    index: DataIndex,
    cache: ImageCache,
    per_pass: int,
    world: World,
) -> Callable[[Iterable[MicroBatchKey]], Loader[MicroBatchKey, MicroBatch]]:
    """Return the function that loads the images of a rank's keys, which have ``per_pass`` micro-batches each."""
    return partial(
        train_loader,
        training_samples(config, network.recipe.value, index, cache, img=network.img, stride=network.stride),
        match=network.loss.match,
        workers=loader_processes(config.workers, world),
        prefetch=-(-config.prefetch // per_pass),
        pin_memory=config.pin_memory and devices.can_pin(world.device),
        on_device=config.augment_on == "device",
    )


def _validation(
    config: TrainConfig,
    network: _Network,
    averaged: Detector,
    index: DataIndex,
    cache: ImageCache,
    precision: str,
    world: World,
    console: NullConsole,
) -> PrepareValidation:
    """Return the function that prepares a validation of the averaged network as it is then."""
    settings = _evaluation_settings(config, network, precision)
    progress = validation_progress(world, console)

    def prepared(
        loss: DetectionLoss,
        on_batch: OnBatch = progress,
        *,
        may_stop: bool = True,
        beside_training: bool = False,
    ) -> Validation:
        return Validation(
            fuse(averaged),
            index,
            settings,
            world=world,
            device=world.device,
            workers=loader_processes(config.workers, world, beside_training=beside_training),
            cache=cache,
            loss=loss,
            on_batch=on_batch,
            stops=lambda: may_stop and world.activity.stop_requested,
        )

    return prepared


def _evaluation_settings(config: TrainConfig, network: _Network, precision: str) -> EvaluationSettings:
    shared = ValConfig(img=network.img, batch=config.val_batch, single_cls=config.single_cls)
    return EvaluationSettings(shared, precision, square_of(network.model, network.img))


def _splitter(config: TrainConfig, network: _Network, images: int, world: World) -> StepSplitter:
    replicas = len(replica_devices(config, world))
    shares = "" if config.shares == "auto" else config.shares
    return StepSplitter(
        partition=Partition.parse(shares, world.size * replicas),
        rank=world.rank,
        replicas=replicas,
        micro_batch=config.step_shape.micro_batch,
        batch=config.batch,
        dataset_images=images,
        sync_bn=config.sync_bn,
        sizes=network.sizes,
        img=network.img,
        stride=network.stride,
        seed=config.seed,
    )


# -- header ----------------------------------------------------------------------------------------------------


def _header_lines(
    config: TrainConfig,
    network: _Network,
    schedule: Schedule,
    splitter: StepSplitter,
    frozen: Sequence[str],
    precision: str,
    cached: str,
    world: World,
) -> dict[str, str]:
    """Return the lines of the header, by name."""
    workers = loader_processes(config.workers, world)
    model, recipe = network.model, network.recipe.value
    steps = min(schedule.steps_of_run, config.max_steps or schedule.steps_of_run)
    rounded = (
        "" if network.img == config.img else f" (--img {config.img} rounded up to stride {network.stride})"
    )
    return {
        "where": place_text(world, len(replica_devices(config, world))),
        "model": f"{model.description.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
        + (f", {len(frozen)} tensors frozen" if frozen else ""),
        "step": ("" if config.minutes else f"{steps} step{'s' if steps != 1 else ''} of ")
        + f"{schedule.step_images} images (after warm-up) as micro-batches of {splitter.micro_batch}, "
        + (f"up to {splitter.per_pass} in a pass, " if splitter.per_pass > 1 else "")
        + f"{precision}, {config.reduce} sums",
        "rate": f"lr0 {recipe.lr0:g} x {schedule.lr_factor:.4g} (--lr-scale {config.lr_scale}: recipe made for "
        f"{recipe.reference_batch} images a step), {schedule.decay}, {config.optimizer}",
        "image": f"{network.img} px{rounded}" + (", rectangles without mosaics" if config.rect else ""),
        "loader": (f"{workers} processes" if workers else "in this process")
        + f"; {cached}"
        + ("; images are augmented on the device" if config.augment_on == "device" else "")
        + ("" if COMPILED else "; augmentation is slow: yolofleet was installed without a C compiler"),
        **({"anchors": network.anchors} if network.anchors else {}),
    }


def _given(resolved: Resolved[TrainConfig]) -> list[tuple[str, str, str]]:
    """Return name, value and source of each setting that is not a default."""
    rows = []
    for name, source in resolved.sources.items():
        if resolved.is_given(name):
            value = getattr(resolved.value, name)
            rows.append((name, " ".join(value) if isinstance(value, tuple) else str(value), source))
    return rows
