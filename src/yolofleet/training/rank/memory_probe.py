"""Probe the memory before the first step; recognise an out-of-memory error, and suggest smaller settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, divisors
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.networks.index_limit import INDEX_LIMIT
from yolofleet.inference.evaluate.run import EvaluationSettings, predictions
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.table import task_of
from yolofleet.training.parallel.world import World
from yolofleet.training.state import TrainState
from yolofleet.training.step import pass_micro_batches


@dataclass(frozen=True)
class LargestPass:
    """The forward and backward pass of a run that needs the most memory.

    Attributes:
        side: of the images, pixels: the largest size of the run.
        labels: of each image.
        most_images: of a pass, by ``families.networks.index_limit.images_within_index``.
        evaluation: settings of the validations of the run. averaged: returns the network that they fold and use.
    """

    state: TrainState
    loss: DetectionLoss
    precision: str
    side: int
    labels: int
    most_images: int = sys.maxsize
    evaluation: EvaluationSettings | None = None
    averaged: Callable[[], Detector] | None = None

    def run(self, images: int, micro_batch: int = 0) -> None:
        """Pass made-up images, cut into micro-batches of that size if it is given, on each device of this process as a step does.

        This changes gradients, their sums and the statistics of a micro-batch, which every step resets. No collective.

        Raises:
            RuntimeError, MemoryError: a device has too little memory, among others.
        """
        if micro_batch:
            self.state.replicas.pass_together(images // micro_batch, micro_batch)
        labels = self._made_up_labels(images)
        pixels = torch.zeros((images, self.side, self.side, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        batch = MicroBatch(0, 0, pixels, labels, self.loss.match(labels, images, (self.side, self.side)))
        first, last = self.loss.at(0.0), self.loss.at(1.0)
        for loss in [first] if last is first else [first, last]:
            self.state.replicas.begin(1)
            for replica in self.state.replicas.all:
                # Adam allocates two values for each parameter after the first backward pass
                slots = [torch.empty_like(p) for p in replica.model.parameters() for _ in range(2)]
                with devices.untimed_kernels():  # the run does not have passes of this size
                    pass_micro_batches(
                        replica,
                        [batch],
                        loss=loss,
                        loss_factors=torch.zeros(len(loss.terms)),
                        image_factor=1,
                        total_micro_batches=1,
                        precision=self.precision,
                        scaler=self.state.scaler,
                        overlaps=False,
                    )
                devices.synchronize(replica.device)
                del slots

    def validate(self, images: int = 0) -> None:
        """Validate so many made-up images, or else those of a batch. Raise as :meth:`run`. No collective.

        Each image has as many boxes as suppression considers, which an untrained network can find.
        """
        assert self.averaged is not None and self.evaluation is not None
        model, device = fuse(self.averaged()), self.state.replicas.lead.device
        settings, images = self.evaluation, images or self.evaluation.config.batch
        height, width = settings.size_hw or (settings.img, settings.img)
        pixels = torch.zeros((images, 3, height, width), dtype=torch.uint8)
        labels = self._made_up_labels(images)
        with torch.inference_mode(), devices.untimed_kernels():
            decoded, _ = predictions(model, pixels, labels, self.loss, self.precision, device)
            task = task_of(model)
            task.found(task.busiest(decoded), settings.limits(model))
            devices.synchronize(device)

    def _made_up_labels(self, images: int) -> Shapes:
        """Return labels of images that have the most, in turn with images whose denoising has the most queries, if it does."""
        busiest = getattr(self.loss, "labels_with_most_queries", lambda most: most)(self.labels)
        counts = np.where(np.arange(images) % 2, self.labels, busiest)
        parts = [task_of(self.state.replicas.lead.model).made_up(n) for n in counts.tolist()]
        return parts[0].of_images(parts)


def most_labels(index: DataIndex, recipe: Recipe) -> int:
    """Return the most labels that an augmented image can have: a mosaic of the images with the most labels."""
    tiles = 9 if recipe.mosaic9 else 4 if recipe.mosaic else 1
    counts = np.sort(np.diff(index.offsets))[-tiles:]
    return int(counts.sum()) * (2 if recipe.mosaic and recipe.mixup else 1) * (2 if recipe.copy_paste else 1)


def largest_that_fits(sizes: Sequence[int], pass_of: Callable[[int], object], device: torch.device) -> int:
    """Return the first of ``sizes`` for which ``pass_of(size)`` does not run out of memory.

    Raises:
        RuntimeError, MemoryError: all of them do; or ``pass_of`` failed for another reason.
    """
    for size in sizes:
        try:
            pass_of(size)
            return size
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem) or size == sizes[-1]:
                raise
        finally:
            devices.release_memory(device)
    raise AssertionError("no sizes")


def check_pass(config: TrainConfig, largest: LargestPass, images: int) -> None:
    """Raise :class:`ConfigError` if the smallest possible pass, of ``images`` images, has a tensor that kernels cannot index."""
    if images <= largest.most_images:
        return
    smaller = [d for d in divisors(config.batch) if d <= largest.most_images]
    hint = f"--micro-batch {smaller[-1]}" if smaller else "a smaller --img or --model"
    raise ConfigError(
        f"a pass of {images} images of {largest.side} px has a tensor with more than {INDEX_LIMIT:,} elements, the most that "
        f"kernels of accelerators can index; the limit of this network is {largest.most_images} images",
        source=f"--batch {config.batch}" if config.sync_bn else f"--micro-batch {images}",
        hint="a smaller --batch, more devices or a smaller --img" if config.sync_bn else hint,
    )


def memory_of_validation(config: TrainConfig, largest: LargestPass, world: World) -> torch.Tensor | None:
    """Return the memory of a validation that goes on beside the training (``--val-overlap``), for trials to leave it.

    No collective.

    Raises:
        RuntimeError: a validation alone has too little memory.
    """
    if not (overlaps(config) and _is_probed(config, world)):
        return None
    needed = reserved_by(largest.validate, world.device)
    return torch.empty(needed, dtype=torch.uint8, device=world.device)


def reserved_peaks(places: Sequence[torch.device], work: Callable[[], object]) -> list[int]:
    """Return the most memory, bytes, that torch holds on each device during ``work``; release what is unused there."""
    for place in places:
        devices.release_memory(place)
        devices.reset_peak_memory(place)
    try:
        work()
        for place in places:
            devices.synchronize(place)
        return [devices.peak_reserved_bytes(place) for place in places]
    finally:
        for place in places:
            devices.release_memory(place)


def reserved_by(work: Callable[[], object], device: torch.device) -> int:
    """Return the memory, bytes, that torch takes on ``device`` for ``work`` beside what it holds now, and release it."""
    before, peak = (reserved_peaks([device], each)[0] for each in (lambda: None, work))
    return max(peak - before, 0)


def overlaps(config: TrainConfig) -> bool:
    """Return whether validations go on beside the training."""
    return config.val_overlap and config.val_period > 0


def _is_probed(config: TrainConfig, world: World) -> bool:
    """Return whether trials are possible: not on a CPU, nor with the collectives of a synchronised batch norm."""
    return not devices.is_host(world.device) and not (config.sync_bn and world.size > 1)


def probed_micro_batch(config: TrainConfig, largest: LargestPass, world: World) -> int:
    """Return the micro-batch of a new run, after a trial of its largest pass. Collective: every rank.

    With ``--micro-batch -1`` it is the largest divisor of ``--batch`` that fits into the memory of every device and
    leaves each of them a part of the batch. Where no trial is possible, the default is used.

    Raises:
        RuntimeError, MemoryError: a device has too little memory.
    """
    given, sizes = config.likely_micro_batch, [config.likely_micro_batch]
    if config.micro_batch < 0:
        share = max(config.batch // (world.size * len(largest.state.replicas.all)), 1)
        sizes = [d for d in divisors(config.batch)[::-1] if d <= min(share, largest.most_images)]
    fits = largest_that_fits(sizes, largest.run, world.device) if _is_probed(config, world) else 0
    return min((n for n in world.gather(fits) if n), default=given) if config.micro_batch < 0 else given


def probed_per_pass(config: TrainConfig, largest: LargestPass, most: int) -> int:
    """Return how many micro-batches pass the network together on a device of this process (``--micro-batches-per-pass``).

    Ranks may choose different numbers, because batch-norm statistics are those of a micro-batch anyway. The trial has a
    quarter more micro-batches than the result, so that memory is left. No pass has more than ``largest.most_images``.

    Args:
        config: with the micro-batch of the run.
        most: micro-batches of a step for a device of this rank.
    """
    replicas, images = largest.state.replicas, config.micro_batch
    indexed = max(largest.most_images // images, 1)
    chosen = min(config.micro_batches_per_pass or most, most, indexed)
    if config.sync_bn or config.rect or config.reduce == "exact" or chosen < 2:
        return 1
    if not config.micro_batches_per_pass:
        if devices.is_host(replicas.lead.device) or ":" in config.device:
            return 1  # processes that share a GPU would take each other's memory in the trial

        def pass_of(micro_batches: int) -> None:
            with_room = min(micro_batches + micro_batches // 4, indexed)
            largest.run(with_room * images, images)

        halves = [-(-chosen // 2**k) for k in range(chosen.bit_length() + 1)]  # the last one is 1
        chosen = largest_that_fits(halves, pass_of, replicas.lead.device)
    replicas.pass_together(chosen, images)
    return chosen


def out_of_memory(problem: Exception, settings: TrainConfig | ValConfig, device: torch.device) -> ConfigError:
    """Return the error that suggests smaller settings."""
    if isinstance(settings, ValConfig):
        at_once = f"--batch {settings.batch}" + (f", --img {settings.img}" if settings.img else "")
        hint = f"--batch {max(1, settings.batch // 2)}: it does not change the figures"
    elif settings.batch < 0:
        share = settings.batch_memory
        at_once = f"{share:.0%} of the memory (--batch auto, or a share), --img {settings.img}"
        hint = (
            f"--batch {share - 0.1:.2g}, or --batch 16" if share >= 0.2 else "--batch 16, or a smaller --img"
        )
    else:
        micro_batch = settings.likely_micro_batch
        smaller = [d for d in divisors(settings.batch) if d < micro_batch]
        at_once = f"--micro-batch {micro_batch}, --img {settings.img}"
        hint = f"--micro-batch {smaller[-1]}" if smaller else "a smaller --img or --model"
        if settings.micro_batch < 0:
            at_once = f"the micro-batch of --micro-batch -1, --img {settings.img}"
            hint = "a new run with a smaller --micro-batch than that of the log"
        hint += (
            "; --micro-batches-per-pass 1 if the run was training, a smaller --val-batch if it was validating"
        )
        hint += ", or leave out --val-overlap" if settings.val_overlap else ""
    return ConfigError(
        f"{device} has too little memory for {at_once}",
        source=" ".join(str(problem).split())[:300] or type(problem).__name__,
        hint=hint,
    )
