"""Greedy non-maximum suppression, exact, without a time limit.

The result of an image depends only on that image, not on its batch, the number of threads or the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yolofleet.data.geometry.boxes import Decoded, iou_matrix, xyxy_from_cxcywh
from yolofleet.support.devices import is_host, to_device

_VERSION = 1  # of the extension; an older one, from before an update of the sources, is not used
try:
    from yolofleet.data.geometry import _nms
except ImportError:  # installed without a C compiler
    COMPILED = False
else:
    COMPILED = _nms.VERSION == _VERSION

# per image, YOLOv5's limit; an untrained model gives more, and the lowest scores are left out
MAX_CANDIDATES = 30_000
# Candidates of an image decided together. On a CPU the first blocks usually fill max_det, so small ones waste little; on a
# GPU larger ones mean fewer kernels and host waits. 32 images take 200 MiB there.
BLOCK_CPU = 256
BLOCK_GPU = 512


def detections(
    decoded: Decoded | list[Decoded],
    *,
    conf: float,
    iou: float | None,
    max_det: int,
    multi_label: bool,
    agnostic: bool = False,
    classes: Sequence[int] | None = None,
    numbered: bool = False,
) -> tuple[list[Tensor], int]:
    """Return the boxes of each image, highest score first.

    Args:
        decoded: a list has the predictions of several sources, whose boxes are fused after their own suppression
            (``fusion.py``).
        conf: lowest objectness, and lowest objectness x class probability (both exclusive).
        iou: overlap above which the box of lower score is removed; None: boxes that need no suppression.
        multi_label: a prediction may give several classes (validation); else only its best one (prediction).
        agnostic: suppress over all classes together.
        numbered: add a column, the number of the prediction in its image, below 2^24; not for a list.
    Returns:
        N tensors [n, 6] float32 of x1, y1, x2, y2 px, score, class; and the number of candidates left out because an
        image had more than ``MAX_CANDIDATES``.
    Parity with YOLOv5: tests/parity/test_nms_parity.py.
    """
    if isinstance(decoded, list):
        from yolofleet.data.geometry.fusion import fused_detections

        limits: dict[str, Any] = {"conf": conf, "iou": iou, "max_det": max_det, "classes": classes}
        each = [detections(one, **limits, multi_label=multi_label, agnostic=agnostic) for one in decoded]
        of_image = zip(*(boxes for boxes, _ in each), strict=True)
        fused = [fused_detections(boxes, conf=conf, max_det=max_det, agnostic=agnostic) for boxes in of_image]
        return fused, sum(cut for _, cut in each)
    iou = math.inf if iou is None else iou
    found, capped = [], 0
    # One image at a time stays in a CPU's cache; all images at once need the fewest kernels and waits for a GPU.
    rows = decoded.rows
    for images in rows.split(1 if is_host(rows.device) else max(1, len(rows))):
        boxes, left_out = _detections(images, conf, iou, max_det, multi_label, agnostic, classes, numbered)
        found += boxes
        capped += left_out
    return found, capped


def _detections(
    decoded: Tensor,
    conf: float,
    iou: float,
    max_det: int,
    multi_label: bool,
    agnostic: bool,
    classes: Sequence[int] | None,
    numbered: bool = False,
) -> tuple[list[Tensor], int]:
    """Do what ``detections`` does, for all images at once."""
    places = decoded.flatten(0, 1)  # [N * K, 5 + C]
    confident = (places[:, 4] > conf).nonzero()[:, 0]
    image = confident.div(decoded.shape[1], rounding_mode="floor")
    rows = places.index_select(0, confident).float()  # [R, 5 + C]
    scores = rows[:, 5:] * rows[:, 4:5]
    if multi_label and decoded.shape[2] > 6:
        row, class_idx = (scores > conf).nonzero(as_tuple=True)
    else:
        best, class_idx = scores.max(1)
        row = (best > conf).nonzero()[:, 0]
        class_idx = class_idx[row]
    if classes is not None:
        wanted = torch.isin(class_idx, torch.as_tensor(classes, device=class_idx.device))
        row, class_idx = row[wanted], class_idx[wanted]
    score, image = scores[row, class_idx], image[row]

    capped = 0
    if len(decoded) == 1 and len(score) > MAX_CANDIDATES:
        capped = len(score) - MAX_CANDIDATES
        top = _highest(score, MAX_CANDIDATES)
        row, class_idx, score = row[top], class_idx[top], score[top]
    boxes = xyxy_from_cxcywh(rows[row, :4])
    groups = None if agnostic else class_idx
    if len(decoded) == 1:
        kept = nms(boxes, score, iou, groups=groups, max_det=max_det)
        kept_counts = [len(kept)]
    else:
        counts = (
            torch.searchsorted(image, torch.arange(len(decoded) + 1, device=image.device)).diff().tolist()
        )
        capped = sum(max(0, count - MAX_CANDIDATES) for count in counts)
        counts = [min(count, MAX_CANDIDATES) for count in counts]
        kept, kept_counts = _nms_of_images(boxes, score, groups, image, counts, iou, max_det)
    columns = [boxes[kept], score[kept, None], class_idx[kept, None].float()]
    if numbered:
        columns.append((confident[row[kept], None] % decoded.shape[1]).float())
    chosen = torch.cat(columns, 1)
    return list(chosen.split(kept_counts)), capped


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
    limit = len(scores) if max_det is None else min(max_det, len(scores))
    if COMPILED and is_host(scores.device):
        of_group = torch.zeros(len(scores)) if groups is None else groups
        arrays = boxes_xyxy.float().contiguous(), scores.float().contiguous(), of_group.int().contiguous()
        kept = torch.empty(limit, dtype=torch.int64)
        boxes, values, numbers = (array.detach().numpy() for array in arrays)
        return kept[: _nms.suppress(boxes, values, numbers, iou, kept.numpy()) if limit else 0]
    image = torch.zeros_like(scores, dtype=torch.int64)
    return _nms_of_images(boxes_xyxy, scores, groups, image, [len(scores)], iou, limit)[0]


def _nms_of_images(
    boxes: Tensor,
    scores: Tensor,
    groups: Tensor | None,
    image: Tensor,
    considered: Sequence[int],
    iou: float,
    limit: int,
) -> tuple[Tensor, list[int]]:
    """Suppress among the rows of each image, on any device, for a block of rows of each image at a time.

    Args:
        image: int64 [M] the image of each row, ascending.
        considered: how many rows of each of N images count, those with the highest scores.
    Returns:
        int64 [n] kept rows by image, highest score first; the number of them for each image.
    """
    order = scores.argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    boxes = boxes[order].float()
    groups = torch.zeros_like(order) if groups is None else groups[order]
    starts = torch.searchsorted(image, torch.arange(len(considered), device=image.device))  # [N]
    counts = to_device(torch.tensor(considered, dtype=torch.int64), boxes.device)  # [N]
    most = max(considered, default=0)
    limit = min(limit, most)
    # [N, limit] rows; the last column takes those that are not kept
    kept = starts.new_zeros((len(counts), limit + 1))
    kept_counts = torch.zeros_like(counts)
    size = BLOCK_CPU if is_host(boxes.device) else BLOCK_GPU
    for begin in range(0, most, size):
        rank = torch.arange(begin, min(begin + size, most), device=boxes.device)  # [b]
        valid = rank < counts[:, None]  # [N, b]
        block = (starts[:, None] + rank).clamp(max=len(boxes) - 1)
        if begin:
            before = min(begin, limit)
            suppressing = torch.arange(before, device=boxes.device) < kept_counts[:, None]
            overlaps = _suppresses(boxes, groups, kept[:, :before], block, iou)
            valid &= ~(overlaps & suppressing[:, :, None]).any(1)
        # [N, b, b] a row may suppress a later column
        rivals = (_suppresses(boxes, groups, block, block, iou) & valid[:, :, None]).triu(1)
        # Iterate "keep a row unless a kept row suppresses it". Each pass decides at least one more row in order, so the
        # only fixed point is the greedy result. It takes a few passes in practice.
        alive, guess = valid & ~rivals.any(1), valid.new_ones(()).expand_as(valid)
        while not torch.equal(alive, guess):
            guess, alive = alive, valid & ~(rivals & alive[:, :, None]).any(1)
        column = kept_counts[:, None] + alive.cumsum(1) - 1
        kept.scatter_(1, column.masked_fill(~alive | (column >= limit), limit), block)
        kept_counts = (kept_counts + alive.sum(1)).clamp(max=limit)
        if bool(((kept_counts == limit) | (counts <= begin + size)).all()):
            break
    chosen = torch.arange(limit + 1, device=boxes.device) < kept_counts[:, None]
    return order[kept[chosen]], kept_counts.tolist()


def _suppresses(boxes: Tensor, groups: Tensor, first: Tensor, second: Tensor, iou: float) -> Tensor:
    """Return [N, A, B] bool: whether row ``first[n, a]`` would suppress row ``second[n, b]``."""
    same = groups[first][:, :, None] == groups[second][:, None]
    return (iou_matrix(boxes[first], boxes[second]) > iou) & same


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the rows of the ``count`` highest of more scores, in their order; of equal scores the earlier rows."""
    border = scores.topk(count).values[-1]
    above = scores > border
    tied = (scores == border).nonzero()[:, 0]
    chosen = above.index_fill(0, tied[: count - int(above.sum())], True)
    return chosen.nonzero()[:, 0]
