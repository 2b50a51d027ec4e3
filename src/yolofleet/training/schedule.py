"""Images and learning rates of each step, and the part of this rank in it: pure functions of recipe and images seen.

The rules are YOLOv5's, or with ``rates: step`` PP-YOLOE's and those of the RT-DETR families, but count images instead of loader lengths. Batch b
covers images [b * batch, (b + 1) * batch) of the endless stream. During warm-up a step accumulates
1 .. nominal / batch batches, afterwards always nominal / batch. A step uses the rates of its last batch.
tests/parity/test_schedule_parity.py compares with a trace of YOLOv5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from yolofleet.config.schema import Recipe, step_images_of
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey
from yolofleet.support.errors import ConfigError
from yolofleet.support.random_numbers import generator
from yolofleet.training.parallel.partition import Partition

LEAST_WARMUP_STEPS = 100
# steps in a row in which a rank without work is measured again (--shares auto)
TRIAL_STEPS = 3
# the last fifth of the steps: as accurate as a cosine in arXiv:2405.18392, which tried 5 % to 20 %
COOLDOWN = 5


@dataclass(frozen=True)
class StepPlan:
    """The images and rates of one optimizer update."""

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
    """Return the factor that ``--lr-scale`` applies to the recipe's rate: linear (arXiv:1706.02677), sqrt or 1."""
    ratio = step_images / reference_images
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


