"""The second and third stage of a training run: the network, and its state on the devices of this rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from yolofleet.config.decide import check_micro_batch, decide
from yolofleet.config.resolve import MEASURED, Resolved, with_values
from yolofleet.config.schema import (
    PREFETCH,
    TARGET_MICRO_BATCH,
    Recipe,
    TrainConfig,
    ValConfig,
    closing_epoch,
)
from yolofleet.data.input.augment import COMPILED
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey, train_loader
from yolofleet.families.build import build_model, family_of, outline
from yolofleet.families.family import load
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import Detector, square_of
from yolofleet.families.networks.index_limit import images_within_index
from yolofleet.inference.evaluate.run import EvaluationSettings
from yolofleet.runs.report.console import NullConsole
from yolofleet.storage.caches import keep_compiled
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.table import task_of
from yolofleet.training.network import (
    build_network,
    checkpoint_activations,
    freeze,
    lr_factors,
    with_fitting_anchors,
)
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.process import loader_processes, place_text, replica_devices, set_kernels
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.inputs import Data, Inputs, Start, training_samples
from yolofleet.training.rank.memory_probe import (
    LargestPass,
    check_pass,
    memory_of_validation,
    most_labels,
    probed_micro_batch,
    probed_per_pass,
)
from yolofleet.training.schedule import Schedule, StepSplitter, lr_factor
from yolofleet.training.state import TrainState


@dataclass(frozen=True)
class Network:
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

    def evaluation_settings(
        self, config: TrainConfig, precision: str, *, most: int = sys.maxsize
    ) -> EvaluationSettings:
        """Return the settings of a validation of this network during the training, with at most ``most`` images in a batch."""
        batch = min(config.val_batch, most)
        shared = ValConfig(img=self.img, batch=batch, single_cls=config.single_cls)
        return EvaluationSettings(shared, precision, square_of(self.model, self.img))


def read_start(inputs: Inputs, world: World) -> Start:
    """Return the description of the network to train, and the weights to start from. No collective."""
    description, weights = inputs.start
    if inputs.snapshot is None and (to_train := family_of(description).to_train):
        expected = outline(description, len(inputs.data.train.names)).state_dict().items()
        given = weights.tensors if weights is not None else {}
        untrained = [name for name, t in expected if name not in given or given[name].shape != t.shape]
        description, note = load(to_train)(description, untrained)
        if note:
            world.console.note(note)
    return description, weights


def with_recipe(inputs: Inputs, start: Start, world: World) -> Inputs:
    """Take the recipe of the network's family, or its recipe for new classes on few images, and a batch that the images fill."""
    (description, weights), config, names = start, inputs.config, inputs.data.train.names
    family, snapshot = family_of(description), inputs.snapshot
    decide_for = partial(decide, inputs.resolved, inputs.recipe, family, description)
    if config.resume:  # config.yaml has what the run decided when it started
        decided = decide_for(sys.maxsize)
    else:
        new_classes = config.verb == "train" and weights is not None and {*weights.header.names} != {*names}
        stored = snapshot.values["fingerprint"]["recipe"] if snapshot is not None else None
        decided = decide_for(len(inputs.data.train), new_classes=new_classes, stored=stored)
    if snapshot is None:
        for note in decided.notes:
            world.console.note(note)
        for warning in decided.warnings:
            world.console.warn(warning)
    resolved = decided.config
    optimizer = inputs.optimizer if config.optimizer_class else resolved.value.optimizer
    return replace(inputs, recipe=decided.recipe, resolved=resolved, optimizer=optimizer)


