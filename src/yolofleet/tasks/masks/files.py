"""Masks in files: COCO results with run lengths, YOLO text with polygons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import Id
from yolofleet.data.geometry import rle
from yolofleet.tasks.boxes.files import detections_as_coco_json, of_each_image, yolo_text
from yolofleet.tasks.masks.draw import one_polygon
from yolofleet.tasks.masks.matching import ScoredMasks


def masks_as_coco_json(
    found: ScoredMasks, index: DataIndex, category_ids: Sequence[Id] | None
) -> list[dict[str, Any]]:
    """Return the rows of a COCO results file, as of boxes, with the mask as compressed run lengths."""
    rows = detections_as_coco_json(found, index.ids, category_ids)
    for row, image, runs in zip(rows, found.image.tolist(), found.masks(), strict=True):
        width, height = index.sizes_wh[image].tolist()
        row["segmentation"] = rle.Mask((height, width), runs).coco()
    return rows


def masks_as_yolo_txt(found: ScoredMasks, index: DataIndex, *, scores: bool) -> dict[int, str]:
    """Return the text of each image's file by image position; images without a mask are absent."""
    texts = {}
    masks = found.masks()
    for image, mine in of_each_image(found.image):
        width, height = index.sizes_wh[image].tolist()
        values = yolo_values([rle.Mask((height, width), masks[row]) for row in mine.tolist()])
        if text := yolo_text(found.classes[mine], values, found.scores[mine] if scores else None):
            texts[image] = text
    return texts


def yolo_values(masks: Sequence[rle.Mask] | np.ndarray) -> list[np.ndarray]:
    """Return the points x, y of the polygon of each mask as fractions of the image; none for an empty mask."""
    return [(one_polygon(mask) / mask.size_hw[::-1]).ravel() for mask in masks]
