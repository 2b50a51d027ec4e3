"""The boxes that a network finds in an image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.tasks.task import Found


@dataclass(frozen=True)
class FoundBoxes(Found):
    """Boxes, highest score first.

    Attributes:
        boxes_xyxy_px: float [n, 4] left, top, right, bottom.
    """

    boxes_xyxy_px: np.ndarray

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> FoundBoxes:
        """Return the boxes of rows [n, 6] x1, y1, x2, y2, score, class, as suppression gives them."""
        classes = rows[:, 5].astype(np.int64)
        return cls(np.zeros_like(classes), classes, rows[:, 4], rows[:, :4])

    @classmethod
    def of_padded(cls, rows: Tensor) -> list[FoundBoxes]:
        """Return the boxes of each image from the output [N, D, 6] of a file that suppresses inside; rows of zeros pad it."""
        images: list[np.ndarray] = list(rows.cpu().numpy())
        return [cls.of_rows(image[image[:, 4] > 0]) for image in images]

    def native(self, back: Letterbox) -> FoundBoxes:
        return replace(self, boxes_xyxy_px=back.to_native(self.boxes_xyxy_px))
