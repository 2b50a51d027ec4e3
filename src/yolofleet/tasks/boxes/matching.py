"""Match detections to labels by the rules of the COCO API, in shards that merge exactly: boxes, and what gives other overlaps.

Each rank matches the detections of its own images (``match_detections``). It keeps, per detection, only class, score and
2 x 40 bits: hit or miss at every IoU threshold and area range. The ranks exchange these records, and ``merge`` puts them
into one order that does not depend on the shards.

Protocol: T. Lin et al., "Microsoft COCO: Common Objects in Context", arXiv:1405.0312, as defined by the
COCO API (pycocotools ``COCOeval``, bbox); compared with it in tests/parity/test_coco_metrics_parity.py.

Legend: D detections, M labels, P pairs (detection, label), C classes, T = 10 IoU thresholds, A = 4 area
ranges. Bit ``t * A + a`` of a 40-bit word stands for threshold t and area range a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.table import Table, ranges
from yolofleet.tasks.task import Found

# linspace, because arange(.5, 1, .05) differs in the last bits, which changes matches
IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
AREA_RANGES_PX = {
    "all": (0.0, 1e10),
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
MOST_DETECTIONS = 100  # per image and class; those of lower score are left out
CONFUSION_SCORE, CONFUSION_IOU = 0.25, 0.45  # YOLOv5's values for the confusion matrix

T, A = len(IOU_THRESHOLDS), len(AREA_RANGES_PX)
_WORD_BYTES = T * A // 8
_EVERY_BIT = np.uint64((1 << T * A) - 1)
_EVERY_THRESHOLD = np.uint64(sum(1 << A * t for t in range(T)))  # 4 area bits x this = the same bits at all T
_REACHED = np.array([(1 << A * t) - 1 for t in range(T + 1)], np.uint64)  # bits of the first t thresholds
_IOU_FLOORS = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)
_PAIRS_AT_ONCE = 1 << 19  # about 60 MB of temporaries


@dataclass(frozen=True)
class Labels(Table):
    """True boxes of some images, in file order within an image.

    Attributes:
        image: int64 [M] >= 0, the position of the image, which breaks ties of scores.
        classes: int64 [M].
        boxes_xywh_px: float64 [M, 4], left, top, width, height in native pixels.
        area_px: float64 [M], the annotated area, which decides small, medium or large.
        crowd: bool [M]; a crowd does not count as an object, and matches any number of detections.
    """

    image: NDArray[np.int64]
    classes: NDArray[np.int64]
    boxes_xywh_px: NDArray[np.float64]
    area_px: NDArray[np.float64]
    crowd: NDArray[np.bool_]

    def overlaps(
        self, m: NDArray[np.int64], detections: Any, d: NDArray[np.int64], _floor: float
    ) -> NDArray[np.float64]:
        """Return [P] the IoU of the labels ``m`` with the ``detections`` ``d``; below ``_floor`` it may be less."""
        return iou_xywh(detections.boxes_xywh_px[d], self.boxes_xywh_px[m], self.crowd[m])


@dataclass(frozen=True)
class ScoredBoxes(Found):
    """Detections of some images, scores in float64; of equal scores in an image and class, the first row comes first.

    Attributes:
        boxes_xywh_px: float64 [D, 4], as in ``Labels``.
    """

    boxes_xywh_px: NDArray[np.float64]

    @property
    def areas_px(self) -> NDArray[np.float64]:
        """[D], which decides small, medium or large."""
        return self.boxes_xywh_px[:, 2] * self.boxes_xywh_px[:, 3]


def rows_of(index: DataIndex, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows of the labels of some images of an index."""
    first, last = index.offsets[positions], index.offsets[positions + 1]
    return np.concatenate(
        [np.arange(a, b) for a, b in zip(first, last, strict=True)] or [np.zeros(0, np.int64)]
    )


