"""PP-YOLOE's loss (arXiv:2203.16250) as sums: class (varifocal), box (GIoU) and distances (distribution focal).

N images, G labels of the image that has most, T = N G labels, L levels, R cells of all levels, M matched cells,
C classes, B bins of a distance. Cells and labels are numbered as in ``assign``.

The divisor of all terms is the sum of the scores of a step's matches. It depends on predictions, so it comes with the
sums. Parity (value and gradient): tests/parity/test_ppyoloe_loss_parity.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from yolofleet.data.geometry.boxes import xyxy_from_cxcywh
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.losses.assign import (
    Grid,
    Matches,
    Pairs,
    atss,
    iou_pairs,
    overlap_pairs,
    pairs_inside,
    pick,
    task_aligned,
)
from yolofleet.families.losses.loss import Key
from yolofleet.families.ppyoloe.network import distances_cells
from yolofleet.support.devices import is_host, to_device

if TYPE_CHECKING:
    from yolofleet.families.networks.detector import Detector
    from yolofleet.families.ppyoloe.hyperparameters import PpyoloeHyperparameters

NEGATIVE_WEIGHT = 0.75  # alpha of the varifocal loss; its gamma is 2
FARTHEST_GAP = 0.01  # a target distance is at most the last bin minus this, so that it lies between two bins


@dataclass(frozen=True)
class Targets:
    """The part of a micro-batch's assignment that does not depend on predictions."""

    grid: Grid
    boxes_xyxy_px: np.ndarray  # float32 [N, G, 4]; zeros where an image has fewer labels
    classes: np.ndarray  # int64 [T]
    atss_cells: np.ndarray  # int64 [M], in order
    atss_labels: np.ndarray  # int64 [M]
    pairs: Pairs
    counts: np.ndarray  # int64 [3]: labels, for each term


class PpyoloeLoss:
    """``sum_t(gains[t] * sums[t]) / max(divisor, 1)`` is the loss of a step.

    Args:
        strides: px per cell of each level, in the order of the head (coarsest first).
        cls_gain, iou_gain, dfl_gain: weights of the terms.
        assigner_switch: fraction of the run after which cells are assigned by task alignment instead of ATSS.
    """

    terms = ("cls", "iou", "dfl")
    times_images = False
    predicted_divisor = True

    def __init__(
        self,
        *,
        strides: Sequence[int],
        cls_gain: float = 1.0,
        iou_gain: float = 2.5,
        dfl_gain: float = 0.5,
        assigner_switch: float = 1 / 3,
    ) -> None:
        self.strides = tuple(int(stride) for stride in strides)
        self.gains = torch.tensor([cls_gain, iou_gain, dfl_gain])
        self.assigner_switch = assigner_switch
        self.is_aligned = assigner_switch <= 0

    def at(self, progress: float) -> PpyoloeLoss:
        """Return the loss at this fraction of the run (epoch / epochs)."""
        loss = copy.copy(self)
        loss.is_aligned = progress >= self.assigner_switch
        return loss

    def match(
        self, labels: Shapes, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()
    ) -> Targets:
        """Return the part of the assignment that does not depend on predictions, for both assigners.

        Args:
            images: number of images of the micro-batch, N.
            size_hw: px, a multiple of every stride.
        """
        grid = Grid(images, size_hw, self.strides)
        labels = labels.rows(np.argsort(labels.image, kind="stable"))
        image = labels.image
        of_image = np.bincount(image, minlength=images)  # [N]
        place = image, np.arange(len(labels)) - (np.cumsum(of_image) - of_image)[image]
        most = max(1, of_image.max(initial=0))
        boxes = np.zeros((images, most, 4), np.float32)
        height, width = size_hw
        boxes[place] = xyxy_from_cxcywh(labels.boxes * np.array([width, height] * 2, np.float32))
        classes = np.zeros((images, most), np.int64)
        classes[place] = labels.classes
        cells, owners = atss(boxes, grid)
        return Targets(
            grid=grid,
            boxes_xyxy_px=boxes,
            classes=classes.reshape(-1),
            atss_cells=cells,
            atss_labels=owners,
            pairs=pairs_inside(boxes, grid),
            counts=np.full(3, len(labels), np.int64),
        )

    def assign(self, raws: Sequence[Tensor], targets: Targets) -> Matches:
        """Return the matches of the current assigner, without gradient. ``raws`` as in :meth:`sums`.

        Host synchronisation: see :func:`task_aligned`.
        """
        logits, distances = _rows(raws)
        grid, device = targets.grid, logits[0].device
        assert [len(level) for level in logits] == grid.sizes, "targets were made for another size"
        centres, strides = grid.centres_px(device)  # [R, 2], [R, 1]
        boxes, classes = _on(device, targets.boxes_xyxy_px, targets.classes)
        with torch.no_grad():
            if self.is_aligned:
                reach = torch.cat([distances_cells(level) for level in distances])  # [R, 4]
                predicted = _around(centres, reach * strides)
                return task_aligned(targets.pairs, boxes, classes, predicted, logits, grid)
            cells, labels = _on(device, targets.atss_cells, targets.atss_labels)
            sizes = tuple(np.diff(np.searchsorted(targets.atss_cells, grid.borders)).tolist())
            reach = distances_cells(pick(distances, cells, sizes))  # [M, 4]
            predicted = _around(centres[cells], reach * strides[cells])
            return Matches(cells, labels, sizes, iou_pairs(boxes.flatten(0, 1)[labels], predicted))

    def sums(self, raws: Sequence[Tensor], targets: Targets) -> Tensor:
        """Return [4] float32: the three terms, differentiable, and this micro-batch's part of the divisor (>= 0).

        Args:
            raws: for each level class logits [N, H, W, C], then distance logits [N, H, W, 4 B] (left, top, right,
                bottom, in strides).
        """
        matches = self.assign(raws, targets)
        logits, distances = _rows(raws)
        device = logits[0].device
        boxes, classes = _on(device, targets.boxes_xyxy_px, targets.classes)
        # [M, 2], [M, 1]
        centres, strides = (table[matches.cells] for table in targets.grid.centres_px(device))

        points, wanted = centres / strides, boxes.flatten(0, 1)[matches.labels] / strides
        # no cell is picked twice, so the backward pass has no sum whose order could vary
        picked = pick(distances, matches.cells, matches.sizes).float()  # [M, 4 B]
        iou = (1 - _giou_pairs(_around(points, distances_cells(picked)), wanted)) * matches.scores
        dfl = distribution_focal(picked, points, wanted) * matches.scores

        by_level = (
            part.split(matches.sizes) for part in (matches.cells, classes[matches.labels], matches.scores)
        )
        cls = [
            _varifocal(level, cells - border, names, scores)
            for level, border, cells, names, scores in zip(
                logits, targets.grid.borders[:-1], *by_level, strict=True
            )
        ]
        return torch.stack((torch.stack(cls).sum(), iou.sum(), dfl.sum(), matches.scores.sum()))


