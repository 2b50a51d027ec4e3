# Paths are strings here: there may be millions.
# ruff: noqa: PTH118
"""COCO's instances JSON as flat arrays, parsed once per machine and stored in the cache folder.

Parsing takes 10 s for a million boxes, so the arrays are stored under a hash of the file's path, size and modification
time. ``bigjson`` reads the file entry by entry and takes at most 200 bytes of memory a box; in the file, a box with
its outline takes hundreds to thousands of bytes. Format: cocodataset.org/#format-data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.datasets.bigjson import JsonFault, read_lists
from yolofleet.datasets.cocotable import HINT, CocoTable, TableBuilder
from yolofleet.datasets.labels import Outlines, Problem, ProblemLog, RawLabels
from yolofleet.datasets.reader import ABSENT, SplitReader, stamp
from yolofleet.errors import DataError
from yolofleet.files.arrayfile import arrays_of, cached_arrays

_FORMAT = 2


class CocoFiles(SplitReader):
    """Images and labels of one JSON file, ordered by image id."""

    def __init__(self, table: CocoTable, roots: tuple[Path, ...], category_ids: tuple[int, ...]) -> None:
        """Find the images.

        Args:
            roots: folders that may hold the images; see ``_image_paths``.
            category_ids: the category of each class number.
        """
        self.table = table
        self.images = _image_paths(table.file_names, roots)
        self.stamps = [stamp(image) for image in self.images]
        self.image_ids = table.image_ids
        if table.stray:
            what = f"{table.stray} annotations have no usable bbox or belong to no listed image"
            self.findings = [(Problem(table.path, None, what, "label-stray"), table.stray)]
        self.key_text = repr((table.path, stamp(table.path)))
        known = {category: number for number, category in enumerate(category_ids)}
        categories, which = np.unique(self.table.category_ids, return_inverse=True)
        self._classes = np.array([known.get(i, -1) for i in categories.tolist()], np.float64)[which]

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Read the labels of images ``start:stop``; see ``SplitReader.rows``.

        Boxes are divided by the size that the JSON states, because their coordinates refer to it.
        """
        table = self.table
        stated = table.sizes_wh[start:stop]
        differs = (stated > 0).all(1) & (sizes_wh > 0).all(1) & (stated != sizes_wh).any(1)
        for at in np.flatnonzero(differs).tolist():
            (width, height), (stated_width, stated_height) = sizes_wh[at], stated[at]
            what = f"is {width} x {height} pixels; the annotations say {stated_width} x {stated_height}"
            log.add(Problem(self.images[start + at], None, what, "size-differs"))
        is_stated = (stated > 0).all(1, keepdims=True)
        sizes = np.where(is_stated, stated, np.maximum(sizes_wh, 1)).astype(np.float64)

        first, last = int(table.offsets[start]), int(table.offsets[stop])
        image = np.repeat(np.arange(stop - start), np.diff(table.offsets[start : stop + 1]))
        xywh = table.boxes_xywh_px[first:last]
        size = sizes[image]
        values = np.concatenate(
            [self._classes[first:last, None], (xywh[:, :2] + xywh[:, 2:] / 2) / size, xywh[:, 2:] / size],
            axis=1,
        )
        return RawLabels(
            image,
            table.annotation_ids[first:last],
            values,
            table.crowd[first:last],
            table.area_px[first:last],
            empty=int((np.diff(table.offsets[start : stop + 1]) == 0).sum()),
            outlines=self._outlines(first, last, size),
        )

    def _outlines(self, first: int, last: int, sizes_wh: np.ndarray) -> Outlines | None:
        """Return the polygons of annotations ``first:last``; their images have these sizes, [last - first, 2]."""
        table, (polygon_starts, point_starts) = self.table, self._starts
        polygons = slice(polygon_starts[first], polygon_starts[last])
        points = table.points_px[point_starts[polygons.start] : point_starts[polygons.stop]]
        if not len(points):
            return None
        polygon_counts, point_counts = table.polygon_counts[first:last], table.point_counts[polygons]
        size = sizes_wh.repeat(polygon_counts, axis=0).repeat(point_counts, axis=0)
        return Outlines(polygon_counts, point_counts, points / size)

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the first polygon of each annotation, and of the first point of each polygon."""
        counts = self.table.polygon_counts, self.table.point_counts
        starts = [np.concatenate([[0], np.cumsum(count)]) for count in counts]
        return starts[0], starts[1]

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.table.path, None, f"annotation {mark} of {self.table.file_names[image]}: "


def _image_paths(file_names: Sequence[str], roots: Sequence[Path]) -> list[str]:
    """Return the path of each image in the first folder that holds at least one of ten sampled names.

    A name is tried whole, then without its first folders: Objects365 writes ``images/v1/patch8/x.jpg`` for a file that
    lies in ``train/patch8/x.jpg``.
    """
    sample = np.linspace(0, len(file_names) - 1, 10).astype(int).tolist() if file_names else []
    for parts in (0, 2, 1):
        for root in map(str, roots):
            if any(stamp(os.path.join(root, _last_parts(file_names[at], parts))) != ABSENT for at in sample):
                return [os.path.join(root, _last_parts(name, parts)) for name in file_names]
    return [os.path.join(str(roots[0]), name) for name in file_names]


def _last_parts(name: str, parts: int) -> str:
    """Return the last ``parts`` components of a path; 0 means all of it."""
    return "/".join(name.split("/")[-parts:]) if parts else name


def load_table(path: Path) -> CocoTable:
    """Return the table of an annotation file, from the cache folder if it is stored there.

    Raises:
        DataError: the file is missing or has another form.
    """
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}") from None
    return _load_table(str(path.absolute()), about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4)
def _load_table(path: str, size: int, modified_ns: int) -> CocoTable:
    text = f"{_FORMAT}\0{path}\0{size}\0{modified_ns}"
    return _unpack(path, *cached_arrays("coco", text, lambda: _pack(parse_json(path))))


def _pack(table: CocoTable) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    names = json.dumps(table.file_names).encode()
    meta = {"categories": json.dumps(table.categories), "stray": str(table.stray)}
    return {**arrays_of(table), "file_names": np.frombuffer(names, np.uint8)}, meta


def _unpack(path: str, arrays: dict[str, np.ndarray], meta: dict[str, str]) -> CocoTable:
    return CocoTable(
        path=path,
        categories=tuple((number, name) for number, name in json.loads(meta["categories"])),
        file_names=tuple(json.loads(arrays.pop("file_names").tobytes())),
        stray=int(meta["stray"]),
        **arrays,
    )


def parse_json(path: str) -> CocoTable:
    """Parse a COCO instances file. Raises DataError."""
    builder = TableBuilder()
    categories: dict[int, str] = {}
    seen: set[str] = set()
    try:
        for key, entry in read_lists(Path(path), ("images", "annotations", "categories")):
            if entry is None and key not in seen:  # read_lists yields None once, before the entries of a list
                seen.add(key)
            elif not isinstance(entry, dict):
                raise DataError(f"annotations {path}: {key} is not a list of objects", hint=HINT)
            elif key == "annotations":
                _add_annotation(builder, entry)
            elif key == "images":
                _add_image(builder, entry, path)
            else:
                number = _whole(entry, "id", f"{path}: a category")
                if not isinstance(entry.get("name"), str) or not entry["name"]:
                    raise DataError(f"{path}: category {number} has no name", hint=HINT)
                categories[number] = entry["name"]
    except (OSError, JsonFault, MemoryError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}", hint=HINT) from None
    for key in ("images", "categories"):
        if key not in seen:
            raise DataError(f"annotations {path} have no list of {key}", hint=HINT)
    return builder.table(path, categories)


def _polygons_of(entry: dict[str, Any]) -> list[list[float]]:
    """Return the polygons of an annotation; those that are not rows of finite numbers are left out, as are masks (RLE)."""
    found = entry.get("segmentation")
    if not isinstance(found, list) or entry.get("iscrowd"):
        return []
    polygons = [[_number(value) for value in polygon] for polygon in found if isinstance(polygon, list)]
    return [p for p in polygons if len(p) >= 6 and len(p) % 2 == 0 and math.isfinite(sum(p))]


def _add_image(builder: TableBuilder, entry: dict[str, Any], path: str) -> None:
    number, name = _whole(entry, "id", f"{path}: an image"), entry.get("file_name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{path}: image {number} has no file_name", hint=HINT)
    width, height = (_number(entry.get(side)) for side in ("width", "height"))
    in_range = 0 < width < 1 << 31 and 0 < height < 1 << 31
    builder.add_image(number, name, int(width) if in_range else 0, int(height) if in_range else 0)


def _add_annotation(builder: TableBuilder, entry: dict[str, Any]) -> None:
    box, image, number = entry.get("bbox"), entry.get("image_id"), entry.get("id", -1)
    if type(image) is not int or abs(image) >= 1 << 63 or not isinstance(box, list) or len(box) != 4:
        builder.stray += 1
        return
    if type(number) is not int or abs(number) >= 1 << 63:
        number = -1
    builder.add_box(
        image,
        number,
        entry.get("category_id"),
        map(_number, box),
        bool(entry.get("iscrowd")),
        _number(entry.get("area")),
        _polygons_of(entry),
    )


def _whole(entry: dict[str, Any], key: str, owner: str) -> int:
    """Return a value of an entry; raise DataError unless it is a whole number of at most 64 bits."""
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise DataError(f"{owner} has {key} {value!r:.40}, not a whole number", hint=HINT)
    return value


def _number(value: Any) -> float:
    """Return a JSON value as a float; NaN if it is not a number or too large."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