@dataclass(frozen=True)
class Schedule:
    """The steps of a whole run.

    Args:
        batch, nominal_batch: images; a step accumulates round(nominal / batch) batches, at least one.
        epochs: of the run; the decay ends with them.
        decay: "linear", "cosine", "constant", or "cooldown": constant, then linear to the recipe's ``lrf`` in the last
            steps.
        last_step: steps of a run that ends before its last epoch; 0: it ends with its epochs.
    """

    recipe: Recipe
    dataset_images: int
    batch: int
    nominal_batch: int
    epochs: int
    decay: str = "linear"
    lr_factor: float = 1.0
    last_step: int = 0

    @property
    def warmup_images(self) -> int:
        """Images of the warm-up: at least 100 batches, as in YOLOv5; 0 if the recipe has none."""
        if not self.recipe.warmup_epochs:
            return 0
        return max(round(self.recipe.warmup_epochs * self.dataset_images), 100 * self.batch)

    @property
    def step_images(self) -> int:
        """Images of a step after warm-up."""
        return step_images_of(self.batch, self.nominal_batch)

    @property
    def weight_decay(self) -> float:
        """The recipe's value, scaled from the nominal batch to the images of a step, as in YOLOv5."""
        return self.recipe.weight_decay * self.step_images / self.nominal_batch

    def accumulate(self, batch_index: int) -> int:
        """Return the batches per step at batch ``batch_index``."""
        full = self.nominal_batch / self.batch
        if self.recipe.rates == "step":
            return max(1, round(full))
        reached, warm = batch_index * self.batch, self.warmup_images
        if reached <= warm and warm:
            return max(1, round(1 + (full - 1) * reached / warm))
        return max(1, round(full))

    def decay_at(self, epoch: float) -> float:
        """Return the factor of lr0 in epoch ``epoch``."""
        lrf = self.recipe.lrf
        if self.is_flat:
            return 1.0
        if self.decay == "cosine":
            return (1 - math.cos(epoch * math.pi / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def rates(self, batch_index: int) -> tuple[float, float, float]:
        """Return (lr of weights, lr of biases, momentum) at batch ``batch_index``."""
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
        # YOLOv5's decay is one epoch late after the epoch in which warm-up ends
        behind = epoch > (warm // self.dataset_images if warm else 0)
        lr = r.lr0 * self.lr_factor * self.decay_at(epoch - 1 if behind else epoch)
        return lr, lr, r.momentum

    @property
    def warmup_by_step(self) -> float:
        """Epochs of the linear warm-up: the recipe's steps, or its fraction of the run.

        A short run would diverge, so that fraction is at least ``LEAST_WARMUP_STEPS`` steps, or the recipe's epochs if that is
        less. The recipe's steps are at most a tenth of the run: 500 steps may be all of a small data set's.
        """
        warm = self.recipe.warmup_epochs
        if steps := self.recipe.warmup_steps:
            return min(steps * self.step_images / self.dataset_images, self.epochs / 10)
        if not self.recipe.reference_epochs:
            return warm
        least = min(warm, LEAST_WARMUP_STEPS * self.step_images / self.dataset_images)
        return max(warm * self.epochs / self.recipe.reference_epochs, least)

    def rate_by_step(self, first_image: int) -> float:
        """Return the rate of the step that begins at ``first_image``, with ``rates: step``.

        It rises linearly from 0, stays for ``flat_fraction`` of the run (DEIM, arXiv:2412.04234), then follows a cosine.
        With ``horizon`` > 1 the cosine ends after the run, as PP-YOLOE's does.
        """
        r = self.recipe
        epoch, warm = first_image / self.dataset_images, self.warmup_by_step
        peak = r.lr0 * self.lr_factor
        if epoch < warm:
            return peak * epoch / warm
        begins = max(warm, r.flat_fraction * self.epochs)
        if self.is_flat or epoch < begins or r.flat_fraction == 1:
            return peak
        return peak * (1 + math.cos(math.pi * (epoch - begins) / (r.horizon * self.epochs - begins))) / 2

    @property
    def is_flat(self) -> bool:
        """Whether the rate is constant after the warm-up, but for a cooldown."""
        return self.decay in ("constant", "cooldown")

    @property
    def form(self) -> str:
        """How the rate falls, in words: ``--lr-schedule``, or what a recipe with ``rates: step`` has in its place."""
        if self.recipe.rates == "epoch" or self.is_flat:
            return self.decay
        flat = self.recipe.flat_fraction
        return "constant" if flat == 1 else f"cosine after {flat:.0%} of the run" if flat else "cosine"

    @cached_property
    def steps_of_run(self) -> int:
        """Steps of the run: ``last_step``, or those of its epochs if they are fewer."""
        step, image, end = 0, 0, self.epochs * self.dataset_images
        while image < min(end, self.warmup_images + self.batch):
            step, image = step + 1, image + self.images_at(image)
        of_epochs = step + -(-max(end - image, 0) // self.step_images)
        return min(self.last_step, of_epochs) if self.last_step else of_epochs

    @property
    def cooldown_start(self) -> int:
        """First step whose rate falls at the end of the run; the number of steps if none does."""
        return self.steps_of_run - (self.steps_of_run // COOLDOWN if self.decay == "cooldown" else 0)

    def cooled_from(self, step: int) -> Schedule:
        """Return the schedule of a run that begins its cooldown at ``step``; a run without a cooldown ends at ``step``."""
        last = step + step // (COOLDOWN - 1) if self.decay == "cooldown" else step
        return replace(self, last_step=last)

    def cooldown(self, step: int) -> float:
        """Return the factor of the rate at ``step``: 1, and from ``cooldown_start`` on linear to ``lrf`` at the last one."""
        if self.decay != "cooldown":
            return 1.0
        late, steps = step + 1 - self.cooldown_start, self.steps_of_run - self.cooldown_start
        return 1 - (1 - self.recipe.lrf) * min(max(late, 0) / max(steps, 1), 1.0)

    def progress(self, first_image: int) -> float:
        """Return the fraction of the run before the epoch of ``first_image``."""
        return first_image // self.dataset_images / self.epochs

    def images_at(self, first_image: int) -> int:
        """Return the images of the step that begins at ``first_image`` (a multiple of ``batch``)."""
        first = first_image // self.batch
        last = first
        while last - first + 1 < self.accumulate(last):
            last += 1
        return (last - first + 1) * self.batch

    def plan(self, step: int, first_image: int) -> StepPlan:
        """Return the step that begins at ``first_image`` (a multiple of ``batch``)."""
        images = self.images_at(first_image)
        if self.recipe.rates == "step":
            lr = lr_bias = self.rate_by_step(first_image)
            momentum = self.recipe.momentum
        else:
            lr, lr_bias, momentum = self.rates((first_image + images) // self.batch - 1)
        factor = self.cooldown(step)
        return StepPlan(step, first_image, images, factor * lr, factor * lr_bias, momentum)

    def ended_by(self, steps: int, end_image: int) -> StepPlan:
        """Return the last of ``steps`` >= 1 steps, which ended before ``end_image``.

        Its last batch decides how many batches it has, because their number never falls from one batch to the next.
        """
        batches = self.accumulate(end_image // self.batch - 1)
        return self.plan(steps - 1, end_image - batches * self.batch)

    def steps(self) -> Iterator[StepPlan]:
        """Yield steps without end."""
        step = first_image = 0
        while True:
            plan = self.plan(step, first_image)
            yield plan
            step, first_image = step + 1, plan.end_image


# -- the part of a rank --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSplitter:
    """Divides a step into the forward passes of one rank.

    A pass is up to ``per_pass`` micro-batches, or with synchronised batch norm this rank's share of each group of
    ``batch`` images.

    Args:
        partition: over the replicas of all ranks, in rank order.
        replicas: devices of this process.
        micro_batch, batch: images.
        img, stride: pixels.
        sizes: smallest and largest training size as fractions of img, drawn for each step in multiples of the
            stride; (1, 1) = always img.
        sizes_until: epoch, counted from 0, from which on the size is img.
        per_pass: micro-batches that pass the network together.
        rotates: with each step, every device takes the place of the next one, so each has work soon.
        trial: the partition of the first steps of each ``trial_period``; a period of 0: of none.
    """

    partition: Partition
    rank: int
    replicas: int
    micro_batch: int
    batch: int
    dataset_images: int
    sync_bn: bool
    sizes: tuple[float, float]
    img: int
    stride: int
    seed: int
    per_pass: int = 1
    rotates: bool = False
    trial: Partition | None = None
    trial_period: int = 0
    sizes_until: float = math.inf

    def divided(self, images: int) -> int:
        """Return the number of micro-batches that the devices share in a step, or with ``sync_bn`` in each of its groups."""
        return (self.batch if self.sync_bn else images) // self.micro_batch

    def statistics_total(self, plan: StepPlan) -> int:
        """Return the number of sets of batch-norm statistics in a step, over all ranks."""
        return plan.images // (self.batch if self.sync_bn else self.micro_batch)

    def keys(self, plan: StepPlan) -> list[MicroBatchKey]:
        """Return the keys of this rank's passes of a step, in replica order."""
        return [key for replica in range(self.replicas) for key in self._replica_keys(plan, replica)]

    def by_replica(self, plan: StepPlan, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """Return the results for :meth:`keys`, one list per replica."""
        rest = iter(micro_batches)
        return [
            list(islice(rest, len(self._replica_keys(plan, replica)))) for replica in range(self.replicas)
        ]

    def most_of(self, plan: StepPlan) -> int:
        """Return the most micro-batches of a step that a device of this rank computes."""
        groups = plan.images // self.batch if self.sync_bn else 1
        return groups * max(len(self._range(plan, replica)) for replica in range(self.replicas))

    def _range(self, plan: StepPlan, replica: int) -> range:
        """Return the micro-batches that a device of this rank computes in a step, or in each of its groups."""
        is_trial = self.trial_period and plan.step % self.trial_period < TRIAL_STEPS
        partition = self.trial if is_trial and self.trial else self.partition
        ranges, number = partition.ranges(self.divided(plan.images)), self.rank * self.replicas + replica
        return ranges[(number + plan.step * self.rotates) % len(ranges)]

    def _replica_keys(self, plan: StepPlan, replica: int) -> list[MicroBatchKey]:
        size, mine = self.size_of(plan), self._range(plan, replica)
        if not self.sync_bn:
            passes = [mine[at : at + self.per_pass] for at in range(0, len(mine), self.per_pass)]
            return [
                self._key(plan, p.start, p.start * self.micro_batch, len(p) * self.micro_batch, size)
                for p in passes
            ]
        first, images = mine.start * self.micro_batch, len(mine) * self.micro_batch
        groups = range(plan.images // self.batch)
        return [self._key(plan, g, g * self.batch + first, images, size) for g in groups]

    def _key(self, plan: StepPlan, ordinal: int, offset: int, images: int, size: int | None) -> MicroBatchKey:
        first = plan.first_image + offset
        samples = tuple(divmod(first + i, self.dataset_images) for i in range(images))
        return MicroBatchKey(plan.step, ordinal, samples, size)

    def largest_share(self, step_images: int) -> int:
        """Return the most micro-batches of a step that a device of this rank gets."""
        ranges = self.partition.ranges(step_images // self.micro_batch)
        first = self.rank * self.replicas
        return max(map(len, ranges[first : first + self.replicas]))

    def largest_pass(self, step_images: int) -> int:
        """Return the images of the largest pass of this rank in a step after warm-up."""
        plan = StepPlan(TRIAL_STEPS, 0, step_images, 0.0, 0.0, 0.0)  # the first step that is no trial
        return max((len(key.samples) for key in self.keys(plan)), default=0)

    def check(self, step_images: int) -> None:
        """Raise if a device gets no work in a step, or batch normalisation one value per channel on the coarsest feature map.

        Args:
            step_images: after the warm-up; 0: devices may have no work, for the fleet of a run that goes on may change, and few
                images have small steps.

        Raises:
            ConfigError: see above.
        """
        assert self.batch % self.micro_batch == 0, (
            f"micro-batches of {self.micro_batch} in a batch of {self.batch}"
        )
        problem, instead = self.idle(step_images) if step_images else ("", "")
        if problem:
            raise ConfigError(problem, hint=instead)
        replicas_together = self.sync_bn and len(self.partition.shares) > 1
        if self.micro_batch == 1 and self.size_range()[0] == 1 and not replicas_together:
            varied = "" if self.sizes == (1, 1) else ", sizes vary"
            raise ConfigError(
                f"one image of {self.stride} px (--micro-batch 1, --img {self.img}{varied}) leaves batch "
                "normalisation a single value",
                hint=f"--micro-batch 2, or --img {2 * self.img}",
            )

    def idle(self, step_images: int) -> tuple[str, str]:
        """Return how many devices get no work in a step, and what to change; see :meth:`Partition.idle`."""
        images = self.batch if self.sync_bn else step_images
        return self.partition.idle(images, self.micro_batch, self.batch)

    def size_range(self) -> tuple[int, int]:
        """Return the smallest and largest image side, in strides."""
        low, high = (max(round(self.img * fraction / self.stride), 1) for fraction in self.sizes)
        return low, high

    def size_of(self, plan: StepPlan) -> int | None:
        """Return the image side of a step in pixels, or None for the configured size."""
        if self.sizes == (1, 1) or plan.first_image // self.dataset_images >= self.sizes_until:
            return None
        low, high = self.size_range()
        draw = generator(self.seed, "multi-scale", plan.step).random()
        return (low + int(draw * (high - low + 1))) * self.stride
