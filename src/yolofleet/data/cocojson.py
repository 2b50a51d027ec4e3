"""COCO's instances JSON -> flat arrays, parsed once per machine and kept under the cache folder.

Parsing train2017 (450 MB) takes seconds and gigabytes, so what is needed of it is stored as arrays; the key is
the file's path, size and modification time. Format: cocodataset.org/#format-data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.arrayfile import cache_root, read_arrays, write_arrays
from yolofleet.data.labels import Problem, ProblemLog, RawLabels
from yolofleet.data.yolotxt import ABSENT, Stamp, stamp
from yolofleet.errors import DataError

_FORMAT = 1
_HINT = "is it an instances_*.json, with images, annotations and categories?"


@dataclass(frozen=True)
class CocoTable:
    """One JSON file. Legend: N images by id, M annotations by image.

    Attributes:
        categories: (id, name), by id.
        image_ids: int64 [N].
        sizes_wh: int32 [N, 2] pixels as the file says; 0 where it does not.
        file_names: N names, relative to a folder that the file does not say.
        offsets: int64 [N + 1]: annotations of image i are offsets[i]:offsets[i + 1].
        annotation_ids, category_ids: int64 [M].
        boxes_xywh_px: float64 [M, 4].
        crowd: bool [M].
        area_px: float64 [M], NaN where not given.
        stray: annotations that were unusable or of no listed image.
    """

    path: str
    categories: tuple[tuple[int, str], ...]
    image_ids: np.ndarray
    sizes_wh: np.ndarray
    file_names: tuple[str, ...]
    offsets: np.ndarray
    annotation_ids: np.ndarray
    category_ids: np.ndarray
    boxes_xywh_px: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    stray: int


class CocoFiles:
    """Images and labels of one JSON file, in the order of image ids.

    Attributes:
        images, stamps: as found under one of the folders; ``ABSENT`` where not found.
        table_stamp: of the JSON file.
        image_ids: int64 [N].
    """

    def __init__(self, path: Path, roots: tuple[Path, ...], category_ids: tuple[int, ...]) -> None:
        """
        Args:
            roots: folders that may hold the images; the first that holds one of the first ten is used.
            category_ids: the category of each class number.
        """
        self.table = load_table(path)
        self.table_stamp = stamp(str(path))
        names = self.table.file_names
        self.root = next(
            (root for root in roots if any(stamp(str(root / name)) != ABSENT for name in names[:10])),
            roots[0],
        )
        self.images = [os.path.join(str(self.root), name) for name in names]  # noqa: PTH118
        self.stamps: list[Stamp] = [stamp(image) for image in self.images]
        self.image_ids = self.table.image_ids
        known = {category: number for number, category in enumerate(category_ids)}
        self._classes = np.array([known.get(i, -1) for i in self.table.category_ids.tolist()], np.float64)
        self._sizes_px = np.maximum(self.table.sizes_wh, 1).astype(np.float64)

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Labels of images start:stop.

        Args:
            sizes_wh: int32 [stop - start, 2], as the image files say; 0 for unusable ones.
        """
        table = self.table
        said = table.sizes_wh[start:stop]
        differs = (said > 0).all(1) & (sizes_wh > 0).all(1) & (said != sizes_wh).any(1)
        for at in np.flatnonzero(differs).tolist():
            (width, height), (said_width, said_height) = sizes_wh[at], said[at]
            what = f"is {width} x {height} pixels; the annotations say {said_width} x {said_height}"
            log.add(Problem(self.images[start + at], None, what, "boxes scaled"))
        sizes = np.where((said > 0).all(1, keepdims=True), said, np.maximum(sizes_wh, 1)).astype(np.float64)

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
            int((np.diff(table.offsets[start : stop + 1]) == 0).sum()),
        )

    def place(self, at: int, mark: int) -> tuple[str, int | None, str]:
        """File, line and opening words for a message about a label."""
        return self.table.path, None, f"annotation {mark} of {self.table.file_names[at]}: "


def load_table(path: Path) -> CocoTable:
    """From the cache folder where possible. Raises DataError for a file that is missing or not COCO's form."""
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}") from None
    return _load_table(str(path.absolute()), about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4)
def _load_table(path: str, size: int, modified_ns: int) -> CocoTable:
    text = f"{_FORMAT}\0{path}\0{size}\0{modified_ns}"
    key = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    stored = cache_root() / "coco" / f"{key}.arrays"
    read = read_arrays(stored)
    if read is not None:
        return _unpack(path, *read)
    table = _parse(path)
    try:
        write_arrays(stored, *_pack(table))
    except OSError:
        pass  # slower next time, nothing else
    return table


