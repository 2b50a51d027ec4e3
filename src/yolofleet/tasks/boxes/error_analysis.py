"""What each kind of error costs: the AP50 that an evaluation would gain without it; and the AP of the PASCAL VOC challenges.

Source of the errors: D. Bolya et al., "TIDE: A General Toolbox for Identifying Object Detection Errors", arXiv:2008.08115.
Compared with the authors' package in tests/unit/evaluate/test_error_analysis.py. All figures follow from the gathered
detections, so the fleet is not in them.

Source of PASCAL VOC's AP: M. Everingham et al., "The PASCAL Visual Object Classes Challenge: A Retrospective", IJCV 2015, and
the challenge's description. Boxes have continuous coordinates; the challenge's own program counts pixels, which makes each
box one pixel larger.

Legend: D detections, M labels, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from yolofleet.tasks.boxes.coco import RECALL_POINTS
from yolofleet.tasks.boxes.matching import (
    CONFUSION_SCORE,
    MOST_DETECTIONS,
    Labels,
    ScoredBoxes,
    iou_xywh,
    overlapping_pairs,
)

FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1
KINDS = ("classification", "localisation", "both", "duplicate", "background", "missed")
CLS, LOC, BOTH, DUPLICATE, BACKGROUND = range(5)
HIT = -1
VOC_IOU = 0.5


@dataclass(frozen=True)
class ErrorAnalysis:
    """The errors of an evaluation.

    Attributes:
        ap50: mean AP at IoU 0.5 of the classes with labels, with at most 100 detections of an image.
        gains: AP50 that would be gained without the errors of each of ``KINDS``.
        counts: number of errors of each of ``KINDS``, among the detections that the analysis counts.
        of_image: the same errors of each image with at least one.
    """

    ap50: float
    gains: Mapping[str, float]
    counts: Mapping[str, int]
    of_image: Mapping[int, int]


def analyse_errors(
    labels: Labels, detections: ScoredBoxes, classes: int, *, counted_above: float = CONFUSION_SCORE
) -> ErrorAnalysis:
    """Return the AP50 that each kind of error costs, and the number of errors that a user would see.

    AP50 and its gains depend on all detections. The numbers are of the detections with a score above ``counted_above``,
    by default that of the confusion matrix: most detections below it are noise, which AP50 hardly notices.
    """
    whole = _analysed(labels, detections, classes)
    counted = _analysed(labels, detections.rows(detections.scores > counted_above), classes)
    return replace(whole, counts=counted.counts, of_image=counted.of_image)


def _analysed(labels: Labels, detections: ScoredBoxes, classes: int) -> ErrorAnalysis:
    """Classify every false detection and every missed label, and compute AP50 without each kind.

    A false detection is, in this order: a localisation error (IoU 0.1 to 0.5 with a label of its class), a classification
    error (IoU of at least 0.5 with a label of another class), a duplicate (its label has a detection of a higher score),
    background (IoU of at most 0.1 with every label), or both classification and localisation. A label is missed if no
    detection matches it and no classification or localisation error belongs to it. A detection that matches no label, but
    lies on a crowd region of its class, does not count.
    """
    crowd = labels.rows(labels.crowd)
    labels = labels.rows(~labels.crowd)
    labels = labels.rows(np.argsort(labels.image, kind="stable"))
    detections = detections.rows(np.lexsort((-detections.scores, detections.image)))
    starts = np.searchsorted(detections.image, detections.image, side="left")
    detections = detections.rows(np.arange(len(starts)) - starts < MOST_DETECTIONS)

    kind = np.full(len(detections.scores), BACKGROUND)
    counts = np.ones(len(kind), bool)
    label_of = np.full(len(kind), -1)  # the label that a repaired detection would match
    found = np.zeros(len(labels.image), bool)
    for image in np.unique(detections.image).tolist():
        d = slice(*np.searchsorted(detections.image, [image, image + 1]).tolist())
        m = slice(*np.searchsorted(labels.image, [image, image + 1]).tolist())
        boxes = detections.boxes_xywh_px[d, None]
        overlaps = iou_xywh(boxes, labels.boxes_xywh_px[m], labels.crowd[m])
        same = detections.classes[d, None] == labels.classes[None, m]
        kinds, matched, found[m] = _of_image(overlaps, same)
        kind[d], label_of[d] = kinds, np.where(matched >= 0, matched + m.start, -1)
        on = crowd.image == image
        inside = iou_xywh(boxes, crowd.boxes_xywh_px[on], crowd.crowd[on])
        inside *= detections.classes[d, None] == crowd.classes[None, on]
        counts[d] = (kinds == HIT) | (inside.max(axis=1, initial=0) <= FOREGROUND_IOU)

    repairable = counts & np.isin(kind, (CLS, LOC)) & (label_of >= 0)
    repairable[repairable] &= ~found[label_of[repairable]]
    repairs = np.zeros(len(kind), bool)  # the detection of the highest score for each label
    order = np.flatnonzero(repairable)
    order = order[np.lexsort((order, -detections.scores[order], label_of[order]))]
    if len(order):
        repairs[order[np.r_[True, np.diff(label_of[order]) != 0]]] = True
    missed = ~found
    missed[label_of[repairable]] = False

    class_idx, hit = detections.classes, kind == HIT
    objects = np.bincount(labels.classes, minlength=classes)
    ap50 = _mean_ap(class_idx, detections.scores, hit, counts, objects)
    gains = {}
    for number, name in enumerate(KINDS[:-1]):
        of_kind = kind == number
        fixed = of_kind & repairs
        new_class = np.where(fixed, labels.classes[label_of], class_idx) if len(labels.image) else class_idx
        kept = counts & (~of_kind | fixed)
        gains[name] = _mean_ap(new_class, detections.scores, hit | fixed, kept, objects) - ap50
    left = objects - np.bincount(labels.classes[missed], minlength=classes)
    gains["missed"] = _mean_ap(class_idx, detections.scores, hit, counts, left) - ap50
    number_of = {name: int((counts & (kind == k)).sum()) for k, name in enumerate(KINDS[:-1])}
    wrong = np.concatenate([detections.image[counts & ~hit], labels.image[missed]])
    images, errors = np.unique(wrong, return_counts=True)
    return ErrorAnalysis(
        ap50,
        gains,
        number_of | {"missed": int(missed.sum())},
        dict(zip(images.tolist(), errors.tolist(), strict=True)),
    )


def _of_image(
    overlaps: NDArray[np.float64], same: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the kind of each detection [D], the label that it would match if repaired [D], and the found labels [M]."""
    kinds = np.full(len(overlaps), BACKGROUND)
    matched = np.full(len(overlaps), -1)
    found = np.zeros(overlaps.shape[1], bool)
    if not found.size:
        return kinds, matched, found
    own, other = overlaps * same, overlaps * ~same
    free = own.copy()
    for d in range(len(overlaps)):
        m = int(free[d].argmax())
        if free[d, m] >= FOREGROUND_IOU:
            kinds[d], found[m] = HIT, True
            free[:, m] = 0
    for d in np.flatnonzero(kinds != HIT).tolist():
        near, wrong = int(own[d].argmax()), int(other[d].argmax())
        if BACKGROUND_IOU <= own[d, near] <= FOREGROUND_IOU:
            kinds[d], matched[d] = LOC, near
        elif other[d, wrong] >= FOREGROUND_IOU:
            kinds[d], matched[d] = CLS, wrong
        elif (own[d] * found).max() >= FOREGROUND_IOU:
            kinds[d] = DUPLICATE
        elif overlaps[d].max() > BACKGROUND_IOU:
            kinds[d] = BOTH
    return kinds, matched, found


