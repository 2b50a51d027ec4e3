"""The hybrid encoder of both families (arXiv:2304.08069): attention on the coarsest map, then a path to finer maps and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.networks.blocks import Upsample
from yolofleet.families.rtdetr.blocks import ConvNorm, CspRep, SelfAttention, map_of, sine_position, tokens_of
from yolofleet.families.rtdetr.description import DetrDescription


class EncoderLayer(nn.Module):
    """Within one map, self-attention (AIFI) and a feed-forward network with GELU, each added to its input and normalised."""

    def __init__(self, width: int, feedforward: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width)
        self.linear1 = nn.Linear(width, feedforward)
        self.linear2 = nn.Linear(feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        x = tokens_of(x)
        position = sine_position(height, width, channels, x.device).to(x.dtype)
        x = self.norm1(x + self.self_attn(x, position))
        x = self.norm2(x + self.linear2(F.gelu(self.linear1(x))))
        return map_of(x, height, width)


class HybridEncoder(nn.Module):
    """Maps of the backbone to as many maps of the encoder's width, the finest first. It returns maps before them as they are.

    Subclasses replace the blocks by overriding ``lateral``, ``joined`` and ``down``.

    Args:
        in_channels: of the backbone's maps.
    """

    def __init__(self, in_channels: Sequence[int], description: DetrDescription) -> None:
        super().__init__()
        width, steps = description.width, range(len(in_channels) - 1)
        self.input_proj = nn.ModuleList(ConvNorm(channels, width) for channels in in_channels)
        attention = EncoderLayer(width, description.feedforward)
        self.encoder = nn.Sequential(nn.Sequential(OrderedDict(layers=nn.Sequential(attention))))
        self.lateral_convs = nn.ModuleList(self.lateral(width) for _ in steps)
        self.fpn_blocks = nn.ModuleList(self.joined(description) for _ in steps)
        self.downsample_convs = nn.ModuleList(self.down(width) for _ in steps)
        self.pan_blocks = nn.ModuleList(self.joined(description) for _ in steps)
        self.upsample = Upsample()

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = len(self.input_proj)
        others, maps = list(maps[:-levels]), maps[-levels:]
        maps = [project(x) for project, x in zip(self.input_proj, maps, strict=True)]
        coarse = [self.encoder(maps[-1])]  # the coarsest first
        for lateral, block, x in zip(self.lateral_convs, self.fpn_blocks, maps[-2::-1], strict=True):
            coarse[-1] = lateral(coarse[-1])
            coarse.append(block(torch.cat([self.upsample(coarse[-1]), x], 1)))
        fine = [coarse.pop()]
        for down, block in zip(self.downsample_convs, self.pan_blocks, strict=True):
            fine.append(block(torch.cat([down(fine[-1]), coarse.pop()], 1)))
        return others + fine

    def lateral(self, width: int) -> nn.Module:
        """Return the convolution of a map before it is enlarged."""
        return ConvNorm(width, width, activation=F.silu)

    def joined(self, description: DetrDescription) -> nn.Module:
        """Return the block of two maps."""
        width = description.width
        hidden = int(width * description.expansion)
        return CspRep(2 * width, width, round(3 * description.depth_multiple), hidden)

    def down(self, width: int) -> nn.Module:
        """Return the layer that halves the size of a map."""
        return ConvNorm(width, width, 3, 2, activation=F.silu)
