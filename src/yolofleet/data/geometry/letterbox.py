"""Fit an image into a given shape: keep the aspect ratio, pad with grey, and convert boxes back."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from yolofleet.data.geometry.boxes import Boxes, clip_xyxy

GREY = 114  # YOLOv5's padding value, all channels


@dataclass(frozen=True)
class Letterbox:
    """The transform from a native image to its letterboxed one: ``x_letterboxed = x_native * scale + pad_left``.

    A resized image and its borders have whole pixels: its sides may have two scales, and an odd pixel of the border goes to
    the right or the bottom. YOLOv5 converts back with one scale for both sides, and with borders that end in .5, so its boxes
    may be a pixel of the letterboxed image away.
    """

    scale_xy: tuple[float, float]  # letterboxed px / native px, along x and along y
    pad_left: float  # px
    pad_top: float  # px
    size_hw: tuple[int, int]  # of the letterboxed image
    native_hw: tuple[int, int]  # of the image as it was read

    def to_native(self, boxes_xyxy: Boxes) -> Boxes:
        """Return boxes [M, 4] in px of the native image, clipped to it, from px of the letterboxed one. Not in place."""
        moved = boxes_xyxy.copy() if isinstance(boxes_xyxy, np.ndarray) else boxes_xyxy.clone()
        for axis, (scale, pad) in enumerate(zip(self.scale_xy, (self.pad_left, self.pad_top), strict=True)):
            moved[..., axis::2] -= pad
            moved[..., axis::2] /= scale
        return clip_xyxy(moved, self.native_hw)


def letterbox(
    image: np.ndarray,
    size: int | tuple[int, int],
    *,
    stride: int | None = None,
    enlarge: bool = True,
    native_hw: tuple[int, int] | None = None,
) -> tuple[np.ndarray, Letterbox]:
    """Resize an image with its aspect ratio kept, then pad it.

    Args:
        image: uint8 [H, W, 3] (any channel order).
        size: shape to fit in, (h, w) or one side of a square, px.
        stride: pad to the next multiple of the stride instead of to ``size`` (prediction).
        enlarge: allow a ratio above 1 (not in validation, whose images are already resized).
        native_hw: shape of the image as it was read, if ``image`` is a resized copy.
    Returns:
        uint8 [h, w, 3] (``image`` itself if nothing changes), and the transform.
    Pixel-exact with YOLOv5 under equal OpenCV resizing: tests/parity/test_letterbox_parity.py.
    """
    height, width = image.shape[:2]
    out_h, out_w = (size, size) if isinstance(size, int) else size
    ratio = min(out_h / height, out_w / width)
    if not enlarge:
        ratio = min(ratio, 1.0)
    resized_h, resized_w = max(round(height * ratio), 1), max(round(width * ratio), 1)
    missing_h, missing_w = out_h - resized_h, out_w - resized_w
    if stride:
        missing_h, missing_w = missing_h % stride, missing_w % stride
    pad_top, pad_left = missing_h // 2, missing_w // 2

    if (resized_h, resized_w) != (height, width):
        image = cv2.resize(image, (resized_w, resized_h), interpolation=cv2.INTER_LINEAR)
    if missing_h or missing_w:
        borders = (pad_top, missing_h - pad_top, pad_left, missing_w - pad_left)
        image = cv2.copyMakeBorder(image, *borders, cv2.BORDER_CONSTANT, value=(GREY, GREY, GREY))

    native_hw = native_hw or (height, width)
    back = Letterbox(
        scale_xy=(resized_w / native_hw[1], resized_h / native_hw[0]),
        pad_left=pad_left,
        pad_top=pad_top,
        size_hw=(resized_h + missing_h, resized_w + missing_w),
        native_hw=native_hw,
    )
    return image, back