_ARRAYS = (
    "image_ids",
    "sizes_wh",
    "offsets",
    "annotation_ids",
    "category_ids",
    "boxes_xywh_px",
    "crowd",
    "area_px",
)


def _pack(table: CocoTable) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    names = json.dumps(table.file_names).encode()
    arrays = {name: getattr(table, name) for name in _ARRAYS}
    meta = {"categories": json.dumps(table.categories), "stray": str(table.stray)}
    return {**arrays, "file_names": np.frombuffer(names, np.uint8)}, meta


def _unpack(path: str, arrays: dict[str, np.ndarray], meta: dict[str, str]) -> CocoTable:
    return CocoTable(
        path=path,
        categories=tuple((number, name) for number, name in json.loads(meta["categories"])),
        file_names=tuple(json.loads(arrays["file_names"].tobytes())),
        stray=int(meta["stray"]),
        **{name: arrays[name] for name in _ARRAYS},
    )


def _without_outline(entry: dict[str, Any]) -> dict[str, Any]:
    entry.pop("segmentation", None)  # most of the file's bulk; dropped while parsing
    return entry


def _parse(path: str) -> CocoTable:
    try:
        content = json.loads(Path(path).read_bytes(), object_hook=_without_outline)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}", hint=_HINT) from None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise DataError(f"annotations {path} have no list of images", hint=_HINT)

    categories: dict[int, str] = {}
    for entry in _entries(content, "categories", path):
        number = _whole(entry, "id", f"{path}: a category")
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise DataError(f"{path}: category {number} has no name", hint=_HINT)
        categories[number] = entry["name"]
    images: dict[int, tuple[str, int, int]] = {}
    for entry in _entries(content, "images", path):
        number, name = _whole(entry, "id", f"{path}: an image"), entry.get("file_name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: image {number} has no file_name", hint=_HINT)
        if number in images:
            raise DataError(f"{path}: image id {number} is given twice ({images[number][0]}, {name})")
        width, height = (_number(entry.get(side)) for side in ("width", "height"))
        in_range = 0 < width < 1 << 31 and 0 < height < 1 << 31
        images[number] = (name, int(width) if in_range else 0, int(height) if in_range else 0)

    rows: list[tuple[int, int, int, float, float, float, float, bool, float]] = []
    stray, unknown = 0, []
    for entry in _entries(content, "annotations", path, needed=False):
        box = entry.get("bbox")
        numbers = [_number(value) for value in box] if isinstance(box, list) else []
        image, number, category = entry.get("image_id"), entry.get("id", -1), entry.get("category_id")
        if not isinstance(image, int) or image not in images or len(numbers) != 4:
            stray += 1
            continue
        number = number if isinstance(number, int) and abs(number) < 1 << 63 else -1
        if not isinstance(category, int) or category not in categories:
            unknown.append(f"annotation {number}: category {category!r:.40}")
            category = -1
        area = _number(entry.get("area"))
        rows.append((image, number, category, *numbers, bool(entry.get("iscrowd")), area))  # type: ignore[arg-type]
    if unknown:
        shown = "\n  ".join(unknown[:10])
        raise DataError(
            f"{path}: {len(unknown)} annotations are of categories that it does not list\n  {shown}",
            hint=_HINT,
        )

    ids = sorted(images)
    position = {number: at for at, number in enumerate(ids)}
    rows.sort(key=lambda row: position[row[0]])
    counts = np.bincount(np.array([position[row[0]] for row in rows], np.int64), minlength=len(ids))
    return CocoTable(
        path=path,
        categories=tuple(sorted(categories.items())),
        image_ids=np.array(ids, np.int64),
        sizes_wh=np.array([images[i][1:] for i in ids], np.int32).reshape(-1, 2),
        file_names=tuple(images[i][0] for i in ids),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        annotation_ids=np.array([row[1] for row in rows], np.int64),
        category_ids=np.array([row[2] for row in rows], np.int64),
        boxes_xywh_px=np.array([row[3:7] for row in rows], np.float64).reshape(-1, 4),
        crowd=np.array([row[7] for row in rows], bool),
        area_px=np.array([row[8] for row in rows], np.float64),
        stray=stray,
    )


def _entries(content: dict[str, Any], key: str, path: str, needed: bool = True) -> list[dict[str, Any]]:
    entries = content.get(key, None if needed else [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"annotations {path} have no usable list of {key}", hint=_HINT)
    return entries


def _whole(entry: dict[str, Any], key: str, owner: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise DataError(f"{owner} has {key} {value!r:.40}, not a whole number", hint=_HINT)
    return value


def _number(value: Any) -> float:
    """NaN for anything that is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
