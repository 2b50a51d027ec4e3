"""COCO figures equal pycocotools': stored answers, the reference's sets, and random sets if it is installed."""

import json

import numpy as np
import pytest
from conditioning import compare
from detection_sets import DetectionSet, load_set, pycocotools_figures, random_set
from reference import parity

from yolofleet.tasks.boxes.coco import FIGURES, CocoMetrics, summarize
from yolofleet.tasks.boxes.matching import match_detections


def figures_of(everything: DetectionSet) -> CocoMetrics:
    records = match_detections(
        everything.labels, everything.found, classes=everything.classes, images_seen=len(everything.image_ids)
    )
    return summarize(records, [str(c) for c in range(everything.classes)])


def assert_equal(ours: CocoMetrics, figures: list[float], per_class: list[list[float]]) -> None:
    compare([ours.figures[name] for name in FIGURES], figures, rtol=0, atol=1e-12)
    table = [[row["AP"], row["AP50"]] for row in ours.per_class.values()]
    compare(table, per_class, rtol=0, atol=1e-12)


def test_synthetic_set_has_the_stored_figures_of_pycocotools():
    everything = load_set(parity("metrics/synthetic.npz"))
    answer = json.loads(parity("metrics/synthetic.json").read_text())
    groups = np.unique(
        np.stack([everything.found.image, everything.found.classes]), axis=1, return_counts=True
    )
    assert groups[1].max() > 100  # the set has something to cut
    assert_equal(figures_of(everything), answer["figures"], answer["per_class_AP_AP50"])


@pytest.mark.parametrize("name", ["coco128", "perfect"])
def test_reference_sets_have_the_figures_of_pycocotools(name):
    answer = json.loads(parity("metrics/results.json").read_text())[name]
    everything = load_set(parity(f"metrics/{name}.npz"))
    ours = figures_of(everything)
    per_class = answer["coco_per_category"]
    table = [[per_class[str(c)]["AP"], per_class[str(c)]["AP50"]] for c in range(everything.classes)]
    assert_equal(ours, answer["coco_stats"], table)


@pytest.mark.parametrize("seed", range(12))
def test_random_sets_have_the_figures_of_pycocotools(seed):
    pytest.importorskip("pycocotools")
    rng = np.random.default_rng(seed)
    everything = random_set(
        seed,
        images=int(rng.integers(2, 20)),
        classes=int(rng.integers(1, 6)),
        most_labels=int(rng.choice([2, 25])),
        most_found=int(rng.choice([4, 40, 260])),
    )
    assert_equal(figures_of(everything), *pycocotools_figures(everything))
