"""Detections against those of YOLOv5 v7.0."""

import json

import numpy as np
import pytest
import torch
from conditioning import compare, paired, perturbed
from reference import parity

from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.nms import detections

CASES = json.loads(parity("nms/cases.json").read_text())
# Two pairs of boxes overlap by 0.6, a limit of two cases: the pair of the first image to within 6e-6, that of the second
# to within 3e-5. Limits this much higher or lower give the same boxes and lie 3e-5 from all pairs that matter.
FACTORS = (1 + 5e-5, 1 - 5e-5, 1)


def detected(options, predictions, factor=1.0):
    found, capped = detections(
        Decoded(torch.from_numpy(predictions)),
        conf=options["conf_thres"],
        iou=options["iou_thres"] * factor,
        max_det=options.get("max_det", 300),
        multi_label=options.get("multi_label", False),
        agnostic=options.get("agnostic", False),
        classes=options.get("classes"),
    )
    assert capped == 0 and len(found) == len(predictions)
    return [boxes.numpy() for boxes in found]


@pytest.mark.parametrize("name", CASES)
def test_detections_are_the_originals_to_the_bit(name):
    """Each operation rounds by itself and adds at most two numbers, so all processors give the same bits."""
    with np.load(parity("nms/cases.npz")) as numbers:
        for image, boxes in enumerate(detected(CASES[name], numbers["pred"])):
            np.testing.assert_array_equal(boxes, numbers[f"{name}.img{image}"])


@pytest.mark.parametrize("name", CASES)
def test_rounding_hardly_moves_the_detections(name):
    with np.load(parity("nms/cases.npz")) as numbers:
        predictions = perturbed(numbers["pred"])
        for image, factor in enumerate(FACTORS):
            (boxes,) = detected(CASES[name], predictions[image : image + 1], factor)
            expected = numbers[f"{name}.img{image}"]
            rows = paired(boxes, expected)
            compare(rows[:, :4], expected[:, :4], atol=3e-3)  # px: perturbations move 640 px by 1e-3
            compare(rows[:, 4], expected[:, 4], rtol=1e-5)
            compare(rows[:, 5], expected[:, 5])
