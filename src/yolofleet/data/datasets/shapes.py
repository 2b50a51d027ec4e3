"""Draw a data set: coloured shapes on a textured background, some small, some partly covered.

It needs no download, and a network learns it within minutes on a CPU, so it serves to try a run, a fleet or a change.
Lengths are fractions of the image's side unless their name ends in px.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from yolofleet.support.random_numbers import generator

NAMES = ("circle", "square", "triangle", "star")

# How difficult the data set is.
HUES_DEGREES = (0.0, 210.0, 120.0, 50.0)  # red, blue, green, yellow
HUE_SPREAD_DEGREES = 14.0
SATURATION = (0.65, 1.0)
BRIGHTNESS = (0.65, 1.0)
GROUND_SATURATION = (0.05, 0.3)
GROUND_BRIGHTNESS = (0.25, 0.75)
STRIPE_CONTRAST = 0.10
BLOTCH_CONTRAST = 0.10
NOISE = 0.025
OBJECTS = (4, 8)  # minimum and maximum, before partners are added
SMALL_SHARE = 0.27
SMALL_SIDE = (0.066, 0.095)
SIDE = (0.13, 0.40)
PARTNER_SHARE = 0.15  # share of objects that get a partner, which overlaps them
PARTNER_IOU = (0.12, 0.30)
LEAST_VISIBLE = 0.5
TURN_DEGREES = (0.0, 15.0, 20.0, 36.0)  # largest rotation in either direction, by class
STRETCH = 1.2  # largest ratio of width to height or of height to width; circles are not stretched

TRIES = 30  # positions that are tried for an object
SUPERSAMPLING = 4


@dataclass
class _Object:
    kind: int
    outline_px: np.ndarray  # float64 [k, 2]
    box_xyxy_px: np.ndarray  # float64 [4], around the whole outline
    # float32 [h, w] over the box rounded outwards: share that is not covered
    visible: np.ndarray | None = None
    area_px: float = 0.0


def make_shapes(
    root: Path,
    *,
    images: int = 640,
    val_images: int = 128,
    img: int = 160,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the data set in YOLO layout (images/, labels/, data.yaml) and return the path of data.yaml.

    Equal arguments give equal images and labels. A larger ``images`` adds images behind the same first ones.

    Args:
        root: folder, created if necessary.
        img: side of the square images in pixels; at 96 or less the small shapes cannot be distinguished.
        on_progress: called with (images drawn, all images).
    Raises:
        OSError: the folder cannot be written.
    """
    for split, (name, count) in enumerate((("train", images), ("val", val_images))):
        for kind in ("images", "labels"):
            (root / kind / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture, labels = draw_picture(generator(seed, "shapes", split, number), img)
            stem = f"{number:06d}"
            _, png = cv2.imencode(".png", picture)
            (root / "images" / name / f"{stem}.png").write_bytes(png.tobytes())
            on_progress(number + 1 + split * images, images + val_images)
            rows = (f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) for row in labels)
            (root / "labels" / name / f"{stem}.txt").write_text("".join(f"{row}\n" for row in rows))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(NAMES))
    description = root / "data.yaml"
    description.write_text(f"path: .\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return description


def draw_picture(rng: np.random.Generator, img: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one image, uint8 [img, img, 3] BGR, and its labels, float64 [n, 5] class, cx, cy, w, h as fractions."""
    picture = _ground(rng, img)
    objects: list[_Object] = []
    for _ in range(_whole(rng, *OBJECTS)):
        side = _between(rng, *(SMALL_SIDE if rng.random() < SMALL_SHARE else SIDE)) * img
        placed = _place(rng, objects, side, img, beside=None)
        if placed is not None:
            objects.append(placed)
            _paint(rng, picture, placed)
            if rng.random() < PARTNER_SHARE:
                partner = _place(rng, objects, side * _between(rng, 0.8, 1.25), img, beside=placed)
                if partner is not None:
                    objects.append(partner)
                    _paint(rng, picture, partner)
    picture += (
        NOISE
        * 255
        * (rng.random(picture.shape, np.float32) + rng.random(picture.shape, np.float32) - 1)
        * 2.4
    )
    labels = np.zeros((len(objects), 5))
    for row, thing in zip(labels, objects, strict=True):
        x1, y1, x2, y2 = thing.box_xyxy_px / img
        row[:] = thing.kind, (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1
    return np.clip(picture + 0.5, 0, 255).astype(np.uint8), labels


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def _whole(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw a whole number from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def _colour(hue_degrees: float, saturation: float, brightness: float) -> np.ndarray:
    """Return a colour as float32 [3] BGR, 0..255."""
    hsv = np.array([[[hue_degrees % 360, saturation, brightness]]], np.float32)
    colour_bgr: np.ndarray = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0] * 255
    return colour_bgr


def _ground(rng: np.random.Generator, img: int) -> np.ndarray:
    """Draw a background: a gradient of two dull colours under stripes and blotches.

    Returns:
        float32 [img, img, 3] BGR, 0..255.
    """
    first, second = (
        _colour(_between(rng, 0, 360), _between(rng, *GROUND_SATURATION), _between(rng, *GROUND_BRIGHTNESS))
        for _ in range(2)
    )
    line = np.linspace(-1, 1, img, dtype=np.float32)
    x, y = line[None, :], line[:, None]
    angle = _between(rng, 0, 2 * math.pi)
    slope = (math.cos(angle) * x + math.sin(angle) * y) / 2.83 + 0.5  # [img, img] in 0..1
    angle, waves = _between(rng, 0, math.pi), _between(rng, 3, 14)
    stripes = np.sin((math.cos(angle) * x + math.sin(angle) * y) * waves * math.pi)
    blotches = cv2.resize(rng.random((6, 6), np.float32) * 2 - 1, (img, img), interpolation=cv2.INTER_CUBIC)
    light = _between(rng, 0, STRIPE_CONTRAST) * stripes + _between(rng, 0, BLOTCH_CONTRAST) * blotches
    picture: np.ndarray = first + (second - first) * slope[..., None] + 255 * light[..., None]
    return picture


def _outline(rng: np.random.Generator, kind: int) -> np.ndarray:
    """Return the corners of a shape around 0, randomly rotated and stretched: float64 [k, 2]."""
    if NAMES[kind] == "star":
        steps = np.arange(10) * math.pi / 5
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.45)
    else:
        corners = {"circle": 48, "square": 4, "triangle": 3}[NAMES[kind]]
        steps = (np.arange(corners) + (0.5 if corners == 4 else 0)) * 2 * math.pi / corners
        radius = np.ones(corners)
    turn = math.radians(TURN_DEGREES[kind]) * _between(rng, -1, 1) - math.pi / 2
    stretch = STRETCH ** _between(rng, -0.5, 0.5) if NAMES[kind] != "circle" else 1.0
    x, y = radius * np.cos(steps), radius * np.sin(steps)
    turned_x = x * math.cos(turn) - y * math.sin(turn)
    turned_y = x * math.sin(turn) + y * math.cos(turn)
    corners_xy: np.ndarray = np.stack([turned_x * stretch, turned_y * (1 / stretch)], axis=1)
    return corners_xy


def _place(
    rng: np.random.Generator, objects: list[_Object], side_px: float, img: int, *, beside: _Object | None
) -> _Object | None:
    """Return a new object that overlaps no other, or only ``beside``; None if no position was found."""
    kind = _whole(rng, 0, len(NAMES) - 1)
    outline = _outline(rng, kind)
    low, high = outline.min(axis=0), outline.max(axis=0)
    scale = side_px / (high - low).max()
    outline, extent = (outline - low) * scale, (high - low) * scale
    for _ in range(TRIES):
        corner = rng.random(2) * (img - 2 - extent) + 1
        if beside is not None:
            near, far = beside.box_xyxy_px[:2] - extent, beside.box_xyxy_px[2:]
            corner = near + rng.random(2) * (far - near)
            if (corner < 1).any() or (corner + extent > img - 1).any():
                continue
        thing = _Object(kind, outline + corner, np.concatenate([corner, corner + extent]))
        allowed = [PARTNER_IOU if other is beside else (0.0, 0.0) for other in objects]
        overlaps = [iou(thing.box_xyxy_px, other.box_xyxy_px) for other in objects]
        if all(low <= value <= high for value, (low, high) in zip(overlaps, allowed, strict=True)) and _cover(
            thing, beside
        ):
            return thing
    return None


def iou(first: np.ndarray, second: np.ndarray) -> float:
    """Return the intersection over union of two boxes xyxy."""
    wide = min(first[2], second[2]) - max(first[0], second[0])
    high = min(first[3], second[3]) - max(first[1], second[1])
    common = max(wide, 0.0) * max(high, 0.0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return float(common / (areas - common))


def _window(thing: _Object) -> tuple[int, int, int, int]:
    """Return the whole pixels x1, y1, x2, y2 around the box of an object."""
    x1, y1, x2, y2 = thing.box_xyxy_px
    return math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2)


def _coverage(thing: _Object, outline_px: np.ndarray) -> np.ndarray:
    """Return the share of each pixel of the object's window that is inside an outline: float32 [h, w], 0..1."""
    x1, y1, x2, y2 = _window(thing)
    large = np.zeros(((y2 - y1) * SUPERSAMPLING, (x2 - x1) * SUPERSAMPLING), np.uint8)
    points = (outline_px - (x1, y1)) * SUPERSAMPLING - 0.5  # OpenCV's coordinates are those of pixel centres
    cv2.fillPoly(large, [np.round(points * 16).astype(np.int32)], 255, shift=4)
    return cv2.resize(large, (x2 - x1, y2 - y1), interpolation=cv2.INTER_AREA).astype(np.float32) / 255


def _cover(thing: _Object, below: _Object | None) -> bool:
    """Update what a new object leaves visible of the one below it; return False, without a change, if that is too little."""
    mask = _coverage(thing, thing.outline_px)
    thing.visible, thing.area_px = mask, float(mask.sum())
    if below is None:
        return True
    assert below.visible is not None
    left, top, right, bottom = _window(thing)
    x1, y1, x2, y2 = _window(below)
    rest = below.visible.copy()
    columns, rows = slice(max(left, x1), min(right, x2)), slice(max(top, y1), min(bottom, y2))
    on_new = mask[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
    rest[rows.start - y1 : rows.stop - y1, columns.start - x1 : columns.stop - x1] *= 1 - on_new
    if rest.sum() < LEAST_VISIBLE * below.area_px:
        return False
    below.visible = rest
    return True


def _paint(rng: np.random.Generator, picture: np.ndarray, thing: _Object) -> None:
    """Paint an object with a dark rim and a bright fill, blended by coverage."""
    hue = HUES_DEGREES[thing.kind] + HUE_SPREAD_DEGREES * _between(rng, -1, 1)
    fill = _colour(hue, _between(rng, *SATURATION), _between(rng, *BRIGHTNESS))
    rim = fill * _between(rng, 0.3, 0.6)
    x1, y1, x2, y2 = _window(thing)
    part = picture[y1:y2, x1:x2]
    centre = (thing.box_xyxy_px[:2] + thing.box_xyxy_px[2:]) / 2
    inner = centre + (thing.outline_px - centre) * _between(rng, 0.72, 0.85)
    for outline, colour in ((thing.outline_px, rim), (inner, fill)):
        mask = _coverage(thing, outline)[..., None]
        part += mask * (colour - part)
