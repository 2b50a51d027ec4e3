"""How anchors fit labels, against YOLOv5 v7.0's two figures (its random jitter of sizes fixed to 1)."""

import json

import numpy as np
import pytest
from reference import reference

from yolofleet.models.anchors import anchor_fit
from yolofleet.models.description import describe


@pytest.mark.parametrize(
    ("case", "scale"),
    [("coco128_640", 1.0), ("coco128_320", 1.0), ("bccd_640", 1.0), ("bccd_320", 1.0), ("coco128_640_anchors_x0.1", 0.1)],
)  # fmt: skip
def test_recall_and_anchors_per_label_are_the_originals(case, scale):
    answer = json.loads(reference("fixtures/yolov5/autoanchor.json").read_text())[case]
    name, img = case.split("_")[:2]
    with np.load(reference("fixtures/yolov5/autoanchor.npz")) as sets:
        sizes, labels = sets[f"{name}.shapes_wh"], sets[f"{name}.labels_flat"]
    ratio = int(img) / sizes.max(1, keepdims=True)
    sizes_px = labels[:, 4:] * (sizes * ratio)[labels[:, 0].astype(int)]
    anchors = np.asarray(describe("yolov5n").anchors_px).reshape(-1, 2) * scale
    recall, per_label = anchor_fit(sizes_px, anchors, 4.0)
    assert recall == pytest.approx(answer["bpr"], abs=1e-6)
    assert per_label == pytest.approx(answer["aat"], abs=1e-6)
