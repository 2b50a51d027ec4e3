"""Confusion matrix of classes, with background as the last row and column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from yolofleet.evaluate.matching import Labels, ScoredBoxes, overlapping_pairs, rows

CONFIDENCE = 0.25  # YOLOv5's values for this matrix
IOU = 0.45


def confusion_matrix(labels: Labels, detections: ScoredBoxes, classes: int) -> NDArray[np.int64]:
    """Count matches of boxes of any classes; the matrices of several shards can be added.

    Boxes with a score above ``CONFIDENCE`` are paired one to one with labels, highest IoU first, while it is above
    ``IOU``. Unpaired boxes and labels count as background, but an unpaired detection on a crowd does not count.

    Returns:
        int64 [C + 1, C + 1], rows predicted, columns true; the last of each is background.
    """
    labels = rows(labels, np.argsort(labels.image, kind="stable"))
    detections = rows(detections, detections.score > CONFIDENCE)
    d, m, iou = overlapping_pairs(
        replace(labels, class_idx=np.zeros_like(labels.class_idx)),
        replace(detections, class_idx=np.zeros_like(detections.class_idx)),
        np.nextafter(IOU, 1),
    )
    on_crowd = np.zeros(len(detections.score), bool)
    on_crowd[d[labels.crowd[m]]] = True
    order = np.lexsort((m, d, -iou))
    order = order[~labels.crowd[m[order]]]
    d, m = d[order], m[order]

    partner = np.full(len(detections.score), -1)
    found = labels.crowd.copy()
    while len(d):  # each round pairs all mutually best boxes; usually 2 or 3 rounds
        places = np.arange(len(d))
        best_of_d = np.full(len(partner), len(d))
        best_of_m = np.full(len(found), len(d))
        np.minimum.at(best_of_d, d, places)
        np.minimum.at(best_of_m, m, places)
        agreed = (best_of_d[d] == places) & (best_of_m[m] == places)
        partner[d[agreed]] = m[agreed]
        found[m[agreed]] = True
        left = (partner[d] < 0) & ~found[m]
        d, m = d[left], m[left]

    paired = partner >= 0
    alone = ~paired & ~on_crowd
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    np.add.at(matrix, (detections.class_idx[paired], labels.class_idx[partner[paired]]), 1)
    np.add.at(matrix[:, classes], detections.class_idx[alone], 1)
    np.add.at(matrix[classes], labels.class_idx[~found], 1)
    return matrix
