"""Building blocks of PP-YOLOE networks (arXiv:2203.16250). N images, C channels, H x W map.

Published checkpoints fix the attribute names (``conv2.conv1.bn.weight``).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.networks import blocks

BN_EPS = 1e-5
BN_MOMENTUM = 0.1  # share of the new value; Paddle's 0.9 is the share of the old one


class ConvNorm(blocks.Conv):
    """Convolution, batch normalisation; SiLU unless ``activate`` is False."""

    def __init__(
        self, in_channels: int, out: int, kernel: int = 1, stride: int = 1, *, activate: bool = True
    ) -> None:
        super().__init__(in_channels, out, kernel, stride)
        self.bn = nn.BatchNorm2d(out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.activate else self.bn(self.conv(x))


class Residual(nn.Module):
    """3x3 convolution and RepVgg, added to the input if ``shortcut``.

    Args:
        plus: RepVgg's 1x1 branch has a learned factor ``alpha``, 1 at the start.
    """

    def __init__(self, channels: int, *, shortcut: bool, plus: bool) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3)
        self.conv2 = blocks.RepVgg(
            ConvNorm(channels, channels, 3, activate=False),
            ConvNorm(channels, channels, 1, activate=False),
            nn.Parameter(torch.ones(1)) if plus else None,
        )
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.conv1(x))
        return x + y if self.shortcut else y


class EffectiveSE(nn.Module):
    """Effective squeeze and excitation (arXiv:1911.06667): one layer computes channel weights from channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class BackboneStage(nn.Module):
    """Stride 2, then a cross-stage partial block with attention (CSPRepResStage)."""

    def __init__(self, in_channels: int, out: int, repeats: int, *, plus: bool) -> None:
        super().__init__()
        middle = (in_channels + out) // 2
        half = middle // 2
        self.conv_down = ConvNorm(in_channels, middle, 3, 2)
        self.conv1 = ConvNorm(middle, half, 1)
        self.conv2 = ConvNorm(middle, half, 1)
        self.blocks = nn.Sequential(*(Residual(half, shortcut=True, plus=plus) for _ in range(repeats)))
        self.attn = EffectiveSE(2 * half)
        self.conv3 = ConvNorm(2 * half, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        y: Tensor = self.conv3(self.attn(torch.cat([self.conv1(x), self.blocks(self.conv2(x))], 1)))
        return y


class SPP(nn.Module):
    """Concatenates the input and its max pools of 5, 9 and 13 pixels; a chain of 5-pools gives the same values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = ConvNorm(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [x]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        y: Tensor = self.conv(torch.cat(pooled, 1))
        return y


class NeckStage(nn.Module):
    """Cross-stage partial block without shortcuts; ``spp`` adds pooling after its middle block."""

    def __init__(self, in_channels: int, out: int, repeats: int, *, spp: bool = False) -> None:
        super().__init__()
        half = out // 2
        self.conv1 = ConvNorm(in_channels, half, 1)
        self.conv2 = ConvNorm(in_channels, half, 1)
        chain: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(repeats):
            chain[str(i)] = Residual(half, shortcut=False, plus=False)
            if spp and i == (repeats - 1) // 2:
                chain["spp"] = SPP(half)
        self.convs = nn.Sequential(chain)
        self.conv3 = ConvNorm(2 * half, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv3(torch.cat([self.conv1(x), self.convs(self.conv2(x))], 1))
        return y


class GatedConv(nn.Module):
    """The head's attention: channels weighted by the map's means, then a 1x1 convolution (ESE of the ET-head)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        self.conv = ConvNorm(channels, channels, 1)

    def forward(self, x: Tensor, means: Tensor) -> Tensor:
        """Return the weighted map; ``means``: [N, C, 1, 1] of ``x``."""
        y: Tensor = self.conv(x * self.fc(means).sigmoid())
        return y
