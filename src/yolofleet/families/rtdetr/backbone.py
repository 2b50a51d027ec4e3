"""ResNet-vd (arXiv:1512.03385, arXiv:1812.01187): a stem of three convolutions, average pools in shortcuts."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rtdetr.blocks import ConvNorm, activated
from yolofleet.families.rtdetr.description import RtdetrDescription


class Residual(nn.Module):
    """Two 3x3 convolutions, or with ``expands`` 1x1, 3x3 and 1x1 ones to four times the width, and a shortcut.

    Args:
        is_first: of its stage; the others add their input as it is.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, *, is_first: bool, expands: bool, is_frozen: bool
    ) -> None:
        super().__init__()

        def conv(*sizes: int, activation: str = "") -> ConvNorm:
            return ConvNorm(*sizes, activation=activation, is_frozen=is_frozen)

        out = 4 * width if expands else width
        if is_first:
            pool, project = nn.AvgPool2d(2, 2), conv(in_channels, out)
            self.short: nn.Module = (
                nn.Sequential(OrderedDict(pool=pool, conv=project)) if stride == 2 else project
            )
        else:
            self.short = nn.Identity()
        if expands:
            self.branch2a = conv(in_channels, width, activation="relu")
            self.branch2b = conv(width, width, 3, stride, activation="relu")
            self.branch2c: nn.Module = conv(width, out)
        else:
            self.branch2a = conv(in_channels, width, 3, stride, activation="relu")
            self.branch2b = conv(width, width, 3)
            self.branch2c = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return activated(self.branch2c(self.branch2b(self.branch2a(x))) + self.short(x), "relu")


class Stage(nn.Module):
    """Blocks of one width; the first one has the stride."""

    def __init__(
        self, in_channels: int, width: int, repeats: int, stride: int, *, expands: bool, is_frozen: bool
    ) -> None:
        super().__init__()
        out = 4 * width if expands else width
        self.blocks = nn.Sequential(
            *(
                Residual(
                    out if i else in_channels,
                    width,
                    1 if i else stride,
                    is_first=i == 0,
                    expands=expands,
                    is_frozen=is_frozen,
                )
                for i in range(repeats)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class ResNet(nn.Module):
    """ResNet-vd; maps of strides 8, 16, 32."""

    def __init__(self, description: RtdetrDescription) -> None:
        super().__init__()
        frozen, expands, widths = description.is_frozen, description.has_bottlenecks, description.stage_widths
        first = widths[0]
        sizes = ((3, first // 2, 3, 2), (first // 2, first // 2, 3, 1), (first // 2, first, 3, 1))
        self.conv1 = nn.Sequential(
            OrderedDict(
                (f"conv1_{i}", ConvNorm(*size, activation="relu", is_frozen=frozen))
                for i, size in enumerate(sizes, 1)
            )
        )
        outs = [4 * width if expands else width for width in widths]
        self.res_layers = nn.ModuleList(
            Stage(before, width, repeats, 2 if i else 1, expands=expands, is_frozen=frozen)
            for i, (before, width, repeats) in enumerate(
                zip([first, *outs], widths, description.stage_blocks, strict=False)
            )
        )
        self.out_channels = outs[1:]
        if frozen:
            self.conv1.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.max_pool2d(self.conv1(x), 3, 2, 1)
        maps = []
        for stage in self.res_layers:
            x = stage(x)
            maps.append(x)
        return maps[1:]

    def groups(self) -> list[str]:
        """Return the prefixes of the names of its parts, in order."""
        return ["conv1.", *(f"res_layers.{i}." for i in range(len(self.res_layers)))]
