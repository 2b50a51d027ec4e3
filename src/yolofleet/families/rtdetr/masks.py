"""The head of masks of both families, in the form of RF-DETR's (arXiv:2511.09554): the product of queries and a fine map.

N images, L decoder layers, T queries with those of the denoising, W channels of the decoder, D channels of the head.
tests/parity/test_detr_masks_parity.py compares it with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.raws import DetrRaws, MaskRaws, MaskTrainingRaws, TrainingRaws

EPS = 1e-6  # of the norm in a block


class Enlarge(nn.Module):
    """Doubles the sides of a map [N, C, H, W], bilinear, centres of pixels at halves, edges repeated.

    The backward pass of ``F.interpolate`` adds in no fixed order on GPUs. The result has channels-last memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        for axis in (1, 2):
            n = x.shape[axis]
            before = torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 0, n - 1)], axis)
            after = torch.cat([x.narrow(axis, 1, n - 1), x.narrow(axis, n - 1, 1)], axis)
            near = 0.75 * x
            x = torch.stack([near + 0.25 * before, near + 0.25 * after], axis + 1).flatten(axis, axis + 1)
        return x.permute(0, 3, 1, 2)

    def for_export(self, lowest: float) -> nn.Module:
        """Return torch's own module; this one is made for training."""
        return nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=False)


class MaskBlock(nn.Module):
    """Adds to a map a depthwise 3x3 convolution, normalised over channels, and a linear layer with GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        added = F.gelu(self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1))))
        return x + added.permute(0, 3, 1, 2)


class MaskHead(nn.Module):
    """The logit of a query's mask is the product of its vector c and the map x: ``c . mix(x) + bias``.

    ``mix`` is a 1x1 convolution in the original. Here it goes into the vectors, ``(c mix) . x``, which is the same and saves a
    convolution of the large map, and its memory, for each layer.

    Args:
        channels: of the map of stride 8.
    """

    def __init__(self, channels: int, description: DetrDescription) -> None:
        super().__init__()
        width, queries = description.mask_width, description.decoder_width
        self.used_layers = description.used_layers
        self.project = nn.Conv2d(channels, width, 1)
        self.enlarge = Enlarge()
        self.blocks = nn.ModuleList(MaskBlock(width) for _ in range(description.layers))
        self.queries = nn.Identity() if queries == width else nn.Linear(queries, width)
        self.norm = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.vectors = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.empty(1))

    def forward(
        self, x: Tensor, states: Sequence[Tensor], raws: DetrRaws | TrainingRaws
    ) -> MaskRaws | MaskTrainingRaws:
        """Return the raw predictions with masks.

        Args:
            x: map [N, C, H / 8, W / 8].
            states: queries [N, T, W] after each layer; in a prediction those of the last layer that it needs.
            raws: of the boxes.
        """
        x = self.enlarge(self.project(x))
        is_full = not isinstance(raws, DetrRaws)
        maps = []
        for block in self.blocks if is_full else self.blocks[: self.used_layers]:
            maps.append(x := block(x))
        found = [self.coefficients(state) for state in states]
        if isinstance(raws, DetrRaws):
            return MaskRaws(*raws, found[-1], maps[-1])
        return MaskTrainingRaws(raws, torch.stack(found, 1), tuple(maps))

    def coefficients(self, queries: Tensor) -> Tensor:
        """Return the factors of the map's channels, and as the last one the summand of all cells: [N, T, D + 1]."""
        q = self.queries(queries)
        vectors = self.vectors(q + self.linear2(F.gelu(self.linear1(self.norm(q)))))
        weight = torch.cat([self.mix.weight.t(), self.mix.bias[None]])
        return F.linear(vectors, weight, F.pad(self.bias, (len(weight) - 1, 0)))

    def fold(self) -> None:
        """Drop the blocks of layers that only the training needs."""
        self.blocks = self.blocks[: self.used_layers]

    def draw_initial(self, generator: torch.Generator) -> None:
        self.bias.zero_()


def decoded(raws: MaskRaws) -> tuple[Tensor, Tensor]:
    """Return coefficients [N, Q, D + 1] and prototypes [N, D + 1, h, w], float32. The last prototype is 1 everywhere."""
    prototypes = raws.prototypes.float()
    return raws.coefficients.float(), torch.cat([prototypes, torch.ones_like(prototypes[:, :1])], 1)
