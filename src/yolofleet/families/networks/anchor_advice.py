"""Say how YOLOv5's anchors fit the labels of a data set."""

from __future__ import annotations

import numpy as np

from yolofleet.families.networks.anchor_fit import GOOD_ENOUGH, anchor_fit
from yolofleet.families.networks.description import AnchorDescription, preset

ADVICE_LABELS = 100_000  # a sample is enough to say how anchors fit
ADVICE_RATIO = 4.0  # largest side ratio of a match, YOLOv5's anchor_t


def preset_advice(sizes_wh_px: np.ndarray, img: int) -> list[str]:
    """Return a line about how YOLOv5's anchors fit labels of these sizes at --img ``img``; none without labels."""
    if not len(sizes_wh_px):
        return []
    sample = sizes_wh_px[:: max(1, len(sizes_wh_px) // ADVICE_LABELS)]
    described = preset("yolov5n")
    assert isinstance(described, AnchorDescription)
    anchors = np.array(described.anchors_px, float).reshape(-1, 2)
    recall, per_label = anchor_fit(sample, anchors, ADVICE_RATIO)
    text = (
        f"YOLOv5's anchors can match {recall:.1%} of the labels at --img {img}, {per_label:.1f} anchors each"
    )
    return [
        text if recall >= GOOD_ENOUGH else f"{text}: too few; another --img, or other anchors in a --cfg file"
    ]
