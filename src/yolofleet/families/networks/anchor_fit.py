"""Measure how well anchors fit the labels, as YOLOv5 does.

M labels, A anchors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

GOOD_ENOUGH = 0.98  # best possible recall below which YOLOv5 searches for other anchors
USUAL_RATIO = 4.0  # largest side ratio of a match, YOLOv5's anchor_t
CHUNK = 1 << 16  # labels in memory at once


def anchor_fit(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float) -> tuple[float, float]:
    """Return (best possible recall, matching anchors per label).

    Args:
        sizes_wh_px: [M, 2] label sizes at the training size, above 0.
        anchors_wh_px: [A, 2] of all levels.
        threshold: largest side ratio of a match (``anchor_t``).

    Parity with YOLOv5: tests/parity/test_anchors_parity.py.
    """
    if not len(sizes_wh_px):
        return 0.0, 0.0
    matched = pairs = 0
    for ratio in chunks(sizes_wh_px, anchors_wh_px):
        fits = ratio > 1 / threshold
        matched += int(fits.any(0).sum())
        pairs += int(fits.sum())
    return matched / len(sizes_wh_px), pairs / len(sizes_wh_px)


def chunks(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray) -> Iterator[np.ndarray]:
    """Yield :func:`ratios` [A, m] for chunks of the labels."""
    for start in range(0, len(sizes_wh_px), CHUNK):
        yield ratios(sizes_wh_px[start : start + CHUNK], anchors_wh_px)


def ratios(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray) -> np.ndarray:
    """Return [A, M] in 0..1: the smaller of the width ratio and the height ratio.

    In float32, as in YOLOv5, because sides of whole pixels are often exactly at the threshold.
    """
    width, height = sizes_wh_px.astype(np.float32).T[:, None] / anchors_wh_px.astype(np.float32).T[..., None]
    smaller: np.ndarray = np.minimum(np.minimum(width, 1 / width), np.minimum(height, 1 / height))
    return smaller
