"""YOLOv5's loss as sums and counts: box (CIoU), objectness and class, each per level.

N images, L levels, A anchors per level, C classes, T labels, M matches, K cells of all levels. A *cell* is one
anchor at one grid position. Cells of a level are numbered in the memory order of a channels-last head: image, y, x,
anchor. The assignment needs only labels, so loader processes run ``match`` in numpy, and the counts of a whole step are
known before its forward pass.

The conversion of raw values to boxes is a parameter (``codings``), so Darknet's networks train with the same loss.

Parity (value and gradient): tests/parity/test_yolov5_loss.py. Sums and counts: tests/unit/losses/test_loss.py. One result on
every fleet: tests/multiprocess/test_contract.py; with other values of the recipe: test_recipe_on_every_fleet.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from yolofleet.data.geometry.boxes import BoxCoding, SquaredSigmoid, ciou_pairs_cxcywh
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.family import load
from yolofleet.families.losses.loss import Key
from yolofleet.families.networks.detector import AnchorDetector, Detector
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.support.devices import to_device
from yolofleet.support.errors import ConfigError

FOCAL_ALPHA = 0.25
# objectness weight of each level, finest first
BALANCE_3_LEVELS = (4.0, 1.0, 0.4)
BALANCE_DEEPER = (4.0, 1.0, 0.25, 0.06, 0.02)
# the label's own cell, then the left, top, right and bottom neighbour, if the label lies in that half of its cell
NEIGHBOURS_XY = np.array([[0, 0], [0.5, 0], [0, 0.5], [-0.5, 0], [0, -0.5]], dtype=np.float32)


@dataclass(frozen=True)
class Targets:
    """The cells that the labels of one micro-batch own; rows are sorted by level, neighbour, anchor, label."""

    matches: tuple[int, ...]  # L: rows of each level
    cells: np.ndarray  # int64 [M]: cell number within its level
    boxes_cxcywh: np.ndarray  # float32 [M, 4]: true box in grid units, relative to the cell's corner
    anchors_wh: np.ndarray  # float32 [M, 2]: grid units
    classes: np.ndarray  # int64 [M]
    winners: np.ndarray  # int64 [U]: the row that sets the objectness of each owned cell (its last one)
    winner_cells: np.ndarray  # int64 [U]: that cell, numbered through all levels; no duplicates
    counts: np.ndarray  # int64 [3 L], in the order of Yolov5Loss.terms


class Yolov5Loss:
    """``images * sum_t(gains[t] * sums[t] / max(counts[t], 1))`` is the loss of a step.

    Args:
        anchors_px: [L, A, 2] width and height.
        strides: px per grid unit of each level.
        nc: classes; with one class the class terms are 0.
        recipe: gains, ``anchor_t``, label smoothing, positive weights, focal gamma.
        img: training size, px; the objectness gain grows with its square.
        codings: conversion of raw values to boxes, for each level; None: YOLOv5's.
    """

    def __init__(
        self,
        *,
        anchors_px: Tensor,
        strides: Sequence[int],
        nc: int,
        recipe: Yolov5Hyperparameters,
        img: int,
        codings: Sequence[BoxCoding] | None = None,
    ) -> None:
        levels = len(strides)
        if levels > len(BALANCE_DEEPER):
            raise ConfigError(
                f"the model has {levels} detection levels; expected 1 to {len(BALANCE_DEEPER)}",
                hint="remove levels from the Detect row of the model description",
            )
        self.strides = tuple(int(stride) for stride in strides)
        anchors = anchors_px.detach().cpu().numpy().astype(np.float32)
        self.anchors_wh = anchors / np.array(self.strides, np.float32)[:, None, None]  # [L, A, 2] grid units
        self.nc, self.recipe = nc, recipe
        self.codings = tuple(codings) if codings else (SquaredSigmoid(),) * levels
        assert len(self.codings) == levels
        self.times_images, self.predicted_divisor = True, False
        self.terms = tuple(f"{term}/{level}" for term in ("box", "obj", "cls") for level in range(levels))
        balance = BALANCE_3_LEVELS if levels == 3 else BALANCE_DEEPER
        box = recipe.box * 3 / levels
        obj = recipe.obj * (img / 640) ** 2 * 3 / levels
        cls = recipe.cls * nc / 80 * 3 / levels
        self.gains = torch.tensor(
            [box] * levels + [obj * weight for weight in balance[:levels]] + [cls] * levels
        )

    def at(self, progress: float) -> Yolov5Loss:
        """Return this loss: it does not change during a run."""
        return self

    def match(
        self, labels: Shapes, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()
    ) -> Targets:
        """Assign labels to cells.

        A label owns every anchor whose side ratio is below ``anchor_t``, in its own cell and, if the box coding reaches
        beyond a cell, in up to two neighbours.

        Args:
            images: number of images of the micro-batch, N.
            size_hw: px, a multiple of every stride.
        """
        return self._matched(labels, images, size_hw)[0]

    def _matched(self, labels: Shapes, images: int, size_hw: tuple[int, int]) -> tuple[Targets, np.ndarray]:
        """Return what :meth:`match` does, and the label of each match, int64 [M]."""
        levels, anchors = self.anchors_wh.shape[:2]
        grid_wh = np.array([[size_hw[1] // s, size_hw[0] // s] for s in self.strides], np.int64)  # [L, 2]
        scale = np.concatenate((grid_wh, grid_wh), 1).astype(np.float32)
        boxes = labels.boxes[None] * scale[:, None]  # [L, T, 4] grid units

        with np.errstate(divide="ignore"):  # a label without width fits no anchor
            ratio = boxes[:, None, :, 2:] / self.anchors_wh[:, :, None]  # [L, A, T, 2]
            fits = np.maximum(ratio, 1 / ratio).max(-1) < self.recipe.anchor_t
        centre, from_end = boxes[..., :2], scale[:, None, :2] - boxes[..., :2]
        left_top = (centre % 1 < 0.5) & (centre > 1)  # [L, T, 2]
        right_bottom = (from_end % 1 < 0.5) & (from_end > 1)
        near = np.concatenate((np.ones_like(left_top[..., :1]), left_top, right_bottom), -1)  # [L, T, 5]
        near[..., 1:] &= np.array([coding.neighbours for coding in self.codings])[:, None, None]
        level, neighbour, anchor, label = np.nonzero(near.transpose(0, 2, 1)[:, :, None] & fits[:, None])

        box = boxes[level, label]  # [M, 4]
        grid = grid_wh[level]
        cell_xy = np.clip((box[:, :2] - NEIGHBOURS_XY[neighbour]).astype(np.int64), 0, grid - 1)
        box[:, :2] -= cell_xy
        image = labels.image[label]
        cells = ((image * grid[:, 1] + cell_xy[:, 1]) * grid[:, 0] + cell_xy[:, 0]) * anchors + anchor

        per_level = images * anchors * grid_wh.prod(1)  # [L] cells
        through_levels = (np.cumsum(per_level) - per_level)[level] + cells
        winner_cells, from_last = np.unique(through_levels[::-1], return_index=True)
        matches = np.bincount(level, minlength=levels)
        targets = Targets(
            matches=tuple(matches.tolist()),
            cells=cells,
            boxes_cxcywh=box,
            anchors_wh=self.anchors_wh[level, anchor],
            classes=labels.classes[label],
            winners=len(cells) - 1 - from_last,
            winner_cells=winner_cells,
            counts=np.concatenate((matches, per_level, matches * self.nc)).astype(np.int64),
        )
        return targets, label

    def sums(self, raws: Sequence[Tensor], targets: Targets) -> Tensor:
        """Return [3 L] float32 in the order of ``terms``, differentiable; a term without matches is exactly 0.

        Args:
            raws: per level [N, A, H, W, 5 + C]: x, y, w, h, objectness, classes. A permuted view of a channels-last
                head is read in place; any other layout is copied once.
        """
        return torch.stack(self._sums(raws, targets)[0])

    def _sums(self, raws: Sequence[Tensor], targets: Targets) -> tuple[list[Tensor], Tensor]:
        """Return what :meth:`sums` does as a list, and the raw values of the matches, float32 [M, 5 + C]."""
        device = raws[0].device
        cells, boxes, anchors, classes, winners, winner_cells = (
            to_device(torch.from_numpy(array), device)
            for array in (
                targets.cells,
                targets.boxes_cxcywh,
                targets.anchors_wh,
                targets.classes,
                targets.winners,
                targets.winner_cells,
            )
        )
        parts = [_pick(raw, rows) for raw, rows in zip(raws, cells.split(targets.matches), strict=True)]
        picked = torch.cat([rows for rows, _ in parts])  # [M, 5 + C]
        objectness = torch.cat([logits for _, logits in parts])  # [K]
        levels = len(raws)
        assert len(objectness) == targets.counts[levels : 2 * levels].sum(), (
            "targets were made for another size"
        )

        ciou = ciou_pairs_cxcywh(self._boxes(picked[:, :4], anchors, targets.matches), boxes)  # [M]

        wanted = torch.zeros_like(objectness)
        wanted[winner_cells] = ciou.detach()[winners].clamp(min=0)
        obj = self._binary(objectness, wanted, self.recipe.obj_pw)

        obj_sums = [part.sum() for part in obj.split([len(logits) for _, logits in parts])]
        box_sums = [part.sum() for part in (1 - ciou).split(targets.matches)]
        if self.nc > 1:
            half = 0.5 * self.recipe.label_smoothing
            logits = picked[:, 5 : 5 + self.nc]
            one_hot = torch.full_like(logits, half)
            one_hot.scatter_(1, classes[:, None], 1 - half)
            cls = self._binary(logits, one_hot, self.recipe.cls_pw)
            cls_sums = [part.sum() for part in cls.split(targets.matches)]
        else:
            cls_sums = [objectness.new_zeros(())] * levels
        return box_sums + obj_sums + cls_sums, picked

    def _boxes(self, raw: Tensor, anchors_wh: Tensor, matches: tuple[int, ...]) -> Tensor:
        """Return predicted boxes [M, 4] in grid units, relative to the cell's corner."""
        if len(set(self.codings)) == 1:
            return self.codings[0].boxes(raw, anchors_wh)
        levels = zip(self.codings, raw.split(matches), anchors_wh.split(matches), strict=True)
        return torch.cat([coding.boxes(rows, anchors) for coding, rows, anchors in levels])

    def _binary(self, logits: Tensor, wanted: Tensor, positive_weight: float) -> Tensor:
        """Return the cross entropy of each element; focal (arXiv:1708.02002) if ``fl_gamma`` is set."""
        weight = None if positive_weight == 1 else logits.new_full((), positive_weight)
        loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none", pos_weight=weight)
        if self.recipe.fl_gamma > 0:
            probability = logits.sigmoid()
            # 1 - p_t; kept above 0, because a gamma below 1 has an infinite derivative there
            miss = (wanted + probability - 2 * wanted * probability).clamp(min=1e-7)
            alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
            loss = loss * alpha * miss**self.recipe.fl_gamma
        return loss


