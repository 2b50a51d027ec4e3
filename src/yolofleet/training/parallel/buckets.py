"""Gradient buckets: the backward pass fills them, and full ones are reduced while it continues.

Each parameter has a view into a flat bucket. A backward pass leaves its gradients in ``.grad``, and one operation for each
bucket adds them to the views. After the reduction, ``.grad`` is the view. During the last local backward pass, hooks count
the parameters whose gradient is final. A full bucket is reduced at once, in a fixed order, while the backward pass
continues. This is the algorithm of PyTorch DDP (arXiv:2006.15704), extended to several micro-batches. A rank without work
contributes zeros.

The ``ReductionFormat`` of a bucket decides what the ranks sum: the float32 gradients (``fast``), bfloat16 (``fast16``), or
integers, whose sum does not depend on its order (``exact``, see ``exact.py``). Batch-norm statistics are reduced in the same way, in a small
buffer of their own, which is complete before the last backward pass begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.training.parallel.world import World

BUCKET_BYTES = 4 << 20  # small enough to pipeline on slow links; see benchmarks/README.md


class ReductionFormat:
    """The number format in which one flat float32 buffer is summed over micro-batches and ranks.

    This one is float32: rounding depends on the number of ranks, at about 1e-7.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def begin(self, micro_batches: int) -> None:
        """Start a step of ``micro_batches`` micro-batches (on all ranks), whose buffer is 0."""

    def accumulate(self) -> None:
        """Add the buffer, which holds the gradient of one more local micro-batch, to the local sum."""

    def add(self, other: Any) -> None:
        """Add the local sum of another device of this process, in the same format."""
        self.flat.add_(other.flat.to(self.flat.device))

    def message(self) -> Tensor:
        """Return the tensor to sum over ranks in place. Called once in a step."""
        return self.flat

    def write_back(self, poison: Tensor) -> None:
        """Convert the message, which holds the sum over ranks, into the buffer.

        Args:
            poison: 0, or NaN in a step to leave out; a format that learns from the values must not learn from its.
        """

    def copy_grid(self, leader: Any) -> None:
        """Use the grid of the format of the same buffer on another device."""

    def grid(self) -> Tensor:
        """Return the scale of each parameter, for a checkpoint; empty without a grid."""
        return self.flat.new_empty(0)

    def restore_grid(self, scales: Tensor) -> None:
        """Set the grid from a checkpoint that another run of this format has written."""


class HalfFormat(ReductionFormat):
    """bfloat16 between ranks: half the bytes. It has float32's range, so it needs no scale.

    Local sums are float32. Each element has 8 significant bits in the message and in each sum on its way, so its error is at
    most 0.4 % for each of them.
    """

    def message(self) -> Tensor:
        self._rounded = self.flat.to(torch.bfloat16)
        return self._rounded

    def write_back(self, poison: Tensor) -> None:
        self.flat.copy_(self._rounded)


class Bucket:
    """Gradients of consecutive parameters in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(self.sizes), dtype=torch.float32, device=parameters[0].device)
        # A gradient has the strides of its parameter, so channels-last weights get channels-last gradients.
        starts = itertools.accumulate(self.sizes, initial=0)
        self.views = [
            self.flat.as_strided(p.size(), p.stride(), at) for p, at in zip(parameters, starts, strict=False)
        ]
        self.format = ReductionFormat(self.flat)
        self.pending = 0
        self.work: Any = None

    def gather(self) -> None:
        """Add the gradients of a backward pass to the views, and free them."""
        pairs = [
            (view, p.grad) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None
        ]
        if pairs:
            views, gradients = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(views, gradients)
        self.clear()

    def clear(self) -> None:
        """Remove the parameters' gradients; a backward pass then stores new tensors instead of adding to them."""
        for p in self.parameters:
            p.grad = None

    def show(self) -> None:
        """Let the parameters' gradients be the views, for the optimizer."""
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view


