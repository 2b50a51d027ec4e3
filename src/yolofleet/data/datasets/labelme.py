# Paths are strings here: there may be millions.
# ruff: noqa: PTH118, PTH119, PTH120, PTH122
"""labelme's JSON, which X-AnyLabeling also writes: a file per image with shapes in pixels, ``a.json`` for ``a.jpg``.

A rectangle has two opposite corners in any order, or four. A polygon, circle, mask or rotated rectangle is learned as
the box around it, or where masks are read as a mask. Such shapes with the same label and ``group_id`` are parts of one object.
Points and lines are not used. A mask is a PNG in base64 over the box of its two points.
"""

from __future__ import annotations

import base64
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.annotations import (
    files_beside,
    files_found,
    flag_of,
    size_of_boxes,
    stated_size,
    summaries,
    unknown_class,
)
from yolofleet.data.datasets.labels import Outline, Parts, Problem, ProblemLog
from yolofleet.data.datasets.reader import (
    ABSENT,
    LabelError,
    LabelFiles,
    LabelRow,
    read_labels,
    stamp,
    unicode_forms,
)
from yolofleet.data.datasets.spec import DatasetSpec, Format, SplitSource
from yolofleet.data.datasets.yolotxt import YoloFiles, images_of, walk
from yolofleet.data.geometry import rle

_MAX_JSON_BYTES = 64 << 20  # a file may hold a copy of its image
_WITHOUT_BOX = ("point", "points", "line", "linestrip")
_FIRST = 20  # files that show whether there are masks
_TURN = np.arange(64) / 64 * 2 * np.pi
_CIRCLE = np.column_stack([np.cos(_TURN), np.sin(_TURN)])
_LEAST_POINTS = {"rectangle": 2, "circle": 2, "mask": 2}  # other shapes are outlines of 3 points or more


