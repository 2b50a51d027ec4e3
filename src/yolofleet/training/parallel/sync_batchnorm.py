"""Batch normalisation over the images of all ranks (``--sync-bn``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from yolofleet.training.parallel.world import World


class GroupBatchNorm(torch.autograd.Function):
    """Normalises by the statistics of all ranks' shares: one all-reduce forward, one backward.

    Shares may be unequal or empty. Works on any backend.
    Source: arXiv:1502.03167 for the layer; the gradient is the usual one with global sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, world: World
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        wide = x.float()
        count = x.numel() // channels
        sums = torch.cat(
            [wide.sum((0, 2, 3)), (wide * wide).sum((0, 2, 3)), wide.new_full((1,), float(count))]
        ).double()
        world.all_reduce_(sums)
        total = sums[-1].clamp(min=1)
        mean = sums[:channels] / total
        var = (sums[channels : 2 * channels] / total - mean * mean).clamp(min=0)
        unbiased = var * (total / (total - 1).clamp(min=1))
        invstd = (var + eps).rsqrt().float()
        mean = mean.float()
        xhat = (wide - mean[:, None, None]) * invstd[:, None, None]
        ctx.save_for_backward(xhat, weight, invstd, total)
        ctx.world = world
        out = xhat * weight[:, None, None] + bias[:, None, None]
        unbiased32 = unbiased.float()
        ctx.mark_non_differentiable(mean, unbiased32)
        return out.to(x.dtype), mean, unbiased32

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _mean: Any, _var: Any) -> Any:
        xhat, weight, invstd, total = ctx.saved_tensors
        wide = grad.float()
        local = torch.cat([wide.sum((0, 2, 3)), (wide * xhat).sum((0, 2, 3))])
        sums = ctx.world.all_reduce_(local.double())
        channels = xhat.shape[1]
        g_mean = (sums[:channels] / total).float()[:, None, None]
        gx_mean = (sums[channels:] / total).float()[:, None, None]
        dx = (wide - g_mean - xhat * gx_mean) * (weight * invstd)[:, None, None]
        return (
            dx.to(grad.dtype),
            local[channels:].to(weight.dtype),
            local[:channels].to(weight.dtype),
            None,
            None,
        )


group_batch_norm: Callable[[Tensor, Tensor, Tensor, float, World], tuple[Tensor, Tensor, Tensor]] = (
    GroupBatchNorm.apply
)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over the images of all ranks (``--sync-bn``).

    Collective: in training mode every rank calls forward and backward of every layer in the same order. A rank's share
    of the images may be empty.
    """

    world: World

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        out, mean, var = group_batch_norm(x, self.weight, self.bias, self.eps, self.world)
        assert self.running_mean is not None and self.running_var is not None
        with torch.no_grad():  # momentum 1: RunningStatistics does the averaging
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
        return out


def with_sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Replace every BatchNorm2d of ``model`` in place; parameters, buffers and names stay."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d
            cast(SyncBatchNorm2d, module).world = world  # mypy does not follow the line above
    return model
