"""Weighted box fusion against the package of its authors, ``ensemble-boxes`` 1.0.9 (stored answers)."""

import json

import numpy as np
from conditioning import compare, perturbed
from reference import parity

from yolofleet.data.geometry.fusion import fuse_boxes


def test_fused_boxes_are_those_of_the_authors_package():
    for case in json.loads(parity("fusion/wbf.json").read_text()):
        boxes = perturbed(np.concatenate([np.array(part) for part in case["boxes"]]))
        scores, labels = (np.concatenate(case[name]) for name in ("scores", "labels"))
        fused, values, first = fuse_boxes(boxes, scores, labels, sources=len(case["boxes"]))
        assert labels[first].tolist() == case["fused_labels"]
        compare(values, case["fused_scores"], atol=1e-5)  # theirs are float32
        compare(fused, case["fused_boxes"], atol=1e-5)
