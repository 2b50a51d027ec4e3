"""Building blocks of YOLOv5 networks, and what the blocks of other families share. N images, C channels, H x W map.

Published checkpoints fix the attribute names (``cv1.conv.weight``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.support.devices import is_host

BN_EPS = 1e-3
BN_MOMENTUM = 0.03


def folded(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution that equals ``bn(conv(x))`` in evaluation mode.

    With scale g = weight / sqrt(var + eps): W' = g W and b' = bias - g mean, computed in float64. ``conv`` has no bias.
    """
    assert bn.running_mean is not None and bn.running_var is not None and conv.bias is None
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = conv.weight.double() * scale.view(-1, 1, 1, 1)
    bias = bn.bias.double() - scale * bn.running_mean.double()
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)


class Foldable(nn.Module):
    """A block with a convolution and its batch normalisation."""

    conv: nn.Conv2d
    bn: nn.Module
    norm_name = "bn"  # attribute of the normalisation, which is an Identity once folded

    def fold(self) -> None:
        """Fold the normalisation into the convolution."""
        norm = getattr(self, self.norm_name)
        if not isinstance(norm, nn.Identity):
            weight, bias = folded(self.conv, norm)
            self.conv.weight.copy_(weight)
            self.conv.bias = nn.Parameter(bias)
            setattr(self, self.norm_name, nn.Identity())


class Conv(Foldable):
    """Convolution, batch normalisation, SiLU."""

    def __init__(
        self,
        in_channels: int,
        out: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
    ) -> None:
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(in_channels, out, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=BN_EPS, momentum=BN_MOMENTUM)

    def forward(self, x: Tensor) -> Tensor:
        # in place only without gradients, because autograd would copy the input
        return F.silu(self.bn(self.conv(x)), inplace=not torch.is_grad_enabled())


