"""Cut a large image into tiles that overlap, and merge the boxes of the tiles and of the whole image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from yolofleet.data.geometry.fusion import fuse_boxes
from yolofleet.data.geometry.nms import nms
from yolofleet.support.errors import ConfigError

Place = tuple[int, int, int, int]  # x1, y1, x2, y2 of a part, pixels of the image
CUT_PX = 2  # a box this near to an inner border is cut by it
INSIDE = 0.6  # a cut box belongs to a whole one that covers more than this part of it
MAX_TILES = 10_000  # of an image: their boxes are merged at once, in memory


def tiles(height: int, width: int, side: int, overlap: float) -> list[Place]:
    """Return tiles of ``side`` pixels that cover the image; none if one tile would be the whole image.

    Neighbours overlap by at least the fraction ``overlap`` of their side.
    """
    columns, rows = _starts(width, side, overlap), _starts(height, side, overlap)
    places = [(x, y, min(x + side, width), min(y + side, height)) for y in rows for x in columns]
    return places if len(places) > 1 else []


def check_tiles(height: int, width: int, side: int, overlap: float, *, source: str) -> None:
    """Raise ConfigError if :func:`tiles` would return more than ``MAX_TILES``; ``source`` is the name of the image."""
    count = (_steps(width, side, overlap) + 1) * (_steps(height, side, overlap) + 1)
    if count > MAX_TILES:
        raise ConfigError(
            f"--tile {side} and --overlap {overlap:g} cut an image of {width} x {height} pixels into {count:,} tiles; the "
            f"limit is {MAX_TILES:,}",
            source=source,
            hint="a larger --tile, or a smaller --overlap",
        )


def _starts(length: int, side: int, overlap: float) -> list[int]:
    """Return evenly spaced first pixels of tiles along one side of the image."""
    steps = _steps(length, side, overlap)
    return [round(i * (length - side) / steps) for i in range(steps + 1)] if steps else [0]


def _steps(length: int, side: int, overlap: float) -> int:
    """Return the number of tiles along one side of the image, less one."""
    return max(-(-(length - side) // max(1, int(side * (1 - overlap)))), 0)


def merged_tiles(
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, Place]],
    *,
    iou: float,
    max_det: int,
    agnostic: bool,
    fuse: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the boxes [n, 4], scores [n] and classes [n] of an image, highest score first.

    The border of a tile may cut an object. A cut box that lies mostly inside an uncut one of its class is left out, because
    another tile or the whole image has seen the object. Then the boxes are suppressed, or fused.

    Args:
        parts: boxes [n, 4] xyxy in pixels of the part, scores [n], classes [n], and the place of the part; the first part
            is the whole image.
    """
    width, height = parts[0][3][2:]
    boxes = np.concatenate([part + np.array([x, y, x, y]) for part, _, _, (x, y, _, _) in parts])
    scores = np.concatenate([part[1] for part in parts]).astype(np.float64)
    classes = np.concatenate([part[2] for part in parts]).astype(np.int64)
    place = np.repeat([part[3] for part in parts], [len(part[1]) for part in parts], axis=0)
    inner = place != np.array([0, 0, width, height])
    cut = ((np.abs(boxes - place) < CUT_PX) & inner).any(axis=1)
    groups = np.zeros_like(classes) if agnostic else classes

    kept = np.ones(len(boxes), bool)
    for i in np.flatnonzero(cut).tolist():
        rivals = boxes[~cut & (groups == groups[i])]
        low, high = np.maximum(rivals[:, :2], boxes[i, :2]), np.minimum(rivals[:, 2:], boxes[i, 2:])
        shared = np.prod(np.maximum(high - low, 0), axis=1)
        kept[i] = shared.max(initial=0) <= INSIDE * np.prod(boxes[i, 2:] - boxes[i, :2])
    boxes, scores, classes, groups = boxes[kept], scores[kept], classes[kept], groups[kept]
    if fuse:
        boxes, scores, first = fuse_boxes(boxes, scores, groups, sources=1)
        boxes, scores, classes = boxes[:max_det], scores[:max_det], classes[first[:max_det]]
    else:
        tensors = (torch.from_numpy(array) for array in (boxes, scores, groups))
        corners, values, numbers = tensors
        rows = nms(corners.float(), values.float(), iou, groups=numbers, max_det=max_det).numpy()
        boxes, scores, classes = boxes[rows], scores[rows], classes[rows]
    return boxes.astype(np.float32), scores.astype(np.float32), classes
