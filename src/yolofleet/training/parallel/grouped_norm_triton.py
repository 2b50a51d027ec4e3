"""Kernels in Triton for batch normalisation of several micro-batches in a pass; see ``grouped_norm.py``.

Activations are channels-last: R rows (pixels) of C channels, and the rows of a micro-batch are consecutive. Its rows are
cut into PARTS, one for each program of a block of channels. Like PyTorch's kernels these read the pass twice in each
direction: first for the statistics of each part, then for the result. Each program of the second kernel joins the
statistics of all parts, in their order, so results do not depend on the order of programs.

The mean and the squared deviations of parts are joined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances" (1979). Everything is computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from yolofleet.support.devices import selected

TILE = 4096  # elements that a program handles at a time
MOST_CHANNELS = 32  # of a program
MOST_PARTS = 64


@triton.jit
def _rows_of_part(part, rows, group_rows, PARTS: tl.constexpr):
    """Return the first row of a part of this program's micro-batch, and the row after its last one."""
    begin = tl.program_id(0) * group_rows
    end = tl.minimum(begin + group_rows, rows)
    length = (end - begin + PARTS - 1) // PARTS
    first = tl.minimum(begin + part * length, end)
    return first, tl.minimum(first + length, end)


@triton.jit
def statistics_kernel(
    x, parts, rows, group_rows, channels,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the mean and the sum of squared deviations of a part to ``parts`` [2, G, PARTS, C]."""
    group, part = tl.program_id(0), tl.program_id(1)
    first, last = _rows_of_part(part, rows, group_rows, PARTS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    mean = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < last)[:, None] & (c < channels)[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(last - start, ROWS).to(tl.float32)
        before = (start - first).to(tl.float32)
        here = tl.sum(values, 0) / count
        deviations = tl.where(inside, values - here[None, :], 0.0)
        away = here - mean
        mean += away * (count / (before + count))
        squares += tl.sum(deviations * deviations, 0) + away * away * (before * count / (before + count))
    out = parts + (group * PARTS + part) * channels + c
    tl.store(out, mean, mask=c < channels)
    tl.store(out + tl.num_programs(0) * PARTS * channels, squares, mask=c < channels)


@triton.jit
def normalise_kernel(
    x, y, weight, bias, parts, saved, means, variances, stride,
    rows, group_rows, channels, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Normalise a part; the first part of a micro-batch also writes its statistics.

    Args:
        saved: [2, G, C], means and inverse deviations.
        means, variances: [G, C], with ``stride`` elements between rows.
    """
    group, part = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    every = tl.arange(0, PARTS)
    begins, ends = _rows_of_part(every, rows, group_rows, PARTS)
    counts = (ends - begins).to(tl.float32)[:, None]
    at_part = parts + (group * PARTS + every)[:, None] * channels + c[None, :]
    part_means = tl.load(at_part, mask=is_channel[None, :], other=0.0)
    part_squares = tl.load(
        at_part + tl.num_programs(0) * PARTS * channels, mask=is_channel[None, :], other=0.0
    )
    count = tl.sum(counts)
    mean = tl.sum(part_means * counts, 0) / count
    away = part_means - mean[None, :]
    squares = tl.sum(part_squares + away * away * counts, 0)
    invstd = 1.0 / tl.sqrt(squares / count + eps)
    if part == 0:
        tl.store(saved + group * channels + c, mean, mask=is_channel)
        tl.store(saved + (tl.num_programs(0) + group) * channels + c, invstd, mask=is_channel)
        tl.store(means + group * stride + c, mean, mask=is_channel)
        tl.store(variances + group * stride + c, squares / (count - 1.0), mask=is_channel)
    scale = invstd * tl.load(weight + c, mask=is_channel, other=0.0)
    shift = tl.load(bias + c, mask=is_channel, other=0.0)
    first, last = _rows_of_part(part, rows, group_rows, PARTS)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < last)[:, None] & is_channel[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, (values - mean[None, :]) * scale[None, :] + shift[None, :], mask=inside)