class _Pick(torch.autograd.Function):
    """Picks float32 rows [m, 5 + C] of cells [m] from raw [N, A, H, W, 5 + C], and the objectness of all cells.

    The backward pass is written by hand because a cell may be picked several times. The backward kernel of an embedding
    adds duplicates in a fixed order on CPU and CUDA; that of indexing does not. The gradient is written in one pass, in
    the layout of the head.
    """

    @staticmethod
    def forward(ctx: Any, raw: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        images, anchors, height, width, values = raw.shape
        rows = raw.permute(0, 2, 3, 1, 4).reshape(-1, values)  # [N H W A, 5 + C]
        ctx.save_for_backward(cells)
        ctx.shape, ctx.dtype = (images, height, width, anchors, values), raw.dtype
        return rows.index_select(0, cells).float(), rows[:, 4].float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_objectness: Tensor) -> tuple[Tensor, None]:
        (cells,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(
            grad_rows.to(ctx.dtype), cells, len(grad_objectness), -1, False
        )
        grad[:, 4] += grad_objectness
        return grad.view(ctx.shape).permute(0, 3, 1, 2, 4), None


_pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _Pick.apply


def anchor_loss(model: Detector, recipe: Yolov5Hyperparameters, img: int) -> Yolov5Loss:
    """Return the loss of a network with anchors; ``img``: training size, pixels. Raise ConfigError if a user's has none."""
    if not isinstance(model, AnchorDetector):
        raise ConfigError(
            f"{model.description.name} has a network without anchors, and no method loss",
            hint="add the method loss, or make the network a subclass of AnchorDetector",
        )
    # most runs have no masks, so they need not load that module
    kind: type[Yolov5Loss] = load("yolov5.mask_loss:MaskLoss") if model.task == "masks" else Yolov5Loss
    return kind(
        anchors_px=model.anchors_px,
        strides=model.strides,
        nc=model.nc,
        recipe=recipe,
        img=img,
        codings=model.codings,
    )
