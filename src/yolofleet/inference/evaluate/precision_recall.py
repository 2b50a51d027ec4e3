"""Precision, recall and F1 over confidence, and the confidence at which YOLOv5 reports them.

The definitions are those of YOLOv5's ``val`` table. Curves have 1000 confidences. F1 is averaged over the classes with
labels and smoothed; the reported P and R are those at its peak. tests/unit/evaluate/test_precision_recall.py has numbers of YOLOv5.

Legend: D detections, C classes, K classes that have labels, T IoU thresholds, X = 1000 points of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POINTS = 1000
SMOOTHING = 0.1  # width of the box filter over the mean F1, as a fraction of the curve


@dataclass(frozen=True)
class PrecisionRecall:
    """Curves and operating point of the K classes that have labels.

    Attributes:
        class_idx: int64 [K], ascending.
        grid: float64 [X], 0..1.
        precision_curves, recall_curves, f1_curves: float64 [K, X], at confidence ``grid`` and the first IoU
            threshold.
        precision_at_recall: float64 [K, X], at recall ``grid`` and the first IoU threshold.
        ap: float64 [K, T], area under precision over recall (101 points, linear between).
        best: index into ``grid`` of the confidence with the best smoothed mean F1; 0 without labels.
    """

    class_idx: NDArray[np.int64]
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
            recall_points = np.linspace(0, 1, 101)
            at_points = np.interp(recall_points, x, y)
            ap[row, t] = ((at_points[1:] + at_points[:-1]) / 2 * np.diff(recall_points)).sum()
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
