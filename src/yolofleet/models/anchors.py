"""How well anchors fit the labels (YOLOv5's two figures)."""

from __future__ import annotations

import numpy as np

GOOD_ENOUGH = 0.98  # best possible recall below which YOLOv5 looks for other anchors


def anchor_fit(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float) -> tuple[float, float]:
    """(best possible recall, anchors above threshold per label).

    Args:
        sizes_wh_px: [M, 2] label sizes at the training size; those under 2 px are not counted.
        anchors_wh_px: [A, 2] of all levels.
        threshold: largest side ratio of a match (``anchor_t``).
    """
    sizes = sizes_wh_px[(sizes_wh_px >= 2.0).any(1)]
    if not len(sizes):
        return 0.0, 0.0
    ratio = sizes[:, None] / anchors_wh_px[None]  # [M, A, 2]
    worst = np.minimum(ratio, 1 / ratio).min(2)  # [M, A] in 0..1
    return float((worst.max(1) > 1 / threshold).mean()), float((worst > 1 / threshold).sum(1).mean())
