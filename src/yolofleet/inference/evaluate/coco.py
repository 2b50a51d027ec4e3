"""The twelve COCO figures and the per-class table, from merged match records.

Equal to pycocotools to 1e-12 (tests/parity/test_coco_metrics_parity.py).

Legend: D detections, C classes, T = 10 IoU thresholds, A = 4 area ranges, R = 101 recall points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yolofleet.inference.evaluate.matching import AREA_RANGES_PX, A, MatchRecords, T, unpacked
from yolofleet.inference.evaluate.precision_recall import PrecisionRecall, precision_recall

RECALL_POINTS = np.linspace(0.0, 1.0, 101)
MOST_DETECTIONS = (1, 10, 100)  # per image and class

FIGURES = (
    "mAP50-95", "mAP50", "mAP75", "mAP-small", "mAP-medium", "mAP-large",
    "AR1", "AR10", "AR100", "AR-small", "AR-medium", "AR-large",
)  # fmt: skip
"""Names of the twelve figures, in pycocotools' order."""


@dataclass(frozen=True)
class CocoMetrics:
    """Figures of one evaluation; -1 means that there are no objects, as in pycocotools.

    Attributes:
        figures: the twelve of ``FIGURES``, then P, R and F1 (mean over classes, IoU 0.5, at the confidence of
            the best mean F1; 0 without labels).
        per_class: AP, AP50, AP-small, AP-medium, AP-large, P, R, images and labels (without crowds) by class name.
        curves: precision and recall over confidence, for plots.
    """

    figures: Mapping[str, float]
    per_class: Mapping[str, Mapping[str, float]]
    curves: PrecisionRecall

    @property
    def map50_95(self) -> float:
        """mAP at IoU 0.5 to 0.95; 0 if there are no objects."""
        return max(self.figures["mAP50-95"], 0.0)

    @property
    def map50(self) -> float:
        """mAP at IoU 0.5; 0 if there are no objects."""
        return max(self.figures["mAP50"], 0.0)


def summarize(records: MatchRecords, names: Sequence[str]) -> CocoMetrics:
    """Return the figures of ordered records.

    Args:
        names: C class names; a repeated name gets its number appended, so that no class is lost.
    """
    classes = len(names)
    assert records.objects.shape == (classes, A), f"{classes} names for {len(records.objects)} classes"
    precision = np.full((T, len(RECALL_POINTS), classes, A), -1.0)
    recall = np.full((T, classes, A, len(MOST_DETECTIONS)), -1.0)
    borders = np.searchsorted(records.class_idx, np.arange(classes + 1))
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
    place = {c: i for i, c in enumerate(curves.class_idx.tolist())}
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
        hit[counts, None], records.score[counts], records.class_idx[counts], records.objects[:, 0]
    )