def labels_of(index: DataIndex, positions: NDArray[np.int64], classes: Sequence[int] | None = None) -> Labels:
    """Return the true boxes of some images of an index, of some classes or all; ``image`` is the position."""
    picked = rows_of(index, positions)
    image = np.repeat(positions, index.offsets[positions + 1] - index.offsets[positions])
    unit = np.asarray(index.boxes_cxcywh_unit[picked], np.float64)
    size = np.asarray(index.sizes_wh[image], np.float64)
    wh = unit[:, 2:] * size
    labels = Labels(
        image=image,
        classes=np.asarray(index.classes[picked], np.int64),
        boxes_xywh_px=np.concatenate([unit[:, :2] * size - wh / 2, wh], axis=1),
        area_px=np.asarray(index.area_px[picked], np.float64),
        crowd=np.asarray(index.crowd[picked], bool),
    )
    return labels if classes is None else labels.rows(np.isin(labels.classes, classes))


@dataclass(frozen=True)
class MatchRecords:
    """The result of matching, 31 bytes per detection, ordered by (class, score descending, image, rank).

    Attributes:
        classes: int32 [D].
        scores: float64 [D].
        image: int64 [D].
        rank: uint8 [D], position by score within its image and class, 0..99.
        hit: uint8 [D, 5], little-endian 40-bit words: the detection matched an object that counts.
        miss: uint8 [D, 5]: it matched no object, and counts. Neither bit: ignored (crowd, other area range).
        objects: int64 [C, A], labels that count in each area range.
        images: int64 [C], images with at least one label of the class that is not a crowd.
        images_seen: int64 [1], number of matched images, with or without labels.
    """

    classes: NDArray[np.int32]
    scores: NDArray[np.float64]
    image: NDArray[np.int64]
    rank: NDArray[np.uint8]
    hit: NDArray[np.uint8]
    miss: NDArray[np.uint8]
    objects: NDArray[np.int64]
    images: NDArray[np.int64]
    images_seen: NDArray[np.int64]


_OF_DETECTIONS = ("classes", "scores", "image", "rank", "hit", "miss")  # fields of D rows


def match_detections(
    labels: Labels, detections: ScoredBoxes, *, classes: int, images_seen: int
) -> MatchRecords:
    """Match detections to labels within each image and class, as COCOeval does.

    Detections choose in order of score. Each takes the free label of its image and class with the highest IoU (the later
    one of equals), if the IoU reaches the threshold. Labels that do not count in an area range are a second choice. The
    loop runs over (rank, choice) instead of images: a step processes all images and, as bits of a word, all 40 pairs of
    threshold and area range.

    Args:
        classes: C; those of the tables are smaller.
        images_seen: number of images of the two tables, including those without rows.
    """
    labels = labels.rows(np.lexsort((labels.classes, labels.image)))  # stable: file order stays
    by_score = np.lexsort((-detections.scores, detections.classes, detections.image))
    rank = _rank_in_runs(detections.image[by_score], detections.classes[by_score])
    best = rank < MOST_DETECTIONS
    detections, rank = detections.rows(by_score[best]), rank[best]

    label_elsewhere = _outside(labels.area_px) | labels.crowd[:, None]  # [M, A]
    label_ignored = _words(label_elsewhere)
    detection_outside = _words(_outside(detections.areas_px))

    matched = np.zeros(len(rank), np.uint64)
    ignored = np.zeros(len(rank), np.uint64)
    taken = np.zeros(len(label_ignored), np.uint64)
    for second_choice, d, m, reached in _claims(labels, detections, rank):
        allowed = reached & (label_ignored[m] if second_choice else ~label_ignored[m])
        won = allowed & ~taken[m] & ~matched[d]
        matched[d] |= won
        taken[m] |= np.where(labels.crowd[m], np.uint64(0), won)
        if second_choice:
            ignored[d] |= won

    objects = np.zeros((classes, A), np.int64)
    np.add.at(objects, labels.classes, ~label_elsewhere)
    found_on = np.stack([labels.classes, labels.image])[:, ~labels.crowd]
    return _in_order(
        MatchRecords(
            classes=detections.classes.astype(np.int32),
            scores=detections.scores,
            image=detections.image,
            rank=rank.astype(np.uint8),
            hit=_packed(matched & ~ignored),
            miss=_packed(~matched & ~detection_outside & _EVERY_BIT),
            objects=objects,
            images=np.bincount(np.unique(found_on, axis=1)[0], minlength=classes).astype(np.int64),
            images_seen=np.array([images_seen], np.int64),
        )
    )


