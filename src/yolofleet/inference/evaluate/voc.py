"""Average precision of the PASCAL VOC challenges, at IoU 0.5.

Source: M. Everingham et al., "The PASCAL Visual Object Classes Challenge: A Retrospective", IJCV 2015, and the
challenge's description. Boxes have continuous coordinates; the challenge's own program counts pixels, which makes each box
one pixel larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from yolofleet.inference.evaluate.matching import Labels, ScoredBoxes, overlapping_pairs, rows

VOC_IOU = 0.5


def voc_ap(labels: Labels, detections: ScoredBoxes, names: Sequence[str], metric: str) -> dict[str, float]:
    """Return the AP of each class with labels, by name.

    A detection belongs to the label of its image and class with the highest IoU. The first one by score, with an IoU of at
    least 0.5, is a hit; later ones are false. A detection of a difficult object (``crowd``) does not count.

    Args:
        metric: voc07: mean of the precision at 11 recalls; voc12: area under the precision-recall curve.
    """
    labels = rows(labels, np.lexsort((labels.class_idx, labels.image)))
    detections = rows(detections, np.lexsort((detections.image, -detections.score)))
    ordinary = Labels(
        labels.image, labels.class_idx, labels.boxes_xywh_px, labels.area_px, np.zeros_like(labels.crowd)
    )
    d, m, iou = overlapping_pairs(ordinary, detections, VOC_IOU)
    order = np.lexsort((m, -iou, d))
    d, m = d[order], m[order]
    best = np.r_[True, np.diff(d) != 0] if len(d) else np.zeros(0, bool)
    d, m = d[best], m[best]  # each detection once, by falling score
    difficult = labels.crowd[m]
    first = np.zeros(len(d), bool)
    first[np.unique(m, return_index=True)[1]] = True
    hit, counts = np.zeros(len(detections.score), bool), np.ones(len(detections.score), bool)
    hit[d[first & ~difficult]] = True
    counts[d[difficult]] = False

    objects = np.bincount(labels.class_idx[~labels.crowd], minlength=len(names))
    result = {}
    for c in np.flatnonzero(objects).tolist():
        hits = hit[counts & (detections.class_idx == c)]
        recall = np.cumsum(hits) / objects[c]
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        result[names[c] if names[c] not in result else f"{names[c]} ({c})"] = _area(recall, precision, metric)
    return result


def _area(recall: NDArray[np.float64], precision: NDArray[np.float64], metric: str) -> float:
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)  # at or above a recall
    if metric == "voc07":
        points = np.arange(11) / 10
        return float(best[np.searchsorted(recall, points)].mean())
    return float((np.diff(np.r_[0.0, recall]) * best[:-1]).sum())