class GradientBuckets:
    """Gradients and batch-norm statistics of one model on one device.

    Args:
        parameters: in order of the forward pass. Buckets hold those that require a gradient, in reverse order: the
            backward pass finishes the last parameters first.
        world: ranks to sum over.
        statistics: elements of the batch-norm buffer.
        bytes_each: size of a bucket.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: World,
        *,
        statistics: int = 0,
        bytes_each: int = BUCKET_BYTES,
    ) -> None:
        self.world = world
        self.buckets = [Bucket(group) for group in grouped(parameters, bytes_each)]
        device = self.buckets[0].flat.device
        self.statistics = torch.zeros(statistics, dtype=torch.float32, device=device)
        self.statistics_format = ReductionFormat(self.statistics)
        self._statistics_work: Any = None
        self._poison = torch.zeros((), device=device)  # NaN if a statistic of this step is not finite
        self._launched = 0
        self._is_reducing = False
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))

    def formats(self) -> list[ReductionFormat]:
        """Return the formats of all buffers, in the order of their reductions."""
        return [self.statistics_format, *(bucket.format for bucket in self.buckets)]

    def begin(self, micro_batches: int) -> None:
        """Start a step: zero the buffers, because gradients would add up over steps."""
        torch._foreach_zero_([form.flat for form in self.formats()])
        for form in self.formats():
            form.begin(micro_batches)
        for bucket in self.buckets:
            bucket.clear()
        self._launched, self._is_reducing = 0, False

    def start_reducing(self) -> None:
        """Reduce buckets as they fill. Call before the backward pass of the last local micro-batch."""
        self._is_reducing = True
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        self._launch_statistics()

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the local sums. Call after each backward pass but the last one."""
        for bucket in self.buckets:
            bucket.gather()
        for form in self.formats():
            form.accumulate()

    def _launch_statistics(self) -> None:
        self.statistics_format.accumulate()
        self._statistics_work = self.world.all_reduce_async(self.statistics_format.message())

    def _on_gradient(self, bucket: Bucket) -> None:
        if self._is_reducing:
            bucket.pending -= 1
            self._launch_full()

    def _launch_full(self) -> None:
        # in bucket order, because every rank must start its collectives in the same order
        while self._launched < len(self.buckets) and self.buckets[self._launched].pending <= 0:
            bucket = self.buckets[self._launched]
            bucket.gather()
            bucket.format.accumulate()
            bucket.work = self.world.all_reduce_async(bucket.format.message())
            self._launched += 1

    def add(self, other: GradientBuckets) -> None:
        """Add the sums of another device of this process (DataParallel). Call before :meth:`finish`."""
        for mine, theirs in zip(self.formats(), other.formats(), strict=True):
            mine.add(theirs)

    def copy_grid(self, leader: GradientBuckets) -> None:
        """Use the grids of the first device. Call before :meth:`begin` on the other devices of a process."""
        for mine, its in zip(self.formats(), leader.formats(), strict=True):
            mine.copy_grid(its)

    def grid(self) -> Tensor:
        """Return [P] the scales of all parameters, for a checkpoint; empty without a grid, zeros before the first step."""
        return torch.cat([bucket.format.grid() for bucket in self.buckets])

    def restore_grid(self, scales: Tensor) -> None:
        """Set the scales from a checkpoint."""
        parts = scales.split([len(bucket.sizes) for bucket in self.buckets])
        for bucket, part in zip(self.buckets, parts, strict=True):
            bucket.format.restore_grid(part)

    def finish(self) -> None:
        """Start the remaining reductions (idle rank, unused parameters) and wait for all.

        Collective: every rank, once per step.
        """
        if not self._is_reducing:
            self._launch_statistics()
        for bucket in self.buckets:
            bucket.pending = 0
        self._launch_full()
        self.world.wait(self._statistics_work)
        self.statistics_format.write_back(self.statistics.new_zeros(()))
        # A variance above float32's range makes the outputs of its layer, and so the gradients, about 0: they would not
        # show it.
        self._poison = 0.0 * self.statistics.sum()  # 0 * infinity is NaN
        for bucket in self.buckets:
            self.world.wait(bucket.work)
            bucket.format.write_back(self._poison)
            bucket.show()
        self._is_reducing = False

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients, a float32 scalar on the device; NaN if a batch-norm statistic is not finite."""
        norms = torch._foreach_norm([bucket.flat for bucket in self.buckets])
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm + self._poison

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply all gradients in place."""
        torch._foreach_mul_([bucket.flat for bucket in self.buckets], factor)


def make_half(buckets: GradientBuckets) -> None:
    """Switch the gradients of ``buckets`` to messages in bfloat16; batch-norm statistics stay float32."""
    for bucket in buckets.buckets:
        bucket.format = HalfFormat(bucket.flat)


def grouped(parameters: Iterable[nn.Parameter], bytes_each: int) -> list[list[nn.Parameter]]:
    """Return the trainable parameters, last first, in groups of at most ``bytes_each`` where possible.

    The last groups are smaller, down to an eighth. They hold the first layers, whose gradients come last and take most of
    the time of the backward pass, so nothing is left to hide their reduction behind.
    """
    groups: list[list[nn.Parameter]] = []
    filled, limit = 0, bytes_each // 16
    for p in [p for p in parameters if p.requires_grad]:
        if not groups or filled + 4 * p.numel() > limit:
            groups.append([])
            filled, limit = 0, min(2 * limit, bytes_each)
        groups[-1].append(p)
        filled += 4 * p.numel()
    return [group[::-1] for group in groups[::-1]]