def merge(shards: Sequence[MatchRecords]) -> MatchRecords:
    """Merge all shards; the result has equal bits for every distribution of the images over the shards."""
    assert shards, "at least one shard"
    whole: dict[str, Any] = {}
    for name in vars(shards[0]):
        parts = [getattr(shard, name) for shard in shards]
        whole[name] = np.concatenate(parts) if name in _OF_DETECTIONS else np.sum(parts, axis=0)
    return _in_order(MatchRecords(**whole))


# matching -------------------------------------------------------------------------------------------------


def _claims(
    labels: Labels, detections: ScoredBoxes, rank: NDArray[np.int64]
) -> Iterator[tuple[bool, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]]:
    """Yield the steps of the matching: (is second choice, detections d, labels m, bits of the reached thresholds).

    In a step every detection and every label occurs at most once, because all its detections have the same rank.
    """
    d, m, iou = overlapping_pairs(labels, detections, _IOU_FLOORS[0])
    order = np.lexsort((-m, -iou, d))  # by detection, best label first, the later of equals first
    d, m, iou = d[order], m[order], iou[order]
    reached = _REACHED[np.searchsorted(_IOU_FLOORS, iou, side="right")]
    choice = _rank_in_runs(d)
    order = np.lexsort((choice, rank[d]))
    d, m, reached = d[order], m[order], reached[order]
    choice = choice[order]
    borders = np.flatnonzero(np.diff(rank[d], prepend=-1) | np.diff(choice, prepend=-1))
    steps = list(pairwise([*borders.tolist(), len(d)]))
    rounds = [i for i, (lo, _) in enumerate(steps) if choice[lo] == 0]  # a round: all choices of one rank
    for first, last in pairwise([*rounds, len(steps)]):
        for second_choice in (False, True):
            for lo, hi in steps[first:last]:
                yield second_choice, d[lo:hi], m[lo:hi], reached[lo:hi]


