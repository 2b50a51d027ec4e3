# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH118, PTH122, PTH208
"""What readers of several formats share: values that annotations state, and label files beside the images or in their folder."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from yolofleet.data.datasets.arrayfile import cached_arrays
from yolofleet.data.datasets.labels import EDGE_TOLERANCE, Id, Problem, ProblemLog
from yolofleet.data.datasets.reader import LabelError, stamp, unicode_forms
from yolofleet.data.images.header import header_of_file
from yolofleet.support.text import nearest

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_FLAGS = {"0": False, "1": True, "false": False, "true": True, "": False}


def number_of(value: object) -> float:
    """Return a number that a label file states; NaN if it states none.

    All formats and fields have this rule: a text that is exactly a number counts as that number; true and false do not.
    """
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def same_number(value: Id) -> Id:
    """Return the id that is the same number as a text, or the text as which programs write a number: 7 for "7", "7" for 7."""
    if not isinstance(value, str):
        return str(value)
    digits = value.removeprefix("-")
    is_whole = digits.isascii() and digits.isdecimal() and len(digits) < 20
    return int(value) if is_whole else number_of(value)  # a float has not all digits of a long number


def flag_of(value: object) -> bool | None:
    """Return whether a flag such as ``iscrowd`` is set: 0, 1, true or false, also as a text; None for anything else."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def around_rotated(width: float, height: float, angle: float) -> tuple[float, float]:
    """Return width and height of the box around a box that is rotated about its centre, angle in radians."""
    cos, sin = (abs(part(angle)) if math.isfinite(angle) else math.nan for part in (math.cos, math.sin))
    return width * cos + height * sin, width * sin + height * cos


def stated_size(width: object, height: object) -> tuple[int, int]:
    """Return the size of an image that a label file states, in pixels; 0, 0 if it states none that is possible."""
    w, h = number_of(width), number_of(height)
    return (int(w), int(h)) if 0 < w < 1 << 31 and 0 < h < 1 << 31 else (0, 0)


def size_of_boxes(
    stated_wh: tuple[int, int],
    size_wh: tuple[int, int],
    most_xy: tuple[float, float],
    image: str,
    log: ProblemLog,
    *,
    drawn_on_pixels: bool = False,
) -> tuple[tuple[int, int], int]:
    """Return the size in pixels that the boxes of an image refer to, and the EXIF orientation for ``turned``.

    Boxes are scaled from the stated size only if it has the shape of the image and holds them. Else the result is the more
    likely of both sizes, and ``log`` says what else may be meant. If the size is that before a rotation by EXIF, boxes were
    either drawn on the pixels of the file and must be rotated, or are fractions of the visible image times that size, as
    Label Studio writes them.

    Args:
        stated_wh: width and height that the labels state; 0 states nothing.
        size_wh: of the image, after rotation by EXIF; 0 if it is not known.
        most_xy: the largest x and y of a box, in the pixels of the labels.
        image: the path, whose header is read if the sides are swapped.
        drawn_on_pixels: all boxes of the file are whole numbers, which fractions of a size hardly give.
    """
    (w, h), (width, height) = stated_wh, size_wh
    if min(w, h) <= 0 or min(width, height) <= 0 or stated_wh == size_wh:
        return (size_wh if min(w, h) <= 0 else stated_wh), 1
    fits, fits_image = (
        all(most <= side * (1 + EDGE_TOLERANCE) for most, side in zip(most_xy, sides, strict=True))
        for sides in (stated_wh, size_wh)
    )
    what = f"is {width} x {height} pixels; the labels say {w} x {h}"
    if fits and abs(w * height - h * width) <= max(w, h, width, height):  # equal up to a rounded side
        log.add(Problem(image, None, what, "size-differs"))
        return stated_wh, 1
    result, is_swapped = stated_wh, stated_wh == size_wh[::-1]
    orientation = _orientation(image) if fits and is_swapped else 1
    if orientation >= 5:
        what += ", the size before the rotation by EXIF: boxes are "
        if drawn_on_pixels:
            what += "rotated with the image, as all are whole numbers, and may have to be scaled"
        else:
            what += "taken as parts of the stated size, and may have to be rotated"
    elif fits and not fits_image:
        what += ", the sides swapped" if is_swapped else ""
        what += ", another shape: boxes are taken as parts of the stated size, since they exceed the image"
    else:
        result = size_wh
        what += ", the sides swapped" if is_swapped else ""
        what += ": boxes are taken as pixels of the image, not scaled"
    log.add(Problem(image, None, f"{what}; look at the boxes with yolofleet data preview", "size-unsure"))
    return result, orientation if orientation >= 5 and drawn_on_pixels else 1


