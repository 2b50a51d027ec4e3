"""What an augmented image shows: the map from a canvas to the output, and the changes of its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Part = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels of an image


class Look(NamedTuple):
    """How the pixels of an output change, from BGR as stored to RGB as trained on.

    Attributes:
        gains: factors of hue (0 to 2), saturation and value; None: the colours stay.
    """

    gains: tuple[float, float, float] | None
    mirrored: bool
    upside_down: bool


@dataclass(frozen=True)
class View:
    """The part of the canvas that the output shows, and how it is mapped.

    Attributes:
        to_output: float64 [3, 3], canvas pixels to output pixels, homogeneous.
        scale: output pixels per canvas pixel, before shear and perspective.
        window_xyxy: whole canvas pixels that contain everything the output shows.
        is_crop: the output is exactly the window, resized.
        canvas_px, output_px: sides of both squares.
        shown_hw: the middle part of the output that the network gets (``--rect``), pixels.
    """

    to_output: np.ndarray
    scale: float
    window_xyxy: tuple[int, int, int, int]
    is_crop: bool
    canvas_px: int
    output_px: int
    shown_hw: tuple[int, int]

    def sees(self, left: int, top: int, right: int, bottom: int) -> bool:
        """Return whether a rectangle of the canvas overlaps the window."""
        x1, y1, x2, y2 = self.window_xyxy
        return left < x2 and right > x1 and top < y2 and bottom > y1

    def part_of(self, left: int, top: int, width: int, height: int) -> Part:
        """Return which pixels of an image at this place of the canvas the output shows; an empty part has x1 >= x2 or y1 >= y2."""
        x1, y1, x2, y2 = self.window_xyxy
        return (
            max(x1 - 1, 0, left) - left,
            max(y1 - 1, 0, top) - top,
            min(x2 + 1, self.canvas_px, left + width) - left,
            min(y2 + 1, self.canvas_px, top + height) - top,
        )
