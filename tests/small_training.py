"""A training run of a few steps without processes, files or a data set: the real ``train_step`` on any devices."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from label_rows import shapes_of
from torch import Tensor

from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.config.schema import Recipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import MicroBatch
from yolofleet.data.input.shared_buffers import pinned
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.darknet.cfg import parse_cfg, preset
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.description import ModelDescription, describe, description_from_dict
from yolofleet.families.networks.detector import Detector
from yolofleet.runs.report.clock import Clock
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.sync_batchnorm import with_sync_batchnorm
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState
from yolofleet.training.step import NanRule, StepReport, train_step

CLASSES = 3
small_detr = runpy.run_path(str(Path(__file__).parent / "detr_family" / "small_detr.py"))
# an eighth of the channels: fast
NARROW = {
    "yolov5-narrow": "yolov5n",
    "yolov3-narrow": "yolov3-tiny",
    "darknet-narrow": "darknet-yolov3-tiny",
    "ppyoloe-narrow": "ppyoloe-s",
}


def described(name: str) -> ModelDescription:
    """A built-in description, or a narrow one for tests."""
    if name.endswith("-toy"):
        toy: ModelDescription = small_detr["preset"](name)
        return toy
    if name not in NARROW:
        return describe(name)
    if name.startswith("darknet"):
        return parse_cfg(narrow_cfg(name), name=name, source="")
    values = describe(NARROW[name]).to_dict()
    return description_from_dict({**values, "name": name, "width_multiple": values["width_multiple"] / 8})


def narrow_cfg(name: str) -> str:
    """The file of a narrow Darknet network."""
    return re.sub(r"filters=(\d+)", lambda m: f"filters={narrowed(int(m[1]))}", preset(NARROW[name]).cfg())


def narrowed(filters: int) -> int:
    """An eighth, but for the convolutions before [yolo] sections."""
    return filters if filters == 255 else filters // 8


@dataclass
class SmallRun:
    """One process of a run.

    Attributes:
        progress: fraction of the run, which decides PP-YOLOE's assigner.
        rate: learning rate.
        skips: steps in a row that are left out if they are not finite.
        left_out: their numbers.
        pin: whether micro-batches lie in page-locked memory.
        per_pass: micro-batches that pass the network together.
    """

    state: TrainState
    loss: DetectionLoss
    world: World
    recipe: Recipe
    precision: str
    images: int
    micro_batch: int
    img: int
    pin: bool
    per_pass: int = 1
    progress: float = 0.0
    rate: float = 0.01
    step: int = 0
    skips: int = 0
    left_out: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def overflow(self, factor: float) -> None:
        """Do a step in which the activations of the first convolution are ``factor`` times as large; leave it out.

        With infinity the activations overflow. With 1e25 they are finite and so are the gradients, which are about 0, but
        the variances of batch normalisation overflow.
        """
        self.skips = 1
        convolution = next(m for m in self.state.model.modules() if isinstance(m, torch.nn.Conv2d))
        hook = convolution.register_forward_hook(lambda _module, _inputs, out: out * factor)
        try:
            self.do()
        finally:
            hook.remove()

    def leave_out(self) -> None:
        """Count a step that is left out, without computing it."""
        self.state.average.updates += 1  # the average counts it
        self.step += 1
        self.state.step = self.step

    def micro_batches(self, step: int) -> list[list[MicroBatch]]:
        """The passes of a step for each device; the images are the same whatever the devices are."""
        loss = self.loss.at(self.progress)
        made = []
        ordinals = range(self.images // self.micro_batch)
        for first in ordinals[:: self.per_pass]:
            parts = [
                images_and_labels(self.micro_batch, self.img, seed=1000 * step + ordinal)
                for ordinal in ordinals[first : first + self.per_pass]
            ]
            images = torch.cat([images for images, _ in parts])
            labels = Shapes.of_images([part for _, labels in parts for part in labels])
            targets = loss.match(labels, len(images), (self.img, self.img))
            batch = MicroBatch(step, first, images, labels, targets)
            made.append(pinned(batch) if self.pin else batch)
        replicas, share = len(self.state.replicas.all), -(-len(made) // len(self.state.replicas.all))
        return [made[replica * share : (replica + 1) * share] for replica in range(replicas)]

    def do(self, steps: int = 1, *, shares: Sequence[Sequence[MicroBatch]] | None = None) -> StepReport:
        """Train for some steps; returns the last report."""
        for _ in range(steps):
            plan = StepPlan(self.step, self.step * self.images, self.images, self.rate, 2 * self.rate, 0.9)
            report = train_step(
                self.state,
                plan,
                self.micro_batches(self.step) if shares is None else shares,
                self.loss.at(self.progress),
                self.world,
                Clock(),
                total_micro_batches=self.images // self.micro_batch,
                precision=self.precision,
                clip_norm=self.recipe.clip_norm,
                nan_rule=NanRule(self.skips),
            )
            self.left_out += [plan.step for plan in report.left_out]
            self.step += 1
        return report

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, on the CPU."""
        return dict(self.state.snapshot({}).tensors)


def small_run(
    model: str = "yolov3-narrow",
    devices: Sequence[str] = ("cpu",),
    *,
    precision: str = "fp32",
    exact: bool = False,
    optimizer: str | type[torch.optim.Optimizer] = "SGD",
    images: int = 8,
    micro_batch: int = 2,
    img: int = 64,
    pin: bool = False,
    per_pass: int = 1,
    sync_bn: bool = False,
    network: Detector | None = None,
) -> SmallRun:
    """Build a run.

    Args:
        sync_bn: with the layers of ``--sync-bn``, among one rank.
        network: instead of a new one with the weights of seed 0; it is already on the first device.
    """
    torch.manual_seed(0)
    description = described(model)
    family = family_of(description)
    recipe = recipe_of(load_recipe(), family, description).value
    net = network or build_model(description, CLASSES)
    loss = family_loss(net, recipe, img)
    places = [torch.device(device) for device in devices]
    if network is None:
        net.to(places[0])
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    world = World.single(places[0])
    if sync_bn:
        with_sync_batchnorm(net, world)
    replicas = Replicas.build(net, places, world, reduce="exact" if exact else "fast", synced=sync_bn)
    if per_pass > 1:
        replicas.pass_together(per_pass, micro_batch)
    state = TrainState.build(
        replicas, recipe, optimizer=optimizer, weight_decay=recipe.weight_decay, precision=precision
    )
    return SmallRun(state, loss, world, recipe, precision, images, micro_batch, img, pin, per_pass)


def images_and_labels(count: int, img: int, *, seed: int) -> tuple[Tensor, list[Shapes]]:
    """uint8 [count, 3, img, img] with channels-last strides, and the labels of each image."""
    rng = np.random.default_rng(seed)
    pixels = torch.from_numpy(rng.integers(0, 256, (count, img, img, 3), dtype=np.uint8))
    labels = []
    for _ in range(count):
        rows = []
        for _ in range(3):
            width, height = rng.uniform(0.2, 0.6, 2)
            x, y = rng.uniform(width / 2, 1 - width / 2), rng.uniform(height / 2, 1 - height / 2)
            rows.append((int(rng.integers(CLASSES)), x, y, width, height))
        labels.append(shapes_of(rows))
    return pixels.permute(0, 3, 1, 2), labels