class LabelmeFiles(LabelFiles):
    """The images of a folder (with its sub-folders) or of a list, and the JSON file of each."""

    form = None

    def __init__(self, path: Path, files: YoloFiles, names: tuple[str, ...], *, masks: bool = False) -> None:
        """Find the label files of the images that ``files`` found in ``path``.

        Other files below ``path`` are those of the images that their ``imagePath`` states. That path may be one of another
        machine, so its last part may also name an image anywhere in the folder.
        """
        by_name: dict[str, list[str]] = {}
        for image in files.images:
            for name in unicode_forms(os.path.basename(image)):
                by_name.setdefault(name, []).append(image)
        labels = _own_files(files)
        others = sorted(set(_files_below(path)) - set(labels.values()))
        assumed, unused = [], []
        for file, (stated, _) in zip(others, _summary(others), strict=True):
            plain = stated.replace("\\", "/")
            image = here = os.path.normpath(os.path.join(os.path.dirname(file), plain))
            if stamp(here) == ABSENT and len(named := by_name.get(os.path.basename(plain), [])) == 1:
                image = named[0]
            if not stated or image in labels:
                unused.append((file, "belongs to no image"))
                continue
            labels[image] = file
            if stamp(image) != ABSENT and (image, stated) != (here, plain):
                assumed.append((file, f"imagePath {stated} -> {os.path.relpath(image, path)}"))
        more = sorted(labels.keys() - set(files.images))
        self.images, self.stamps = [*files.images, *more], [*files.stamps, *map(stamp, more)]
        self.labels = [labels.get(at) or f"{os.path.splitext(at)[0]}.json" for at in self.images]
        self.label_stamps = list(map(stamp, self.labels))
        unread = [found for found in files.problems if found[0].kind == "image-unread"]
        self.problems = (
            files_found("name-assumed", assumed) + files_found("labels-without-image", unused) + unread
        )
        self._masks = masks
        self._classes = {name: number for number, name in enumerate(names)}

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``. Coordinates refer to the size that the file states."""
        path, content = self.labels[image], _read(self.labels[image])
        stated = stated_size(content.get("imageWidth"), content.get("imageHeight"))
        shapes = [(shape, *self._corners(shape)) for shape in content["shapes"]]
        every = [corners for _, corners, *_ in shapes if corners is not None]
        boxes = _boxes_around(every)
        if self.has_fractions(boxes):
            log.add(Problem(path, None, forms.FRACTIONS, "numbers-assumed"), len(boxes))
            size = (1, 1)
        else:
            x, y = np.concatenate(every).max(0).tolist() if every else (0.0, 0.0)
            size, _ = size_of_boxes(stated, tuple(size_wh.tolist()), (x, y), self.images[image], log)
        objects: dict[object, list[tuple[int, dict[str, Any], np.ndarray]]] = {}
        for number, (shape, corners, kind, problem) in enumerate(shapes, 1):
            if corners is None:
                log.add(Problem(path, None, f"shape {number}: {problem}", kind))
                continue
            group = None if shape.get("shape_type") == "rectangle" else shape.get("group_id")
            parts = objects.setdefault(number if group is None else f"{shape['label']}\0{group}", [])
            parts.append((number, shape, corners))
            if len(parts) > 1:
                log.add(Problem(path, None, f"shape {number}: part of shape {parts[0][0]}", "label-joined"))
        for parts in objects.values():
            number, shape, _ = parts[0]
            points = np.concatenate([corners for *_, corners in parts]) / np.maximum(size, 1)
            low, high = points.min(0), points.max(0)
            outline: Outline = []
            if self._masks:
                outline = self._outline(image, parts, size, size_wh, log)
            elif len(parts) == 1 and str(shape.get("shape_type")) not in _LEAST_POINTS:
                outline = points.ravel().tolist()
            values = [self._classes[shape["label"]], *((low + high) / 2).tolist(), *(high - low).tolist()]
            difficult = any(flag_of(shape.get("difficult")) for _, shape, _ in parts)
            yield number, values, difficult, outline

    def _outline(
        self,
        image: int,
        parts: Sequence[tuple[int, dict[str, Any], np.ndarray]],
        size: tuple[int, int],
        size_wh: np.ndarray,
        log: ProblemLog,
    ) -> Outline:
        """Return the mask of an object: polygons as fractions of the image, or run lengths if a part is a bitmap.

        Args:
            size: that coordinates refer to; a bitmap must have the pixels of the image, ``size_wh``.
        """
        width, height = size_wh.tolist()
        polygons, bitmaps = [], []
        for number, shape, corners in parts:
            kind = str(shape.get("shape_type") or "polygon")
            if kind == "circle":
                corners = corners.mean(0) + _CIRCLE * (corners[1] - corners[0]) / 2
            if kind == "mask":
                try:
                    if size != (width, height):
                        raise ValueError("the labels state another size of the image")
                    bitmaps.append(_runs_of_png(shape.get("mask"), corners, (height, width)))
                except ValueError as problem:
                    what = f"shape {number}: its mask cannot be read: {problem}"
                    log.add(Problem(self.labels[image], None, what, "mask-unreadable"))
            elif kind != "rectangle":
                polygons.append(corners / np.maximum(size, 1))
        if not bitmaps:
            return Parts([polygon.ravel().tolist() for polygon in polygons])
        pixels = [polygon * size_wh for polygon in polygons]
        runs = rle.union([*bitmaps, rle.from_polygons(pixels, (height, width))], (height, width))
        return rle.Mask((height, width), runs)

    def corners_in(self, file: str) -> list[list[float]]:
        found = (self._corners(shape)[0] for shape in _read(file)["shapes"])
        return _boxes_around([corners for corners in found if corners is not None])

    @property
    def has_masks(self) -> bool:
        """See ``SplitReader.has_masks``."""
        files = (file for file, about in zip(self.labels, self.label_stamps, strict=True) if about != ABSENT)
        for file in islice(files, _FIRST):
            with suppress(LabelError):
                for shape in _read(file)["shapes"]:
                    kind = shape.get("shape_type") if isinstance(shape, dict) else "rectangle"
                    if kind in ("mask", "circle") or (
                        kind != "rectangle" and shape.get("group_id") is not None
                    ):
                        return True
        return False

    def _corners(self, shape: Any) -> tuple[np.ndarray | None, str, str]:
        """Return the corners of a shape in pixels, [n, 2]; or None, the kind of problem, and what is wrong."""
        label = shape.get("label") if isinstance(shape, dict) else None
        if not isinstance(label, str) or not label:
            return None, "label-unreadable", "it has no label"
        kind = str(shape.get("shape_type") or "polygon")
        if kind in _WITHOUT_BOX:
            return None, "shape-without-box", f"a {kind} has no box ({label:.60})"
        if flag_of(shape.get("difficult")) is None:
            return None, "label-unreadable", f"difficult is {shape['difficult']!r:.40}, not true or false"
        if label not in self._classes:
            return None, "wrong-class", unknown_class(label, self._classes)
        with suppress(ValueError, TypeError, LookupError, OverflowError):
            points = np.asarray(shape["points"], np.float64).reshape(len(shape["points"]), 2)
            if kind == "circle":  # centre, and a point on the circle
                radius = math.dist(*points)
                return np.stack([points[0] - radius, points[0] + radius]), "", ""
            if kind == "mask":  # its corners are the first and the last pixel
                points[1] += 1
            if len(points) >= _LEAST_POINTS.get(kind, 3):
                return points, "", ""
        return None, "label-unreadable", f"the {kind:.20} ({label:.60}) has no usable points"

    def label_names(self) -> set[str]:
        """Return the labels of all shapes that have a box."""
        files = [file for file, about in zip(self.labels, self.label_stamps, strict=True) if about != ABSENT]
        return {name for _, names in _summary(files) for name in names}

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.labels[image], None, f"shape {mark}: "


def _boxes_around(every: Sequence[np.ndarray]) -> list[list[float]]:
    return [[*corners.min(0).tolist(), *corners.max(0).tolist()] for corners in every]


def _runs_of_png(text: object, corners: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """Return the run lengths of a bitmap, a PNG in base64 over a box whose corners [2, 2] are pixels of an image.

    Raise ValueError, with the reason, before memory is taken for a bitmap that does not fill the box.
    """
    if not isinstance(text, str):
        raise ValueError("it has no bitmap")
    if len(corners) != 2:
        raise ValueError(f"its box has {len(corners)} points, not 2")
    (left, top), (right, bottom) = (
        np.rint(np.nan_to_num(corners, nan=-1)).clip(-1, 1 << 31).astype(int).tolist()
    )
    if not (0 <= left < right <= size_hw[1] and 0 <= top < bottom <= size_hw[0]):
        raise ValueError("its box is not inside the image")
    data = base64.b64decode(text, validate=True)
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR" or len(data) < 24:
        raise ValueError("its bitmap is not a PNG")
    width, height = struct.unpack_from(">II", data, 16)
    if (width, height) != (right - left, bottom - top):
        raise ValueError(f"its bitmap has {width} x {height} pixels, its box {right - left} x {bottom - top}")
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error:
        pixels = None
    if pixels is None or pixels.shape != (height, width):
        raise ValueError("its bitmap cannot be decoded")
    return rle.encode(pixels > 0, size_hw, (left, top))


def _own_files(files: YoloFiles) -> dict[str, str]:
    """Return the label file of each image that has one beside it, or where its YOLO label would be."""
    return files_beside(files.images, ".json", lambda folder: [folder, files.label_folder[folder]])[0]


def _files_below(path: Path) -> Iterator[str]:
    return (file for file, _ in walk(str(path), (".json",))) if path.is_dir() else iter(())


def _summary(files: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return ``imagePath`` and the labels that have a box, of each file; ("", []) for a file that is not labelme's."""

    def of_file(file: str) -> tuple[str, list[str]]:
        content = _read(file)
        shapes = [shape for shape in content["shapes"] if isinstance(shape, dict)]
        names = [shape.get("label") for shape in shapes if shape.get("shape_type") not in _WITHOUT_BOX]
        return str(content.get("imagePath") or ""), [n for n in names if n and isinstance(n, str)]

    return [about or ("", []) for about in summaries("labelme", files, of_file)]


def _read(path: str) -> dict[str, Any]:
    """Return the content of a file, which has a list of ``shapes``. Raises LabelError."""
    data = read_labels(path, _MAX_JSON_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LabelError(f"is not JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        raise LabelError("is not a file of labelme: it has no list of shapes")
    return content


def _reader(source: SplitSource, spec: DatasetSpec, images: YoloFiles | None) -> LabelmeFiles:
    return LabelmeFiles(source.path, images or images_of(source, spec), spec.names, masks=spec.masks)


def _has_files(path: Path, files: YoloFiles) -> bool:
    """Return whether one of the first JSON files of the images ``files``, or below the folder ``path``, is labelme's."""
    first = [*islice(_own_files(files).values(), 10), *islice(_files_below(path), 10)]
    return any(stated for stated, _ in _summary(first))


FORMAT = Format(_reader, has_files=_has_files)
