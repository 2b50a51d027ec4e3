"""Compare predictions of an exported file with those of the network. N images, K predictions of an image, h x w cells."""

from __future__ import annotations

import torch

from yolofleet.data.geometry.boxes import clip_xyxy, xyxy_from_cxcywh
from yolofleet.data.geometry.masks import DecodedMasks
from yolofleet.tasks.boxes.differences import FAR, decoded_difference, partners_of
from yolofleet.tasks.task import Difference

COMPARED = 50  # masks of an image, those of the highest scores


def masks_difference(
    ours: DecodedMasks, theirs: DecodedMasks, size_hw: tuple[int, int], *, in_order: bool
) -> Difference:
    """Return the difference of boxes and scores, which includes that of masks.

    That of a mask is 1 - IoU of the cells within its box, or the largest difference of a logit there if it is less: where logits
    are nearly 0, equal ones round to either side.
    """
    boxes = decoded_difference(ours.boxes, theirs.boxes, size_hw, in_order=in_order)
    if boxes == FAR or any(
        a.shape != b.shape or not (a - b).isfinite().all() for a, b in zip(ours, theirs, strict=True)
    ):
        return FAR
    partners = None if in_order else partners_of(ours.boxes, theirs.boxes, size_hw)
    worst = boxes.score
    for n, scores in enumerate(ours.boxes.scores.amax(2)):
        best = scores.topk(min(COMPARED, len(scores))).indices
        others = best if partners is None else partners[n][best]
        mine, found = (
            torch.einsum("kd,dyx->kyx", of.coefficients[n][rows].double(), of.prototypes[n].double())
            for of, rows in ((ours, best), (theirs, others))
        )
        height, width = mine.shape[1:]
        corners = clip_xyxy(xyxy_from_cxcywh(ours.boxes.boxes[n][best]), size_hw)
        x1, y1, x2, y2 = (corners / torch.tensor(size_hw[::-1] * 2) * torch.tensor([width, height] * 2)).T
        x, y = torch.arange(width) + 0.5, torch.arange(height) + 0.5
        inside = ((x >= x1[:, None]) & (x < x2[:, None]))[:, None] & ((y >= y1[:, None]) & (y < y2[:, None]))[
            ..., None
        ]
        both, either = (
            ((mine > 0) & (found > 0) & inside).sum((1, 2)),
            (((mine > 0) | (found > 0)) & inside).sum((1, 2)),
        )
        logits = ((mine - found).abs() * inside).amax((1, 2))
        differs = torch.minimum(1 - both / either.clamp(min=1), logits) * (either > 0)
        worst = max(worst, float(differs.max()))
    return Difference(boxes.place, worst, boxes.compared)
