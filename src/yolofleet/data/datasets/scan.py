# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH119, PTH122
"""Read the images of a split for its index: headers and labels, without decoding.

Threads of ``SplitScan`` call ``scan`` for ranges of 512 images. ``pack`` and ``unpack`` send the results to other ranks.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.arrayfile import arrays_of
from yolofleet.data.datasets.labels import (
    MAX_FRACTION,
    Id,
    Outlines,
    Problem,
    ProblemLog,
    RawLabels,
    clean,
    offsets_of,
)
from yolofleet.data.datasets.reader import ABSENT, SplitReader, Stamp
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.data.images.decode import read_image, unreadable
from yolofleet.data.images.header import header_of_file
from yolofleet.storage.mirrored import download, listed_by_store
from yolofleet.support.errors import DataError
from yolofleet.support.text import quoted

CHUNK = 512  # images that a thread takes at a time
_COUNTS = ("rows_read", "unlabelled", "empty")  # of Scanned
_REMARKS = {  # kind -> what is assumed about the images
    "image-16-bit": "images of 16 bits a channel, of which the upper 8 are used: {count}; those of a 12-bit camera become nearly "
    "black (--decode looks for such)",
    "image-rotated": "images that are rotated by EXIF, as their labels must be: {count}; look at yolofleet data preview",
    "image-with-alpha": "TIFF images whose fourth channel is taken for transparency and darkens the others: {count}",
}
_PROBLEM_LISTS = ("kept", "assumed")  # of ProblemLog


class Ranks(Protocol):
    """The part of ``World`` that ranks need to divide the work."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather_bytes(self, payload: bytes, /) -> list[bytes]: ...


@dataclass
class Scanned:
    """The usable images of one range, and their labels. The arrays are those of ``DataIndex`` and of ``Outlines``.

    Attributes:
        usable: bool, one for each image of the range.
        counts: int64, labels of each usable image.
        evidence: see ``forms.evidence_of``.
        rows_read: all label rows of the range.
        unlabelled: images without a label file.
        empty: images whose label file is empty; see ``RawLabels``.
        run_counts, runs: int64 and uint32, the run lengths of each label's mask; empty if masks are not read.
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
    run_counts: np.ndarray
    runs: np.ndarray
    evidence: np.ndarray
    rows_read: int
    unlabelled: int
    empty: int
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
    masks: bool = False,
) -> Scanned:
    """Read images ``start:stop``; report unusable images and labels in the log of the result.

    Args:
        problems_kept: problems to keep in full; all are counted.
        root: paths of problems are relative to it.
    Raises:
        StorageError: the images are in a store that cannot be read.
    """
    known = _known_sizes(reader.images[start:stop])
    download([path for path in reader.files(start, stop) if path not in known])
    log = ProblemLog(problems_kept)
    sizes = np.zeros((stop - start, 2), np.int32)
    for at in range(start, stop):
        path, stamp = reader.images[at], reader.stamps[at]
        try:
            sizes[at - start] = known.get(path) or _size_of(path, stamp, log, reader.bare_rows)
        except DataError as error:
            kind = "image-missing" if stamp == ABSENT else "image-unreadable"
            log.add(Problem(path, None, error.what.removeprefix(f"image {path} "), kind))
    raw = reader.rows(start, stop, sizes, log)
    rows_read = len(raw.image) + log.rows_dropped
    if single_cls:
        raw.values[:, 0] = np.where(np.isfinite(raw.values[:, 0]), 0, np.nan)
    cleaned = clean(raw, 1 if single_cls else class_count, bare_rows=reader.bare_rows)
    for row, what, kind in cleaned.problems:
        file, line, opening = reader.place(start + int(raw.image[row]), int(raw.mark[row]))
        log.add(Problem(file, line, what if kind == "label-repeated" else opening + what, kind))

    usable = np.asarray((sizes > 0).all(1))
    usable[list(raw.unusable)] = False
    keep = cleaned.keep & usable[raw.image]
    boxes = cleaned.boxes_cxcywh_unit[keep]
    size = sizes[raw.image[keep]].astype(np.float64)
    box_area = boxes[:, 2].astype(np.float64) * size[:, 0] * boxes[:, 3] * size[:, 1]
    area = raw.area_px[keep]
    if masks:
        from yolofleet.data.datasets.maskrows import masks_of  # boxes need none of it

        outlines, run_counts, runs = masks_of(raw, keep, sizes)
        owner = np.repeat(np.arange(len(run_counts)), run_counts)
        inside = runs * ((np.arange(len(runs)) - (np.cumsum(run_counts) - run_counts)[owner]) % 2)
        box_area = np.where(run_counts > 0, np.bincount(owner, inside, len(run_counts)), box_area)
    else:
        outlines = (raw.outlines or Outlines.none(len(keep))).in_order(np.flatnonzero(keep)).packed()
        run_counts, runs = np.zeros(0, np.int64), np.zeros(0, np.uint32)
    log.kept = [problem.below(root) for problem in log.kept]
    log.assumed = [problem.below(root) for problem in log.assumed]
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
        run_counts=run_counts,
        runs=runs,
        evidence=_evidence(raw, reader, sizes),
        rows_read=rows_read,
        unlabelled=raw.unlabelled,
        empty=raw.empty,
        log=log,
    )


def _evidence(raw: RawLabels, reader: SplitReader, sizes_wh: np.ndarray) -> np.ndarray:
    """Return ``Scanned.evidence`` for the numbers of boxes as the format of a reader has them."""
    is_box = np.ones(len(raw.image), bool)
    if reader.bare_rows and raw.outlines is not None:  # else a box has numbers of its own beside the polygons
        is_box = raw.outlines.polygon_counts == 0
    boxes = raw.values[is_box, 1:]
    low, high = forms.low_and_high(forms.CENTRE, boxes)
    first = boxes[:, :2] if reader.form == forms.CENTRE else low
    numbers = np.concatenate([first, high if reader.form == forms.CORNERS else boxes[:, 2:]], axis=1)
    in_pixels = (np.abs(numbers) > MAX_FRACTION).any(1, keepdims=True) & reader.bare_rows
    return forms.evidence_of(numbers, np.where(in_pixels, sizes_wh[raw.image[is_box]], 1))


def _known_sizes(paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the sizes of images in pixels that the index of shards says, so that only labels are read; else nothing."""
    listed = listed_by_store(paths) or {}
    return {path: (about.width, about.height) for path, about in listed.items() if about.width}


