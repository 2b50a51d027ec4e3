"""Detections against those of YOLOv5 v7.0."""

import json

import numpy as np
import pytest
import torch
from conditioning import compare, paired, perturbed
from reference import parity

from yolofleet.geometry.nms import detections

CASES = json.loads(parity("nms/cases.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_detections_are_the_originals(name):
    options = CASES[name]
    with np.load(parity("nms/cases.npz")) as numbers:
        found, capped = detections(
            torch.from_numpy(perturbed(numbers["pred"])),
            conf=options["conf_thres"],
            iou=options["iou_thres"],
            max_det=options.get("max_det", 300),
            multi_label=options.get("multi_label", False),
            agnostic=options.get("agnostic", False),
            classes=options.get("classes"),
        )
        for image, boxes in enumerate(found):
            expected = numbers[f"{name}.img{image}"]
            rows = paired(boxes.numpy(), expected)
            compare(rows[:, :4], expected[:, :4], atol=5e-3)  # px
            compare(rows[:, 4], expected[:, 4], rtol=1e-5)
            compare(rows[:, 5], expected[:, 5])
    assert capped == 0 and len(found) == 3
