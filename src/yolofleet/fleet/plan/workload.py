"""The workload of a training: the values that decide its time, for the formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

BUCKET_BYTES = 4 << 20  # as in training/parallel/buckets.py, which needs torch; a test compares them
FILLED = 0.75  # share of the square that images of 640 x 480 fill
STATE_BYTES = 20  # of each parameter, in fp32: weight, gradient, momentum, moving average, and its next value
FORMAT_BYTES = {"fast": 4, "fast16": 2, "exact": 4}  # size of an element in a message


@dataclass(frozen=True)
class Network:
    """The properties of a network that decide the time of a step.

    Attributes:
        parameters: number of trained parameters.
        gflops: 10^9 operations of a forward pass of one image at 640 px, as ``families/networks/cost.py`` counts them.
        ready: shares of the backward pass, 0..1, after which 1/8, 2/8 ... 8/8 of the gradients are final. The last layers'
            gradients come first; a share is one of operations.
        saved_bytes: that the backward pass needs of the forward pass of one image at 640 px, in fp32.
    """

    name: str
    parameters: int
    gflops: float
    ready: tuple[float, ...]
    saved_bytes: float = 0.0

    def ready_at(self, share: float) -> float:
        """Return the share of the backward pass after which ``share`` of the gradients is final; both 0..1."""
        curve = (0.0, *self.ready)
        return float(np.interp(share, np.linspace(0, 1, len(curve)), curve))


@dataclass(frozen=True)
class Workload:
    """A training, as the formula needs it.

    Attributes:
        img: pixels.
        images, val_images: of an epoch and of a validation.
        image_bytes: mean size of an image file.
        step_images: images of a step, over all ranks, after the warm-up.
        micro_batch: images; per_pass: micro-batches that pass the network together.
        workers: loader processes of each rank; 0: the process that trains loads; -1: chosen from the cores.
        cache: where decoded images are kept; auto: in memory, if all fit into half of it.
        shares: of the ranks; () = equal, except with ``auto_shares``: in proportion to their speed.
        val_period: epochs between validations; 0: only after the last one.
    """

    network: Network
    img: int
    images: int
    val_images: int
    image_bytes: float
    epochs: int
    step_images: int
    micro_batch: int
    per_pass: int = 1
    workers: int = -1
    cache: Literal["none", "ram", "disk", "auto"] = "none"
    reduce: Literal["fast", "fast16", "exact"] = "fast"
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    shares: tuple[float, ...] = ()
    auto_shares: bool = False
    val_period: int = 1

    @property
    def steps(self) -> float:
        """Steps of an epoch: a step may hold images of two epochs."""
        return self.images / self.step_images

    @property
    def validations(self) -> int:
        """Validations of the whole run; the last epoch has one."""
        return math.ceil(self.epochs / self.val_period) if self.val_period else 1

    @property
    def device_bytes(self) -> float:
        """Bytes of a device that a pass of one micro-batch needs at least.

        This counts the state and what the backward pass needs of the forward pass. It leaves out what the kernels, the loss
        and the allocator add.
        """
        saved = self.network.saved_bytes * (self.img / 640) ** 2 * self.micro_batch
        in_16_bits = self.precision in ("fp16", "bf16")
        return STATE_BYTES * self.network.parameters + saved / (2 if in_16_bits else 1)

    @property
    def cached_bytes(self) -> int:
        """Bytes of all decoded images, if they fill as much of the square as those of COCO."""
        return round(self.images * 3 * self.img**2 * FILLED)

    @cached_property
    def buckets(self) -> tuple[tuple[int, float], ...]:
        """(bytes of the message, share of the backward pass after which it is complete) of each bucket, in order.

        The sizes follow the rule of ``training.parallel.buckets.grouped`` for parameters that fill each bucket.
        """
        gradient, sizes, limit = 4 * self.network.parameters, list[int](), BUCKET_BYTES // 8
        while (remaining := gradient - sum(sizes)) > 0:
            sizes.append(min(limit, remaining))
            limit = min(2 * limit, BUCKET_BYTES)
        ends = [0, *accumulate(reversed(sizes))]
        factor = FORMAT_BYTES[self.reduce] / 4
        return tuple(
            (round((end - start) * factor), self.network.ready_at(end / gradient))
            for start, end in pairwise(ends)
        )