def _size_of(path: str, stamp: Stamp, log: ProblemLog, bare_rows: bool) -> tuple[int, int]:
    """Return width and height in pixels after rotation; add what decoding changes to ``log``.

    Raise the DataError that decoding would raise. An image that only some builds of OpenCV decode is decoded here.
    """
    if stamp == ABSENT:
        raise DataError(f"image {path} does not exist")
    try:
        header = header_of_file(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if header is None:
        what = "is not in a known image format" if stamp[0] else "is empty (0 bytes)"
        raise DataError(f"image {path} {what}")
    if header.problem:
        raise DataError(f"image {path} {header.problem}")
    if header.rare:
        read_image(path)
    if header.remark:
        log.add(Problem(path, None, _REMARKS[header.remark], header.remark))
    if header.orientation > 1 and (bare_rows or header.orientation < 5):  # which no stated size shows
        log.add(Problem(path, None, _REMARKS["image-rotated"], "image-rotated"))
    return header.size_wh


def pack(parts: Sequence[Scanned]) -> bytes:
    """Return ranges as bytes: the length of a JSON text, that text, and the arrays of all ranges one after the other."""
    about, arrays = [], []
    for part in parts:
        columns = arrays_of(part)
        log = vars(part.log) | {
            name: [astuple(problem) for problem in getattr(part.log, name)] for name in _PROBLEM_LISTS
        }
        shapes = {name: (array.dtype.str, array.shape) for name, array in columns.items()}
        about.append([shapes, {name: getattr(part, name) for name in _COUNTS}, log])
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
        log |= {name: [Problem(*row) for row in log[name]] for name in _PROBLEM_LISTS}
        log["kinds"] = Counter(log["kinds"])
        parts.append(Scanned(**arrays, **counts, log=ProblemLog(**log)))
    return parts


@dataclass(frozen=True)
class SplitScan:
    """Reads every image header and label of a split. ``log`` holds the problems that were found before."""

    spec: DatasetSpec
    split: str
    readers: Sequence[SplitReader]
    log: ProblemLog
    single_cls: bool
    strict: bool
    workers: int
    on_progress: Callable[[int, int], None] | None

    def values(self, ranks: Ranks | None = None) -> dict[str, Any]:
        """Return arrays, names and problems of the index. Collective if ``ranks``. Raises DataError."""
        jobs = [
            (reader, start, min(start + CHUNK, len(reader.images)))
            for reader in self.readers
            for start in range(0, len(reader.images), CHUNK)
        ]
        read = partial(
            scan,
            class_count=len(self.spec.names),
            single_cls=self.single_cls,
            problems_kept=self.log.limit,
            root=self.spec.root,
            masks=self.spec.masks,
        )
        mine = jobs if ranks is None else jobs[ranks.rank :: ranks.size]
        parts: list[Scanned] = []
        done, total = 0, sum(stop - start for _, start, stop in mine)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="index") as pool:
            for part in pool.map(lambda job: read(*job), mine):
                parts.append(part)
                done += len(part.usable)
                if self.on_progress:
                    self.on_progress(done, total)
        if ranks is not None:
            every = [unpack(packed) for packed in ranks.all_gather_bytes(pack(parts))]
            parts = [every[job % ranks.size][job // ranks.size] for job in range(len(jobs))]
        wrong_classes = sum(part.log.kinds["wrong-class"] for part in parts)
        if self.strict and wrong_classes:
            shown = ProblemLog()
            for part in parts:
                part.log.kept = [problem for problem in part.log.kept if problem.kind == "wrong-class"]
                part.log.count = part.log.kinds["wrong-class"]
                shown.merge(part.log)
            many = f"{wrong_classes} labels have" if wrong_classes > 1 else "1 label has"
            raise self._unusable(f"{many} a class that names does not have", shown)
        names = ("object",) if self.single_cls and len(self.spec.names) > 1 else self.spec.names
        return {"names": names, **self._join(parts, jobs)}

    def _join(self, parts: Sequence[Scanned], jobs: Sequence[tuple[SplitReader, int, int]]) -> dict[str, Any]:
        """Return the arrays and counts of the whole split. Raise DataError if most of it is not usable."""
        log = self.log
        for part in parts:
            log.merge(part.log)
        for kind in ("polygons-or-poses", "corners-boxed"):
            if log.kinds[kind] < sum(len(part.point_counts) for part in parts):
                del log.kinds[kind]  # poses and corners of rotated boxes would be so without exception
                log.assumed = [problem for problem in log.assumed if problem.kind != kind]
        for reader in self.readers:
            for problem, count in reader.problems:
                log.add(problem.below(self.spec.root), count)
        kept = [  # reader, and the numbers of its usable images
            (reader, (start + np.flatnonzero(part.usable)).tolist())
            for (reader, start, _), part in zip(jobs, parts, strict=True)
        ]
        paths = [reader.images[at] for reader, images in kept for at in images]
        total = sum(len(reader.images) for reader in self.readers)
        rows_read = sum(part.rows_read for part in parts)
        if len(paths) * 2 < total:
            what = f"{total - len(paths)} of {total} images cannot be used"
            raise self._unusable(what, log, self._searched())
        for reader in self.readers:
            of_reader = [part.evidence for (one, *_), part in zip(jobs, parts, strict=True) if one is reader]
            evidence = sum(of_reader, np.zeros(6, np.int64))
            if reader.form is not None and forms.form_of(evidence, reader.form) != reader.form:
                raise self._unusable(forms.form_in_words(evidence, reader.form), log)
        if log.rows_dropped * 2 > rows_read:
            raise self._unusable(f"{log.rows_dropped} of {rows_read} labels cannot be used", log)

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])

        classes, crowd = joined("classes"), joined("crowd")
        if self.split == "train" and crowd.all():
            what = f"none of the {len(paths)} train images has a label"
            if len(crowd):
                hint = "clear iscrowd, ignore or difficult of the objects to learn"
                raise DataError(f"{what} but {len(crowd)} crowd regions", source=self.spec.origin, hint=hint)
            found = [f"{problem.words}; " for problem in log.kept if problem.kind == "labels-without-image"]
            raise DataError(what, source=self.spec.origin, hint="".join(found) + self._where_labels_belong())
        numbers, given_ids = _image_ids(kept, paths, log)
        encoded = [os.fsencode(path) for path in paths]
        return {
            "path_bytes": np.frombuffer(b"".join(encoded), np.uint8),
            "path_offsets": offsets_of(np.array([len(path) for path in encoded], np.int64)),
            "stamps": np.array([reader.stamps[at] for reader, images in kept for at in images], np.int64),
            "image_ids": numbers,
            "given_ids": given_ids,
            "sizes_wh": joined("sizes_wh"),
            "offsets": offsets_of(joined("counts")),
            "classes": classes,
            "boxes_cxcywh_unit": joined("boxes_cxcywh_unit"),
            "crowd": crowd,
            "area_px": joined("area_px"),
            **outline_arrays(Outlines(*map(joined, ("polygon_counts", "point_counts", "points")))),
            "run_offsets": offsets_of(joined("run_counts")),
            "run_lengths": joined("runs"),
            "problems": tuple(log.kept),
            "problem_count": log.count,
            "problem_kinds": dict(log.kinds),
            "assumed": log.assumptions(),
            "unlabelled": sum(part.unlabelled for part in parts),
            "empty": sum(part.empty for part in parts),
        }

    def _unusable(self, what: str, log: ProblemLog, where: str = "") -> DataError:
        """Return the error that lists the first problems, without actions: the whole data set is refused."""
        lines = [problem.words for problem in log.kept[:10]]
        lines += [f"... and {log.count - len(lines)} more"] if log.count > len(lines) else []
        origin = self.spec.origin
        return DataError(
            f"{what} in the {self.split} split\n  " + "\n  ".join(lines),
            source=origin,
            hint=f"correct the files, or the names; yolofleet data check {quoted(origin)} lists more{where}",
        )

    def _searched(self) -> str:
        """Return the folders that were searched for missing images of annotation files, as the end of a hint."""
        roots = dict.fromkeys(root for source in self.spec.sources(self.split) for root in source.image_roots)
        if not roots or not self.log.kinds["image-missing"]:
            return ""
        found = ", ".join(str(root) for root in roots if root.is_dir())
        return f". Images were looked for in {found}; path: of a YAML names another folder (docs/data.md#formats)"

    def _where_labels_belong(self) -> str:
        """Return a hint that names the label file of the first image that has one of its own."""
        for reader in self.readers:
            if reader.images and (label_file := reader.label_file(0)):
                return f"put the labels of {reader.images[0]} into {label_file}"
        return "write the annotations of these images"


