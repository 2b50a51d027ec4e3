"""What each step takes and at which rates: pure functions of the recipe and of the images seen.

YOLOv5's rules (a recipe may ask for PP-YOLOE's instead), in images instead of loader lengths. Batch b covers images [b * batch, (b + 1) * batch) of the
endless stream; during warm-up a step accumulates 1 .. nominal / batch batches, afterwards always
nominal / batch. Rates of a step are those of its last batch. Checked against the original's own trace in
tests/parity/test_schedule_parity.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from yolofleet.config.checks import step_images_of
from yolofleet.config.schema import Recipe

LEAST_WARMUP_STEPS = 100


@dataclass(frozen=True)
class StepPlan:
    """One optimizer update: which images, at which rates."""

    step: int
    first_image: int  # position in the endless stream
    images: int
    lr: float  # of weights
    lr_bias: float
    momentum: float

    @property
    def end_image(self) -> int:
        return self.first_image + self.images


def lr_factor(rule: str, step_images: int, reference_images: int) -> float:
    """What ``--lr-scale`` multiplies the recipe's rate with: linear (arXiv:1706.02677), sqrt, or none (1)."""
    ratio = step_images / reference_images
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


@dataclass(frozen=True)
class Schedule:
    """The plan of a whole run.

    Args:
        recipe: rates and warm-up.
        dataset_images: images of one epoch.
        batch, nominal_batch: images; a step accumulates round(nominal / batch) batches, at least one.
        epochs: the horizon of the decay.
        decay: "linear" or "cosine".
        lr_factor: what the learning-rate rule multiplies lr0 with.
    """

    recipe: Recipe
    dataset_images: int
    batch: int
    nominal_batch: int
    epochs: int
    decay: str = "linear"
    lr_factor: float = 1.0

    @property
    def warmup_images(self) -> int:
        """By epoch: at least 100 batches, as in YOLOv5; 0 when the recipe has no warm-up."""
        if not self.recipe.warmup_epochs:
            return 0
        return max(round(self.recipe.warmup_epochs * self.dataset_images), 100 * self.batch)

    @property
    def step_images(self) -> int:
        """Images of a step after warm-up."""
        return step_images_of(self.batch, self.nominal_batch)

    @property
    def weight_decay(self) -> float:
        """The recipe's value is for the nominal batch; YOLOv5 scales it by what a step really holds."""
        return self.recipe.weight_decay * self.step_images / self.nominal_batch

    def accumulate(self, batch_index: int) -> int:
        """Batches per step, as seen at batch ``batch_index``."""
        full = self.nominal_batch / self.batch
        if self.recipe.rates == "step":
            return max(1, round(full))
        reached, warm = batch_index * self.batch, self.warmup_images
        if reached <= warm and warm:
            return max(1, round(1 + (full - 1) * reached / warm))
        return max(1, round(full))

    def decay_at(self, epoch: float) -> float:
        """Factor of lr0 in epoch ``epoch``."""
        lrf = self.recipe.lrf
        if self.decay == "cosine":
            return (1 - math.cos(epoch * math.pi / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def rates(self, batch_index: int) -> tuple[float, float, float]:
        """(lr of weights, lr of biases, momentum) at batch ``batch_index``."""
        r = self.recipe
        reached, warm = batch_index * self.batch, self.warmup_images
        epoch = min(reached // self.dataset_images, self.epochs - 1)
        if reached <= warm and warm:
            f = reached / warm
            lr = r.lr0 * self.lr_factor * self.decay_at(epoch)
            return (
                lr * f,
                r.warmup_bias_lr + (lr - r.warmup_bias_lr) * f,
                r.warmup_momentum + (r.momentum - r.warmup_momentum) * f,
            )
        # after the epoch in which warm-up ended, the original's decay runs one epoch behind
        behind = epoch > (warm // self.dataset_images if warm else 0)
        lr = r.lr0 * self.lr_factor * self.decay_at(epoch - 1 if behind else epoch)
        return lr, lr, r.momentum

    @property
    def warmup_by_step(self) -> float:
        """Epochs of the linear rise: as long in the run as in the one that the recipe was made for, and, as a short
        run would diverge, at least ``LEAST_WARMUP_STEPS`` or the recipe's epochs."""
        warm = self.recipe.warmup_epochs
        if not self.recipe.reference_epochs:
            return warm
        least = min(warm, LEAST_WARMUP_STEPS * self.step_images / self.dataset_images)
        return max(warm * self.epochs / self.recipe.reference_epochs, least)

    def rate_by_step(self, first_image: int) -> float:
        """PP-YOLOE's rate of the step that begins at ``first_image``: linear from 0, then a cosine that a longer
        run would end."""
        r = self.recipe
        epoch, warm = first_image / self.dataset_images, self.warmup_by_step
        peak = r.lr0 * self.lr_factor
        if epoch < warm:
            return peak * epoch / warm
        return peak * (1 + math.cos(math.pi * (epoch - warm) / (r.horizon * self.epochs - warm))) / 2

    def progress(self, first_image: int) -> float:
        """Fraction of the run before the epoch of ``first_image``."""
        return first_image // self.dataset_images / self.epochs

    def plan(self, step: int, first_image: int) -> StepPlan:
        """The step that begins at ``first_image`` (a multiple of ``batch``)."""
        first = first_image // self.batch
        last = first
        while last - first + 1 < self.accumulate(last):
            last += 1
        if self.recipe.rates == "step":
            lr = lr_bias = self.rate_by_step(first_image)
            momentum = self.recipe.momentum
        else:
            lr, lr_bias, momentum = self.rates(last)
        return StepPlan(step, first_image, (last - first + 1) * self.batch, lr, lr_bias, momentum)

    def steps(self, step: int = 0, first_image: int = 0) -> Iterator[StepPlan]:
        """Endless, from any step on."""
        while True:
            plan = self.plan(step, first_image)
            yield plan
            step, first_image = step + 1, plan.end_image
