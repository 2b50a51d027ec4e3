"""Write detections in COCO's results format and as YOLO text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import Id
from yolofleet.inference.evaluate.matching import ScoredBoxes


def detections_as_coco_json(
    detections: ScoredBoxes, image_ids: Sequence[Id], category_ids: Sequence[Id] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a COCO results file, with the unrounded floats, so that pycocotools gives equal figures.

    Args:
        detections: ``image`` is the position in the index.
        image_ids: by position.
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
            detections.class_idx.tolist(),
            detections.boxes_xywh_px.tolist(),
            detections.score.tolist(),
            strict=True,
        )
    ]


def detections_as_yolo_txt(
    detections: ScoredBoxes, index: DataIndex, *, scores: bool = False
) -> dict[int, str]:
    """Return the text of each image's file by image position; images without detections are absent.

    A line is ``class cx cy w h [score]``, as fractions of the image.
    """
    lines: dict[int, list[str]] = {}
    size = index.sizes_wh[detections.image]
    wh = detections.boxes_xywh_px[:, 2:] / size
    centre = detections.boxes_xywh_px[:, :2] / size + wh / 2
    for row, (image, c) in enumerate(
        zip(detections.image.tolist(), detections.class_idx.tolist(), strict=True)
    ):
        numbers = [*centre[row], *wh[row], *([detections.score[row]] if scores else [])]
        lines.setdefault(image, []).append(" ".join([str(c), *(f"{number:.6g}" for number in numbers)]))
    return {image: "\n".join(text) + "\n" for image, text in lines.items()}
