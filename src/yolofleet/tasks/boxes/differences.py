"""Compare predictions of an exported file with those of the network. n boxes of an image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from yolofleet.data.geometry.boxes import Decoded, clip_xyxy, iou_matrix, xyxy_from_cxcywh
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.task import Difference

UNITS = (0.5, 1e-3)  # that weigh alike in the assignment of two sets of rows: pixels of a side, and a score
SAME_IOU = 0.5  # overlap of two boxes of one class that count as one
FAR = Difference(float("inf"), float("inf"), 0)


def decoded_difference(
    ours: Decoded, theirs: Decoded, size_hw: tuple[int, int], *, in_order: bool = True
) -> Difference:
    """Return the largest difference of box sides, and of objectness, class probabilities and their products.

    Sides outside the image are first moved to its border, as in every detection. Some predictions without an object have
    a side ten images away, where rounding errors exceed a pixel.

    Args:
        size_hw, in_order: as for ``Task.difference``; rows of two sets are matched one to one.
    """
    if ours.rows.shape != theirs.rows.shape or not (ours.rows - theirs.rows).isfinite().all():
        return FAR
    images, rows = ours.rows.shape[:2]
    mine, found = (_values(decoded, size_hw) for decoded in (ours, theirs))
    if not in_order:
        order = partners_of(ours, theirs, size_hw)
        found = torch.stack([rows[partners] for rows, partners in zip(found, order, strict=True)])
    sides, scores = (mine - found).abs().split([4, mine.shape[2] - 4], 2)
    return Difference(float(sides.max()), float(scores.max()), images * rows)


def _values(decoded: Decoded, size_hw: tuple[int, int]) -> Tensor:
    """Return what is compared: [N, K, 4 sides, objectness, C class probabilities, C scores]."""
    boxes = clip_xyxy(xyxy_from_cxcywh(decoded.boxes), size_hw)
    return torch.cat([boxes, decoded.objectness[..., None], decoded.probabilities, decoded.scores], 2)


def partners_of(ours: Decoded, theirs: Decoded, size_hw: tuple[int, int]) -> Tensor:
    """Return int64 [N, K]: the row of ``theirs`` that stands for each row of ``ours``, in a one-to-one assignment."""
    from scipy.optimize import linear_sum_assignment  # no benchmark loads scipy

    mine, found = (_values(decoded, size_hw) for decoded in (ours, theirs))
    units = torch.tensor(UNITS).repeat_interleave(torch.tensor([4, mine.shape[2] - 4]))
    costs = torch.cdist(mine / units, found / units, p=torch.inf)  # [N, K, K]
    return torch.from_numpy(np.stack([linear_sum_assignment(cost)[1] for cost in costs.numpy()]))


def partners_difference(ours: FoundBoxes, theirs: FoundBoxes, *, above: float) -> Difference:
    """Return the largest differences between each box of an image and its partner, the nearest box of its class in the other set.

    They are infinite if a box has no partner. Boxes whose score is not ``above`` need none.
    """
    worst_px, worst_score = 0.0, 0.0
    for some, others in ((ours, theirs), (theirs, ours)):
        for i in np.flatnonzero(some.scores > above).tolist():
            same = others.rows(others.classes == some.classes[i])
            if not len(same):
                return FAR
            off_px = np.abs(same.boxes_xyxy_px - some.boxes_xyxy_px[i]).max(axis=1)
            partner = int(off_px.argmin())
            worst_px = max(worst_px, float(off_px[partner]))
            worst_score = max(worst_score, abs(float(same.scores[partner] - some.scores[i])))
    return Difference(worst_px, worst_score, len(ours))


def shared(ours: FoundBoxes, theirs: FoundBoxes) -> int:
    """Return how many boxes of an image both sets have."""
    overlaps = iou_matrix(
        torch.from_numpy(ours.boxes_xyxy_px), torch.from_numpy(theirs.boxes_xyxy_px)
    ).numpy()
    same = (overlaps >= SAME_IOU) & (ours.classes[:, None] == theirs.classes)
    return min(int(same.any(1).sum()), int(same.any(0).sum()))
