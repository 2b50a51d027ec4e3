"""Draw boxes on images uint8 [H, W, 3] BGR. Boxes are [n, 4] left, top, right, bottom in pixels of the image."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np

from yolofleet.data.images.decode import read_image
from yolofleet.support.errors import DataError

# Twenty colours, with different hue and lightness for neighbouring indices; hex RGB
_HEX = (
    "e6194b 3cb44b 4363d8 f58231 911eb4 00bcd4 f032e6 9acd32 ff8fa3 008080 "
    "b388ff 9a6324 ffd60a 800000 7fe3a8 808000 ffb27a 1e3a8a a9a9a9 ff5fa2"
)
PALETTE = tuple((int(h[4:], 16), int(h[2:4], 16), int(h[:2], 16)) for h in _HEX.split())  # BGR
BLACK, WHITE = (0, 0, 0), (255, 255, 255)
GREY = (114, 114, 114)  # as in letterboxes
JPEG_QUALITY = 80  # for pictures in a page
FONT = cv2.FONT_HERSHEY_SIMPLEX
UNICODE = int(cv2.__version__.split(".")[0]) >= 5  # OpenCV 4 draws ASCII only

Colour = tuple[int, int, int]


def colour(class_idx: int) -> Colour:
    """Return the BGR colour of a class; the palette repeats after 20."""
    return PALETTE[class_idx % len(PALETTE)]


def text_colour(background: Colour) -> Colour:
    """Return black or white, whichever has more contrast to ``background`` (luma of BT.601)."""
    blue, green, red = background
    return BLACK if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else WHITE


def drawable(text: str, fallback: str) -> str:
    """Return ``text`` as this OpenCV can draw it: unchanged, without accents, or ``fallback``."""
    if UNICODE or text.isascii():
        return text
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return plain if plain.isascii() else fallback


@lru_cache(maxsize=4096)
def _text_size(text: str, scale: float, thickness: int) -> tuple[int, int, int]:
    """Return the width of ``text``, and the font's height above and below the base line, px."""
    width = cv2.getTextSize(text, FONT, scale, thickness)[0][0]
    (_, above), below = cv2.getTextSize("Ag", FONT, scale, thickness)  # the same for every text
    return width, above, below


def class_name(names: Sequence[str], class_idx: int) -> str:
    return names[class_idx] if 0 <= class_idx < len(names) else str(class_idx)


def draw_boxes(
    image: np.ndarray,
    boxes_xyxy_px: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
    *,
    line_width: int = 0,
    hide_labels: bool = False,
    hide_scores: bool = False,
) -> np.ndarray:
    """Return a copy of ``image`` with boxes and labels, the highest score on top.

    Args:
        classes: [n] class indices.
        names: by class index; an index without a name is drawn as a number.
        scores: [n] 0..1; None: no scores (true labels).
        line_width: pixels; 0: chosen from the image size.
    """
    image = np.ascontiguousarray(image).copy()
    height, width = image.shape[:2]
    pen = line_width or max(1, round((height + width) / 600))
    scale, thickness = 0.3 + 0.1 * pen, max(1, round(pen / 2))
    order = range(len(boxes_xyxy_px)) if scores is None else np.argsort(scores, kind="stable")
    pixels = np.nan_to_num(np.rint(boxes_xyxy_px))  # an exported file of others may give NaN
    corners = np.clip(pixels, 0, [width - 1, height - 1] * 2).astype(int).tolist()
    for i in order:
        left, top, right, bottom = corners[i]
        cv2.rectangle(image, (left, top), (right, bottom), colour(int(classes[i])), pen)
    if hide_labels:
        return image
    for i in order:
        class_idx = int(classes[i])
        text = drawable(class_name(names, class_idx), f"class {class_idx}")
        if scores is not None and not hide_scores:
            text += f" {float(scores[i]):.2f}"
        _draw_label(image, text, corners[i], colour(class_idx), scale, thickness, pen)
    return image


