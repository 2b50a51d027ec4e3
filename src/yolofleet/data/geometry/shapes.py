"""The labels of images as one value, from the reader of a data set to the loss.

n labels. A task whose objects are more than boxes has a subclass with further fields, which moves them in the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.table import Table
from yolofleet.data.geometry.view import Look, View
from yolofleet.support.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

# A moved box is kept if both sides are larger, it kept this share of its area, and its aspect is below the limit.
SMALLEST_SIDE_PX = 2.0
SMALLEST_AREA_LEFT = 0.1
LARGEST_ASPECT = 100.0


@dataclass(frozen=True)
class Shapes(Table):
    """The labelled objects of an image, or of the images of a micro-batch.

    Attributes:
        image: int64 [n] number of the image in the micro-batch; 0 for the labels of one image.
        classes: int64 [n].
        boxes: float32 [n, 4] cx, cy, w, h as fractions of the image.
    """

    image: np.ndarray
    classes: np.ndarray
    boxes: np.ndarray

    @classmethod
    def of_image(cls, classes: np.ndarray, boxes: np.ndarray) -> Self:
        """Return the labels of one image."""
        typed = classes.astype(np.int64, copy=False), boxes.astype(np.float32, copy=False)
        return cls(np.zeros(len(classes), np.int64), *typed)

    @classmethod
    def of_images(cls, parts: Sequence[Self]) -> Self:
        """Return the labels of the images of a micro-batch, which may be none."""
        numbered = [replace(part, image=np.full(len(part), i, np.int64)) for i, part in enumerate(parts)]
        return cls.joined(numbered) if numbered else cls.none()

    @classmethod
    def none(cls) -> Self:
        """Return no labels."""
        return cls.of_image(np.zeros(0), np.zeros((0, 4)))

    def corners_px(self, width: float, height: float) -> np.ndarray:
        """Return float64 [n, 4] x1, y1, x2, y2 in pixels of an image of that size."""
        size = np.array([width, height])
        middle, half = self.boxes[:, :2] * size, self.boxes[:, 2:] * size / 2
        return np.concatenate([middle - half, middle + half], axis=1)

    def with_pasted(
        self, pasted: Sequence[tuple[int, np.ndarray, list[np.ndarray]]], size_wh: np.ndarray
    ) -> Self:
        """Return these labels and those of objects pasted into the image: class, x1, y1, x2, y2, and outlines, in pixels.

        Raises:
            ConfigError: labels of this class cannot be made from boxes.
        """
        if type(self) is not Shapes:
            raise ConfigError("copy_paste: it is for boxes", hint="--set copy_paste=0")
        corners = np.stack([box for _, box, _ in pasted])
        low, high = corners[:, :2], corners[:, 2:]
        boxes = np.concatenate([(low + high) / 2 / size_wh, (high - low) / size_wh], axis=1)
        return self.joined([self, self.of_image(np.array([number for number, _, _ in pasted]), boxes)])

    def mapped(self, places: np.ndarray, view: View, look: Look) -> Self:
        """Return the labels as the network sees them, in fractions of the shown part; drop those of which too little is left.

        Args:
            places: float64 [n, 4] width and height of the image of each label, and the canvas column and row of its corner.
        """
        if not len(self):
            return self
        boxes = self.boxes.astype(np.float64)
        centre = boxes[:, :2] * places[:, :2] + places[:, 2:]
        half = boxes[:, 2:] * places[:, :2] / 2
        before = np.concatenate([centre - half, centre + half], axis=1)
        _limit(before, 0, view.canvas_px)
        after = _map_boxes(before, view)
        hidden = (view.output_px - _sides_of(view)) / 2  # on the left, at the top, ...
        _limit(after, hidden, view.output_px - hidden)

        # two columns by a ufunc take a third of the time of a reduction
        width, height = (after[:, 2:] - after[:, :2]).T
        width_before, height_before = ((before[:, 2:] - before[:, :2]) * view.scale).T
        area_before = width_before * height_before
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        keep = (
            (shorter > SMALLEST_SIDE_PX)
            & (shorter * longer > SMALLEST_AREA_LEFT * area_before)
            & (longer < LARGEST_ASPECT * shorter)
        )
        moved = _flipped(after[keep].astype(np.float32), view.output_px, look)
        return replace(self.rows(keep), boxes=_fractions(moved, view))

    def letterboxed(self, size_wh: np.ndarray, back: Letterbox) -> Self:
        """Return the labels of an image of ``size_wh`` pixels as fractions of the letterboxed image."""
        boxes = self.boxes.astype(np.float64)
        size, pad = np.array(back.size_hw[::-1]), np.array([back.pad_left, back.pad_top])
        wh = boxes[:, 2:] * size_wh
        corner = boxes[:, :2] * size_wh - wh / 2
        centre = ((corner + wh / 2) * back.scale_xy + pad) / size
        return replace(
            self, boxes=np.concatenate([centre, wh * back.scale_xy / size], axis=1).astype(np.float32)
        )


def _limit(boxes: np.ndarray, low: float | np.ndarray, high: float | np.ndarray) -> None:
    """Clip coordinates in place. Two ufuncs take a third of the time of ``np.clip`` on few numbers."""
    np.maximum(boxes, low, out=boxes)
    np.minimum(boxes, high, out=boxes)


def _sides_of(view: View) -> float | np.ndarray:
    """Return width, height, width, height of the shown part, float64 [4]; of a square one number, which takes less time."""
    height, width = view.shown_hw
    return float(width) if width == height else np.array([width, height] * 2, np.float64)


def _map_boxes(boxes_xyxy: np.ndarray, view: View) -> np.ndarray:
    """Return the boxes around the four mapped corners of each box: [n, 4] -> [n, 4]."""
    matrix = view.to_output
    if view.is_crop:
        moved: np.ndarray = boxes_xyxy * view.scale + matrix[[0, 1, 0, 1], 2]
        return moved
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)  # [n, 4] -> [n, 4 corners, xy]
    mapped = corners @ matrix[:2, :2].T + matrix[:2, 2]
    mapped /= corners @ matrix[2:, :2].T + 1
    return np.concatenate([mapped.min(axis=1), mapped.max(axis=1)], axis=1)


def _flipped(corners_px: np.ndarray, side: int, look: Look) -> np.ndarray:
    """Mirror boxes [n, 4] x1, y1, x2, y2 in pixels of a square image as its pixels are, in place."""
    if look.mirrored:
        corners_px[:, [0, 2]] = side - corners_px[:, [2, 0]]
    if look.upside_down:
        corners_px[:, [1, 3]] = side - corners_px[:, [3, 1]]
    return corners_px


def _fractions(corners_px: np.ndarray, view: View) -> np.ndarray:
    """Return [n, 4] cx, cy, w, h as fractions of the shown part of the output, with centres below 1."""
    sides = _sides_of(view)
    boxes = (corners_px - (view.output_px - sides) / 2).astype(np.float32, copy=False)
    _limit(boxes, 0, sides - 1e-3)
    boxes /= sides
    result: np.ndarray = np.concatenate(
        [(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1
    )
    return result
