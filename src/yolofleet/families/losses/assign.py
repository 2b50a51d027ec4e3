"""Assign labels to the cells of a dense head: ATSS and task-aligned assignment.

N images, G labels of the image that has most, T = N G labels (label t is in image t // G; boxes of zeros pad images
with fewer labels and contain no cell), L levels, R cells of all levels, P pairs of a label and a cell inside it,
M matches, C classes. Cells are numbered level after level in the head's order, then by image, y, x.

Both rules assign a cell to one label at most, and take the first of equal candidates. ATSS needs only labels, so loader
processes run it in numpy. Task alignment needs predictions; loader processes prepare the pairs that it chooses from.

Parity: tests/parity/test_ppyoloe_loss_parity.py. Comparison with a direct form of the rules:
tests/unit/losses/test_ppyoloe_loss.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from yolofleet.data.geometry.table import ranges
from yolofleet.support.devices import to_device

ATSS_NEAREST = 9  # candidate cells of each level
ANCHOR_STRIDES = 5  # side, in strides, of the square anchor of a cell in ATSS
ALIGNED_BEST = 13  # cells of each label in task alignment
SCORE_POWER, IOU_POWER = 1, 6


@dataclass(frozen=True)
class Grid:
    """The cells of a micro-batch. Strides are in pixels, in the order of the head's levels."""

    images: int
    size_hw: tuple[int, int]
    strides: tuple[int, ...]

    @property
    def shapes_hw(self) -> list[tuple[int, int]]:
        """Rows and columns of each level."""
        height, width = self.size_hw
        return [(height // stride, width // stride) for stride in self.strides]

    @property
    def sizes(self) -> list[int]:
        """Number of cells of each level, over all images."""
        return [self.images * height * width for height, width in self.shapes_hw]

    @property
    def borders(self) -> list[int]:
        """[L + 1] the number of the first cell of each level, then R."""
        return [0, *np.cumsum(self.sizes).tolist()]

    def centres_px(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ([R, 2] x, y of each cell's centre, [R, 1] its stride), float32 px."""
        centres, strides = [], []
        for (height, width), stride in zip(self.shapes_hw, self.strides, strict=True):
            y, x = ((torch.arange(n, device=device) + 0.5) * stride for n in (height, width))
            points = torch.stack((x.expand(height, width), y[:, None].expand(height, width)), -1)
            centres.append(points.expand(self.images, height, width, 2).reshape(-1, 2))
            strides.append(torch.full((len(centres[-1]), 1), float(stride), device=device))
        return torch.cat(centres), torch.cat(strides)


@dataclass(frozen=True)
class Pairs:
    """All pairs of a label and a cell whose centre is inside it, sorted by level, label, y, x."""

    cells: np.ndarray  # int32 [P]
    labels: np.ndarray  # int32 [P]
    sizes: tuple[int, ...]  # pairs of each level
    # int64 [S]: rows of each label's ALIGNED_BEST best pairs after a sort by label and merit
    best: np.ndarray


@dataclass(frozen=True)
class Matches:
    """Cells with an assigned label, in order of cell, without duplicates."""

    cells: Tensor  # int64 [M]
    labels: Tensor  # int64 [M]
    sizes: tuple[int, ...]  # matches of each level
    scores: Tensor  # float32 [M] in 0..1: target of the cell for the label's class


def atss(boxes_xyxy_px: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return cells int64 [M] in order, and their labels, by adaptive training sample selection (arXiv:1912.02424).

    Candidates of a label are the nearest cells of each level. A label takes those whose IoU is above
    mean + standard deviation and whose centre is inside it. A cell that several labels take goes to the label of its
    image with the highest IoU, even if that label did not take it (as in PP-YOLOE).

    Args:
        boxes_xyxy_px: float32 [N, G, 4].
    """
    per_image = boxes_xyxy_px.shape[1]
    sides = boxes_xyxy_px[..., 2:] - boxes_xyxy_px[..., :2]
    real = np.flatnonzero((sides > 0).all(-1))  # labels, without padding
    boxes = boxes_xyxy_px.reshape(-1, 1, 4)[real]  # [t, 1, 4]
    image = real // per_image
    levels = [_nearest(boxes, image, grid, level) for level in range(len(grid.strides))]
    # [t, k of all levels, ...]
    cells, centres, anchors = (np.concatenate(parts, 1) for parts in zip(*levels, strict=True))

    ious = _iou_numpy(boxes, anchors)  # [t, k of all levels]
    is_above = ious > ious.mean(1, keepdims=True) + ious.std(1, ddof=1, keepdims=True)
    is_inside = ((centres > boxes[..., :2]) & (centres < boxes[..., 2:])).all(-1)
    wanted = np.nonzero(is_above & is_inside)
    chosen, first, times = np.unique(cells[wanted], return_index=True, return_counts=True)
    labels, anchors = real[wanted[0][first]], anchors[wanted][first]

    contested = times > 1
    images = labels[contested] // per_image
    rivals = _iou_numpy(anchors[contested][:, None], boxes_xyxy_px[images])  # [contested, G]
    labels[contested] = images * per_image + rivals.argmax(1)
    return chosen, labels


def _nearest(
    boxes: np.ndarray, image: np.ndarray, grid: Grid, level: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the k cells of one level nearest to the centre of each box [t, 1, 4], nearest first.

    The search covers five columns and rows around the centre's own cell. That is enough: a row of that width already
    has nine cells, all nearer than the next column.

    Returns:
        Cells [t, k], their centres [t, k, 2] px, their anchors [t, k, 4] px.
    """
    stride, shape_hw = grid.strides[level], np.array(grid.shapes_hw[level])
    centre_yx = ((boxes[:, 0, :2] + boxes[:, 0, 2:]) / 2)[:, ::-1]  # [t, 2]
    span = np.minimum(shape_hw, ATSS_NEAREST + 2)
    first = np.clip((centre_yx // stride).astype(np.int64) - span // 2, 0, shape_hw - span)  # [t, 2]
    rows, columns = (first[:, axis, None] + np.arange(span[axis]) for axis in (0, 1))  # [t, span]
    away_y = _centres(rows, stride) - centre_yx[:, :1]
    away_x = _centres(columns, stride) - centre_yx[:, 1:]
    distance = np.sqrt(away_y[:, :, None] ** 2 + away_x[:, None] ** 2).reshape(len(boxes), span.prod())
    order = np.argsort(distance, axis=1, kind="stable")[:, :ATSS_NEAREST]  # [t, k]
    row, column = np.divmod(order, span[1])
    y, x = np.take_along_axis(rows, row, 1), np.take_along_axis(columns, column, 1)

    cells = grid.borders[level] + (image[:, None] * shape_hw[0] + y) * shape_hw[1] + x
    centres = _centres(np.stack((x, y), -1), stride)
    half = np.float32(ANCHOR_STRIDES * stride / 2)
    return cells, centres, np.concatenate((centres - half, centres + half), -1)


def pairs_inside(boxes_xyxy_px: np.ndarray, grid: Grid) -> Pairs:
    """Return all pairs of a label and a cell inside it. Box edges do not count as inside.

    Args:
        boxes_xyxy_px: float32 [N, G, 4].
    """
    boxes = boxes_xyxy_px.reshape(-1, 4)
    image = np.arange(len(boxes)) // boxes_xyxy_px.shape[1]
    cells, labels, counts = [], [], []
    for border, (height, width), stride in zip(grid.borders[:-1], grid.shapes_hw, grid.strides, strict=True):
        x, y = (_centres(np.arange(n), stride) for n in (width, height))
        left, right = np.searchsorted(x, boxes[:, 0], "right"), np.searchsorted(x, boxes[:, 2], "left")
        top, bottom = np.searchsorted(y, boxes[:, 1], "right"), np.searchsorted(y, boxes[:, 3], "left")
        columns = np.maximum(right - left, 0)
        counts.append(columns * np.maximum(bottom - top, 0))  # [T]
        label = np.repeat(np.arange(len(boxes)), counts[-1])
        row, column = np.divmod(ranges(0, counts[-1]), columns[label])
        cells.append(border + (image[label] * height + top[label] + row) * width + left[label] + column)
        labels.append(label)

    of_label = np.sum(counts, 0)  # [T]
    best = np.minimum(of_label, ALIGNED_BEST)
    return Pairs(
        cells=np.concatenate(cells).astype(np.int32),
        labels=np.concatenate(labels).astype(np.int32),
        sizes=tuple(len(part) for part in cells),
        best=ranges(np.cumsum(of_label) - of_label, best),
    )


def task_aligned(
    pairs: Pairs,
    boxes_xyxy_px: Tensor,
    classes: Tensor,
    predicted_xyxy_px: Tensor,
    logits: Sequence[Tensor],
    grid: Grid,
) -> Matches:
    """Return the matches by task alignment (arXiv:2108.07755): each label takes its cells of highest merit.

    The merit is probability x IoU^6. A cell that several labels take goes to the label of its image with the highest
    IoU, even if that label did not take it. Scores are merits, scaled so that each label's best cell gets the label's
    best IoU. Every cell inside a label has an IoU above 0, because a predicted box contains its cell's centre.

    Host synchronisation: three, for the number of matches, of contested cells, and of matches per level.

    Args:
        boxes_xyxy_px: [N, G, 4].
        classes: int64 [T].
        predicted_xyxy_px: [R, 4].
        logits: class logits of each level, [R of the level, C].
    """
    device = boxes_xyxy_px.device
    per_image = boxes_xyxy_px.shape[1]
    boxes = boxes_xyxy_px.view(-1, 4)
    flat_logits = [level.flatten() for level in logits]
    nc = logits[0].shape[1]

    def merit(cells: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        probability = pick(flat_logits, cells * nc + classes[labels], sizes).float().sigmoid()
        iou = iou_pairs(boxes[labels], predicted_xyxy_px[cells])
        return probability**SCORE_POWER * iou**IOU_POWER, iou

    cells, labels, places = (
        to_device(torch.from_numpy(array), device).long() for array in (pairs.cells, pairs.labels, pairs.best)
    )
    merits, _ = merit(cells, labels, pairs.sizes)
    # By label, then by falling merit (>= 0): one stable sort of integers, because the bits of floats >= 0, read as integers,
    # sort like the floats.
    by_label = ((labels << 32) - merits.view(torch.int32).long()).argsort(stable=True)
    best = by_label[places]  # [S]

    wanted, order = cells[best].sort(stable=True)
    chosen, times = torch.unique_consecutive(wanted, return_counts=True)  # [M]
    owners = labels[best][order][times.cumsum(0) - times]
    contested = (times > 1).nonzero().flatten()
    images = owners[contested] // per_image
    rivals = iou_pairs(boxes_xyxy_px[images], predicted_xyxy_px[chosen[contested], None])  # [contested, G]
    owners[contested] = images * per_image + rivals.argmax(1)

    borders = to_device(torch.tensor(grid.borders), device)
    sizes = tuple(torch.searchsorted(chosen, borders).diff().tolist())
    merits, ious = merit(chosen, owners, sizes)
    score = merits / (_highest(merits, owners, len(boxes)) + 1e-9) * _highest(ious, owners, len(boxes))
    return Matches(chosen, owners, sizes, score)


def pick(levels: Sequence[Tensor], rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``torch.cat(levels)[rows]`` without the copy; ``rows`` are sorted by level, ``sizes[l]`` of level l."""
    picked, border = [], 0
    for level, part in zip(levels, rows.split(sizes), strict=True):
        picked.append(level.index_select(0, part - border))
        border += len(level)
    return torch.cat(picked)


def overlap_pairs(a_xyxy: Tensor, b_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    """Return (intersection, union) of boxes [..., 4] in the same units; leading dimensions broadcast."""
    a_low, a_high, b_low, b_high = a_xyxy[..., :2], a_xyxy[..., 2:], b_xyxy[..., :2], b_xyxy[..., 2:]
    shared = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0)
    a_size, b_size = (a_high - a_low).clamp(min=0), (b_high - b_low).clamp(min=0)
    intersection = shared[..., 0] * shared[..., 1]
    return intersection, a_size[..., 0] * a_size[..., 1] + b_size[..., 0] * b_size[..., 1] - intersection


def iou_pairs(a_xyxy: Tensor, b_xyxy: Tensor) -> Tensor:
    """Return the IoU in 0..1 of boxes [..., 4] in the same units; empty boxes give 0."""
    intersection, union = overlap_pairs(a_xyxy, b_xyxy)
    return intersection / (union + 1e-9)


def _iou_numpy(a_xyxy: np.ndarray, b_xyxy: np.ndarray) -> np.ndarray:
    """Return the IoU of numpy arrays, as :func:`iou_pairs`."""
    shared = np.minimum(a_xyxy[..., 2:], b_xyxy[..., 2:]) - np.maximum(a_xyxy[..., :2], b_xyxy[..., :2])
    intersection = shared.clip(min=0).prod(-1)
    a_area, b_area = ((boxes[..., 2:] - boxes[..., :2]).clip(min=0).prod(-1) for boxes in (a_xyxy, b_xyxy))
    iou: np.ndarray = intersection / (a_area + b_area - intersection + np.float32(1e-10))
    return iou


def _centres(places: np.ndarray, stride: int) -> np.ndarray:
    """Return the centres of columns or rows, float32 px."""
    return ((places + 0.5) * stride).astype(np.float32)


def _highest(values: Tensor, labels: Tensor, total: int) -> Tensor:
    """Return for each row the highest of its label's values (>= 0)."""
    return values.new_zeros(total).scatter_reduce_(0, labels, values, "amax")[labels]
