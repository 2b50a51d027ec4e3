"""The step of a training on ready images beside the bare network, its checkpoints, and the whole training loop."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey
from yolofleet.data.input.shared_buffers import pinned
from yolofleet.families.build import build_model
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.networks.precision import autocast
from yolofleet.measure.timing import WARM_UP, Seconds, Turns, in_turns
from yolofleet.runs.report.clock import Clock
from yolofleet.support import devices
from yolofleet.tasks.table import task_of
from yolofleet.training.loop import TrainingRun
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.train import BuiltRun
from yolofleet.training.step import NanRule, train_step

LABELS = 8  # of each image of ready micro-batches
SAVES = 3  # checkpoints


def random_micro_batch(
    loss: DetectionLoss, device: torch.device, labels: Shapes, images: int, img: int, *, seed: int
) -> MicroBatch:
    """Return a micro-batch of random square images with these labels, page-locked where that helps."""
    pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (images, img, img, 3), np.uint8))
    targets = loss.match(labels, images, (img, img))
    batch = MicroBatch(0, 0, pixels.permute(0, 3, 1, 2), labels, targets)
    return pinned(batch) if devices.can_pin(device) else batch


class ReadySteps:
    """Steps of a run on micro-batches that are ready in memory, page-locked where that helps."""

    def __init__(self, run: BuiltRun) -> None:
        self.training = run.training
        self.plan = next(self.training.steps.schedule.steps())
        keys = self.training.splitter.keys(self.plan)
        made = {n: self.micro_batch(run, n) for n in {len(key.samples) for key in keys}}
        mine = [replace(made[len(key.samples)], ordinal=key.ordinal) for key in keys]
        self.shares = self.training.splitter.by_replica(self.plan, mine)
        self.passes = [len(key.samples) for key in keys]

    def micro_batch(self, run: BuiltRun, images: int) -> MicroBatch:
        parts = [task_of(run.network.model).made_up(LABELS)] * images
        loss, device, labels = self.training.loss, self.training.world.device, parts[0].of_images(parts)
        return random_micro_batch(loss, device, labels, images, run.network.img, seed=images)

    def sum_over(self, world: World) -> None:
        """Let the steps sum gradients over the ranks of ``world``."""
        for replica in self.training.state.replicas.all:
            replica.buckets.world = world

    def step(self, world: World, batches: Sequence[MicroBatch] = ()) -> None:
        """Do one update with the ready micro-batches, or with ``batches`` on one device. Collective: every rank of ``world``."""
        training = self.training
        self.sum_over(world)
        train_step(
            training.state,
            self.plan,
            [batches] if batches else self.shares,
            training.loss.at(1.0),
            world,
            Clock(),
            total_micro_batches=len(batches) or training.splitter.statistics_total(self.plan),
            precision=training.precision,
            clip_norm=training.clip_norm,
            nan_rule=NanRule(skips=10**6),
        )


class BareNetwork:
    """Forward, backward and update of a network with a trivial loss: what every trainer has to compute.

    Args:
        passes: images of each forward pass of a step.
    """

    def __init__(
        self,
        description: ModelDescription,
        nc: int,
        img: int,
        passes: Sequence[int],
        device: torch.device,
        precision: str,
    ) -> None:
        self.precision, self.device = precision, device
        self.net = cast(Any, build_model(description, nc).to(device).train()).to(
            memory_format=torch.channels_last
        )
        self.optimizer = torch.optim.SGD(
            self.net.parameters(),
            lr=1e-6,
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-4,
            fused=devices.has_fused(torch.optim.SGD, device),
        )
        sizes = {
            n: torch.rand(n, 3, img, img, device=device).to(memory_format=torch.channels_last)
            for n in {*passes}
        }
        self.passes = [sizes[n] for n in passes]

    def step(self) -> None:
        for images in self.passes:
            with autocast(self.precision, self.device):
                outputs = self.net(images)
            torch.stack([t.float().sum() for t in _tensors_of(outputs)]).sum().mul(1e-6).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _tensors_of(outputs: Any) -> list[Tensor]:
    """Return all tensors of a network's output that have a gradient."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad else []
    return [t for part in outputs for t in _tensors_of(part)]


@dataclass(frozen=True)
class StepSpeed:
    """Seconds of a step with all ranks, of the same step without other ranks, and of the bare network.

    Attributes:
        turns: "together", "alone", "bare".
        network: the bare network, on a CPU; else None, because it takes memory of the device.
        memory_mib: peak of the device in a step, the largest of the ranks; 0 if torch does not count it.
    """

    turns: Turns
    network: BareNetwork | None
    memory_mib: float

    @property
    def together(self) -> Seconds:
        return self.turns.median("together")

    @property
    def bare(self) -> Seconds:
        return self.turns.median("bare")