@triton.jit
def sums_kernel(
    grad, x, saved, parts, rows, group_rows, channels,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the sums over a part of the gradient and of gradient x deviation from the mean to ``parts`` [2, G, PARTS, C]."""
    group, part = tl.program_id(0), tl.program_id(1)
    first, last = _rows_of_part(part, rows, group_rows, PARTS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    mean = tl.load(saved + group * channels + c, mask=c < channels, other=0.0)
    sums = tl.zeros([CHANNELS], tl.float32)
    products = tl.zeros([CHANNELS], tl.float32)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < last)[:, None] & (c < channels)[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(gradient, 0)
        products += tl.sum(gradient * (values - mean[None, :]), 0)
    out = parts + (group * PARTS + part) * channels + c
    tl.store(out, sums, mask=c < channels)
    tl.store(out + tl.num_programs(0) * PARTS * channels, products, mask=c < channels)


@triton.jit
def gradient_kernel(
    grad, x, weight, saved, parts, of_x, of_both,
    rows, group_rows, channels, groups,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a part; the first part of the pass also writes ``of_both`` [2, C], of weight and bias."""
    group, part = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    at_part = parts + tl.arange(0, PARTS)[:, None] * channels + c[None, :]
    second = groups * PARTS * channels
    if (group == 0) & (part == 0):
        of_weight = tl.zeros([CHANNELS], tl.float32)
        of_bias = tl.zeros([CHANNELS], tl.float32)
        for each in range(0, groups):
            at = at_part + each * PARTS * channels
            invstd = tl.load(saved + (groups + each) * channels + c, mask=is_channel, other=0.0)
            of_bias += tl.sum(tl.load(at, mask=is_channel[None, :], other=0.0), 0)
            of_weight += tl.sum(tl.load(at + second, mask=is_channel[None, :], other=0.0), 0) * invstd
        tl.store(of_both + c, of_weight, mask=is_channel)
        tl.store(of_both + channels + c, of_bias, mask=is_channel)
    at_part += group * PARTS * channels
    begin, end = _rows_of_part(0, rows, group_rows, 1)
    count = (end - begin).to(tl.float32)
    mean = tl.load(saved + group * channels + c, mask=is_channel, other=0.0)
    invstd = tl.load(saved + (groups + group) * channels + c, mask=is_channel, other=0.0)
    average = tl.sum(tl.load(at_part, mask=is_channel[None, :], other=0.0), 0) / count
    products = tl.sum(tl.load(at_part + second, mask=is_channel[None, :], other=0.0), 0)
    slope = products * invstd * invstd / count
    scale = invstd * tl.load(weight + c, mask=is_channel, other=0.0)
    first, last = _rows_of_part(part, rows, group_rows, PARTS)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < last)[:, None] & is_channel[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        away = gradient - average[None, :] - (values - mean[None, :]) * slope[None, :]
        tl.store(of_x + at, away * scale[None, :], mask=inside)


class _Plan(NamedTuple):
    """The division of a pass among programs."""

    groups: int
    sizes: tuple[int, int, int]  # rows of the pass, rows of a micro-batch, channels
    blocks: dict[str, int]  # PARTS, and the ROWS and CHANNELS of a tile
    grid: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor, images: int) -> _Plan:
        n, c, h, w = x.shape
        groups, rows, channels = (
            -(-n // images),
            images * h * w,
            min(triton.next_power_of_2(c), MOST_CHANNELS),
        )
        parts = 1
        # Each program reads the statistics of all parts (8 bytes a channel): at most a twentieth of its own rows.
        while parts < MOST_PARTS and 40 * (2 * parts) ** 2 <= rows:
            parts *= 2
        blocks = {"PARTS": parts, "ROWS": TILE // channels, "CHANNELS": channels}
        return cls(groups, (n * h * w, rows, c), blocks, (groups, parts, triton.cdiv(c, channels)))

    def new_parts(self, x: Tensor) -> Tensor:
        """Return memory for two values of each part and channel."""
        return x.new_empty(2 * self.groups * self.blocks["PARTS"] * self.sizes[2], dtype=torch.float32)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, variances: Tensor, images: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise in two launches. Other layouts than channels-last are copied."""
    x = x.contiguous(memory_format=torch.channels_last)
    plan, y = _Plan.of(x, images), torch.empty_like(x)
    parts, saved = plan.new_parts(x), weight.new_empty((2, plan.groups, len(weight)))
    with selected(x.device):  # Triton launches on the current device
        statistics_kernel[plan.grid](x, parts, *plan.sizes, **plan.blocks)
        normalise_kernel[plan.grid](
            x,
            y,
            weight,
            bias,
            parts,
            saved,
            means,
            variances,
            means.stride(0),
            *plan.sizes,
            eps,
            **plan.blocks,
        )
    return y, saved


def differentiate(
    grad: Tensor, x: Tensor, weight: Tensor, saved: Tensor, images: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate in two launches. Other layouts than channels-last are copied."""
    grad, x = (t.contiguous(memory_format=torch.channels_last) for t in (grad, x))
    plan, of_x = _Plan.of(x, images), torch.empty_like(x)
    parts, of_both = plan.new_parts(x), weight.new_empty((2, len(weight)))
    with selected(x.device):
        sums_kernel[plan.grid](grad, x, saved, parts, *plan.sizes, **plan.blocks)
        gradient_kernel[plan.grid](
            grad, x, weight, saved, parts, of_x, of_both, *plan.sizes, plan.groups, **plan.blocks
        )
    return of_x, of_both[0], of_both[1]
