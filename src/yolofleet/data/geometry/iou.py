"""Overlap of boxes: matched pairs for losses, all pairs for suppression."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ciou_pairs_cxcywh(pred_cxcywh: Tensor, true_cxcywh: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Return the complete IoU of matched boxes: row i with row i (for all pairs see ``iou_matrix``).

    Args:
        pred_cxcywh: [M, 4] float32, sizes above 0; gradients flow (not through the aspect weight alpha).
        true_cxcywh: [M, 4] same units; no gradient.
        eps: added to denominators (units^2).
    Returns:
        [M] in (-1.5, 1].
    Source: arXiv:1911.08287. Hand-worked boxes in test_iou.py, gradients in test_yolov5_loss.py.
    """
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
