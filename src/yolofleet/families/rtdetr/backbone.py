"""ResNet-vd (arXiv:1512.03385, arXiv:1812.01187): a stem of three convolutions, average pools in shortcuts."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.networks.blocks import results
from yolofleet.families.rtdetr.blocks import ConvNorm
from yolofleet.families.rtdetr.description import RtdetrDescription


class Residual(nn.Module):
    """Two 3x3 convolutions, or with bottlenecks 1x1, 3x3 and 1x1 ones to four times the width, and a shortcut.

    Args:
        is_first: of its stage; the others add their input as it is.
    """

    def __init__(
        self, description: RtdetrDescription, in_channels: int, width: int, stride: int, *, is_first: bool
    ) -> None:
        super().__init__()
        conv = partial(ConvNorm, is_frozen=description.is_frozen)
        out = 4 * width if description.has_bottlenecks else width
        self.short: nn.Module = conv(in_channels, out) if is_first else nn.Identity()
        if stride == 2:
            self.short = nn.Sequential(OrderedDict(pool=nn.AvgPool2d(2, 2), conv=self.short))
        if description.has_bottlenecks:
            self.branch2a = conv(in_channels, width, activation=F.relu)
            self.branch2b = conv(width, width, 3, stride, activation=F.relu)
            self.branch2c: nn.Module = conv(width, out)
        else:
            self.branch2a = conv(in_channels, width, 3, stride, activation=F.relu)
            self.branch2b = conv(width, width, 3)
            self.branch2c = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch2c(self.branch2b(self.branch2a(x))) + self.short(x)
        return F.relu(y, inplace=not torch.is_grad_enabled())


class ResNet(nn.Module):
    """ResNet-vd; maps of strides 8, 16, 32."""

    def __init__(self, description: RtdetrDescription) -> None:
        super().__init__()
        conv = partial(ConvNorm, activation=F.relu, is_frozen=description.is_frozen)
        before = description.stage_widths[0]
        half = before // 2
        self.conv1 = nn.Sequential(
            OrderedDict(
                conv1_1=conv(3, half, 3, 2), conv1_2=conv(half, half, 3), conv1_3=conv(half, before, 3)
            )
        )
        self.conv1.requires_grad_(not description.is_frozen)
        self.res_layers = nn.ModuleList()
        sizes = zip(description.stage_widths, description.outer_widths, description.stage_blocks, strict=True)
        for stage, (width, out, repeats) in enumerate(sizes):
            first = Residual(description, before, width, 2 if stage else 1, is_first=True)
            others = (Residual(description, out, width, 1, is_first=False) for _ in range(1, repeats))
            self.res_layers.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(first, *others))))
            before = out
        self.out_channels = description.outer_widths[1:]

    def forward(self, x: Tensor) -> list[Tensor]:
        return results(self.res_layers, F.max_pool2d(self.conv1(x), 3, 2, 1))[1:]
