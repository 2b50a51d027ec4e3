"""Augment a training image: pure functions of arrays and of a keyed generator.

The recipe is YOLOv5's: four or nine images on a canvas of twice the output size, a random affine or perspective map
from the canvas to the output, colour gains in HSV, flips, and mixing of two such images. Mosaics: arXiv:2004.10934;
mixing: arXiv:1710.09412.

All random numbers are drawn before a pixel is read. So it is known in advance which window of the canvas the output
shows: only that window is painted, and images outside it are not read. Without rotation, shear and perspective (the
default recipe), the map is a crop and a resize, which costs a quarter of a warp. For that, scale and offset are
rounded to whole canvas pixels, which moves pixels and boxes by less than half a pixel.

Coordinates are continuous: the pixel in column i covers i to i + 1. s is the output size; a canvas has the side 2s (or
s for a single image); n boxes; images are uint8 [h, w, 3] BGR.

``_pixels.c`` crops, resizes, recolours and mirrors row by row in one pass over memory. Where that extension was not built,
NumPy and OpenCV do the same with the same bytes (test_pixels.py compares both), but take ten times as long. This is one
file, because who follows a picture needs what is drawn for it and what is then done to its pixels side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from yolofleet.config.schema import Recipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.geometry.view import Look, View
from yolofleet.data.images.decode import Seen

_VERSION = 1  # of the extension; an older one, from before an update of the sources, is not used
try:
    from yolofleet.data.input import _pixels
except ImportError:  # installed without a C compiler
    COMPILED = False
else:
    COMPILED = _pixels.VERSION == _VERSION
FILL = 114  # grey level of canvas that no image covers

SMALLEST_CROP_SCALE = 0.4  # at smaller scales most of the window is outside the canvas, so a warp is cheaper
SMALLEST_SCALE = 0.05  # with a gain of 1 the random scale could be 0, which cannot be inverted


Placed = tuple[np.ndarray, int, int]  # an image, and the canvas column and row of its upper left corner


@dataclass(frozen=True)
class Tile:
    """One image on the canvas.

    Attributes:
        image: uint8 [h, w, 3].
        left, top: canvas pixels of its upper left corner; may be negative.
    """

    image: np.ndarray
    labels: Shapes
    left: int
    top: int


class Scene(NamedTuple):
    """Images on a canvas, and the view of it."""

    tiles: list[Tile]
    view: View

    def labels(self, look: Look, none: Shapes) -> Shapes:
        """Return the labels of all tiles as the output shows them; ``none``: those of a scene without tiles."""
        counts = [len(tile.labels) for tile in self.tiles]
        places = [(*tile.image.shape[1::-1], tile.left, tile.top) for tile in self.tiles]
        labels = none.joined([tile.labels for tile in self.tiles] or [none])
        return labels.mapped(
            np.array(places, np.float64).reshape(-1, 4).repeat(counts, axis=0), self.view, look
        )


@dataclass(frozen=True)
class Drawn:
    """A sample before it is rendered: everything that was drawn for it.

    Attributes:
        scenes: one scene, or two that are mixed.
        weight: of the first of two scenes.
        look: of the output, after mixing.
    """

    scenes: list[Scene]
    weight: float
    look: Look
    labels: Shapes


def draw_view(
    rng: np.random.Generator,
    recipe: Recipe,
    canvas_px: int,
    output_px: int,
    shown_hw: tuple[int, int] | None = None,
) -> View:
    """Draw a random map from canvas to output: centre, perspective, rotation and scale, shear, translation.

    Args:
        shown_hw: as in ``View``; default: the whole output.
    """
    height, width = shown_hw = shown_hw or (output_px, output_px)
    perspective_x, perspective_y, turn, zoom, shear_x, shear_y, shift_x, shift_y = (
        2 * rng.random(8) - 1
    ).tolist()
    scale = max(1 + recipe.scale * zoom, SMALLEST_SCALE)
    # the centre of the canvas in the output
    middle_x = (0.5 + recipe.translate * shift_x * (width / output_px)) * output_px
    middle_y = (0.5 + recipe.translate * shift_y * (height / output_px)) * output_px

    turned = bool(recipe.degrees or recipe.shear or recipe.perspective)
    if not turned and scale >= SMALLEST_CROP_SCALE:
        side = round(output_px / scale)
        scale = output_px / side
        left, top = round(canvas_px / 2 - middle_x / scale), round(canvas_px / 2 - middle_y / scale)
        crop = np.array([[scale, 0, -left * scale], [0, scale, -top * scale], [0, 0, 1]])
        return View(crop, scale, (left, top, left + side, top + side), True, canvas_px, output_px, shown_hw)

    centre = _translation(-canvas_px / 2, -canvas_px / 2)
    tilt = np.eye(3)
    tilt[2, :2] = recipe.perspective * perspective_x, recipe.perspective * perspective_y
    angle = math.radians(recipe.degrees * turn)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear = np.eye(3)
    shear[0, 1] = math.tan(math.radians(recipe.shear * shear_x))
    shear[1, 0] = math.tan(math.radians(recipe.shear * shear_y))
    matrix = _translation(middle_x, middle_y) @ shear @ rotation @ tilt @ centre
    if recipe.perspective or abs(np.linalg.det(matrix)) < 1e-9:  # the horizon may cross the window
        window = (0, 0, canvas_px, canvas_px)
    else:
        corners = np.array([[0, output_px, 0, output_px], [0, 0, output_px, output_px], [1, 1, 1, 1]])
        x, y, _ = np.linalg.inv(matrix) @ corners
        window = (
            min(max(math.floor(x.min()) - 1, 0), canvas_px - 1),
            min(max(math.floor(y.min()) - 1, 0), canvas_px - 1),
            max(min(math.ceil(x.max()) + 1, canvas_px), 1),
            max(min(math.ceil(y.max()) + 1, canvas_px), 1),
        )
    return View(matrix, scale, window, False, canvas_px, output_px, shown_hw)


def _translation(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


# image number, and which part of it is needed (None: all) -> image, labels as in Tile
Read = Callable[[int, Seen | None], tuple[np.ndarray, Shapes]]


def centred(read: Read, number: int, view: View) -> list[Tile]:
    """Place one image in the middle of the canvas (letterbox)."""

    def corner(width: int, height: int) -> tuple[int, int]:
        return (view.canvas_px - width) // 2, (view.canvas_px - height) // 2

    return [_tile(read, number, view, corner)]


def _tile(read: Read, number: int, view: View, corner: Callable[[int, int], tuple[int, int]]) -> Tile:
    """Read an image and place it.

    Args:
        corner: width and height of the image -> canvas column and row of its upper left corner.
    """
    image, labels = read(number, lambda width, height: view.part_of(*corner(width, height), width, height))
    return Tile(image, labels, *corner(*image.shape[1::-1]))


def mosaic4(rng: np.random.Generator, read: Read, numbers: Sequence[int], view: View) -> list[Tile]:
    """Place four images around a random point in the middle half of the canvas, each with a corner on it.

    An image whose quarter is outside the view is not read.
    """
    side = view.canvas_px
    x, y = (int((0.25 + 0.5 * u) * side) for u in rng.random(2).tolist())

    def corner(is_left: int, is_upper: int, width: int, height: int) -> tuple[int, int]:
        return x - is_left * width, y - is_upper * height

    tiles = []
    for number, (is_left, is_upper) in zip(numbers, ((1, 1), (0, 1), (1, 0), (0, 0)), strict=True):
        quarter = (0 if is_left else x, 0 if is_upper else y, x if is_left else side, y if is_upper else side)
        if view.sees(*quarter):
            tiles.append(_tile(read, number, view, partial(corner, is_left, is_upper)))
    return tiles


def mosaic9(rng: np.random.Generator, read: Read, numbers: Sequence[int], view: View) -> list[Tile]:
    """Place one image in the middle of a 3s canvas and eight around it, clockwise from the top, each touching the last.

    The result is a random 2s part of that canvas.
    """
    side = view.canvas_px // 2
    images, labels = zip(*(read(number, None) for number in numbers), strict=True)
    heights = [image.shape[0] for image in images]
    widths = [image.shape[1] for image in images]
    right, bottom = side + widths[0], side + heights[0]  # the image in the middle begins at (s, s)
    corners = [
        (side, side),
        (side, side - heights[1]),  # top
        (side + widths[1], side - heights[2]),
        (right, side),  # right
        (right, side + heights[3]),
        (right - widths[5], bottom),  # bottom
        (right - widths[5] - widths[6], bottom),
        (side - widths[7], bottom - heights[7]),  # left
        (side - widths[8], bottom - heights[7] - heights[8]),
    ]
    from_x, from_y = (int(u * side) for u in rng.random(2).tolist())
    return [
        Tile(image, truth, left - from_x, top - from_y)
        for image, truth, (left, top) in zip(images, labels, corners, strict=True)
    ]


def render(tiles: Sequence[Tile], view: View, look: Look | None, out: np.ndarray) -> None:
    """Paint the window of the view, map it to the output, and apply the look unless it is None.

    Args:
        out: uint8 [s, s, 3] contiguous, receives RGB, or BGR if there is no look.
    """
    placed = [(tile.image, tile.left, tile.top) for tile in tiles]
    x1, y1, x2, _ = view.window_xyxy
    if view.is_crop:
        crop = _pixels.render if COMPILED else plain_crop
        crop(placed, (x1, y1, x2 - x1), view.canvas_px, look, out)
        return
    painted = _painted(placed, view.window_xyxy, view.canvas_px)
    matrix = _translation(-0.5, -0.5) @ view.to_output @ _translation(x1 + 0.5, y1 + 0.5)  # of pixel centres
    size, fill = (view.output_px, view.output_px), (FILL, FILL, FILL)
    if matrix[2, 0] or matrix[2, 1]:
        image = cv2.warpPerspective(painted, matrix, size, flags=cv2.INTER_LINEAR, borderValue=fill)
    else:
        image = cv2.warpAffine(painted, matrix[:2], size, flags=cv2.INTER_LINEAR, borderValue=fill)
    if look is None:
        out[:] = image
    else:
        finish(image, look, out)


def plain_crop(
    placed: list[Placed], window: tuple[int, int, int], canvas_px: int, look: Look | None, out: np.ndarray
) -> None:
    """Paint a square window of a canvas, and resize it to ``out``; the compiled function may get at most 16 images.

    Args:
        window: left column, top row and side, canvas pixels; may reach beyond the canvas.
    """
    x1, y1, side = window
    painted = _painted(placed, (x1, y1, x1 + side, y1 + side), canvas_px)
    resized = cv2.resize(painted, out.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    if look is None:
        out[:] = resized
    else:
        plain_finish(resized, look, out)


def _painted(placed: list[Placed], window_xyxy: tuple[int, int, int, int], canvas_px: int) -> np.ndarray:
    """Return a rectangle of a canvas with the parts of the images in it: uint8 [h, w, 3].

    Later images cover earlier ones; what is outside the canvas is not painted.
    """
    x1, y1, x2, y2 = window_xyxy
    painted = np.full((y2 - y1, x2 - x1, 3), FILL, np.uint8)
    for image, image_left, image_top in placed:
        height, width = image.shape[:2]
        left, right = max(image_left, x1, 0), min(image_left + width, x2, canvas_px)
        top, bottom = max(image_top, y1, 0), min(image_top + height, y2, canvas_px)
        if left < right and top < bottom:
            seen = image[top - image_top : bottom - image_top, left - image_left : right - image_left]
            painted[top - y1 : bottom - y1, left - x1 : right - x1] = seen
    return painted


def finish(image: np.ndarray, look: Look, out: np.ndarray) -> None:
    """Apply a look to an image BGR, into ``out`` of the same shape, RGB."""
    if COMPILED:
        _pixels.finish(image, look, out)
    else:
        plain_finish(image, look, out)


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


def mixing_weight(rng: np.random.Generator) -> float:
    """Draw the weight of the first of two mixed images from the distribution Beta(32, 32)."""
    # The k-th smallest of n uniform numbers follows Beta(k, n + 1 - k), so ``random`` is enough; see random_numbers.py.
    return float(np.partition(rng.random(63), 31)[31])


def colour_gains(rng: np.random.Generator, recipe: Recipe) -> tuple[float, float, float] | None:
    """Draw the factors of hue, saturation and value; None if the recipe changes no colours."""
    ranges = (recipe.hsv_h, recipe.hsv_s, recipe.hsv_v)
    if not any(ranges):
        return None
    hue, saturation, value = (
        1 + most * (2 * u - 1) for most, u in zip(ranges, rng.random(3).tolist(), strict=True)
    )
    return hue, saturation, value