def _image_ids(
    kept: Sequence[tuple[SplitReader, list[int]]], paths: Sequence[str], log: ProblemLog
) -> tuple[np.ndarray, tuple[Id, ...]]:
    """Return distinct numbers, int64 [N], and the ids of the annotations if these are no such numbers; else ().

    Adds a problem if annotation files give one id to several images.

    The numbers are the ids of the annotations, else those in the file names, else 0..N-1.
    """
    given = [reader.given_ids[at] for reader, images in kept if reader.given_ids is not None for at in images]
    if len(given) < len(paths):
        given = []
        stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
        if all(stem.isascii() and stem.isdecimal() and len(stem) <= 18 for stem in stems):
            given = [int(stem) for stem in stems]
    distinct = len(set(given)) == len(paths)
    if distinct and all(type(one) is int and abs(one) < 1 << 63 for one in given):
        return np.array(given, np.int64), ()
    if not distinct and any(reader.given_ids is not None for reader, _ in kept) and given:
        again, count = Counter(given).most_common(1)[0]
        what = f"{count} images have the id {again!r:.60}: val --save-json and data convert number all images of the split from 0"
        log.add(Problem(kept[0][0].place(0, 0)[0], None, what, "id-twice"), len(given) - len(set(given)))
    return np.arange(len(paths)), tuple(given) if distinct else ()


def outline_arrays(outlines: Outlines) -> dict[str, np.ndarray]:
    """Return the arrays of an index for packed outlines."""
    counts = outlines.polygon_counts if len(outlines.points) else outlines.polygon_counts[:0]
    return {
        "polygon_offsets": offsets_of(counts),
        "point_offsets": offsets_of(outlines.point_counts),
        "points": outlines.points,
    }
