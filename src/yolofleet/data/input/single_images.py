"""Change an image before it is placed on a canvas: paste objects, apply albumentations, cut a hole.

Images are uint8 [h, w, 3] BGR, and the functions return changed copies.

Sources: copy-paste arXiv:2012.07177, cutout arXiv:1708.04552.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import cv2
import numpy as np
from pydantic import ValidationError

from yolofleet.config.transforms import transform_of
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.augment import FILL
from yolofleet.support.errors import ConfigError, install_hint

MOST_PASTED_OVER = 0.3  # of the area of a label: an object that would hide more of it is not pasted
MOST_CUT_OUT = 0.6  # of the area of a label: without more of it, the label is dropped
HOLE_SIDES = (1 / 16, 1 / 2)  # smallest and largest side of a hole, as fractions of the shorter side


def paste_objects(
    rng: np.random.Generator,
    image: np.ndarray,
    labels: Shapes,
    source: np.ndarray,
    classes: Sequence[int],
    outlines: Sequence[Sequence[np.ndarray]],
) -> tuple[np.ndarray, Shapes]:
    """Paste objects of another image at random places, half of them mirrored, each on top of those before.

    An object is left out if it is larger than the image, or would hide more than ``MOST_PASTED_OVER`` of a label.

    Args:
        source: the other image.
        classes: of its objects to paste.
        outlines: polygons of each object, [k, 2] as fractions of ``source``.
    """
    size, source_size = (np.array(pixels.shape[1::-1]) for pixels in (image, source))
    image, boxes = image.copy(), labels.corners_px(*size.tolist())
    pasted = []
    for number, polygons in zip(classes, outlines, strict=True):
        u_x, u_y, u_mirror = rng.random(3).tolist()
        points = [polygon * source_size for polygon in polygons]
        every = np.concatenate(points)
        low = np.floor(every.min(axis=0)).astype(int)
        high = np.minimum(np.ceil(every.max(axis=0)).astype(int), source_size)
        width, height = (high - low).tolist()
        room_x, room_y = (size - (high - low)).tolist()
        if min(width, height) < 2 or min(room_x, room_y) < 0:
            continue
        left, top = int(u_x * (room_x + 1)), int(u_y * (room_y + 1))
        box = np.array([left, top, left + width, top + height], float)
        if len(boxes) and _covered(boxes, box).max() > MOST_PASTED_OVER:
            continue
        # a vertex between two pixels has a whole coordinate, and in OpenCV the middle of a pixel has one
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [np.rint(polygon - low - 0.5).astype(np.int32) for polygon in points], 1)
        patch = source[low[1] : high[1], low[0] : high[0]]
        step = -1 if u_mirror < 0.5 else 1
        where = mask[:, ::step, None].astype(bool)
        np.copyto(image[top : top + height, left : left + width], patch[:, ::step], where=where)
        boxes = np.concatenate([boxes, box[None]])
        moved = [polygon - low + box[:2] for polygon in points]
        if step < 0:  # in the other direction, because a mirror turns it
            moved = [(polygon * (-1, 1) + (box[0] + box[2], 0))[::-1] for polygon in moved]
        pasted.append((number, box, moved))
    return image, labels.with_pasted(pasted, size) if pasted else labels


def cut_hole(rng: np.random.Generator, image: np.ndarray, labels: Shapes) -> tuple[np.ndarray, Shapes]:
    """Fill a random square with grey, and drop the labels of which it hides more than ``MOST_CUT_OUT``.

    Its middle is anywhere in the image, so it may reach beyond the border.
    """
    height, width = image.shape[:2]
    u_side, u_x, u_y = rng.random(3).tolist()
    half = (HOLE_SIDES[0] + (HOLE_SIDES[1] - HOLE_SIDES[0]) * u_side) * min(height, width) / 2
    x1, x2 = (round(min(max(u_x * width + d, 0), width)) for d in (-half, half))
    y1, y2 = (round(min(max(u_y * height + d, 0), height)) for d in (-half, half))
    image = image.copy()
    image[y1:y2, x1:x2] = FILL
    hidden = _covered(labels.corners_px(width, height), np.array([x1, y1, x2, y2], float))
    return image, labels.rows(hidden <= MOST_CUT_OUT)


def _covered(boxes: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return the share of the area of each box [n, 4] that another box [4] covers: [n]."""
    shared = np.minimum(boxes[:, 2:], by[2:]) - np.maximum(boxes[:, :2], by[:2])
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    covered: np.ndarray = shared.clip(0).prod(axis=1) / np.maximum(areas, 1e-9)
    return covered


class Transforms:
    """Transforms of albumentations 2.0, which change pixels but move none.

    Args:
        texts: the recipe's ``albumentations``.
    Raises:
        ConfigError: albumentations is not installed, is of another version, or refuses a parameter.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        assert self._compose is not None  # build it now, for its errors

    def __call__(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        """Return the changed image. All random numbers of the transforms follow from one that ``rng`` draws."""
        self._compose.set_random_seed(int(rng.random() * 2**32))
        rgb = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        changed: np.ndarray = self._compose(image=rgb)["image"]
        return cv2.cvtColor(changed, cv2.COLOR_RGB2BGR)

    @cached_property
    def _compose(self) -> Any:
        library = _albumentations()
        transforms = []
        for text in self.texts:
            name, parameters = transform_of(text)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # it only warns of unknown parameters
                    transforms.append(getattr(library, name)(**parameters))
            except (TypeError, ValueError, UserWarning) as problem:
                raise ConfigError(
                    f"albumentations refuses {text!r}: {_reason(problem)}",
                    hint=f"correct the parameters of {name} in the recipe",
                ) from None
        return library.Compose(transforms)

    def __getstate__(self) -> dict[str, Any]:
        return {"texts": self.texts}


def _reason(problem: Exception) -> str:
    """Return the reason of albumentations for refusing parameters, in one line."""
    told = [str(problem)]
    if isinstance(problem.__cause__, ValidationError):
        told = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in problem.__cause__.errors()]
    return " ".join("; ".join(told).split())[:300]


def albumentations_version() -> str:
    """Return the version of albumentations. Raise ConfigError if it is not usable."""
    return str(_albumentations().__version__)


def _albumentations() -> Any:
    quiet = "NO_ALBUMENTATIONS_UPDATE"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"  # else the import asks the internet for a newer version
    try:
        import albumentations
    except ImportError:
        raise ConfigError(
            "the recipe's albumentations need the package albumentations, which is not installed",
            hint=install_hint("albumentations"),
        ) from None
    finally:
        if before is None:
            del os.environ[quiet]
    version = str(albumentations.__version__)
    if not version.startswith("2.0."):
        raise ConfigError(
            f"the recipe's albumentations need albumentations 2.0, and {version} is installed",
            hint=install_hint("albumentations"),
        )
    return albumentations
