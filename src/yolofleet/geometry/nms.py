"""Greedy non-maximum suppression, exact, without a time limit.

The result of an image depends only on that image, not on its batch, the number of threads or the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yolofleet.devices import is_host
from yolofleet.geometry.boxes import xyxy_from_cxcywh
from yolofleet.geometry.iou import iou_matrix

MAX_CANDIDATES = (
    30_000  # per image, YOLOv5's limit; an untrained model gives more, and the lowest scores are left out
)
BLOCK_CPU = (
    256  # candidates decided together; the first blocks usually fill max_det, so small blocks waste little
)
BLOCK_GPU = 1024  # larger blocks mean fewer kernels and host waits


def detections(
    decoded: Tensor,
    *,
    conf: float,
    iou: float,
    max_det: int,
    multi_label: bool,
    agnostic: bool = False,
    classes: Sequence[int] | None = None,
) -> tuple[list[Tensor], int]:
    """Return the boxes of each image, highest score first.

    Args:
        decoded: [N, K, 5 + C] cx, cy, w, h px, objectness and class probabilities (0..1).
        conf: lowest objectness, and lowest objectness x class probability (both exclusive).
        iou: overlap above which the box of lower score is removed.
        max_det: maximum number of boxes per image.
        multi_label: a prediction may give several classes (validation); else only its best one (prediction).
        agnostic: suppress over all classes together.
        classes: keep only these.
    Returns:
        N tensors [n, 6] float32 of x1, y1, x2, y2 px, score, class; and the number of candidates left out because an
        image had more than ``MAX_CANDIDATES``.
    Parity with YOLOv5: tests/parity/test_nms_parity.py.
    """
    found, capped = [], 0
    several = multi_label and decoded.shape[2] > 6
    for image in decoded:
        rows = image[image[:, 4] > conf].float()  # [R, 5 + C]
        scores = rows[:, 5:] * rows[:, 4:5]
        if several:
            row, class_idx = (scores > conf).nonzero(as_tuple=True)
        else:
            best, class_idx = scores.max(1)
            row = (best > conf).nonzero()[:, 0]
            class_idx = class_idx[row]
        if classes is not None:
            wanted = torch.isin(class_idx, torch.as_tensor(classes, device=class_idx.device))
            row, class_idx = row[wanted], class_idx[wanted]
        score = scores[row, class_idx]
        if len(score) > MAX_CANDIDATES:
            capped += len(score) - MAX_CANDIDATES
            top = _highest(score, MAX_CANDIDATES)
            row, class_idx, score = row[top], class_idx[top], score[top]
        boxes = xyxy_from_cxcywh(rows[row, :4])
        kept = nms(boxes, score, iou, groups=None if agnostic else class_idx, max_det=max_det)
        found.append(torch.cat((boxes[kept], score[kept, None], class_idx[kept, None].float()), 1))
    return found, capped


def nms(
    boxes_xyxy: Tensor,
    scores: Tensor,
    iou: float,
    *,
    groups: Tensor | None = None,
    max_det: int | None = None,
) -> Tensor:
    """Return the rows that overlap no kept row of a higher score by more than ``iou``.

    Args:
        boxes_xyxy: [M, 4] any unit.
        scores: [M]; of equal scores the earlier row comes first.
        groups: [M] integers; only rows of the same group suppress each other. None: all rows do.
        max_det: maximum number of rows; the search ends there.
    Returns:
        int64 [n] kept rows, highest score first.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes_xyxy[order].float()
    groups = torch.zeros_like(order) if groups is None else groups[order]
    limit = len(order) if max_det is None else max_det

    kept = order.new_empty(0)  # positions in `order`
    positions = torch.arange(len(order), device=order.device)
    for block in positions.split(BLOCK_CPU if is_host(order.device) else BLOCK_GPU):
        block = block[~_suppresses(boxes, groups, kept, block, iou).any(0)]
        # [b, b] a row may suppress a later column
        rivals = _suppresses(boxes, groups, block, block, iou).triu(1)
        # Iterate "keep a row unless a kept row suppresses it". Each pass decides at least one more row in order, so the
        # only fixed point is the greedy result. It takes a few passes in practice.
        alive = ~rivals.any(0)
        guess = torch.ones_like(alive)
        while not torch.equal(alive, guess):
            guess, alive = alive, ~(rivals & alive[:, None]).any(0)
        kept = torch.cat((kept, block[alive]))
        if len(kept) >= limit:
            break
    return order[kept[:limit]]


def _suppresses(boxes: Tensor, groups: Tensor, first: Tensor, second: Tensor, iou: float) -> Tensor:
    """Return [A, B] bool: whether row ``first[a]`` would suppress row ``second[b]``."""
    return (iou_matrix(boxes[first], boxes[second]) > iou) & (groups[first][:, None] == groups[second])


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the rows of the ``count`` highest of more scores, in their order; of equal scores the earlier rows."""
    border = scores.topk(count).values[-1]
    above = scores > border
    tied = (scores == border).nonzero()[:, 0]
    chosen = above.index_fill(0, tied[: count - int(above.sum())], True)
    return chosen.nonzero()[:, 0]
