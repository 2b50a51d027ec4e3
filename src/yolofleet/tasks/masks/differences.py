"""Compare predictions of an exported file with those of the network. N images, K predictions of an image, h x w cells."""

from __future__ import annotations

from dataclasses import replace

import torch

from yolofleet.data.geometry.boxes import DecodedMasks
from yolofleet.tasks.boxes.differences import FAR, decoded_difference, partners_of
from yolofleet.tasks.task import Difference

WHOLE = 50  # masks of an image that are compared in every cell, those of the highest scores
CELLS = 64  # of an image, in which the masks of all predictions are compared


def masks_difference(
    ours: DecodedMasks, theirs: DecodedMasks, size_hw: tuple[int, int], *, in_order: bool
) -> Difference:
    """Return the differences of boxes, scores and masks.

    That of a mask is the largest difference of its logits as a part of the largest logit, at least 1. It says how far edges move,
    while 1 - IoU would depend on the cells whose logit is nearly 0, where rounding decides.
    """
    boxes = decoded_difference(ours.boxes, theirs.boxes, size_hw, in_order=in_order)
    if boxes == FAR or any(
        a.shape != b.shape or not (a - b).isfinite().all() for a, b in zip(ours, theirs, strict=True)
    ):
        return FAR
    partners = None if in_order else partners_of(ours.boxes, theirs.boxes, size_hw)
    worst = 0.0
    for n, scores in enumerate(ours.boxes.scores.amax(2)):
        order = scores.argsort(descending=True)
        others = order if partners is None else partners[n][order]
        cells = torch.linspace(0, ours.prototypes[n, 0].numel() - 1, CELLS).long()
        for chosen, at in ((slice(WHOLE), slice(None)), (slice(None), cells)):
            mine, found = (
                of.coefficients[n][rows[chosen]].double() @ of.prototypes[n].flatten(1)[:, at].double()
                for of, rows in ((ours, order), (theirs, others))
            )
            off = (mine - found).abs().amax(1) / mine.abs().amax(1).clamp(min=1)
            worst = max(worst, float(off.max()))
    return replace(boxes, mask=worst)
