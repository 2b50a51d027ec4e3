"""The twelve COCO figures, the per-class table, and YOLOv5's P, R and F1 over confidence, from merged match records.

The figures are equal to pycocotools to 1e-12 (tests/parity/test_coco_metrics_parity.py).

P, R and F1 have the definitions of YOLOv5's ``val`` table. Curves have 1000 confidences. F1 is averaged over the classes with
labels and smoothed; the reported P and R are those at its peak. tests/unit/evaluate/test_precision_recall.py has numbers of YOLOv5.

Legend: D detections, C classes, K classes that have labels, T = 10 IoU thresholds, A = 4 area ranges, R = 101 recall points,
X = 1000 points of a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from yolofleet.runs.report.results import MAP, MAP50
from yolofleet.tasks.boxes.matching import AREA_RANGES_PX, A, MatchRecords, T, unpacked
from yolofleet.tasks.task import Metrics

RECALL_POINTS = np.linspace(0.0, 1.0, 101)
MOST_DETECTIONS = (1, 10, 100)  # per image and class
POINTS = 1000
SMOOTHING = 0.1  # width of the box filter over the mean F1, as a fraction of the curve

FIGURES = (
    MAP, MAP50, "mAP75", "mAP-small", "mAP-medium", "mAP-large",
    "AR1", "AR10", "AR100", "AR-small", "AR-medium", "AR-large",
)  # fmt: skip
"""Names of the twelve figures, in pycocotools' order."""


@dataclass(frozen=True)
class CocoMetrics(Metrics):
    """Figures of one evaluation; -1 means that there are no objects, as in pycocotools.

    Attributes:
        figures: the twelve of ``FIGURES``, then P, R and F1 (mean over classes, IoU 0.5, at the confidence of
            the best mean F1; 0 without labels).
        per_class: AP, AP50, AP-small, AP-medium, AP-large, P, R, images and labels (without crowds) by class name.
        curves: precision and recall over confidence, for plots.
        confusion: int64 [C + 1, C + 1], rows predicted, columns true, the last is background; empty if it was not counted.
    """

    curves: PrecisionRecall
    confusion: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))


def summarize(records: MatchRecords, names: Sequence[str]) -> CocoMetrics:
    """Return the figures of ordered records.

    Args:
        names: C class names; a repeated name gets its number appended, so that no class is lost.
    """
    classes = len(names)
    assert records.objects.shape == (classes, A), f"{classes} names for {len(records.objects)} classes"
    precision = np.full((T, len(RECALL_POINTS), classes, A), -1.0)
    recall = np.full((T, classes, A, len(MOST_DETECTIONS)), -1.0)
    borders = np.searchsorted(records.classes, np.arange(classes + 1))
    for c in np.flatnonzero(records.objects.any(axis=1)).tolist():
        rows = slice(borders[c], borders[c + 1])
        hit, miss = unpacked(records.hit[rows]), unpacked(records.miss[rows])  # [T, A, D]
        within = records.rank[rows] < np.array(MOST_DETECTIONS)[:, None]  # [most detections, D]
        counts = records.objects[c] > 0  # [A]
        objects = np.maximum(records.objects[c], 1)
        hits = np.einsum("tad,md->tam", hit, within, dtype=np.int64)
        recall[:, c, counts] = (hits / objects[:, None])[:, counts]
        precision[:, :, c, counts] = _precision_at_recall_points(hit, miss, objects)[:, :, counts]

    figures = dict(zip(FIGURES, _twelve(precision, recall), strict=True))
    curves = _precision_recall_at_50(records)
    figures |= curves.means
    place = {c: i for i, c in enumerate(curves.classes.tolist())}
    per_class: dict[str, dict[str, float]] = {}
    for c, name in enumerate(names):
        p, r = (curves.precision[place[c]], curves.recall[place[c]]) if c in place else (0.0, 0.0)
        per_class[name if name not in per_class else f"{name} ({c})"] = {
            "AP": _mean_of_present(precision[:, :, c, 0]),
            "AP50": _mean_of_present(precision[0, :, c, 0]),
            **{
                f"AP-{size}": _mean_of_present(precision[:, :, c, a])
                for a, size in enumerate(AREA_RANGES_PX)
                if a
            },
            "P": float(p),
            "R": float(r),
            "images": int(records.images[c]),
            "labels": int(records.objects[c, 0]),
        }
    return CocoMetrics(figures, per_class, curves)


# accumulation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionRecall:
    """Curves and operating point of the K classes that have labels.

    Attributes:
        classes: int64 [K], ascending.
        grid: float64 [X], 0..1.
        precision_curves, recall_curves, f1_curves: float64 [K, X], at confidence ``grid`` and the first IoU
            threshold.
        precision_at_recall: float64 [K, X], at recall ``grid`` and the first IoU threshold.
        ap: float64 [K, T], area under precision over recall (101 points, linear between).
        best: index into ``grid`` of the confidence with the best smoothed mean F1; 0 without labels.
    """

    classes: NDArray[np.int64]
    grid: NDArray[np.float64]
    precision_curves: NDArray[np.float64]
    recall_curves: NDArray[np.float64]
    f1_curves: NDArray[np.float64]
    precision_at_recall: NDArray[np.float64]
    ap: NDArray[np.float64]
    best: int

    @property
    def confidence(self) -> float:
        """The best confidence, at which ``precision``, ``recall`` and ``f1`` are given."""
        return float(self.grid[self.best])

    @property
    def precision(self) -> NDArray[np.float64]:
        """[K] at the best confidence."""
        return self.precision_curves[:, self.best]

    @property
    def recall(self) -> NDArray[np.float64]:
        """[K] at the best confidence."""
        return self.recall_curves[:, self.best]

    @property
    def f1(self) -> NDArray[np.float64]:
        """[K] at the best confidence."""
        return self.f1_curves[:, self.best]

    @property
    def means(self) -> dict[str, float]:
        """``P``, ``R`` and ``F1``: means of the K classes at the best confidence; 0 without labels."""
        values = {"P": self.precision, "R": self.recall, "F1": self.f1}
        return {
            name: float(of_classes.mean()) if len(of_classes) else 0.0 for name, of_classes in values.items()
        }


