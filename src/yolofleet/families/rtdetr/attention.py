"""Deformable attention (arXiv:2010.04159, with RT-DETRv2's number of points for each level, arXiv:2407.17140).

N images, Q queries, P points of a head on all levels, S cells of all levels, W channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rtdetr.blocks import xavier
from yolofleet.families.rtdetr.description import HEADS
from yolofleet.support.devices import is_host, to_device

NARROW = 32  # channels of a head; below, grid_sample's backward pass is faster than embedding_bag's on CPUs
OFFSET_SCALE = 0.5  # offsets of a level's n points are in units of the box's size x 0.5 / n


class DeformableAttention(nn.Module):
    """Each head of a query samples a few points around its box and adds them with learned weights.

    Args:
        points: of each level.
        projects: there are linear layers before and after the sampling.
    """

    def __init__(self, width: int, points: Sequence[int], *, projects: bool, heads: int = HEADS) -> None:
        super().__init__()
        self.points, self.heads = tuple(points), heads
        self.sampling_offsets = nn.Linear(width, 2 * heads * sum(points))
        self.attention_weights = nn.Linear(width, heads * sum(points))
        self.value_proj: nn.Module = nn.Linear(width, width) if projects else nn.Identity()
        self.output_proj: nn.Module = nn.Linear(width, width) if projects else nn.Identity()
        self.is_exported = False

    def forward(
        self, query: Tensor, boxes: Tensor, memory: Tensor, sizes_hw: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return [N, Q, W].

        Args:
            query: [N, Q, W].
            boxes: float32 [N, Q, 4] cx, cy, w, h in 0..1.
            memory: [N, S, W] cells of the levels, one after the other.
            sizes_hw: of each level.
        """
        # float32 from here on: in 16 bits, places in a fine map would be off by a quarter of a cell
        (n, queries, width), points, heads = query.shape, sum(self.points), self.heads
        offsets = self.sampling_offsets(query).float().reshape(n, queries, heads, points, 2)
        weights = self.attention_weights(query).float().reshape(n, queries, heads, points).softmax(3)
        values = self.value_proj(memory).float()
        values = values.reshape(n, memory.shape[1], heads, width // heads)
        centres, sides = boxes[:, :, None, None].split(2, 4)
        scales = torch.tensor([[OFFSET_SCALE / count] for count in self.points for _ in range(count)])
        places = centres + offsets * to_device(scales, query.device) * sides
        by_grid = self.is_exported or (is_host(query.device) and width // heads < NARROW)
        sample = _sampled_by_grid if by_grid else _sampled
        levels = [(*size_hw, count) for size_hw, count in zip(sizes_hw, self.points, strict=True)]
        sampled: Tensor = self.output_proj(sample(values, places, weights, levels).to(query.dtype))
        return sampled

    def for_export(self, lowest: float) -> nn.Module:
        """Sample by ``grid_sample``, which every runtime has."""
        self.is_exported = True
        return self

    def initialise(self, generator: torch.Generator) -> None:
        """Let the points of each head begin on a ray of its own, with equal weights."""
        angles = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        rays = torch.stack([angles.cos(), angles.sin()], 1)
        rays = rays / rays.abs().amax(1, keepdim=True)  # [heads, 2] on a square
        distances = torch.cat([torch.arange(1, count + 1) for count in self.points])  # [P]
        self.sampling_offsets.weight.zero_()
        self.sampling_offsets.bias.copy_((rays[:, None] * distances[:, None]).flatten())
        self.attention_weights.weight.zero_()
        self.attention_weights.bias.zero_()
        for layer in (self.value_proj, self.output_proj):
            if isinstance(layer, nn.Linear):
                xavier([layer.weight], generator)
                layer.bias.zero_()


def _sampled(
    values: Tensor, places: Tensor, shares: Tensor, levels: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Return the weighted sums of bilinear samples, [N, Q, W]; cells outside the map are zeros.

    One ``embedding_bag`` reads the four cells of all points and adds them, so no copy of them exists. Its backward pass sorts
    the cells and adds in that order, so it is deterministic on GPUs as well, unlike that of ``grid_sample``. All levels and
    both axes are computed together, because each operation is a kernel.

    Args:
        values: [N, S, heads, W / heads].
        places: [N, Q, heads, P, 2] x, y in 0..1.
        shares: [N, Q, heads, P].
        levels: height and width of each, and its points.
    """
    n, cells, heads, width = values.shape
    queries, device, of_points, start = shares.shape[1], values.device, [], 0
    for height, across, count in levels:
        of_points += [(across, height, start)] * count
        start += height * across
    # [P, 2], [P, 1]
    extents, starts = to_device(torch.tensor(of_points, dtype=torch.int32), device).split([2, 1], 1)
    beside, parts = _neighbours(places * extents - 0.5, extents)  # [N, Q, heads, P, axes, 2]
    (columns, rows), (column_shares, row_shares) = beside.unbind(4), parts.unbind(4)
    across = extents[:, :1, None]  # [P, 1, 1]
    index = rows[..., None] * across + columns[..., None, :] + starts[:, None]  # [N, Q, heads, P, 2, 2]
    weight = (shares[..., None] * row_shares)[..., None] * column_shares[..., None, :]
    first, head = (torch.arange(count, device=device, dtype=torch.int32) for count in (n, heads))
    index = (index.flatten(3) + first[:, None, None, None] * cells) * heads + head[:, None]
    sums = F.embedding_bag(
        index.flatten(0, 2),
        values.reshape(-1, width),
        per_sample_weights=weight.flatten(3).flatten(0, 2),
        mode="sum",
    )
    return sums.view(n, queries, heads * width)


def _neighbours(places: Tensor, extents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two cells beside each place on each axis, int32 [..., axes, 2], and their shares.

    The share of a cell outside the axis is 0. A place that is not a number gets cell 0 and its share is not a number, so
    a diverged step fails by its gradient instead of an invalid index.

    Args:
        places: [..., axes] in cells.
        extents: int32, cells of the axes.
    """
    low = places.detach().floor().nan_to_num(0)
    part = places - low
    cells = torch.stack([low, low + 1], -1)
    inside = torch.minimum(cells.clamp(min=0), (extents - 1)[..., None])
    return inside.int(), torch.stack([1 - part, part], -1) * (inside == cells)


def _sampled_by_grid(
    values: Tensor, places: Tensor, shares: Tensor, levels: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Return the same as :func:`_sampled`, by operators that ONNX has."""
    n, cells, heads, width = values.shape
    queries, every, parts, points = places.shape[1], places.shape[3], [], [count for _, _, count in levels]
    maps = values.permute(0, 2, 3, 1).reshape(n * heads, width, cells).split([h * w for h, w, _ in levels], 2)
    grids = (2 * places - 1).permute(0, 2, 1, 3, 4).reshape(n * heads, queries, every, 2).split(points, 2)
    by_level = shares.permute(0, 2, 1, 3).reshape(n * heads, 1, queries, every).split(points, 3)
    for (height, across, _), cells_of_map, grid, share in zip(levels, maps, grids, by_level, strict=True):
        image = cells_of_map.reshape(n * heads, width, height, across)
        # [N heads, W / heads, Q, points]
        seen = F.grid_sample(image, grid, "bilinear", "zeros", align_corners=False)
        parts.append((seen * share).sum(3))
    found: Tensor = reduce(torch.add, parts)
    return found.reshape(n, heads * width, queries).permute(0, 2, 1)