def overlapping_pairs(
    labels: Labels, detections: ScoredBoxes, floor: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return rows d and m [P] of the same image and class, and their IoU [P], for IoU of at least ``floor``.

    Args:
        labels: ordered by (image, class).
    """
    images = np.unique(labels.image)
    classes = 1 + max(labels.classes.max(initial=0), detections.classes.max(initial=0))
    label_key = np.searchsorted(images, labels.image) * classes + labels.classes
    assert (np.diff(label_key) >= 0).all(), "labels are sorted"
    image = np.searchsorted(images, detections.image)
    known = np.append(images, -1)[image] == detections.image
    key = np.where(known, image * classes + detections.classes, -1)
    first = np.searchsorted(label_key, key, side="left")
    count = np.searchsorted(label_key, key, side="right") - first
    ends = np.cumsum(count)
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
    lo = 0
    while lo < len(count):
        done = ends[lo] - count[lo]
        hi = max(lo + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        d = np.repeat(np.arange(lo, hi), count[lo:hi])
        m = ranges(first[lo:hi], count[lo:hi])
        iou = labels.overlaps(m, detections, d, floor)
        near = iou >= floor
        found.append((d[near], m[near], iou[near]))
        lo = hi
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    d, m, iou = (np.concatenate(parts) for parts in zip(empty, *found, strict=True))
    return d, m, iou


def iou_xywh(
    found_xywh: NDArray[np.float64], true_xywh: NDArray[np.float64], crowd: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the IoU of boxes [..., 4]; for a crowd the union is the detection alone.

    The operations are those of COCO's C code, because a different last bit at a threshold changes a match.
    """
    d, m = np.moveaxis(found_xywh, -1, 0), np.moveaxis(true_xywh, -1, 0)
    w = np.minimum(d[2] + d[0], m[2] + m[0]) - np.maximum(d[0], m[0])
    h = np.minimum(d[3] + d[1], m[3] + m[1]) - np.maximum(d[1], m[1])
    both = w * h
    area = d[2] * d[3]
    union = np.where(crowd, area, area + m[2] * m[3] - both)
    overlap = (w > 0) & (h > 0)
    iou: NDArray[np.float64] = np.divide(both, union, out=np.zeros_like(both), where=overlap)
    return iou


def _rank_in_runs(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, ... within each run of equal keys."""
    place = np.arange(len(keys[0]))
    begins = np.ones(len(place), bool)
    if len(place):
        begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    first: NDArray[np.int64] = np.maximum.accumulate(np.where(begins, place, 0))
    return place - first


def _outside(area_px: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return [..., A]: whether the area is outside of each range; both ends belong to a range."""
    low, high = np.array(list(AREA_RANGES_PX.values())).T
    outside: NDArray[np.bool_] = (area_px[:, None] < low) | (area_px[:, None] > high)
    return outside


# confusion -----------------------------------------------------------------------------------------------


def confusion_matrix(labels: Labels, detections: ScoredBoxes, classes: int) -> NDArray[np.int64]:
    """Count matches of boxes of any classes; the matrices of several shards can be added.

    Boxes with a score above ``CONFUSION_SCORE`` are paired one to one with labels, highest IoU first, while it is above
    ``CONFUSION_IOU``. Unpaired boxes and labels count as background, but an unpaired detection on a crowd does not count.

    Returns:
        int64 [C + 1, C + 1], rows predicted, columns true; the last of each is background.
    """
    labels = labels.rows(np.argsort(labels.image, kind="stable"))
    detections = detections.rows(detections.scores > CONFUSION_SCORE)
    d, m, iou = overlapping_pairs(
        replace(labels, classes=np.zeros_like(labels.classes)),
        replace(detections, classes=np.zeros_like(detections.classes)),
        np.nextafter(CONFUSION_IOU, 1),
    )
    on_crowd = np.zeros(len(detections.scores), bool)
    on_crowd[d[labels.crowd[m]]] = True
    order = np.lexsort((m, d, -iou))
    order = order[~labels.crowd[m[order]]]
    d, m = d[order], m[order]

    partner = np.full(len(detections.scores), -1)
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
    np.add.at(matrix, (detections.classes[paired], labels.classes[partner[paired]]), 1)
    np.add.at(matrix[:, classes], detections.classes[alone], 1)
    np.add.at(matrix[classes], labels.classes[~found], 1)
    return matrix


# bits -----------------------------------------------------------------------------------------------------


def _words(by_area: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return [N] words with the [N, A] flags at every threshold."""
    nibble = (by_area << np.arange(A)).sum(axis=1).astype(np.uint64)
    words: NDArray[np.uint64] = nibble * _EVERY_THRESHOLD
    return words


def _packed(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    packed: NDArray[np.uint8] = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :_WORD_BYTES].copy()
    return packed


def unpacked(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [T, A, D] zeros and ones from [D, 5] bytes."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")  # [D, 5] -> [D, T * A]
    return np.ascontiguousarray(bits.T).reshape(T, A, len(packed))


def _in_order(records: MatchRecords) -> MatchRecords:
    order = np.lexsort((records.rank, records.image, -records.scores, records.classes))
    return replace(records, **{name: getattr(records, name)[order] for name in _OF_DETECTIONS})
