"""Seconds of the COCO figures of masks, ours against pycocotools and faster-coco-eval where they are installed, on one core.

    python benchmarks/mask_metrics.py --images 500

Random masks: like COCO (80 classes, 7 labels and 100 detections an image), and crowded (one class, 40 labels). All give
the same twelve figures, which is checked. Ours counts areas, boxes, matching and figures; theirs counts loadRes, evaluate
and accumulate. All begin with run lengths.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from coco_metrics import timed_figures

from yolofleet.data.geometry import rle
from yolofleet.tasks.boxes.coco import FIGURES, summarize
from yolofleet.tasks.boxes.matching import Labels, ScoredBoxes, match_detections
from yolofleet.tasks.masks.matching import MaskLabels, ScoredMasks

SIZE_HW, FOUND = (480, 640), 100
CASES = {"like COCO": (80, 7), "crowded": (1, 40)}  # classes, labels of an image

Masks = list[np.ndarray]


def random_masks(images: int, classes: int, labels: int) -> tuple[Labels, Masks, ScoredBoxes, Masks]:
    """Blobs of 12 to 200 px; about half of the detections lie near a label, most of these are of its class."""
    rng = np.random.default_rng(0)
    image, found_image = np.repeat(np.arange(images), labels), np.repeat(np.arange(images), FOUND)
    centre = rng.uniform(0, SIZE_HW[::-1], (len(image), 2))
    radius = np.exp(rng.uniform(1.8, 4.6, len(image)))
    turn = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    wave = 1 + 0.3 * np.sin(turn * rng.integers(2, 6, (len(image), 1)) + rng.uniform(0, 6, (len(image), 1)))

    def blobs(rows: np.ndarray, moved: np.ndarray) -> Masks:
        around = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        shapes = (moved + radius[rows, None])[:, :1, None] * wave[rows][..., None] * around
        return [
            rle.from_polygons([shape], SIZE_HW) for shape in centre[rows][:, None] + shapes + moved[:, None]
        ]

    near = found_image * labels + rng.integers(0, labels, len(found_image))
    true = blobs(np.arange(len(image)), np.zeros((len(image), 2)))
    spread = np.where(rng.random(len(near)) < 0.5, 0.1, 1.0)
    found = blobs(near, rng.normal(0, 1, (len(near), 2)) * (radius[near] * spread)[:, None])
    class_idx = rng.integers(0, classes, len(image))
    found_class = np.where(rng.random(len(near)) < 0.7, class_idx[near], rng.integers(0, classes, len(near)))
    nothing = np.zeros((len(image), 4)), np.zeros((len(near), 4))
    area = np.array([rle.area(runs) for runs in true], float)
    crowd = rng.random(len(image)) < 0.01
    boxes = ScoredBoxes(found_image, found_class, rng.random(len(near)), nothing[1])
    return Labels(image, class_idx, nothing[0], area, crowd), true, boxes, found


def figures_of(
    package: str, labels: Labels, true: Masks, boxes: ScoredBoxes, found: Masks, images: int, classes: int
) -> tuple[list[float], float]:
    """See ``coco_metrics.timed_figures``."""
    height, width = SIZE_HW
    truth = {
        "images": [{"id": i, "height": height, "width": width} for i in range(images)],
        "categories": [{"id": c} for c in range(classes)],
        "annotations": [
            {
                "id": k + 1,
                "image_id": int(labels.image[k]),
                "category_id": int(labels.classes[k]),
                "segmentation": rle.Mask(SIZE_HW, runs).coco(),
                "area": float(labels.area_px[k]),
                "iscrowd": int(labels.crowd[k]),
            }
            for k, runs in enumerate(true)
        ],
    }
    results = [
        {
            "image_id": int(boxes.image[k]),
            "category_id": int(boxes.classes[k]),
            "segmentation": rle.Mask(SIZE_HW, runs).coco(),
            "score": float(boxes.scores[k]),
        }
        for k, runs in enumerate(found)
    ]
    return timed_figures(truth, results, "segm", package)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=100)
    images = parser.parse_args().images
    for name, (classes, each) in CASES.items():
        labels, true, boxes, found = random_masks(images, classes, each)
        began_s = time.process_time()
        heights = np.full(max(len(true), len(found)), SIZE_HW[0])
        records = match_detections(
            MaskLabels(**vars(labels), **MaskLabels.columns(true, heights)),
            ScoredMasks(**vars(boxes), **ScoredMasks.columns(found, heights)),
            classes=classes,
            images_seen=images,
        )
        metrics = summarize(records, [str(c) for c in range(classes)])
        ours_s = time.process_time() - began_s
        runs = sum(map(len, found)) / len(found)
        print(
            f"{name}: {images} images, {each} masks and {FOUND} detections each, {runs:.0f} runs, {classes} classes, one core"
        )
        print(f"  yolofleet    {ours_s:7.2f} s")
        for package in ("pycocotools", "faster_coco_eval"):
            try:
                figures, theirs_s = figures_of(package, labels, true, boxes, found, images, classes)
            except ImportError:
                print(f"  {package} is not installed")
                continue
            difference = np.abs(np.array([metrics.figures[name] for name in FIGURES]) - figures).max()
            print(
                f"  {package}  {theirs_s:7.2f} s = {theirs_s / ours_s:.1f} times as long, "
                f"largest difference of a figure {difference:.1e}"
            )
            assert difference < 1e-12
        print(f"  mAP50-95 {metrics.figures['mAP50-95']:.3f}")


if __name__ == "__main__":
    main()
