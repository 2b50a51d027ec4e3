"""Seconds of the COCO figures, ours against pycocotools where it is installed, on one core.

    python benchmarks/coco_metrics.py --images 5000

Random labels and detections (100 an image, 80 classes); both give the same twelve figures, which is checked.
Ours counts matching and figures; pycocotools counts loadRes, evaluate and accumulate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from typing import Any

import numpy as np

from yolofleet.tasks.boxes.coco import FIGURES, summarize
from yolofleet.tasks.boxes.matching import Labels, ScoredBoxes, match_detections

CLASSES, LABELS, FOUND = 80, 7, 100  # COCO val2017 has 7.3 labels an image


def random_sets(images: int) -> tuple[Labels, ScoredBoxes]:
    """About half of the detections lie near a label of their class."""
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(images), LABELS)
    true = np.concatenate(
        [rng.uniform(0, 500, (len(image), 2)), np.exp(rng.uniform(2.5, 5, (len(image), 2)))], 1
    )
    classes = rng.integers(0, CLASSES, len(image))
    crowd = rng.random(len(image)) < 0.01
    labels = Labels(image, classes, true, true[:, 2] * true[:, 3] * 0.8, crowd)
    found_image = np.repeat(np.arange(images), FOUND)
    near = found_image * LABELS + rng.integers(0, LABELS, len(found_image))
    boxes = true[near] + rng.normal(0, 0.1, (len(near), 4)) * np.tile(true[near][:, 2:], 2)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], 1)
    own = rng.random(len(near)) < 0.5
    found_classes = np.where(own, classes[near], rng.integers(0, CLASSES, len(near)))
    return labels, ScoredBoxes(found_image, found_classes, rng.random(len(near)), boxes)


def pycocotools_figures(labels: Labels, found: ScoredBoxes, images: int) -> tuple[list[float], float]:
    """The twelve figures and the CPU seconds they took."""

    def rows(table: Labels | ScoredBoxes) -> zip[tuple[int, int, list[float]]]:
        return zip(table.image.tolist(), table.classes.tolist(), table.boxes_xywh_px.tolist(), strict=True)

    truth = {
        "images": [{"id": i} for i in range(images)],
        "categories": [{"id": c} for c in range(CLASSES)],
        "annotations": [
            {"id": k + 1, "image_id": i, "category_id": c, "bbox": box, "area": area, "iscrowd": crowd}
            for k, ((i, c, box), area, crowd) in enumerate(
                zip(rows(labels), labels.area_px.tolist(), labels.crowd.astype(int).tolist(), strict=True)
            )
        ],
    }
    results = [
        {"image_id": i, "category_id": c, "bbox": box, "score": score}
        for (i, c, box), score in zip(rows(found), found.scores.tolist(), strict=True)
    ]
    return timed_figures(truth, results, "bbox")


def timed_figures(
    truth: dict[str, Any], results: list[dict[str, Any]], kind: str, package: str = "pycocotools"
) -> tuple[list[float], float]:
    """The twelve figures of a package and the CPU seconds they took. Raise ImportError if it is not installed.

    Args:
        kind: "bbox" or "segm".
        package: pycocotools, or faster_coco_eval.
    """
    if package == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    else:
        from faster_coco_eval import COCO
        from faster_coco_eval import COCOeval_faster as COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        dataset = COCO()
        dataset.dataset = truth
        dataset.createIndex()
        began_s = time.process_time()
        evaluation = COCOeval(dataset, dataset.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        seconds = time.process_time() - began_s
        evaluation.summarize()
    return [float(figure) for figure in evaluation.stats[:12]], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=500)
    images = parser.parse_args().images
    labels, found = random_sets(images)
    began_s = time.process_time()
    records = match_detections(labels, found, classes=CLASSES, images_seen=images)
    metrics = summarize(records, [str(c) for c in range(CLASSES)])
    ours_s = time.process_time() - began_s
    print(f"COCO figures of {images} images x {FOUND} detections, {CLASSES} classes, one core")
    print(f"  yolofleet    {ours_s:7.2f} s")
    try:
        figures, theirs_s = pycocotools_figures(labels, found, images)
    except ImportError:
        print("  pycocotools  is not installed")
        return
    difference = np.abs(np.array([metrics.figures[name] for name in FIGURES]) - figures).max()
    print(f"  pycocotools  {theirs_s:7.2f} s = {theirs_s / ours_s:.0f} times as long")
    print(f"  largest difference of a figure: {difference:.1e}")
    assert difference < 1e-12


if __name__ == "__main__":
    main()
