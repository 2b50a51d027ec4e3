"""Batch normalisation of several micro-batches in a pass, each by its own statistics ("ghost" batches, arXiv:1705.08741).

G micro-batches of n images pass together, and the last may have fewer; C channels. PyTorch's kernels take one micro-batch
at a time. Those of ``grouped_norm_triton.py`` take all of them, and read and write no more than plain batch
normalisation of the whole pass. tests/unit/parallel/test_grouped_norm.py compares both with plain layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from yolofleet.storage.caches import keep_compiled
from yolofleet.support.devices import has_triton


class Kernels(NamedTuple):
    """The two directions of a layer, with the arguments and the results of :data:`PYTORCH`."""

    normalise: Callable[..., tuple[Tensor, Tensor]]
    differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]]


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, variances: Tensor, images: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise with PyTorch's kernel for each micro-batch, which writes into its part of the result.

    Args:
        x: [N, C, H, W].
        means, variances: [at least G, C]; their first rows receive the statistics (variance unbiased, n / (n - 1)).
        images: of a micro-batch.
    Returns:
        the normalised pass, like ``x``, and the means and inverse deviations of the micro-batches, [2, G, C].
    """
    y, parts = torch.empty_like(x), x.split(images)
    saved = weight.new_empty((2, len(parts), len(weight)))
    for part, out, mean, variance, *kept in zip(
        parts, y.split(images), means, variances, *saved, strict=False
    ):
        torch.native_batch_norm(part, weight, bias, mean, variance, True, 1.0, eps, out=(out, *kept))
    return y, saved


def differentiate(
    grad: Tensor, x: Tensor, weight: Tensor, saved: Tensor, images: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate with PyTorch's kernel for each micro-batch. It cannot write into a result, so this copies once."""
    parts = [
        torch.ops.aten.native_batch_norm_backward(
            part_grad, part, weight, None, None, mean, invstd, True, eps, [True, True, True]
        )
        for part_grad, part, mean, invstd in zip(grad.split(images), x.split(images), *saved, strict=True)
    ]
    of_x, of_weight, of_bias = zip(*parts, strict=True)
    # the last micro-batch first, in the order of a backward pass through layers of their own
    of_both = torch.stack(of_weight[::-1] + of_bias[::-1]).unflatten(0, (2, len(parts))).sum(1)
    return torch.cat(of_x), of_both[0], of_both[1]


PYTORCH = Kernels(normalise, differentiate)


@cache
def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of Triton if they work on ``device``, else PyTorch's.

    Triton compiles them here, so it needs a C compiler and the header files of Python. Each process tries two small
    micro-batches, and compares the results with PyTorch's. The host waits for the device.

    Raises:
        StorageError: see :func:`keep_compiled`.
    """
    if not has_triton(device):
        return PYTORCH
    keep_compiled()
    try:
        from yolofleet.training.parallel import grouped_norm_triton

        kernels = Kernels(grouped_norm_triton.normalise, grouped_norm_triton.differentiate)
        return kernels if _agree(kernels, device) else PYTORCH
    except Exception:  # of Triton, the C compiler, the driver or the file system: training goes on without
        return PYTORCH


def _agree(kernels: Kernels, device: torch.device) -> bool:
    """Return whether ``kernels`` and PyTorch's have the same results for a micro-batch of two images and one of one."""
    values = torch.linspace(-40, 40, 2 * 3 * 20 * 5 * 7, device=device).sin().unflatten(0, (2, 3, 5, 7, 20))
    x, grad = values.permute(0, 1, 4, 2, 3)  # each [3, 20, 5, 7], channels last
    weight, bias = values[0, 0, 0, :2]
    found: list[Tensor] = []
    for normalise, differentiate in (PYTORCH, kernels):
        means, variances = statistics = x.new_zeros((2, 2, 20))
        y, saved = normalise(x, weight, bias, means, variances, 2, 1e-3)
        results = (y, statistics, *differentiate(grad, x, weight, saved, 2, 1e-3))
        found.append(torch.cat([t.flatten() for t in results]))
    return torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4)


class _GroupedNorm(torch.autograd.Function):
    """Normalises with the kernels of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: GroupedBatchNorm2d) -> Tensor:
        ctx.layer, ctx.images = layer, layer.images
        y, saved = layer.kernels.normalise(
            x, weight, bias, layer.means, layer.variances, layer.images, layer.eps
        )
        ctx.save_for_backward(x, weight, saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, saved = ctx.saved_tensors
        return (*ctx.layer.kernels.differentiate(grad, x, weight, saved, ctx.images, ctx.layer.eps), None)


_grouped_norm: Callable[[Tensor, Tensor, Tensor, GroupedBatchNorm2d], Tensor] = _GroupedNorm.apply


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that normalises each micro-batch of a pass by its own statistics.

    Attributes:
        images: of a micro-batch; the last one of a pass may have fewer.
        means, variances: [most micro-batches of a pass, C]; receive the statistics of each, the variance unbiased.
    """

    images: int
    means: Tensor
    variances: Tensor
    kernels: Kernels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if torch.compiler.is_compiling():  # torch's compiler makes its own kernels of the plain form
            rows = zip(x.split(self.images), self.means, self.variances, strict=False)
            return torch.cat(
                [
                    F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
                    for part, mean, variance in rows
                ]
            )
        return _grouped_norm(x, self.weight, self.bias, self)
