"""How anchors fit labels, against YOLOv5 v7.0's figures (its random jitter of sizes fixed to 1), and its search."""

import json

import numpy as np
import pytest
from conditioning import compare, perturbed
from reference import parity

from yolofleet.families.networks.anchor_fit import GOOD_ENOUGH, anchor_fit
from yolofleet.families.networks.anchors import anchor_fitness, better_anchors
from yolofleet.families.yolov5.presets import preset


def answers():
    return json.loads(parity("anchors/answers.json").read_text())


def sizes_px(name, img):
    """[M, 2] of the set's labels, the longer side of each image scaled to ``img``."""
    with np.load(parity("anchors/labels.npz")) as sets:
        sizes, labels = sets[f"{name}.shapes_wh"], sets[f"{name}.labels_flat"]
    ratio = img / sizes.max(1, keepdims=True)
    return labels[:, 4:] * (sizes * ratio)[labels[:, 0].astype(int)]


@pytest.mark.parametrize(
    ("case", "scale"),
    [("coco128_640", 1.0), ("coco128_320", 1.0), ("bccd_640", 1.0), ("bccd_320", 1.0), ("coco128_640_anchors_x0.1", 0.1)],
)  # fmt: skip
def test_recall_and_anchors_per_label_are_the_originals(case, scale):
    answer = answers()[case]
    name, img = case.split("_")[:2]
    sizes = perturbed(sizes_px(name, int(img)))
    anchors = np.asarray(preset("yolov5n").anchors_px).reshape(-1, 2) * scale
    anchors = perturbed(anchors)
    # Sides of whole pixels can be exactly four times an anchor's: such labels may count either way.
    fewest, most = (anchor_fit(sizes, anchors, 4.0 * (1 + change)) for change in (-1e-5, 1e-5))
    original = (answer["bpr"], answer["aat"])
    compare(np.clip(original, fewest, most), original, atol=1e-6)
    if scale == 1:
        assert len(sizes) == answer["n_labels"]
        assert answer["threshold_for_rerun"] == GOOD_ENOUGH


@pytest.mark.parametrize("name", ["coco128", "bccd"])
def test_the_originals_anchors_have_its_fitness(name):
    answer = answers()[f"{name}_kmeans_ga"]
    sizes = perturbed(sizes_px(name, answer["img_size"]))
    theirs = np.array(answer["anchors"])
    seen = sizes[(sizes >= 2).any(1)]  # those it measured its own fitness on
    compare(anchor_fitness(seen, theirs, answer["thr"]), answer["fitness_final"], atol=2e-5)
    compare(anchor_fit(sizes, theirs, answer["thr"]), (answer["bpr"], answer["aat"]), atol=1e-6)


@pytest.mark.parametrize("name", ["coco128", "bccd"])
def test_anchors_found_are_at_least_as_good_as_the_originals(name):
    answer = answers()[f"{name}_kmeans_ga"]
    sizes = sizes_px(name, answer["img_size"])
    seen = sizes[(sizes >= 2).any(1)]
    given = np.array(preset("yolov5n").anchors_px)
    for seed in range(3):
        found = better_anchors(sizes, given, answer["thr"], seed).reshape(-1, 2)
        assert anchor_fitness(seen, found, answer["thr"]) > answer["fitness_final"]
        assert anchor_fit(sizes, found, answer["thr"])[0] >= answer["bpr"]
