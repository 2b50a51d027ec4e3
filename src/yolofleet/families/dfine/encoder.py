"""D-FINE's encoder (arXiv:2410.13842): RT-DETR's with GELAN blocks (arXiv:2402.13616) and lighter downsampling."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rtdetr.blocks import ConvNorm, CspRep
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.encoder import HybridEncoder


class Gelan(nn.Module):
    """One half of the channels passes two cross-stage partial blocks; a convolution joins the results of all steps."""

    def __init__(self, in_channels: int, out: int, inner: int, repeats: int) -> None:
        super().__init__()
        self.cv1 = ConvNorm(in_channels, 2 * out, activation=F.silu)
        self.cv2, self.cv3 = (
            nn.Sequential(CspRep(before, inner, repeats, inner), ConvNorm(inner, inner, 3, activation=F.silu))
            for before in (out, inner)
        )
        self.cv4 = ConvNorm(2 * out + 2 * inner, out, activation=F.silu)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        first = self.cv2(x.chunk(2, 1)[1])
        y: Tensor = self.cv4(torch.cat([x, first, self.cv3(first)], 1))
        return y


class DfineEncoder(HybridEncoder):
    """The hybrid encoder with D-FINE's blocks."""

    def lateral(self, width: int) -> nn.Module:
        return ConvNorm(width, width)

    def joined(self, description: DetrDescription) -> nn.Module:
        width = description.width
        inner = max(round(description.expansion * width // 2), 1)
        return Gelan(2 * width, width, inner, round(3 * description.depth_multiple))

    def down(self, width: int) -> nn.Module:
        """Return a 1x1 convolution and a depthwise one of stride 2 (arXiv:2405.14458)."""
        depthwise = ConvNorm(width, width, 3, 2, width)
        return nn.Sequential(nn.Sequential(OrderedDict(cv1=ConvNorm(width, width), cv2=depthwise)))
