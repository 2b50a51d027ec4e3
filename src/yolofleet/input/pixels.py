"""The pixels of a training image: paint what a window of the canvas shows, resize it, change its colours, mirror it.

``_pixels.c`` does this row by row in one pass over memory. Where that extension was not built, NumPy and OpenCV do the
same with the same bytes (test_pixels.py compares both), but take ten times as long.

Legend: s is the side of the output, a canvas is a square of ``canvas_px``, images are uint8 [h, w, 3] BGR.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

_VERSION = 1  # of the extension; an older one, from before an update of the sources, is not used
try:
    from yolofleet.input import _pixels
except ImportError:  # installed without a C compiler
    COMPILED = False
else:
    COMPILED = _pixels.VERSION == _VERSION
FILL = 114  # grey level of canvas that no image covers


class Look(NamedTuple):
    """How the pixels of an output change, from BGR as stored to RGB as trained on.

    Attributes:
        gains: factors of hue (0 to 2), saturation and value; None: the colours stay.
        mirrored, upside_down: flips.
    """

    gains: tuple[float, float, float] | None
    mirrored: bool
    upside_down: bool


Placed = tuple[np.ndarray, int, int]  # an image, and the canvas column and row of its upper left corner


def render(
    placed: list[Placed], window: tuple[int, int, int], canvas_px: int, look: Look | None, out: np.ndarray
) -> None:
    """Paint a square window of a canvas, and resize it to ``out`` with bilinear interpolation.

    Args:
        placed: at most 16 images; later ones cover earlier ones; what is outside the canvas is not painted.
        window: left column, top row and side, canvas pixels; may reach beyond the canvas.
        look: applied last; None: ``out`` receives plain BGR.
        out: uint8 [s, s, 3] contiguous.
    """
    if COMPILED:
        _pixels.render(placed, window, canvas_px, look, out)
    else:
        plain_render(placed, window, canvas_px, look, out)


def finish(image: np.ndarray, look: Look, out: np.ndarray) -> None:
    """Apply a look to an image, into ``out`` of the same shape."""
    if COMPILED:
        _pixels.finish(image, look, out)
    else:
        plain_finish(image, look, out)


def plain_render(
    placed: list[Placed], window: tuple[int, int, int], canvas_px: int, look: Look | None, out: np.ndarray
) -> None:
    """Do what ``render`` does, without the extension."""
    x1, y1, side = window
    painted = paint(placed, (x1, y1, x1 + side, y1 + side), canvas_px)
    resized = cv2.resize(painted, out.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    if look is None:
        out[:] = resized
    else:
        plain_finish(resized, look, out)


def paint(
    placed: list[Placed],
    window_xyxy: tuple[int, int, int, int],
    canvas_px: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return a rectangle of a canvas with the parts of the images in it: uint8 [h, w, 3], ``out`` if that is given."""
    x1, y1, x2, y2 = window_xyxy
    painted = np.empty((y2 - y1, x2 - x1, 3), np.uint8) if out is None else out
    painted.fill(FILL)
    for image, image_left, image_top in placed:
        height, width = image.shape[:2]
        left, right = max(image_left, x1, 0), min(image_left + width, x2, canvas_px)
        top, bottom = max(image_top, y1, 0), min(image_top + height, y2, canvas_px)
        if left < right and top < bottom:
            seen = image[top - image_top : bottom - image_top, left - image_left : right - image_left]
            painted[top - y1 : bottom - y1, left - x1 : right - x1] = seen
    return painted


def plain_finish(image: np.ndarray, look: Look, out: np.ndarray) -> None:
    """Do what ``finish`` does, without the extension."""
    rgb = cv2.cvtColor(image, cv2.COLOR_BGR2RGB) if look.gains is None else _recoloured(image, look.gains)
    out[:] = rgb[:: -1 if look.upside_down else 1, :: -1 if look.mirrored else 1]


def _recoloured(image: np.ndarray, gains: tuple[float, float, float]) -> np.ndarray:
    """Multiply hue, saturation and value: BGR -> RGB.

    OpenCV's way back from HSV cuts off fractions and gives other bytes on processors with fused multiply-add. So that
    way is computed here: a channel falls from v to v - v s / 255 while the hue moves away from its own, from 60 degrees
    to 120.
    """
    level = np.arange(256, dtype=np.float32)
    hue, saturation, value = (np.trunc(level * np.float32(gain)) for gain in gains)
    tables = [np.where(hue < 180, hue, hue - 180), np.minimum(saturation, 255), np.minimum(value, 255)]
    planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    h, s, v = (table[plane] for table, plane in zip(tables, planes, strict=True))
    fall = v * s * np.float32(1 / 7650)
    top = v + np.float32(0.5)
    high = top + 30 * fall
    rgb = np.empty_like(image)
    rgb[..., 0] = top - 60 * fall + fall * np.clip(abs(h - 90), 30, 60)
    rgb[..., 1] = high - fall * np.clip(abs(h - 60), 30, 60)
    rgb[..., 2] = high - fall * np.clip(abs(h - 120), 30, 60)
    return rgb
