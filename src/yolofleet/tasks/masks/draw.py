"""Masks as pixels, polygons and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.maskrows import joined_rings
from yolofleet.data.geometry import rle
from yolofleet.runs.report.draw import colour
from yolofleet.runs.report.plots import MASK_OPACITY, or_note
from yolofleet.tasks.boxes.plots import draw_validation, plot_confusion, plot_curves
from yolofleet.tasks.masks.matching import mask_labels_of

SIMPLER_PX = 0.75  # a polygon leaves out corners that are nearer than this to the line without them


def polygons(mask: rle.Mask) -> list[np.ndarray]:
    """Return simplified outlines int64 [k, 2] x, y in pixels: outer ones of positive signed area, holes of negative."""
    found = []
    for ring in rle.rings(mask.runs, mask.size_hw):
        few = cv2.approxPolyDP(ring.astype(np.int32)[:, None], SIMPLER_PX, True)[:, 0].astype(np.int64)
        found.append(few if len(few) > 2 else ring)
    return found


def one_polygon(mask: rle.Mask) -> np.ndarray:
    """Return all outlines as one polygon int64 [k, 2]: lines that are walked twice, there and back, join parts and holes."""
    return joined_rings(polygons(mask) or [np.zeros((0, 2), np.int64)])


def painted(image: np.ndarray, masks: Sequence[rle.Mask] | np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return a copy of an image uint8 [H, W, 3] BGR with masks and their outlines, the first one on top."""
    image = np.ascontiguousarray(image).copy()
    pen = max(1, round(sum(image.shape[:2]) / 1200))
    for mask, class_idx in zip(masks[::-1], classes[::-1].tolist(), strict=True):
        left, top, width, height = rle.box(mask.runs, mask.size_hw[0])
        if not width:
            continue
        inside = rle.decode(mask.runs, mask.size_hw, (left, left + width))[top : top + height]
        part = image[top : top + height, left : left + width]
        part[inside] = (1 - MASK_OPACITY) * part[inside] + MASK_OPACITY * np.array(colour(class_idx))
        outlines = [ring.astype(np.int32) for ring in rle.rings(mask.runs, mask.size_hw)]
        cv2.polylines(image, outlines, True, colour(class_idx), pen, cv2.LINE_AA)
    return image


def draw_masks(metrics: Any, found: Any, index: DataIndex, folder: Path, note: Callable[[str], None]) -> None:
    """Draw what is drawn of boxes, with masks in the images, and the curves and the confusion of masks in ``masks``."""

    def with_masks(pixels: np.ndarray, image: int, rows: Any) -> np.ndarray:
        table = mask_labels_of(index, np.array([image])) if rows is None else found.rows(rows)
        masks = [rle.Mask(pixels.shape[:2], runs) for runs in table.masks()]
        return painted(pixels, masks, table.classes)

    draw_validation(metrics, found, index, folder, note, with_masks)
    of_masks = folder / "masks"
    curves = f"the curves of the masks in {of_masks}"
    or_note(note, curves, plot_curves, metrics.masks.curves, index.names, of_masks)
    matrix = of_masks / "confusion_matrix.png"
    or_note(note, matrix, plot_confusion, metrics.masks.confusion, index.names, matrix)
