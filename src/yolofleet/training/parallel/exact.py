"""Sums that do not depend on their order: gradients as integers on a grid.

Integer addition is associative, so any partition, number of ranks and reduction algorithm give the same bits. A rank
sends as many bytes as with float32, once every parameter has had a gradient. Each micro-batch's gradient g becomes
``round(g * scale)``. Each parameter has its own scale, a power of two that puts the largest element of the last step's
sum at about 2^TARGET_BITS. So the grid is 2^-22 of that element, and a gradient may grow 64-fold in a step before it is
clamped (equally for every number of ranks). For example, if the largest element of the last sum was 1, the grid is 2^-22
and the limit is 64. A parameter without a gradient so far, in the first 16 steps, and batch-norm statistics use 64-bit
integers on a fixed grid. The others of its bucket are then sent in 64 bits, too, on their own grids.

A fixed tree of float32 sums gives equal bits too, but sends up to twice as much when shares are uneven
(docs/distributed.md has the figures). Related: IntSGD (arXiv:2102.08374), VirtualFlow (arXiv:2009.09523).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yolofleet.training.parallel.buckets import GradientBuckets, ReductionFormat

TARGET_BITS = 22  # the largest element of the last step is about 2^22 grid units
# Steps in 64 bits that wait for the first gradient of a parameter. A scale <= 0 counts them, and a checkpoint stores it.
MOST_WIDE_STEPS = 16
WIDE_BITS = 36  # fixed grid of the first step: 2^-36; with 8 micro-batches each may have up to 2^23 (x the fp16 loss scale)
STATISTICS_BITS = 32


class IntegerFormat(ReductionFormat):
    """Sums ``flat`` as integers; the module docstring has the algorithm.

    Args:
        sizes: elements of each parameter in ``flat``.
        fixed_bits: use a fixed grid of 2^-fixed_bits in 64 bits; None: adapt the grid to the values.
    """

    def __init__(self, flat: Tensor, sizes: list[int], fixed_bits: int | None = None) -> None:
        super().__init__(flat)
        self.sizes = sizes
        self.fixed_bits = fixed_bits
        # scale of each parameter, a power of two; 0 = not known yet
        self.scales = torch.zeros(len(sizes), dtype=torch.float32, device=flat.device)
        self.is_wide = True
        self._scale = torch.zeros(0)  # of each element
        self._total = torch.zeros(0)
        self._bound = 0.0

    def begin(self, micro_batches: int) -> None:
        spare = math.ceil(math.log2(max(micro_batches, 1)))
        self._bound = 2.0 ** ((62 if self.is_wide else 30) - spare)
        dtype = torch.int64 if self.is_wide else torch.int32
        if self._total.dtype != dtype:
            # The last element counts micro-batches with NaN or infinity, which integers cannot express.
            total = torch.empty(len(self.flat) + 1, dtype=dtype, device=self.flat.device)
            # Set both together: if an allocation fails, a trial of a smaller pass uses this object again.
            self._total, self._scale = total, torch.empty_like(self.flat)
        self._total.zero_()
        unknown = 2.0 ** (WIDE_BITS if self.fixed_bits is None else self.fixed_bits)
        scales = self.scales.masked_fill(self.scales <= 0, unknown)
        torch._foreach_copy_(self._scale.split(self.sizes), scales.unbind())

    def accumulate(self) -> None:
        finite = torch.isfinite(self.flat.sum())
        grid = self.flat.double() if self.is_wide else self.flat
        grid.mul_(self._scale).round_().clamp_(-self._bound, self._bound)
        # converting NaN is undefined; the count below overrides it
        self._total[:-1] += grid.to(self._total.dtype)
        self._total[-1] += (~finite).to(self._total.dtype)
        self.flat.zero_()

    def add(self, other: IntegerFormat) -> None:
        self._total.add_(other._total.to(self._total.device))

    def message(self) -> Tensor:
        return self._total

    def write_back(self, poison: Tensor) -> None:
        nan_or_zero = torch.where(self._total[-1] > 0, math.nan, poison)
        self.flat.copy_(self._total[:-1]).div_(self._scale).add_(nan_or_zero)
        if self.fixed_bits is None:
            self._choose_scales()

    def copy_grid(self, leader: IntegerFormat) -> None:
        self.scales, self.is_wide = leader.scales.to(self.flat.device), leader.is_wide

    def grid(self) -> Tensor:
        return self.scales

    def restore_grid(self, scales: Tensor) -> None:
        self.scales = scales.to(self.flat.device)
        self.is_wide = not bool((scales > 0).all())

    def _choose_scales(self) -> None:
        """Choose the grid of the next step from the sum, which is equal on every rank."""
        # ten times the speed of _foreach_norm(inf) on CPUs
        largest = torch.stack(torch._foreach_max(self.flat.abs().split(self.sizes)))  # [P]
        _, exponent = torch.frexp(largest)  # largest = 0.5..1 x 2^exponent
        scales = torch.ldexp(torch.ones_like(largest), (TARGET_BITS - exponent).clamp(-100, 100))
        usable = torch.isfinite(largest) & (largest > 0)
        waiting = torch.where(self.scales > -MOST_WIDE_STEPS, self.scales - 1, 2.0**TARGET_BITS)
        scales = torch.where(usable, scales, torch.where(self.scales > 0, self.scales, waiting))
        if self.is_wide:  # one read of the device
            found = int(torch.isfinite(largest).all() + 2 * (scales > 0).all())
            if not found & 1:
                return  # an overflow (from the search for fp16's loss scale) does not show the size of later gradients
            self.is_wide = not found & 2
        self.scales = scales


def make_exact(buckets: GradientBuckets) -> None:
    """Switch ``buckets`` to integer sums."""
    for bucket in buckets.buckets:
        bucket.format = IntegerFormat(bucket.flat, bucket.sizes)
    statistics = buckets.statistics
    buckets.statistics_format = IntegerFormat(statistics, [len(statistics)], STATISTICS_BITS)