def step_speed(run: BuiltRun, steps: int) -> StepSpeed:
    """Collective: every rank."""
    training, world = run.training, run.training.world
    ready, alone = ReadySteps(run), World.single(world.device)
    devices.reset_peak_memory(world.device)
    for _ in range(WARM_UP):
        ready.step(world)
    devices.synchronize(world.device)
    memory_mib = devices.peak_memory_bytes(world.device) / 2**20
    model = run.network.model
    bare = BareNetwork(
        model.description, model.nc, run.network.img, ready.passes, world.device, training.precision
    )
    for _ in range(WARM_UP):
        bare.step()
    works: dict[str, Callable[[], object]] = {"together": lambda: ready.step(world), "bare": bare.step}
    if world.size > 1:
        works["alone"] = lambda: ready.step(alone)
    turns = in_turns(works, world, steps)
    turns = Turns({"alone": turns.seconds["together"], **turns.seconds})
    ready.sum_over(world)
    memory_mib = max(row[0] for row in world.gather([memory_mib]))
    return StepSpeed(turns, bare if devices.is_host(world.device) else None, memory_mib)


@dataclass(frozen=True)
class Saved:
    """A checkpoint: size, seconds to write and verify it, seconds that training stands still, and bytes/s of writes."""

    bytes: int
    write_s: float
    standstill_s: float
    rate: float
    limit: float


def checkpoint_cost(training: TrainingRun) -> Saved:
    """Measure on rank 0. Collective: every rank."""
    world, saves = training.world, []
    if training.report.is_writer and world.is_main:
        for number in range(SAVES):
            began_s = time.perf_counter()
            snapshot = training.state.snapshot({**training.stored, "clock": training.report.clock.to_dict()})
            copied_s = time.perf_counter()
            training.store.save(replace(snapshot, step=number))
            training.store.flush()
            written_s = time.perf_counter()
            path = training.store.entries()[0].path
            content = path.read_bytes()
            raw_s = time.perf_counter()
            raw = path.with_name("raw")
            with raw.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            done_s = time.perf_counter()
            raw.unlink()
            saves.append((len(content), written_s - copied_s, copied_s - began_s, done_s - raw_s))
        for entry in training.store.entries():
            entry.path.unlink()
    size, write_s, standstill_s, raw_s = (
        (statistics.median(column) for column in zip(*saves, strict=True)) if saves else [math.nan] * 4
    )
    size, write_s, standstill_s, raw_s = world.gather([size, write_s, standstill_s, raw_s])[0]
    return Saved(int(size), write_s, standstill_s, size / write_s, size / raw_s)


@dataclass(frozen=True)
class WholeRun:
    """Images/s of the training loop, and of the validation and its network.

    Attributes:
        turns: "step", and "bare" if steps of the bare network took turns with those of the loop; else None.
    """

    rate: float
    turns: Turns | None
    validation_rate: float
    validation_limit: float


class Interleaved:
    """Passes on the micro-batches of a loader, and times the steps of the loop in turns with steps of the bare network.

    A step lasts from the moment when its first micro-batch is ready to that of the next one. Only for a loop that has no
    loader processes and no other ranks: those would work on during the steps of the bare network.
    """

    def __init__(self, loader: Callable[[Iterable[MicroBatchKey]], Any], bare: Callable[[], object]) -> None:
        self.loader, self.bare = loader, bare
        self.seconds: dict[str, list[Seconds]] = {"step": [], "bare": []}
        self._batches: Any = None
        self._step, self._began = -1, Seconds.now()

    def __call__(self, keys: Iterable[MicroBatchKey]) -> Interleaved:
        self._batches = self.loader(keys)
        return self

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        made: MicroBatch = next(self._batches)
        if made.step != self._step:
            ready = Seconds.now()
            self.bare()
            done = Seconds.now()
            if self._step >= 0:
                self.seconds["step"].append(ready.since(self._began))
                self.seconds["bare"].append(done.since(ready))
            self._step, self._began = made.step, done
        return made

    def close(self) -> None:
        self._batches.close()

    def turns(self) -> Turns:
        """Return the turns after the warm-up."""
        return Turns({name: seconds[WARM_UP:] for name, seconds in self.seconds.items()})


def whole_run(run: BuiltRun, bare: BareNetwork | None, workers: int) -> WholeRun:
    """Train to the end of the run, with its validation. Collective: every rank."""
    training, world = run.training, run.training.world
    if bare is not None and workers == 0 and world.size == 1:
        training.loader = Interleaved(training.loader, bare.step)
    run.begin()
    training.train()
    rate, evaluation = training.report.clock.run_so_far().rate_img_s, training.report.last_evaluation
    assert evaluation is not None, "the last step of a run validates"
    turns = None
    if isinstance(training.loader, Interleaved):
        turns = training.loader.turns()
        rate = training.steps.schedule.step_images / turns.median("step").wall
    return WholeRun(
        rate=min(row[0] for row in world.gather([rate])),
        turns=turns,
        validation_rate=evaluation.images_per_s,
        validation_limit=evaluation.images / max(evaluation.seconds["forward"], 1e-9),
    )