def _draw_label(
    image: np.ndarray, text: str, box: Sequence[int], fill: Colour, scale: float, thickness: int, pen: int
) -> None:
    """Draw a filled strip with ``text`` above the box, or inside it if there is no room above."""
    text_w, above, below = _text_size(text, scale, thickness)
    pad = 2 + pen // 2
    strip_w, strip_h = text_w + 2 * pad, above + below + pad
    left = max(0, min(box[0] - pen // 2, image.shape[1] - strip_w))
    top = box[1] - strip_h
    if top < 0:
        top = max(0, min(box[1], image.shape[0] - strip_h))
    cv2.rectangle(image, (left, top), (left + strip_w, top + strip_h), fill, cv2.FILLED)
    base = (left + pad, top + (pad + 1) // 2 + above)
    cv2.putText(image, text, base, FONT, scale, text_colour(fill), thickness, cv2.LINE_AA)


@dataclass(frozen=True)
class Picture:
    """One image of a grid with its boxes."""

    image: np.ndarray
    # boxes_xyxy_px, classes, scores: as for :func:`draw_boxes`
    boxes_xyxy_px: np.ndarray
    classes: np.ndarray
    scores: np.ndarray | None = None
    title: str = ""  # drawn in the corner, usually a file name


def picture_grid(
    pictures: Sequence[Picture], names: Sequence[str], *, most: int = 16, side_px: int = 1920
) -> np.ndarray:
    """Return up to ``most`` pictures in a nearly square grid, uint8 BGR; small ones are enlarged.

    Args:
        side_px: longest side of the grid; a small grid is enlarged to at least two thirds of it.
    """
    shown = pictures[:most]
    assert shown, "no pictures"
    columns = int(np.ceil(np.sqrt(len(shown))))
    rows = -(-len(shown) // columns)
    cell_h = max(p.image.shape[0] for p in shown)
    cell_w = max(p.image.shape[1] for p in shown)
    longest = max(columns * cell_w, rows * cell_h)
    scale = min(max(longest, side_px * 2 // 3), side_px) / longest
    cell_h, cell_w = max(1, int(cell_h * scale)), max(1, int(cell_w * scale))
    grid = np.full((rows * cell_h, columns * cell_w, 3), 255, np.uint8)
    for i, picture in enumerate(shown):
        row, column = divmod(i, columns)
        cell = grid[row * cell_h : (row + 1) * cell_h, column * cell_w : (column + 1) * cell_w]
        cell[:] = GREY
        _draw_into(cell, picture, names)
    for row in range(1, rows):
        grid[row * cell_h - 1 : row * cell_h + 1] = 255
    for column in range(1, columns):
        grid[:, column * cell_w - 1 : column * cell_w + 1] = 255
    return grid


def _draw_into(cell: np.ndarray, picture: Picture, names: Sequence[str]) -> None:
    """Draw ``picture`` as large as possible in the middle of ``cell``, in place."""
    height, width = picture.image.shape[:2]
    ratio = min(cell.shape[0] / height, cell.shape[1] / width)
    fit_h, fit_w = max(1, int(height * ratio)), max(1, int(width * ratio))
    how = cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR
    fitted = cv2.resize(picture.image, (fit_w, fit_h), interpolation=how)
    boxes = np.asarray(picture.boxes_xyxy_px) * ratio
    drawn = draw_boxes(fitted, boxes, picture.classes, names, picture.scores)
    top, left = (cell.shape[0] - fit_h) // 2, (cell.shape[1] - fit_w) // 2
    cell[top : top + fit_h, left : left + fit_w] = drawn
    if picture.title:
        _draw_label(cell, drawable(picture.title, ""), (0, 0), (40, 40, 40), 0.4, 1, 1)


def picture_base64(path: str | Path, side_px: int, *, follow: bool = True) -> str:
    """Return an image file as a JPEG in base64 with sides of at most ``side_px``; "" if it cannot be read.

    Args:
        follow: False: a symbolic link cannot be read.
    """
    try:
        pixels = read_image(path, follow=follow)
    except DataError:
        return ""
    ratio = side_px / max(pixels.shape[:2])
    if ratio < 1:
        size_wh = (max(1, round(pixels.shape[1] * ratio)), max(1, round(pixels.shape[0] * ratio)))
        pixels = cv2.resize(pixels, size_wh, interpolation=cv2.INTER_AREA)
    _, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return base64.b64encode(encoded.tobytes()).decode("ascii")