def built_network(inputs: Inputs, start: Start, world: World) -> Network:
    """Build the network with its start weights, on the host; choose kernels. Collective: every rank."""
    config, data, recipe = inputs.config, inputs.data.train, inputs.recipe
    description, weights = start
    for assumption in weights.header.assumed.values() if weights is not None else ():
        world.console.note(f"start weights: {assumption}")
    if weights is not None and not inputs.resolved.is_given("img"):
        # a run from scratch imports no readers of weights
        from yolofleet.inference.export.runtime import size_note

        stated = weights.header.trained_px or config.img
        if note := size_note(config.img, [stated]):
            world.console.note(f"{note}: --img {stated} trains at that size")
    img = -(-config.img // inputs.stride) * inputs.stride
    anchors = ""
    if config.autoanchor and inputs.snapshot is None:
        description, anchors = with_fitting_anchors(description, data, recipe.value, img, config.seed)
    with world.activity.doing("network"):
        model = build_network(description, weights, data.names, config.seed, world.console)
    sizes = (recipe.value.size_low, recipe.value.size_high)
    # kernels cannot be timed for the training alone while a validation runs beside it
    sizes_vary = sizes != (1, 1) or config.rect or config.val_overlap
    set_kernels(config, sizes_vary=sizes_vary, tf32=inputs.precision == "tf32")
    loss = inputs.recipe_class.loss(model, recipe.value, img)
    return Network(model, loss, recipe, img, inputs.stride, sizes, anchors)


@dataclass(frozen=True)
class Prepared:
    """The state of a run on the devices of this rank, before its first step.

    Attributes:
        config: with the micro-batch of the run.
        frozen: names of the parameters that are not trained.
        averaged: a network whose tensors are those of the moving average, for validation.
    """

    config: TrainConfig
    state: TrainState
    schedule: Schedule
    splitter: StepSplitter
    frozen: tuple[str, ...]
    averaged: Detector


def prepared_state(inputs: Inputs, network: Network, world: World) -> Prepared:
    """Move the network to its devices, and probe their memory with the largest pass. Collective: every rank."""
    config = inputs.config
    with world.activity.doing("training state"):
        state, schedule, frozen = _state(inputs, network, world)
    if inputs.snapshot is not None and config.micro_batch < 0:
        stored = inputs.snapshot.values["fingerprint"]["settings"].get("micro_batch")
        config = with_values(inputs.resolved, {"micro_batch": stored}, {}).value
    images = len(inputs.data.train)
    with world.activity.doing("memory probe"):
        largest = _largest_pass(config, inputs, network, state)
        one_pass = _splitter(config, network, images, world).largest_pass(schedule.step_images)
        check_pass(config, largest, one_pass if config.micro_batch >= 0 else 1)
        beside = memory_of_validation(config, largest, world)
        probed = {"micro_batch": probed_micro_batch(config, largest, world)}
        config = with_values(inputs.resolved, probed, {}).value
        splitter = _splitter(config, network, images, world)
        with world.activity.doing("Triton kernels"):
            per_pass = probed_per_pass(config, largest, splitter.largest_share(schedule.step_images))
        with world.activity.doing("CUDA graphs"):
            if config.passes == "graphs" or devices.has_graphs(world.device):
                from yolofleet.training.rank.cuda_graphs import capture  # not for runs on CPUs

                capture(config, network.sizes, largest, per_pass * splitter.micro_batch, world)
        del beside
    if config.passes == "compiled":
        _compile(network, largest, per_pass * splitter.micro_batch, world)
    splitter = replace(splitter, per_pass=per_pass)
    return Prepared(config, state, schedule, splitter, tuple(frozen), averaged_network(network.model, state))


def with_batch_by_memory(inputs: Inputs, start: Start, world: World) -> Inputs:
    """Replace ``--batch auto`` by a number, with a network of its own for the trials. Collective: every rank."""
    if inputs.config.batch >= 0:
        return inputs
    if inputs.snapshot is not None:  # the launcher started the run again
        stored = inputs.snapshot.values["fingerprint"]["settings"]
        chosen = {"batch": stored["batch"], "micro_batch": stored["micro_batch"]}
    else:
        chosen = _measured_batch(inputs, start, world)
    resolved = with_values(inputs.resolved, chosen, dict.fromkeys(chosen, MEASURED))
    check_micro_batch(resolved)
    return replace(inputs, resolved=resolved)


def _measured_batch(inputs: Inputs, start: Start, world: World) -> dict[str, int]:
    """Return the settings that the memory of all devices decides, by name. Collective: every rank."""
    from yolofleet.training.rank import autobatch

    config, images = inputs.config, len(inputs.data.train)
    limits = autobatch.memory_limits(config, world)
    of_trial = {"batch": TARGET_MICRO_BATCH[0], "micro_batch": TARGET_MICRO_BATCH[0], "autoanchor": False}
    trial = replace(inputs, resolved=with_values(inputs.resolved, of_trial, {}))

    def measure(sizes: dict[int, int]) -> list[autobatch.Measured]:
        with world.activity.doing("memory probe"):
            network = built_network(trial, start, replace(world, console=NullConsole()))
            state, _, _ = _state(trial, network, world)
            largest = _largest_pass(config, trial, network, state)
            mine = autobatch.measured(config, largest, limits, sizes, world)
            del network, state, largest
            devices.release_memory(world.device)
        return [autobatch.Measured(*theirs) for theirs in world.gather(mine)]

    shares, on_cpu = _partition(config, world).shares, devices.is_host(world.device)
    chosen, reason = autobatch.chosen_settings(config, images, shares, measure, on_cpu=on_cpu)
    world.console.fact(f"batch {chosen['batch']}: {reason}")
    return chosen


def _state(inputs: Inputs, network: Network, world: World) -> tuple[TrainState, Schedule, list[str]]:
    """Move the network to its devices; return the training state, the schedule and the names of frozen parameters."""
    config, model, recipe = inputs.config, network.model, network.recipe.value
    model.to(world.device)
    cast(Any, model).to(memory_format=torch.channels_last)  # torch's stub lacks memory_format
    model.train()
    frozen = freeze(model, config.freeze)
    if config.checkpoint_activations:
        checkpoint_activations(model)
    synced = config.sync_bn and world.size > 1
    if synced:
        from yolofleet.training.parallel.sync_batchnorm import with_sync_batchnorm  # only with --sync-bn

        with_sync_batchnorm(model, world)
    images = len(inputs.data.train)
    schedule = Schedule(recipe, images, config.batch, config.nominal_batch, config.epochs, config.lr_decay)
    factor = lr_factor(config.lr_scale, schedule.step_images, recipe.reference_batch)
    schedule = replace(schedule, lr_factor=factor)
    on_devices = replica_devices(config, world)
    state = TrainState.build(
        Replicas.build(model, on_devices, world, reduce=config.reduce, synced=synced),
        recipe,
        optimizer=inputs.optimizer,
        weight_decay=schedule.weight_decay,
        precision=inputs.precision,
        lr_factors=lr_factors(model, recipe, network.recipe.sources["lr_factors"]),
    )
    return state, schedule, frozen


def _splitter(config: TrainConfig, network: Network, images: int, world: World) -> StepSplitter:
    return StepSplitter(
        partition=_partition(config, world),
        rank=world.rank,
        replicas=len(replica_devices(config, world)),
        micro_batch=config.likely_micro_batch,
        batch=config.batch,
        dataset_images=images,
        sync_bn=config.sync_bn,
        sizes=network.sizes,
        img=network.img,
        stride=network.stride,
        seed=config.seed,
        sizes_until=closing_epoch(network.recipe.value.close_augment, config.epochs),
    )


def _partition(config: TrainConfig, world: World) -> Partition:
    shares = "" if config.shares == "auto" else config.shares
    return Partition.parse(shares, world.size * len(replica_devices(config, world)))


def _largest_pass(config: TrainConfig, inputs: Inputs, network: Network, state: TrainState) -> LargestPass:
    side = max(round(network.img * network.sizes[1] / network.stride), 1) * network.stride
    most_images = most_validated = sys.maxsize
    if not devices.is_host(state.replicas.lead.device):
        shape = outline(network.model.description, network.model.nc).eval()
        fit = {px: images_within_index(shape, px) for px in {side, network.img}}
        most_images = fit[side]
        most_validated = max(fit[network.img], 1)
    return LargestPass(
        state,
        network.loss,
        inputs.precision,
        side,
        most_labels(inputs.data.train, network.recipe.value),
        most_images,
        network.evaluation_settings(config, inputs.precision, most=most_validated),
        partial(averaged_network, network.model, state),
    )


def micro_batch_loader(
    prepared: Prepared, network: Network, data: Data, cache: ImageCache, world: World
) -> Callable[[Iterable[MicroBatchKey]], Loader[MicroBatchKey, MicroBatch]]:
    """Return the function that loads the images of a rank's keys."""
    config, recipe = prepared.config, network.recipe.value
    return partial(
        train_loader,
        training_samples(
            config,
            recipe,
            data.train,
            cache,
            img=network.img,
            stride=network.stride,
            labels=task_of(network.model).labels,
        ),
        match=network.loss.match,
        workers=loader_processes(config.workers, world),
        prefetch=-(-PREFETCH // prepared.splitter.per_pass),
        pin_memory=devices.can_pin(world.device),
    )


def averaged_network(model: Detector, state: TrainState) -> Detector:
    """Return a network whose tensors are those of the moving average, for validation."""
    # a user's initialise() may fill buffers that the state lacks; all others need no random start weights
    build = build_model if family_of(model.description).user_code else outline
    averaged = build(model.description, model.nc)
    averaged.load_state_dict(state.weights(), strict=False, assign=True)
    averaged.names = model.names
    averaged.eval()
    return averaged


def _compile(network: Network, largest: LargestPass, images: int, world: World) -> None:
    """Compile the network for passes of ``images`` images. No collective.

    Raises:
        ConfigError: torch cannot compile the network here.
    """
    keep_compiled()
    try:
        with world.activity.doing("compiling"):
            largest.state.replicas.compile(images)
            largest.run(images)
    except (RuntimeError, ImportError, OSError) as problem:
        if devices.is_out_of_memory(problem):
            raise
        raise ConfigError(
            f"--passes compiled: torch {torch.__version__} cannot compile the network on {world.device}",
            source=" ".join(str(problem).split())[:300],
            hint="leave out --passes; it needs a C++ compiler such as g++, the header files of Python, on a GPU Triton, and a "
            "cache folder (YOLOFLEET_CACHE) without spaces in its path",
        ) from None


def header_lines(
    network: Network, prepared: Prepared, precision: str, cached: str, world: World
) -> dict[str, str]:
    """Return the lines of the header, by name; ``cached`` says where decoded images are kept."""
    config, schedule, splitter = prepared.config, prepared.schedule, prepared.splitter
    workers = loader_processes(config.workers, world)
    model, recipe = network.model, network.recipe.value
    frozen = f", {len(prepared.frozen)} tensors frozen" if prepared.frozen else ""
    fused = " (batch norm in Triton)" if prepared.state.statistics.is_fused else ""
    has_graphs = prepared.state.replicas.lead.usual_pass is not None and config.passes != "compiled"
    graphs = "CUDA graphs, " if has_graphs else ""
    steps = min(schedule.steps_of_run, config.max_steps or schedule.steps_of_run)
    rounded = (
        f" (--img {config.img} rounded up to stride {network.stride})" if network.img != config.img else ""
    )
    low, high = (side * network.stride for side in splitter.size_range())
    varied = f", in training {low} to {high} px, drawn for each step" if low != high else ""
    lines = {
        "where": place_text(world, len(replica_devices(config, world))),
        "model": f"{model.description.name}, {sum(p.numel() for p in model.parameters()):,} parameters{frozen}",
        "step": ("" if config.minutes else f"{steps} step{'s' if steps != 1 else ''} of ")
        + f"{schedule.step_images} images (after warm-up) as micro-batches of {splitter.micro_batch}, "
        + (f"up to {splitter.per_pass} in a pass{fused}, " if splitter.per_pass > 1 else "")
        + f"{graphs}{precision}, {config.reduce} sums",
        "rate": f"lr0 {recipe.lr0:g} x {schedule.lr_factor:.4g} (--lr-scale {config.lr_scale}: recipe made for "
        f"{recipe.reference_batch} images a step), {schedule.form}, {config.optimizer}",
        "image": f"{network.img} px{rounded}{varied}"
        + (", rectangles without mosaics" if config.rect else ""),
        "loader": (f"{workers} processes" if workers else "in this process")
        + f"; {cached}"
        + ("" if COMPILED else "; augmentation is slow: yolofleet was installed without a C compiler"),
    }
    return {**lines, "anchors": network.anchors} if network.anchors else lines