class _Varifocal(torch.autograd.Function):
    """Computes a level's sum from (logits [R, C], matched rows [m], their classes [m], their scores [m]).

    Varifocal loss (arXiv:2008.13367) with probability p: alpha p^2 times the cross entropy with 0 everywhere, but score
    times the cross entropy with the score at matched classes. Gradients flow through p^2, as in PP-YOLOE. The gradient
    is written by hand because autograd allocates many arrays of this size: 3 x the time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
        x = logits.float().contiguous()
        slopes = torch.empty_like(x)
        # on a CPU in parts that stay in its cache
        part = max(1, 2**18 // x.shape[1] if is_host(x.device) else len(x))
        sums = []
        for values, out in zip(x.split(part), slopes.split(part), strict=True):
            losses, slope = _negatives(values)
            out.copy_(slope)
            sums.append(losses.sum())
        at = rows * x.shape[1] + classes
        matched = x.view(-1)[at]
        positives = scores * (F.softplus(matched) - scores * matched)
        slopes.view(-1)[at] = scores * (matched.sigmoid() - scores)
        ctx.save_for_backward(slopes)
        ctx.dtype = logits.dtype
        return torch.stack(sums).sum() + (positives - _negatives(matched)[0]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad).to(ctx.dtype), None, None, None


_varifocal: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _Varifocal.apply


def _rows(raws: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the class logits [R of the level, C] and distance logits [R of the level, 4 B] of each level."""
    rows = [raw.flatten(0, -2) for raw in raws]
    return rows[0::2], rows[1::2]


def _on(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    return [to_device(torch.from_numpy(array), device) for array in arrays]


def _negatives(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss, its derivative) of each logit for the target 0."""
    probability = logits.sigmoid()
    entropy = F.softplus(logits)  # -log(1 - p)
    weight = probability.square().mul_(NEGATIVE_WEIGHT)
    slope = torch.addcmul(probability, 1 - probability, entropy, value=2).mul_(weight)
    return entropy.mul_(weight), slope


def _around(points: Tensor, distances_ltrb: Tensor) -> Tensor:
    """Return corners [m, 4] of the boxes with these distances from points [m, 2] to their sides."""
    return torch.cat((points - distances_ltrb[:, :2], points + distances_ltrb[:, 2:]), 1)


def _giou_pairs(pred_xyxy: Tensor, true_xyxy: Tensor, eps: float = 1e-10) -> Tensor:
    """Return the generalised IoU (arXiv:1902.09630) of matched boxes [m, 4] in the same units: [m] in (-1, 1]."""
    intersection, union = overlap_pairs(pred_xyxy, true_xyxy)
    hull = torch.maximum(pred_xyxy[:, 2:], true_xyxy[:, 2:]) - torch.minimum(
        pred_xyxy[:, :2], true_xyxy[:, :2]
    )
    hull_area = hull[:, 0] * hull[:, 1] + eps
    union = union + eps
    return intersection / union - (hull_area - union) / hull_area


def distribution_focal(distances: Tensor, points: Tensor, true_xyxy: Tensor) -> Tensor:
    """Return the distribution focal loss (arXiv:2006.04388), mean of the four sides: [m].

    Args:
        distances: [m, 4 B] logits; gradients flow.
        points: [m, 2] cell centres, in strides.
        true_xyxy: [m, 4] in strides.
    """
    bins = distances.shape[1] // 4
    wanted = torch.cat((points - true_xyxy[:, :2], true_xyxy[:, 2:] - points), 1)
    wanted = wanted.clamp(0, bins - 1 - FARTHEST_GAP)[..., None]  # [m, 4, 1]
    # the two bins beside the distance share the weight; the nearer bin gets more
    weights = (1 - (torch.arange(float(bins), device=distances.device) - wanted).abs()).clamp(min=0)
    by_side: Tensor = distances.unflatten(1, (4, bins))
    loss: Tensor = -(weights * by_side.log_softmax(-1)).sum(-1).mean(-1)
    return loss


def ppyoloe_loss(model: Detector, recipe: PpyoloeHyperparameters, img: int) -> PpyoloeLoss:
    """Return the loss of a network."""
    return PpyoloeLoss(
        strides=model.strides,
        cls_gain=recipe.cls_gain,
        iou_gain=recipe.iou_gain,
        dfl_gain=recipe.dfl_gain,
        assigner_switch=recipe.assigner_switch,
    )
