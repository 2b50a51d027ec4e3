"""How well anchors fit the labels (YOLOv5's two figures)."""

from __future__ import annotations

import numpy as np

GOOD_ENOUGH = 0.98  # best possible recall below which YOLOv5 looks for other anchors


def anchor_fit(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float) -> tuple[float, float]:
    """(best possible recall, anchors above threshold per label).

    Args:
        sizes_wh_px: [M, 2] label sizes at the training size, above 0.
        anchors_wh_px: [A, 2] of all levels.
        threshold: largest side ratio of a match (``anchor_t``).

    Parity with YOLOv5: tests/parity/test_anchors_parity.py.
    """
    if not len(sizes_wh_px):
        return 0.0, 0.0
    # in float32, as there: sides of whole pixels often stand exactly at the threshold
    ratio = sizes_wh_px.astype(np.float32)[:, None] / anchors_wh_px.astype(np.float32)  # [M, A, 2]
    worst = np.minimum(ratio, 1 / ratio).min(2)  # [M, A] in 0..1
    return float((worst.max(1) > 1 / threshold).mean()), float((worst > 1 / threshold).sum(1).mean())
