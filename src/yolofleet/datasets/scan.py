"""Read a range of images of a split: headers and labels, without decoding.

Threads of ``build_index`` call ``scan`` for ranges of 512 images. ``pack`` and ``unpack`` send the results to other ranks.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from yolofleet.datasets.labels import Outlines, Problem, ProblemLog, clean
from yolofleet.datasets.reader import ABSENT, SplitReader, Stamp
from yolofleet.errors import DataError
from yolofleet.files.arrayfile import arrays_of
from yolofleet.images.decode import unreadable
from yolofleet.images.header import header_of_file


@dataclass
class Scanned:
    """The usable images of one range, and their labels. The arrays are those of ``DataIndex`` and of ``Outlines``.

    Attributes:
        usable: bool, one for each image of the range.
        counts: int64, labels of each usable image.
        rows_read: all label rows of the range.
        unlabelled: images without a label file.
    """

    usable: np.ndarray
    sizes_wh: np.ndarray
    counts: np.ndarray
    classes: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    polygon_counts: np.ndarray
    point_counts: np.ndarray
    points: np.ndarray
    rows_read: int
    unlabelled: int
    log: ProblemLog


def scan(
    reader: SplitReader,
    start: int,
    stop: int,
    *,
    class_count: int,
    single_cls: bool,
    problems_kept: int,
    root: Path,
) -> Scanned:
    """Read images ``start:stop``; report unusable images and labels in the log of the result.

    Args:
        single_cls: all classes become class 0.
        problems_kept: problems to keep in full; all are counted.
        root: paths of problems are relative to it.
    """
    log = ProblemLog(problems_kept)
    sizes = np.zeros((stop - start, 2), np.int32)
    for at in range(start, stop):
        path, stamp = reader.images[at], reader.stamps[at]
        try:
            sizes[at - start] = _size_of(path, stamp)
        except DataError as error:
            kind = "image-missing" if stamp == ABSENT else "image-unreadable"
            log.add(Problem(path, None, error.what.removeprefix(f"image {path} "), kind))
    raw = reader.rows(start, stop, sizes, log)
    rows_read = len(raw.image) + log.rows_dropped
    if single_cls:
        raw.values[:, 0] = np.where(np.isfinite(raw.values[:, 0]), 0, np.nan)
    cleaned = clean(raw, 1 if single_cls else class_count, drop_duplicates=reader.repeats_are_duplicates)
    for row, what, kind in cleaned.complaints:
        file, line, opening = reader.place(start + int(raw.image[row]), int(raw.mark[row]))
        log.add(Problem(file, line, opening + what, kind))

    usable = np.asarray((sizes > 0).all(1))
    usable[list(raw.unusable)] = False
    keep = cleaned.keep & usable[raw.image]
    boxes = cleaned.boxes_cxcywh_unit[keep]
    size = sizes[raw.image[keep]].astype(np.float64)
    box_area = boxes[:, 2].astype(np.float64) * size[:, 0] * boxes[:, 3] * size[:, 1]
    area = raw.area_px[keep]
    outlines = (raw.outlines or Outlines.none(len(keep))).of_rows(keep).packed()
    log.kept = [problem.below(root) for problem in log.kept]
    log.kept.sort(key=lambda problem: (problem.path, problem.line or 0))
    return Scanned(
        usable=usable,
        sizes_wh=sizes[usable],
        counts=np.bincount(raw.image[keep], minlength=stop - start)[usable].astype(np.int64),
        classes=raw.values[keep, 0].astype(np.int32),
        boxes_cxcywh_unit=boxes,
        crowd=raw.crowd[keep],
        area_px=np.where(np.isfinite(area), area, box_area),
        polygon_counts=outlines.polygon_counts,
        point_counts=outlines.point_counts,
        points=outlines.points,
        rows_read=rows_read,
        unlabelled=raw.unlabelled,
        log=log,
    )


def _size_of(path: str, stamp: Stamp) -> tuple[int, int]:
    """Return width and height in pixels after rotation. Raise the DataError that decoding would raise."""
    if stamp == ABSENT:
        raise DataError(f"image {path} does not exist")
    try:
        header = header_of_file(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if header is None:
        what = "is not in a known image format" if stamp[0] else "is empty (0 bytes)"
        raise DataError(f"image {path} {what}")
    if header.fault:
        raise DataError(f"image {path} {header.fault}")
    return header.size_wh


def pack(parts: Sequence[Scanned]) -> bytes:
    """Return ranges as bytes: the length of a JSON text, that text, and the arrays of all ranges one after the other."""
    about, arrays = [], []
    for part in parts:
        columns = arrays_of(part)
        log = {**vars(part.log), "kept": [astuple(problem) for problem in part.log.kept]}
        shapes = {name: (array.dtype.str, array.shape) for name, array in columns.items()}
        about.append([shapes, {"rows_read": part.rows_read, "unlabelled": part.unlabelled}, log])
        arrays += [np.ascontiguousarray(array).tobytes() for array in columns.values()]
    text = json.dumps(about).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *arrays])


def unpack(data: bytes) -> list[Scanned]:
    """Return the ranges that ``pack`` packed. Their arrays are views of ``data``."""
    (length,) = struct.unpack_from("<Q", data)
    at, parts = 8 + length, []
    for shapes, counts, log in json.loads(data[8:at]):
        arrays = {}
        for name, (dtype, shape) in shapes.items():
            arrays[name] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
            at += arrays[name].nbytes
        log["kept"] = [Problem(*row) for row in log["kept"]]
        log["kinds"] = Counter(log["kinds"])
        parts.append(Scanned(**arrays, **counts, log=ProblemLog(**log)))
    return parts