def turned(xy: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    """Return points of a stored image in the image that EXIF orientation 5 to 8 makes of it; 1 changes nothing.

    Args:
        xy: [n, 2] fractions of the sides.
        orientation: int [n].
    """
    x, y = xy[:, 0], xy[:, 1]
    across = np.where(np.isin(orientation, (6, 7)), 1 - y, y)
    down = np.where(np.isin(orientation, (7, 8)), 1 - x, x)
    return np.where(orientation[:, None] >= 5, np.column_stack([across, down]), xy)


def _orientation(image: str) -> int:
    """Return the EXIF orientation of an image, 1 to 8; 1 if it cannot be read."""
    try:
        header = header_of_file(image)
    except (OSError, ValueError):
        return 1
    return header.orientation if header else 1


def unknown_class(name: str, names: Collection[str]) -> str:
    """Return what is wrong with a label of a class that ``names`` does not have."""
    near = nearest(name, names)
    what = f"class {name!r:.60} is not one of the {len(names)} names"
    return f"{what} (nearest: {near})" if near else what


def files_found(kind: str, found: Sequence[tuple[str, str]]) -> list[tuple[Problem, int]]:
    """Return the first of some problems of files (path, what) with their number, for ``SplitReader.problems``."""
    return [
        (Problem(path, None, f"{what} (files like this: {len(found)})", kind), len(found))
        for path, what in found[:1]
    ]


def files_in(folder: str, suffix: str) -> dict[str, str]:
    """Return the files of a folder with a suffix, by the name without it; {} if there is no such folder."""
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(suffix)]
    except (OSError, ValueError):  # ValueError: a list may name a folder with a NUL character
        return {}
    return {name[: -len(suffix)]: os.path.join(folder, name) for name in names}


def files_beside(
    images: Iterable[str], suffix: str, folders_of: Callable[[str], Iterable[str]]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Find the files with the names of images.

    Args:
        folders_of: returns where the files of a folder of images may be, the most likely place first.
    Returns:
        the file of each image that has one, and ``files_in`` of each folder that has such files or is the first with any.
    """
    options: dict[str, list[str]] = {}
    files: dict[str, dict[str, str]] = {}
    found: dict[str, str] = {}
    used: set[str] = set()
    for image in images:
        folder, name = os.path.split(image)
        if folder not in options:
            options[folder] = list(folders_of(folder))
            files |= {option: files_in(option, suffix) for option in options[folder] if option not in files}
            used.add(next((option for option in options[folder] if files[option]), folder))
        stems = unicode_forms(os.path.splitext(name)[0])
        pairs = ((option, stem) for stem in stems for option in options[folder] if stem in files[option])
        if pair := next(pairs, None):
            found[image] = files[pair[0]][pair[1]]
            used.add(pair[0])
    return found, {option: files[option] for option in used}


def summaries(kind: str, files: Sequence[str], of_file: Callable[[str], Any]) -> list[Any]:
    """Return what ``of_file`` says of each label file, in the types of JSON; None where it raises LabelError.

    Each file is read once per machine, and the result is stored in the folder ``kind`` of the cache.
    """

    def read(file: str) -> Any:
        with suppress(LabelError):  # the index of the split reports it
            return of_file(file)
        return None

    key = "\n".join(f"{file}\0{stamp(file)}" for file in files)
    found = cached_arrays(kind, key, lambda: ({}, {"files": json.dumps(list(map(read, files)))}))
    return list(json.loads(found[1]["files"]))
