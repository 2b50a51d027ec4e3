"""Divide a step into the forward passes of one rank, and measure the ranks for ``--shares auto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from yolofleet.config.step_shape import divisors
from yolofleet.errors import ConfigError
from yolofleet.input.sample import MicroBatch, MicroBatchKey
from yolofleet.parallel.partition import Partition
from yolofleet.random_numbers import generator
from yolofleet.report.clock import Clock
from yolofleet.train.schedule import StepPlan

MEASURED_STEPS = range(3, 10)  # steps that --shares auto measures; the first steps are slower (warm-up)


@dataclass(frozen=True)
class StepSplitter:
    """Divides a step into the forward passes of one rank.

    A pass is up to ``per_pass`` micro-batches, or with synchronised batch norm this rank's share of each group of
    ``batch`` images.

    Args:
        partition: over the replicas of all ranks, in rank order.
        replicas: devices of this process.
        micro_batch, batch: images.
        dataset_images: images of an epoch.
        img, stride: pixels.
        sizes: smallest and largest training size as fractions of img, drawn for each step in multiples of the
            stride; (1, 1) = always img.
        per_pass: micro-batches that pass the network together.
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

    def _replica_keys(self, plan: StepPlan, replica: int) -> list[MicroBatchKey]:
        size, number = self.size_of(plan.step), self.rank * self.replicas + replica
        if not self.sync_bn:
            mine = self.partition.ranges(plan.images // self.micro_batch)[number]
            passes = [mine[at : at + self.per_pass] for at in range(0, len(mine), self.per_pass)]
            return [
                self._key(plan, p.start, p.start * self.micro_batch, len(p) * self.micro_batch, size)
                for p in passes
            ]
        share = self.partition.ranges(self.batch // self.micro_batch)[number]
        first, images = share.start * self.micro_batch, len(share) * self.micro_batch
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
        plan = StepPlan(0, 0, step_images, 0.0, 0.0, 0.0)
        return max((len(key.samples) for key in self.keys(plan)), default=0)

    def check(self) -> None:
        """Raise if batch normalisation has only one value per channel on the coarsest feature map.

        Raises:
            ConfigError: a micro-batch has one image, whose side is the stride.
        """
        replicas_together = self.sync_bn and len(self.partition.shares) > 1
        if self.micro_batch == 1 and self._size_range()[0] == 1 and not replicas_together:
            varied = "" if self.sizes == (1, 1) else ", sizes vary"
            raise ConfigError(
                f"one image of {self.stride} px (--micro-batch 1, --img {self.img}{varied}) leaves batch "
                "normalisation a single value",
                hint=f"--micro-batch 2, or --img {2 * self.img}",
            )

    def idle_note(self, step_images: int) -> str:
        """Return a warning if some devices get no work in a step, else ""."""
        return self.partition.idle_note(
            self.batch if self.sync_bn else step_images, self.micro_batch, divisors(self.batch)
        )

    def _size_range(self) -> tuple[int, int]:
        """Return the smallest and largest image side, in strides."""
        low, high = (max(round(self.img * fraction / self.stride), 1) for fraction in self.sizes)
        return low, high

    def size_of(self, step: int) -> int | None:
        """Return the image side of a step in pixels, or None for the configured size."""
        if self.sizes == (1, 1):
            return None
        low, high = self._size_range()
        draw = generator(self.seed, "multi-scale", step).random()
        return (low + int(draw * (high - low + 1))) * self.stride


class SpeedProbe:
    """Counts this rank's images and compute seconds over ``MEASURED_STEPS``."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.images, self.compute_s = 0, 0.0

    def is_done(self, plan: StepPlan, splitter: StepSplitter, clock: Clock) -> bool:
        """Record a finished step; return True after the last measured one."""
        number, compute_s = plan.step - self.first_step, clock.run_so_far().seconds["compute"]
        if number == MEASURED_STEPS.start - 1:
            self.compute_s = -compute_s
        elif number in MEASURED_STEPS:
            self.images += sum(len(key.samples) for key in splitter.keys(plan))
        if number == MEASURED_STEPS.stop - 1:
            self.compute_s += compute_s
            return True
        return False