def precision_recall(
    hit: NDArray[np.bool_],
    score: NDArray[np.floating],
    class_idx: NDArray[np.integer],
    labels_per_class: NDArray[np.integer],
) -> PrecisionRecall:
    """Return the curves of every class that has labels.

    Args:
        hit: [D, T], the detection matched a label at this IoU threshold.
        score: [D], 0..1. class_idx: [D].
        labels_per_class: [C].
    """
    present = np.flatnonzero(labels_per_class)
    grid = np.linspace(0, 1, POINTS, dtype=np.float64)
    precision_curves = np.zeros((len(present), POINTS))
    recall_curves = np.zeros((len(present), POINTS))
    at_recall = np.zeros((len(present), POINTS))
    ap = np.zeros((len(present), hit.shape[1]))
    order = np.lexsort((-score, class_idx))  # stable
    hit, score, class_idx = hit[order], score[order], class_idx[order]
    borders = np.searchsorted(class_idx, np.arange(len(labels_per_class) + 1))
    for row, c in enumerate(present):
        mine = slice(borders[c], borders[c + 1])
        if borders[c] == borders[c + 1]:
            continue
        hits = np.cumsum(hit[mine], axis=0, dtype=np.float64)  # [D of the class, T]
        recall = hits / labels_per_class[c]
        precision = hits / np.arange(1, len(hits) + 1)[:, None]
        falling = -score[mine].astype(np.float64)  # np.interp wants rising abscissae
        recall_curves[row] = np.interp(-grid, falling, recall[:, 0], left=0)
        precision_curves[row] = np.interp(-grid, falling, precision[:, 0], left=1)
        for t in range(hit.shape[1]):
            x, y = _envelope(recall[:, t], precision[:, t])
            at_points = np.interp(RECALL_POINTS, x, y)
            ap[row, t] = ((at_points[1:] + at_points[:-1]) / 2 * np.diff(RECALL_POINTS)).sum()
            if t == 0:
                at_recall[row] = np.interp(grid, x, y)
    f1_curves = 2 * precision_curves * recall_curves / (precision_curves + recall_curves + 1e-16)
    best = int(_smoothed(f1_curves.mean(axis=0)).argmax()) if len(present) else 0
    return PrecisionRecall(present, grid, precision_curves, recall_curves, f1_curves, at_recall, ap, best)


def _envelope(
    recall: NDArray[np.float64], precision: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return recall and the upper envelope of precision, with the points (0, 1) and (1, 0) added at the ends."""
    x = np.concatenate(([0.0], recall, [1.0]))
    y = np.concatenate(([1.0], precision, [0.0]))
    return x, np.maximum.accumulate(y[::-1])[::-1]


def _smoothed(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving average over ``SMOOTHING`` of the curve's length (odd), padded with the end values."""
    half = round(len(curve) * SMOOTHING / 2)
    return np.convolve(
        np.pad(curve, half, mode="edge"), np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid"
    )


def _precision_at_recall_points(
    hit: NDArray[np.uint8], miss: NDArray[np.uint8], objects: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [T, R, A] the best precision at or above each recall, from [T, A, D] bits by falling score."""
    at = np.empty((T, len(RECALL_POINTS), A))
    for t, a in np.ndindex(T, A):  # a loop, because a class can have millions of detections
        hits = np.cumsum(hit[t, a], dtype=np.float64)
        misses = np.cumsum(miss[t, a], dtype=np.float64)
        precision = hits / (misses + hits + np.spacing(1))
        best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)  # 0 above the highest recall
        at[t, :, a] = best[np.searchsorted(hits / objects[a], RECALL_POINTS, side="left")]
    return at


def _twelve(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> list[float]:
    """Return the figures in the order of ``FIGURES``, from [T, R, C, A] and [T, C, A, most detections]."""
    parts = [precision[..., 0], precision[0, ..., 0], precision[5, ..., 0]]
    parts += [precision[..., a] for a in (1, 2, 3)]
    parts += [recall[:, :, 0, m] for m in (0, 1, 2)]
    parts += [recall[:, :, a, 2] for a in (1, 2, 3)]
    return [_mean_of_present(part) for part in parts]


def _mean_of_present(values: NDArray[np.float64]) -> float:
    present = values[values > -1]
    return float(present.mean()) if present.size else -1.0


def _precision_recall_at_50(records: MatchRecords) -> PrecisionRecall:
    """Return precision and recall at IoU 0.5 for all areas (bit 0)."""
    hit = (records.hit[:, 0] & 1).astype(bool)
    counts = hit | (records.miss[:, 0] & 1).astype(bool)
    return precision_recall(
        hit[counts, None], records.scores[counts], records.classes[counts], records.objects[:, 0]
    )