class RepVgg(nn.Module):
    """Sum of a 3x3 and a 1x1 convolution, SiLU (arXiv:2101.03697); one 3x3 convolution for inference.

    Args:
        wide, narrow: both convolutions with their normalisations, without activations.

    Attributes:
        alpha: learned factor of the 1x1 branch; None: 1.
    """

    def __init__(self, wide: Foldable, narrow: Foldable, alpha: nn.Parameter | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2, self.alpha = wide, narrow, alpha
        self.conv: nn.Conv2d | None = None  # both branches in one, once folded

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            y = self.conv(x)
        else:
            narrow = self.conv2(x)
            y = self.conv1(x) + (narrow if self.alpha is None else self.alpha * narrow)
        return F.silu(y, inplace=not torch.is_grad_enabled())

    def fold(self) -> None:
        """Fold both branches and their normalisations into one 3x3 convolution; zeros extend the 1x1 kernel to 3x3."""
        if self.conv is not None:
            return
        self.conv1.fold()
        self.conv2.fold()
        wide, narrow, factor = self.conv1.conv, self.conv2.conv, 1.0 if self.alpha is None else self.alpha
        assert wide.bias is not None and narrow.bias is not None
        wide.weight += factor * F.pad(narrow.weight, (1, 1, 1, 1))
        wide.bias += factor * narrow.bias
        self.conv = wide
        del self.conv1, self.conv2
        self.alpha = None


class Focus(nn.Module):
    """Moves every second pixel into channels ([N, 3, H, W] -> [N, 12, H/2, W/2]), then Conv: the stem of early YOLOv5."""

    def __init__(
        self, in_channels: int, out: int, kernel: int = 1, stride: int = 1, padding: int | None = None
    ) -> None:
        super().__init__()
        self.conv = Conv(4 * in_channels, out, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = x[:, :, ::2], x[:, :, 1::2]
        y: Tensor = self.conv(
            torch.cat([top[..., ::2], bottom[..., ::2], top[..., 1::2], bottom[..., 1::2]], 1)
        )
        return y


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution, added to the input if the channels are equal (arXiv:1512.03385)."""

    def __init__(self, in_channels: int, out: int, shortcut: bool = True, *, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(out * expansion)
        self.cv1 = Conv(in_channels, hidden, 1)
        self.cv2 = Conv(hidden, out, 3)
        self.add = shortcut and in_channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    """Cross-stage partial block: one branch with bottlenecks, one without (arXiv:1911.11929)."""

    def __init__(self, in_channels: int, out: int, shortcut: bool = True, *, repeats: int = 1) -> None:
        super().__init__()
        hidden = out // 2
        self.cv1 = Conv(in_channels, hidden, 1)
        self.cv2 = Conv(in_channels, hidden, 1)
        self.cv3 = Conv(2 * hidden, out, 1)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, expansion=1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))
        return y


class SPP(nn.Module):
    """Concatenates max pools of several windows (arXiv:1406.4729)."""

    def __init__(self, in_channels: int, out: int, kernels: tuple[int, ...] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.kernels = (kernels,) if isinstance(kernels, int) else kernels
        self.cv1 = Conv(in_channels, hidden, 1)
        self.cv2 = Conv(hidden * (len(self.kernels) + 1), out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        y: Tensor = self.cv2(torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in self.kernels)], 1))
        return y


class SPPF(nn.Module):
    """SPP with windows k, 2k - 1, 3k - 2 as a chain of three k-pools."""

    def __init__(self, in_channels: int, out: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.kernel = kernel
        self.cv1 = Conv(in_channels, hidden, 1)
        self.cv2 = Conv(4 * hidden, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [self.cv1(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], self.kernel, 1, self.kernel // 2))
        y: Tensor = self.cv2(torch.cat(pooled, 1))
        return y


class Upsample(nn.Module):
    """Repeats every pixel twice in both directions (nearest neighbour, x 2).

    The backward pass of ``F.interpolate`` adds in no fixed order on GPUs and is slow on CPUs. Here a row of pixels is
    concatenated with itself along channels, which in NHWC memory repeats each pixel.
    """

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        nhwc = x.permute(0, 2, 3, 1)
        wide = torch.cat([nhwc, nhwc], 3).view(n, h, 2 * w, c)
        return torch.cat([wide, wide], 2).view(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)

    def for_export(self, lowest: float) -> nn.Module:
        """Return torch's own module; this one is made for training."""
        return nn.Upsample(scale_factor=2.0, mode="nearest")


def conv_of_doubled(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return ``conv(Upsample()(x))`` of a 3x3 convolution with padding 1: [N, C, H, W] -> [N, D, 2H, 2W].

    It differs by rounding, in fp32 by about 1e-6 of the largest value.

    Doubling spreads the pixels, with zeros between them, and sums windows of 2x2. A convolution gives the same before that sum,
    where it skips the zeros: 9 multiply-adds for 4 pixels instead of 36. The backward pass needs the small map alone.
    """
    assert conv.bias is None
    spread = F.conv_transpose2d(x, conv.weight.transpose(0, 1).flip(2, 3), stride=2)  # [N, D, 2H + 1, 2W + 1]
    return F.avg_pool2d(spread, 2, stride=1, divisor_override=1)


def results(chain: Iterable[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the result of each module of a chain that begins with ``x``."""
    found = []
    for module in chain:
        x = module(x)
        found.append(x)
    return found


class Concat(nn.Module):
    """Concatenates maps along channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(maps, 1)


class Detect(nn.Module):
    """One 1x1 convolution per level: raw box, objectness and class values of A anchors per cell.

    Args:
        anchors_grid: [L][A] (width, height) in cells of the level.
        coefficients: further values of each anchor, behind those of the classes.
    """

    anchors: Tensor  # [L, A, 2] grid units, part of the state dict

    def __init__(
        self,
        in_channels: tuple[int, ...],
        nc: int,
        anchors_grid: list[list[tuple[float, float]]],
        coefficients: int = 0,
    ) -> None:
        super().__init__()
        self.nc = nc
        self.values_per_anchor = 5 + nc + coefficients
        self.anchors_per_cell = len(anchors_grid[0])
        self.register_buffer("anchors", torch.tensor(anchors_grid, dtype=torch.float32))
        self.m = nn.ModuleList(
            nn.Conv2d(c, self.anchors_per_cell * self.values_per_anchor, 1) for c in in_channels
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return views [N, A, H, W, 5 + C] of the convolutions' outputs, without a copy."""
        raws = []
        for conv, x in zip(self.m, maps, strict=True):
            y = conv(x).unflatten(1, (self.anchors_per_cell, self.values_per_anchor))  # [N, A, 5 + C, H, W]
            raws.append(y.permute(0, 1, 3, 4, 2))
        return raws


class Proto(nn.Module):
    """Prototypes of masks at twice the resolution of a map (arXiv:1904.02689): [N, C, H, W] -> [N, D, 2H, 2W].

    A training on CPUs computes the doubled map and its convolution as one (``conv_of_doubled``), which halves their time.
    Elsewhere the layers are the published ones: other processors are not measured.
    """

    def __init__(self, in_channels: int, hidden: int, out: int) -> None:
        super().__init__()
        self.cv1 = Conv(in_channels, hidden, 3)
        self.upsample = Upsample()
        self.cv2 = Conv(hidden, hidden, 3)
        self.cv3 = Conv(hidden, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        if self.training and is_host(x.device):
            x = F.silu(self.cv2.bn(conv_of_doubled(x, self.cv2.conv)))
        else:
            x = self.cv2(self.upsample(x))
        y: Tensor = self.cv3(x)
        return y


class Segment(Detect):
    """Detect, with coefficients of D prototypes for each anchor: its mask is their product (arXiv:1904.02689).

    Args:
        prototypes: D.
        channels: of the layers before the prototypes.
    """

    def __init__(
        self,
        in_channels: tuple[int, ...],
        nc: int,
        anchors_grid: list[list[tuple[float, float]]],
        prototypes: int,
        channels: int,
    ) -> None:
        super().__init__(in_channels, nc, anchors_grid, prototypes)
        self.proto = Proto(in_channels[0], channels, prototypes)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return views [N, A, H, W, 5 + C + D] of each level, and the prototypes [N, D, h, w] of the first map."""
        return [*super().forward(maps), self.proto(maps[0])]
