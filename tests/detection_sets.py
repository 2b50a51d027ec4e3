"""Random labels and detections with everything that COCO's protocol has a rule for, and pycocotools' answer.

``python tests/detection_sets.py`` writes ``parity/data/metrics/synthetic.npz`` and its figures again.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.tasks.boxes.matching import Labels, ScoredBoxes


@dataclass(frozen=True)
class DetectionSet:
    """``image`` of labels and detections is the image's id."""

    classes: int
    image_ids: np.ndarray  # int64, not sorted
    labels: Labels
    found: ScoredBoxes


def random_set(seed: int, *, images: int, classes: int, most_labels: int, most_found: int) -> DetectionSet:
    """Not sorted ids, images without labels or detections, crowds, boxes on top of each other, exact
    hits, scores in steps of 0.01 (many ties), areas below the box's, more than 100 boxes of a class."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(10 * images)[:images] + 1
    labels: list[tuple[int, int, np.ndarray, float, bool]] = []
    found: list[tuple[int, int, np.ndarray, float]] = []
    for image in ids.tolist():
        own: list[tuple[int, np.ndarray]] = []
        for _ in range(int(rng.integers(0, most_labels + 1))):
            c = int(rng.integers(classes))
            box = np.concatenate([rng.uniform(0, 640, 2), np.exp(rng.uniform(1.5, 5.5, 2))])
            if own and rng.random() < 0.5:  # a neighbour or a twin of the one before
                c, box = own[-1][0], own[-1][1] + rng.normal(0, 3, 4) * (rng.random() < 0.7)
            box = np.round(np.maximum(box, [-50, -50, 2, 2]), 2)
            own.append((c, box))
            labels.append((image, c, box, box[2] * box[3] * rng.uniform(0.5, 1), bool(rng.random() < 0.1)))
        for _ in range(int(rng.integers(0, most_found + 1))):
            c = int(rng.integers(classes))
            box = np.concatenate([rng.uniform(0, 640, 2), np.exp(rng.uniform(1, 5.5, 2))])
            if own and rng.random() < 0.7:
                c, box = own[int(rng.integers(len(own)))]
                if rng.random() < 0.8:
                    box = box + rng.normal(0, 0.1, 4) * np.tile(box[2:], 2)
                    box[2:] = np.maximum(box[2:], 1)
            found.append((image, c, np.round(box, 2), round(rng.random(), 2)))
    return DetectionSet(
        classes,
        ids,
        Labels(
            np.array([row[0] for row in labels], np.int64),
            np.array([row[1] for row in labels], np.int64),
            np.array([row[2] for row in labels], np.float64).reshape(-1, 4),
            np.array([row[3] for row in labels], np.float64),
            np.array([row[4] for row in labels], bool),
        ),
        ScoredBoxes(
            np.array([row[0] for row in found], np.int64),
            np.array([row[1] for row in found], np.int64),
            np.array([row[3] for row in found], np.float64),
            np.array([row[2] for row in found], np.float64).reshape(-1, 4),
        ),
    )


def pycocotools_figures(everything: DetectionSet) -> tuple[list[float], list[list[float]]]:
    """The twelve figures, and [AP, AP50] of each class; at least one detection."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    labels, found = everything.labels, everything.found
    truth = {
        "images": [{"id": i} for i in everything.image_ids.tolist()],
        "categories": [{"id": c} for c in range(everything.classes)],
        "annotations": [
            {"id": k + 1, "image_id": i, "category_id": c, "bbox": box, "area": area, "iscrowd": int(crowd)}
            for k, (i, c, box, area, crowd) in enumerate(
                zip(
                    labels.image.tolist(),
                    labels.classes.tolist(),
                    labels.boxes_xywh_px.tolist(),
                    labels.area_px.tolist(),
                    labels.crowd.tolist(),
                    strict=True,
                )
            )
        ],
    }
    results = [
        {"image_id": i, "category_id": c, "bbox": box, "score": score}
        for i, c, box, score in zip(
            found.image.tolist(),
            found.classes.tolist(),
            found.boxes_xywh_px.tolist(),
            found.scores.tolist(),
            strict=True,
        )
    ]
    return run_cocoeval(COCO, COCOeval, truth, results)


def run_cocoeval(
    coco: Any, cocoeval: Any, truth: dict[str, Any], results: list[dict[str, Any]], kind: str = "bbox"
) -> tuple[list[float], list[list[float]]]:
    """The twelve figures, and [AP, AP50] of each class."""
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = coco()
        dataset.dataset = truth
        dataset.createIndex()
        evaluation = cocoeval(dataset, dataset.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    per_class = []
    for c in range(len(truth["categories"])):
        precision = evaluation.eval["precision"][:, :, c, 0, 2]
        every, at50 = precision[precision > -1], precision[0][precision[0] > -1]
        per_class.append([float(p.mean()) if p.size else -1.0 for p in (every, at50)])
    return [float(figure) for figure in evaluation.stats], per_class


# names in stored files, in the order of the tables' columns
LABELS = ("image", "class_idx", "boxes_xywh_px", "area_px", "crowd")
FOUND = ("image", "class_idx", "score", "boxes_xywh_px")


def load_set(path: Path) -> DetectionSet:
    with np.load(path) as arrays:
        return DetectionSet(
            int(arrays["classes"]),
            arrays["image_ids"],
            Labels(*(arrays[f"label_{name}"] for name in LABELS)),
            ScoredBoxes(*(arrays[f"found_{name}"] for name in FOUND)),
        )


def _write_synthetic() -> None:
    from importlib.metadata import version

    folder = Path(__file__).resolve().parent / "parity" / "data" / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    made = random_set(20240607, images=16, classes=3, most_labels=12, most_found=450)
    arrays = {f"label_{name}": v for name, v in zip(LABELS, vars(made.labels).values(), strict=True)}
    arrays |= {f"found_{name}": v for name, v in zip(FOUND, vars(made.found).values(), strict=True)}
    np.savez_compressed(folder / "synthetic.npz", classes=made.classes, image_ids=made.image_ids, **arrays)
    figures, per_class = pycocotools_figures(made)
    answer = {
        "producer": f"pycocotools {version('pycocotools')} COCOeval bbox, numpy {np.__version__}",
        "input": "synthetic.npz, random boxes of tests/detection_sets.py (no data set's labels)",
        "figures": figures,
        "per_class_AP_AP50": per_class,
    }
    (folder / "synthetic.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write_synthetic()
