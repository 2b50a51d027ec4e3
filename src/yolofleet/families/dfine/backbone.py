"""HGNetV2, the backbone of D-FINE (PaddleClas). N images, C channels, H x W map.

Published checkpoints fix the attribute names (``stem1.conv.weight``, ``lab.scale``).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.dfine.description import DfineDescription
from yolofleet.families.networks.blocks import results
from yolofleet.families.rtdetr.blocks import ConvNorm

LIGHT_FROM = 2  # from the third stage on, an inner layer is :func:`light_conv`


class Scaled(torch.autograd.Function):
    """``bias + scale x`` of a map of any shape and two numbers [1]; the backward pass has four operations, that of torch six."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(bias, x, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()[None], gradient.sum()[None]


class Affine(nn.Module):
    """A learned factor and summand of a whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        # in the map's format, else mixed precision would make it float32
        scale, bias = self.scale.to(x.dtype), self.bias.to(x.dtype)
        if not x.requires_grad:
            return torch.addcmul(bias, x, scale)
        y: Tensor = Scaled.apply(x, scale, bias)  # type: ignore[no-untyped-call]
        return y

    def draw_initial(self, generator: torch.Generator) -> None:
        """Let the block change nothing at the start."""
        self.scale.fill_(1)
        self.bias.zero_()


class HgConv(ConvNorm):
    """Convolution and batch normalisation, and with ``activates`` ReLU and :class:`Affine`.

    Args:
        sizes: input and output channels, kernel, stride and groups, as of :class:`ConvNorm`.
    """

    norm_name = "bn"

    def __init__(self, description: DfineDescription, *sizes: int, activates: bool = True) -> None:
        super().__init__(*sizes, activation=F.relu if activates else None, is_frozen=description.is_frozen)
        self.lab = Affine() if activates and description.has_affine else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lab(super().forward(x))
        return y


def light_conv(description: DfineDescription, in_channels: int, out: int) -> nn.Module:
    """Return a 1x1 convolution, then a depthwise 5x5 one."""
    mixed = HgConv(description, in_channels, out, activates=False)
    return nn.Sequential(OrderedDict(conv1=mixed, conv2=HgConv(description, out, out, 5, 1, out)))


class Stem(nn.Module):
    """Two halvings; between them a branch of convolutions of 2 pixels and one of pooling."""

    def __init__(self, description: DfineDescription) -> None:
        super().__init__()
        inner, out = description.stem
        self.stem1 = HgConv(description, 3, inner, 3, 2)
        self.stem2a = HgConv(description, inner, inner // 2, 2)
        self.stem2b = HgConv(description, inner // 2, inner, 2)
        self.stem3 = HgConv(description, 2 * inner, inner, 3, 2)
        self.stem4 = HgConv(description, inner, out)
        self.border = nn.ZeroPad2d((0, 1, 0, 1))  # a module, because exports replace it
        self.pool = nn.MaxPool2d(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.border(self.stem1(x))
        convolved = self.stem2b(self.border(self.stem2a(x)))
        y: Tensor = self.stem4(self.stem3(torch.cat([self.pool(x), convolved], 1)))
        return y


class HgBlock(nn.Module):
    """A chain of layers; two 1x1 convolutions aggregate the input and the results of all of them.

    Args:
        adds: the result is added to the input.
    """

    def __init__(self, description: DfineDescription, stage: int, in_channels: int, *, adds: bool) -> None:
        super().__init__()
        count, inner = description.stage_layers, description.inner_widths[stage]
        out = description.outer_widths[stage]
        self.layers = nn.ModuleList(
            light_conv(description, c, inner) if stage >= LIGHT_FROM else HgConv(description, c, inner, 3)
            for c in (in_channels, *[inner] * (count - 1))
        )
        self.aggregation = nn.Sequential(
            HgConv(description, in_channels + count * inner, out // 2), HgConv(description, out // 2, out)
        )
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.aggregation(torch.cat([x, *results(self.layers, x)], 1))
        return x + y if self.adds else y


class HgNet(nn.Module):
    """HGNetV2; maps of strides 8, 16, 32, or of the last two of them. Each stage but the first halves the map.

    With a head of masks they are always three. The encoder reads the last ones, which have ``out_channels``.
    """

    def __init__(self, description: DfineDescription) -> None:
        super().__init__()
        levels = len(description.points)
        self.out_channels = description.outer_widths[-levels:]
        self.levels = 3 if description.mask_width else levels
        self.stem = Stem(description).requires_grad_(not description.is_frozen)
        self.stages = nn.ModuleList()
        for stage, (before, out) in enumerate(pairwise((description.stem[1], *description.outer_widths))):
            parts: OrderedDict[str, nn.Module] = OrderedDict()
            if stage:
                parts["downsample"] = HgConv(description, before, before, 3, 2, before, activates=False)
            inputs = (before, *[out] * (description.stage_blocks[stage] - 1))
            blocks = (HgBlock(description, stage, c, adds=i > 0) for i, c in enumerate(inputs))
            parts["blocks"] = nn.Sequential(*blocks)
            self.stages.append(nn.Sequential(parts))

    def forward(self, x: Tensor) -> list[Tensor]:
        return results(self.stages, self.stem(x))[-self.levels :]
