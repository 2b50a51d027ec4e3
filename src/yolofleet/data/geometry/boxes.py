"""Formats, overlap and coding of boxes.

Boxes are [..., 4] torch tensors or numpy arrays; a name ends in the format of the last axis. ``xyxy`` is left,
top, right, bottom; ``cxcywh`` is centre and size. Functions keep the unit (px, grid cells, 0..1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Boxes = TypeVar("Boxes", Tensor, np.ndarray)


class Decoded(NamedTuple):
    """Decoded predictions of N images, K of each, with C classes, float32.

    They are one tensor, because suppression reads whole rows and an exported file returns it.
    """

    rows: Tensor  # [N, K, 5 + C]

    @classmethod
    def of(cls, boxes: Tensor, probabilities: Tensor, objectness: Tensor | None = None) -> Decoded:
        """Return the predictions of parts as below; without ``objectness`` it is 1."""
        objects = torch.ones_like(probabilities[..., :1]) if objectness is None else objectness[..., None]
        return cls(torch.cat([boxes, objects, probabilities], -1))

    @property
    def boxes(self) -> Tensor:
        """[N, K, 4] cx, cy, w, h in pixels of the input."""
        return self.rows[..., :4]

    @property
    def objectness(self) -> Tensor:
        """[N, K] whether there is an object, 0..1; 1 if the family predicts none."""
        return self.rows[..., 4]

    @property
    def probabilities(self) -> Tensor:
        """[N, K, C] of each class if there is an object, 0..1."""
        return self.rows[..., 5:]

    @property
    def scores(self) -> Tensor:
        """[N, K, C] objectness x probability."""
        return self.rows[..., 4:5] * self.rows[..., 5:]

    def of_classes(self, numbers: Sequence[int]) -> Decoded:
        """Return the predictions with these classes in this order."""
        return Decoded(self.rows[..., [*range(5), *(5 + number for number in numbers)]])


class DecodedMasks(NamedTuple):
    """Decoded predictions of N images, K of each, with C classes and D prototypes, float32.

    The logit of a prediction's mask at a cell of the map is the product of its coefficients and the prototypes there. The map
    covers the whole input. A mask is where its logits, enlarged to the image, are above 0 within the box.
    """

    decoded: Tensor  # [N, K, 5 + C] as of ``Decoded``
    coefficients: Tensor  # [N, K, D]
    prototypes: Tensor  # [N, D, h, w], a quarter of the input's height and width

    @property
    def boxes(self) -> Decoded:
        """The predictions without masks."""
        return Decoded(self.decoded)

    def of_classes(self, numbers: Sequence[int]) -> DecodedMasks:
        """Return the predictions with these classes in this order."""
        return self._replace(decoded=self.boxes.of_classes(numbers).rows)


def xyxy_from_cxcywh(boxes_cxcywh: Boxes) -> Boxes:
    """Return corners [..., 4] from centre and size."""
    centre, half = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:4] / 2
    return _joined(centre - half, centre + half)


def cxcywh_from_xyxy(boxes_xyxy: Boxes) -> Boxes:
    """Return centre and size [..., 4] from corners."""
    low, high = boxes_xyxy[..., :2], boxes_xyxy[..., 2:4]
    return _joined((low + high) / 2, high - low)


def clip_xyxy(boxes_xyxy: Boxes, size_hw: tuple[int, int]) -> Boxes:
    """Return a copy with every corner clipped to an image of ``size_hw`` (0..w, 0..h)."""
    height, width = size_hw
    if isinstance(boxes_xyxy, np.ndarray):
        highest = np.array([width, height, width, height], dtype=boxes_xyxy.dtype)
        clipped: np.ndarray = np.clip(boxes_xyxy, 0, highest)
        return clipped
    upper = boxes_xyxy.new_tensor([width, height, width, height])
    return torch.minimum(boxes_xyxy.clamp(min=0), upper)


def _joined(first: Boxes, second: Boxes) -> Boxes:
    if isinstance(first, np.ndarray):
        return np.concatenate((first, second), axis=-1)
    return torch.cat((first, second), dim=-1)


def ciou_pairs_cxcywh(pred_cxcywh: Tensor, true_cxcywh: Tensor) -> Tensor:
    """Return the complete IoU of matched boxes: row i with row i (for all pairs see ``iou_matrix``).

    Args:
        pred_cxcywh: [M, 4] float32, sizes above 0; gradients flow (not through the aspect weight alpha).
        true_cxcywh: [M, 4] same units; no gradient.
    Returns:
        [M] in (-1.5, 1].
    Source: arXiv:1911.08287. Hand-worked boxes in test_iou.py, gradients in test_yolov5_loss.py.
    """
    eps = 1e-7  # added to denominators, units^2
    pred_centre, pred_size = pred_cxcywh[:, :2], pred_cxcywh[:, 2:]
    true_centre, true_size = true_cxcywh[:, :2], true_cxcywh[:, 2:]
    pred_low, pred_high = pred_centre - pred_size / 2, pred_centre + pred_size / 2
    true_low, true_high = true_centre - true_size / 2, true_centre + true_size / 2

    shared = (torch.minimum(pred_high, true_high) - torch.maximum(pred_low, true_low)).clamp(min=0)
    hull = torch.maximum(pred_high, true_high) - torch.minimum(pred_low, true_low)
    pred_w, pred_h = pred_size.unbind(1)
    true_w, true_h = true_size.unbind(1)
    intersection = shared[:, 0] * shared[:, 1]
    iou = intersection / (pred_w * pred_h + true_w * true_h - intersection + eps)

    distance = (pred_centre - true_centre).square().sum(1) / (hull.square().sum(1) + eps)
    aspect = (torch.atan(true_w / true_h) - torch.atan(pred_w / pred_h)).square() * (4 / math.pi**2)
    with torch.no_grad():
        alpha = aspect / (1 + eps - iou + aspect)
    ciou: Tensor = iou - distance - alpha * aspect
    return ciou


def iou_matrix(a_xyxy: Tensor, b_xyxy: Tensor) -> Tensor:
    """Return the IoU of all pairs in 0..1; two empty boxes give NaN.

    Args:
        a_xyxy, b_xyxy: [..., A, 4] and [..., B, 4] in the same units.
    Returns:
        [..., A, B]
    """
    a_x1, a_y1, a_x2, a_y2 = a_xyxy.movedim(-1, 0).contiguous()[..., :, None]  # each [..., A, 1]
    b_x1, b_y1, b_x2, b_y2 = b_xyxy.movedim(-1, 0).contiguous()[..., None, :]  # each [..., 1, B]
    width = (torch.minimum(a_x2, b_x2) - torch.maximum(a_x1, b_x1)).clamp_(min=0)
    height = (torch.minimum(a_y2, b_y2) - torch.maximum(a_y1, b_y1)).clamp_(min=0)
    intersection = width * height
    union = (a_x2 - a_x1) * (a_y2 - a_y1) + (b_x2 - b_x1) * (b_y2 - b_y1) - intersection
    iou: Tensor = intersection / union
    return iou


# Codings convert the four raw values of an anchor in a grid cell to a box, for losses (matched rows) and decoding (whole maps).
# Centres are in cells relative to the cell's corner, sizes in the unit of the anchors.

# e^10 = 22,026 anchors: larger than any image, and float32 neither overflows nor reaches 0
MAX_LOG_SIZE = 10.0


@dataclass(frozen=True)
class SquaredSigmoid:
    """YOLOv5's coding: centre = 2 sigmoid(t) - 0.5, size = (2 sigmoid(t))^2 anchor.

    Centres reach half a cell beyond the cell, so the nearest neighbours of a label's cell may predict it too.
    """

    neighbours = True

    def boxes(self, raw: Tensor, anchors_wh: Tensor) -> Tensor:
        """Return [..., 4] cx, cy, w, h from [..., 4] raw x, y, w, h and their [..., 2] anchors."""
        unit = raw.sigmoid() * 2
        return torch.cat((unit[..., :2] - 0.5, unit[..., 2:].square() * anchors_wh), -1)


@dataclass(frozen=True)
class Exponential:
    """Darknet's coding: centre = s sigmoid(t) - (s - 1) / 2, size = exp(t) anchor (arXiv:1804.02767; s: arXiv:2004.10934).

    Centres stay in the label's own cell, or reach a little beyond it.

    Attributes:
        scale_xy: s, at least 1; 1 in YOLOv3.
    """

    scale_xy: float = 1.0

    neighbours = False

    def boxes(self, raw: Tensor, anchors_wh: Tensor) -> Tensor:
        """Return [..., 4] cx, cy, w, h from [..., 4] raw x, y, w, h and their [..., 2] anchors."""
        centres = raw[..., :2].sigmoid()
        if self.scale_xy != 1:
            centres = centres * self.scale_xy - (self.scale_xy - 1) / 2
        sizes = raw[..., 2:].clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp() * anchors_wh
        return torch.cat((centres, sizes), -1)


BoxCoding = SquaredSigmoid | Exponential
