"""Gains after scaling for classes, levels and image size, against YOLOv5's own."""

import json

import pytest
import torch
from conditioning import compare
from reference import parity

from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss

BALANCE = {3: [4.0, 1.0, 0.4], 4: [4.0, 1.0, 0.25, 0.06]}


@pytest.mark.parametrize("row", json.loads(parity("yolov5_loss/gains.json").read_text()), ids=str)
def test_gains_are_the_originals(row):
    levels = row["nl"]
    loss = Yolov5Loss(
        anchors_px=torch.ones(levels, 3, 2),
        strides=(8, 16, 32, 64)[:levels],
        nc=row["nc"],
        recipe=Yolov5Hyperparameters(),
        img=row["imgsz"],
    )
    expected = [row["box"]] * levels + [row["obj"] * b for b in BALANCE[levels]] + [row["cls"]] * levels
    compare(loss.gains, expected, rtol=1e-6)
    assert loss.terms[:2] == ("box/0", "box/1") and loss.terms[-1] == f"cls/{levels - 1}"
