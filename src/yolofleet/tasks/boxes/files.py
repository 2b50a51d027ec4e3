"""What ``yolofleet val`` shows and writes of boxes on request: kinds of errors, VOC's AP, COCO results, YOLO text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import Id
from yolofleet.runs.report.console import NullConsole
from yolofleet.tasks.boxes.error_analysis import KINDS, analyse_errors, voc_ap
from yolofleet.tasks.boxes.matching import CONFUSION_SCORE, ScoredBoxes, labels_of
from yolofleet.tasks.boxes.plots import draw_worst


def detections_as_coco_json(
    detections: ScoredBoxes, image_ids: Sequence[Id], category_ids: Sequence[Id] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a COCO results file, with the unrounded floats, so that pycocotools gives equal figures.

    Args:
        detections: ``image`` is the position in the index.
        category_ids: by class number; None: the class number itself.
    """
    return [
        {
            "image_id": image_ids[image],
            "category_id": c if category_ids is None else category_ids[c],
            "bbox": box,
            "score": score,
        }
        for image, c, box, score in zip(
            detections.image.tolist(),
            detections.classes.tolist(),
            detections.boxes_xywh_px.tolist(),
            detections.scores.tolist(),
            strict=True,
        )
    ]


def detections_as_yolo_txt(
    detections: ScoredBoxes, index: DataIndex, *, scores: bool = False
) -> dict[int, str]:
    """Return the text of each image's file by image position; images without detections are absent.

    A line is ``class cx cy w h [score]``, as fractions of the image.
    """
    size = index.sizes_wh[detections.image]
    wh = detections.boxes_xywh_px[:, 2:] / size
    values = np.concatenate([detections.boxes_xywh_px[:, :2] / size + wh / 2, wh], axis=1)
    texts = {}
    for image, mine in of_each_image(detections.image):
        score = detections.scores[mine] if scores else None
        texts[image] = yolo_text(detections.classes[mine], values[mine], score)
    return texts


def of_each_image(image: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each image of a table, ascending, and its rows in their order. ``image``: int64 [D] of each row."""
    order = np.argsort(image, kind="stable")
    images, first = np.unique(image[order], return_index=True)
    # without rows there is one empty part
    yield from zip(images.tolist(), np.split(order, first[1:]), strict=False)


def yolo_text(
    classes: np.ndarray, values: Sequence[np.ndarray] | np.ndarray, scores: np.ndarray | None
) -> str:
    """Return a line of class, values and score for each object that has values."""
    columns = [[] for _ in classes] if scores is None else scores[:, None].tolist()
    lines = [
        " ".join([str(c), *(f"{number:.6g}" for number in (*numbers, *score))])
        for c, numbers, score in zip(classes.tolist(), values, columns, strict=True)
        if len(numbers)
    ]
    return "".join(f"{line}\n" for line in lines)


def analysed(
    config: ValConfig,
    folder: Path,
    found: ScoredBoxes,
    index: DataIndex,
    classes: Sequence[int] | None,
    console: NullConsole,
) -> dict[str, Any]:
    """Show what the settings ask for beside the COCO metrics; return it as values for JSON."""
    figures = dict[str, Any]()
    labels = labels_of(index, np.arange(len(index)), classes)
    if config.metric != "coco":
        per_class = voc_ap(labels, found, index.names, config.metric)
        mean = sum(per_class.values()) / max(len(per_class), 1)
        figures[config.metric] = {"mAP": mean, "per_class": per_class}
        table = [["all", f"{mean:.3f}"]]
        table += [[name, f"{ap:.3f}"] for name, ap in per_class.items()] if config.verbose else []
        console.table(f"PASCAL {config.metric.upper()}, IoU 0.5", ["class", "AP"], table)
    if config.error_analysis or config.worst:
        analysis = analyse_errors(labels, found, len(index.names))
    if config.error_analysis:
        figures["errors"] = {
            "AP50": analysis.ap50,
            "gains": dict(analysis.gains),
            "counts": dict(analysis.counts),
        }
        console.table(
            f"errors: AP50 {analysis.ap50:.3f} with 100 boxes of an image, and what it gains without each kind",
            ["kind", f"number, score above {CONFUSION_SCORE:g}", "AP50 gained"],
            [[kind, str(analysis.counts[kind]), f"{analysis.gains[kind]:.3f}"] for kind in KINDS],
        )
    if config.worst:
        errors = analysis.of_image
        draw_worst(found, index, errors, config.worst, folder / "worst")
        figures["errors_of_image"] = {index.path(image): number for image, number in errors.items()}
    return figures
