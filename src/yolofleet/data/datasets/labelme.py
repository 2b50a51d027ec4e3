# Paths are strings here: there may be millions.
# ruff: noqa: PTH118, PTH119, PTH120, PTH122
"""labelme's JSON, which X-AnyLabeling also writes: a file per image with shapes in pixels, ``a.json`` for ``a.jpg``.

A rectangle has two opposite corners in any order, or four. A polygon, circle, mask or rotated rectangle is learned as
the box around it. Such shapes with the same label and ``group_id`` are parts of one object. Points and lines are not used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

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
from yolofleet.data.datasets.labels import Problem, ProblemLog
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

_MAX_JSON_BYTES = 64 << 20  # a file may hold a copy of its image
_WITHOUT_BOX = ("point", "points", "line", "linestrip")
_LEAST_POINTS = {"rectangle": 2, "circle": 2, "mask": 2}  # other shapes are outlines of 3 points or more


class LabelmeFiles(LabelFiles):
    """The images of a folder (with its sub-folders) or of a list, and the JSON file of each."""

    form = None

    def __init__(self, path: Path, files: YoloFiles, names: tuple[str, ...]) -> None:
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
        self._classes = {name: number for number, name in enumerate(names)}

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``. Coordinates refer to the size that the file states."""
        path, content = self.labels[image], _read(self.labels[image])
        stated = stated_size(content.get("imageWidth"), content.get("imageHeight"))
        shapes = [(shape, *self._corners(shape)) for shape in content["shapes"]]
        every = [corners for _, corners, *_ in shapes if corners is not None]
        boxes = [[*corners.min(0), *corners.max(0)] for corners in every]
        if forms.are_fractions(boxes):
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
            is_outline = len(parts) == 1 and str(shape.get("shape_type")) not in _LEAST_POINTS
            values = [self._classes[shape["label"]], *((low + high) / 2).tolist(), *(high - low).tolist()]
            difficult = any(flag_of(shape.get("difficult")) for _, shape, _ in parts)
            yield number, values, difficult, points.ravel().tolist() if is_outline else []

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
    return LabelmeFiles(source.path, images or images_of(source, spec), spec.names)


def _has_files(path: Path, files: YoloFiles) -> bool:
    """Return whether one of the first JSON files of the images ``files``, or below the folder ``path``, is labelme's."""
    first = [*islice(_own_files(files).values(), 10), *islice(_files_below(path), 10)]
    return any(stated for stated, _ in _summary(first))


FORMAT = Format(_reader, has_files=_has_files)