def _mean_ap(
    class_idx: NDArray[np.int64],
    score: NDArray[np.float64],
    hit: NDArray[np.bool_],
    counts: NDArray[np.bool_],
    objects: NDArray[np.int64],
) -> float:
    """Return the mean AP of the classes with objects (101 recall points); 0 without objects."""
    values = []
    for c in np.flatnonzero(objects).tolist():
        mine = np.flatnonzero(counts & (class_idx == c))
        hits = np.cumsum(hit[mine[np.argsort(-score[mine], kind="stable")]])
        precision = hits / np.arange(1, len(hits) + 1)
        best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
        values.append(best[np.searchsorted(hits / objects[c], RECALL_POINTS)].mean())
    return float(np.mean(values)) if values else 0.0


def voc_ap(labels: Labels, detections: ScoredBoxes, names: Sequence[str], metric: str) -> dict[str, float]:
    """Return the AP of each class with labels, by name.

    A detection belongs to the label of its image and class with the highest IoU. The first one by score, with an IoU of at
    least 0.5, is a hit; later ones are false. A detection of a difficult object (``crowd``) does not count.

    Args:
        metric: voc07: mean of the precision at 11 recalls; voc12: area under the precision-recall curve.
    """
    labels = labels.rows(np.lexsort((labels.classes, labels.image)))
    detections = detections.rows(np.lexsort((detections.image, -detections.scores)))
    ordinary = replace(labels, crowd=np.zeros_like(labels.crowd))
    d, m, iou = overlapping_pairs(ordinary, detections, VOC_IOU)
    order = np.lexsort((m, -iou, d))
    d, m = d[order], m[order]
    best = np.r_[True, np.diff(d) != 0] if len(d) else np.zeros(0, bool)
    d, m = d[best], m[best]  # each detection once, by falling score
    difficult = labels.crowd[m]
    first = np.zeros(len(d), bool)
    first[np.unique(m, return_index=True)[1]] = True
    hit, counts = np.zeros(len(detections.scores), bool), np.ones(len(detections.scores), bool)
    hit[d[first & ~difficult]] = True
    counts[d[difficult]] = False

    objects = np.bincount(labels.classes[~labels.crowd], minlength=len(names))
    result = {}
    for c in np.flatnonzero(objects).tolist():
        hits = hit[counts & (detections.classes == c)]
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
