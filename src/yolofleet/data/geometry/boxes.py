"""Box formats. Boxes are [..., 4] torch tensors or numpy arrays; a name ends in the format of the last axis.

``xyxy`` is left, top, right, bottom; ``cxcywh`` is centre and size. Functions keep the unit (px, grid cells, 0..1).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Boxes = TypeVar("Boxes", Tensor, np.ndarray)


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
