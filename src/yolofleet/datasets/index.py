# Paths are strings here: there may be millions.
# ruff: noqa: PTH119, PTH122
"""Images and labels of one split as flat arrays: built once, kept outside the data set, mapped by everybody.

The key of an index is made of the names, sizes and modification times of all images and label files, so a
changed data set gets a new one. Of several processes that need the same one builds it and the others wait; where the
file system has no locks they build it at once, and the last rename wins, with the same content. An index that a crash
spoilt is noticed by its checksum and built again.

Legend: N images, M labels, C classes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.datasets.cocojson import CocoFiles, load_table
from yolofleet.datasets.labels import MAX_PROBLEMS_KEPT, Problem, ProblemLog, clean
from yolofleet.datasets.odgt import OdgtFiles
from yolofleet.datasets.sources import DatasetSpec, SplitSource
from yolofleet.datasets.vocxml import VocFiles
from yolofleet.datasets.yolotxt import ABSENT, Stamp, YoloFiles
from yolofleet.errors import DataError
from yolofleet.files.arrayfile import read_arrays, write_arrays
from yolofleet.files.caches import cache_root
from yolofleet.files.lock import in_turn
from yolofleet.images.decode import unreadable
from yolofleet.images.header import header_of_file

__all__ = ["DataIndex", "Problem", "build_index", "cache_root"]

_Files = YoloFiles | VocFiles | CocoFiles
_FORMAT = 3
_CHUNK = 512  # images that a thread takes at a time
_THREADS = 8  # they wait for the disk or the network; the reading itself is 60 us an image
_ARRAYS = (
    "path_bytes",
    "path_offsets",
    "image_ids",
    "sizes_wh",
    "offsets",
    "classes",
    "boxes_cxcywh_unit",
    "crowd",
    "area_px",
)


@dataclass(frozen=True, eq=False)
class DataIndex:
    """Read-only; views of a mapped file where it could be stored. Sent to another process as that file's name.

    Attributes:
        key: names this index in the cache folder; another machine with the same data has another key.
        digest: of names, image file names, sizes and labels; equal on every machine with the same data.
        split: train, val or test.
        names: of the classes; one name when classes are treated as one.
        path_bytes, path_offsets: uint8 [...], int64 [N + 1]: image i is bytes offsets[i]:offsets[i + 1].
        image_ids: int64 [N]: COCO's; the file names themselves where all are different whole numbers; else 0..N-1.
        sizes_wh: int32 [N, 2] pixels, after EXIF rotation.
        offsets: int64 [N + 1]: labels of image i are rows offsets[i]:offsets[i + 1].
        classes: int32 [M].
        boxes_cxcywh_unit: float32 [M, 4] fractions of the image.
        crowd: bool [M], COCO's iscrowd and VOC's difficult.
        area_px: float64 [M], COCO's, else width x height in the image's own pixels.
        problems: the first ones of ``problem_count``.
        problem_kinds: how many labels or images each kind of problem concerns (``labels.KINDS``).
        unlabelled: images without a label file (COCO: without an annotation): background.
        file: where it is stored, None when that was not possible.
    """

    key: str
    digest: str
    split: str
    names: tuple[str, ...]
    path_bytes: np.ndarray
    path_offsets: np.ndarray
    image_ids: np.ndarray
    sizes_wh: np.ndarray
    offsets: np.ndarray
    classes: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    problems: tuple[Problem, ...] = ()
    problem_count: int = 0
    problem_kinds: dict[str, int] = field(default_factory=dict)
    unlabelled: int = 0
    file: Path | None = field(default=None)

    def __len__(self) -> int:
        return len(self.image_ids)

    def path(self, image: int) -> str:
        start, stop = self.path_offsets[image : image + 2].tolist()
        return os.fsdecode(self.path_bytes[start:stop].tobytes())

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them, decoded anew."""
        return tuple(self.path(image) for image in range(len(self)))

    def labels(self, image: int) -> np.ndarray:
        """What an image teaches: float32 [n, 5] class, cx, cy, w, h; crowd regions are left out."""
        start, stop = self.offsets[image : image + 2].tolist()
        rows = np.empty((stop - start, 5), np.float32)
        rows[:, 0] = self.classes[start:stop]
        rows[:, 1:] = self.boxes_cxcywh_unit[start:stop]
        crowd = self.crowd[start:stop]
        return rows[~crowd] if crowd.any() else rows

    def class_counts(self) -> np.ndarray:
        """int64 [C] labels of each class, crowd regions left out."""
        return np.bincount(self.classes[~self.crowd], minlength=len(self.names))

    def problems_text(self, limit: int = 10) -> str:
        """What a person should see, '' when all is well: a line each for the first problems, and their number."""
        lines = [str(problem) for problem in self.problems[:limit]]
        if self.problem_count > len(lines):
            lines.append(f"... and {self.problem_count - len(lines)} more")
        if self.unlabelled:
            lines.append(f"{self.unlabelled} of {len(self)} {self.split} images have no labels: background")
        return "\n".join(lines)

    def save(self, file: Path) -> None:
        """Raises OSError."""
        meta = {
            "format": str(_FORMAT),
            "key": self.key,
            "digest": self.digest,
            "split": self.split,
            "names": json.dumps(self.names),
            "problem_count": str(self.problem_count),
            "problem_kinds": json.dumps(self.problem_kinds),
            "unlabelled": str(self.unlabelled),
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        rows = [[p.path, p.line, p.what, p.kind] for p in self.problems]
        arrays["problems"] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
        write_arrays(file, arrays, meta)

    @staticmethod
    def load(file: Path, *, verify: bool = True) -> DataIndex | None:
        """None when the file is absent, spoilt or of another version."""
        read = read_arrays(file, verify=verify)
        if read is None or read[1].get("format") != str(_FORMAT):
            return None
        arrays, meta = read
        return DataIndex(
            key=meta["key"],
            digest=meta["digest"],
            split=meta["split"],
            names=tuple(json.loads(meta["names"])),
            problems=tuple(Problem(*row) for row in json.loads(arrays["problems"].tobytes())),
            problem_count=int(meta["problem_count"]),
            problem_kinds=json.loads(meta["problem_kinds"]),
            unlabelled=int(meta["unlabelled"]),
            file=file,
            **{name: arrays[name] for name in _ARRAYS},
        )

    def __reduce__(self) -> tuple[Callable[..., DataIndex], tuple[Any, ...]]:
        if self.file is not None:
            return _reload, (self.file,)
        return DataIndex, tuple(getattr(self, name) for name in self.__dataclass_fields__)


def _reload(file: Path) -> DataIndex:
    index = DataIndex.load(file, verify=False)
    if index is None:
        raise DataError(f"the index {file} has gone", hint="was the cache folder emptied? start again")
    return index


def build_index(
    spec: DatasetSpec,
    split: str,
    *,
    single_cls: bool = False,
    workers: int = 0,
    strict: bool = True,
    problems_kept: int = MAX_PROBLEMS_KEPT,
    on_progress: Callable[[int, int], None] | None = None,
) -> DataIndex:
    """The stored index of a split if its files are as they were, else a new one.

    Labels that cannot be used are dropped, clipped or counted once, and reported as problems; the rules are in
    ``labels.clean``. Images that are missing, cut off or unreadable are left out, and reported.

    Args:
        single_cls: all classes become class 0.
        workers: threads; 0 chooses.
        strict: a label whose class the data set does not have is an error; otherwise such labels are dropped.
        problems_kept: at least so many problems are kept in full; an index that was stored with fewer is built again.
        on_progress: called with (images read, all images), from this thread.
    Raises:
        DataError: no images; most images or most labels unusable; wrong classes (see ``strict``); a train split
            without any label.
        ConfigError: the data set has no such split.
    """
    sources = spec.sources(split)
    groups = [_open(source, spec) for source in sources]
    log = ProblemLog(problems_kept)
    _drop_repeats(groups, log)
    total = sum(len(group.images) for group in groups)
    if not total:
        places = ", ".join(str(source.path) for source in sources)
        raise DataError(
            f"no images in {places}", source=spec.origin, hint="are they .jpg, .png, .bmp, .webp or .tif?"
        )
    key = _key(spec, split, groups, single_cls=single_cls, strict=strict)
    file = cache_root() / "index" / f"{key}.arrays"

    def stored() -> DataIndex | None:
        index = DataIndex.load(file)
        if index is not None and len(index.problems) < min(index.problem_count, problems_kept):
            return None
        return index

    if (found := stored()) is not None:
        return found
    with in_turn(file.with_suffix(".lock")):
        if (found := stored()) is not None:  # the one before has built it
            return found
        index = _build(
            spec,
            split,
            groups,
            log,
            key=key,
            single_cls=single_cls,
            workers=workers or _THREADS,
            strict=strict,
            problems_kept=problems_kept,
            on_progress=on_progress,
        )
        try:
            index.save(file)
        except OSError:
            return index  # no place for it: this process keeps its own
    return DataIndex.load(file, verify=False) or index


def _build(
    spec: DatasetSpec,
    split: str,
    groups: Sequence[_Files],
    log: ProblemLog,
    *,
    key: str,
    single_cls: bool,
    workers: int,
    strict: bool,
    problems_kept: int,
    on_progress: Callable[[int, int], None] | None,
) -> DataIndex:
    """Reads every image header and label. ``log`` has what was noticed before."""
    total = sum(len(group.images) for group in groups)
    jobs = [
        (group, start, min(start + _CHUNK, len(group.images)))
        for group in groups
        for start in range(0, len(group.images), _CHUNK)
    ]
    parts: list[_Part] = []
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="index") as pool:
        for part in pool.map(
            lambda job: _scan(
                job[0], job[1], job[2], spec, single_cls=single_cls, problems_kept=problems_kept
            ),
            jobs,
        ):
            parts.append(part)
            done += part.images_read
            if on_progress:
                on_progress(done, total)
    wrong_classes = sum(part.log.kinds["wrong-class"] for part in parts)
    if strict and wrong_classes:
        shown = ProblemLog()
        for part in parts:
            part.log.kept = [problem for problem in part.log.kept if problem.wrong_class]
            part.log.count = part.log.kinds["wrong-class"]
            shown.merge(part.log)
        many = f"{wrong_classes} labels have" if wrong_classes > 1 else "1 label has"
        raise _unusable(spec, split, f"{many} a class that names does not have", shown)
    names = ("object",) if single_cls and len(spec.names) > 1 else spec.names
    arrays = _join(parts, groups, log, spec, split, total)
    return DataIndex(key=key, digest=_digest(names, arrays), split=split, names=names, **arrays)


def _open(source: SplitSource, spec: DatasetSpec) -> _Files:
    if source.kind == "coco":
        return CocoFiles(load_table(source.path), source.image_roots, spec.category_ids or ())
    if source.kind == "odgt":
        return OdgtFiles(source.path, source.image_roots, spec.names)
    if source.kind == "voc":
        return VocFiles(source.path, spec.names)
    return YoloFiles(source.path)


def _key(spec: DatasetSpec, split: str, groups: Sequence[_Files], **choices: bool) -> str:
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps([_FORMAT, split, spec.names, spec.category_ids, choices]).encode())
    for group in groups:
        columns: list[list[Any]] = [group.images, group.stamps]
        if isinstance(group, CocoFiles):
            digest.update(repr((group.table.path, group.table_stamp)).encode())
        else:
            columns += [group.labels, group.label_stamps]
        for start in range(0, len(group.images), _CHUNK):
            rows = [column[start : start + _CHUNK] for column in columns]
            digest.update(repr(rows).encode())
    return digest.hexdigest()


@dataclass
class _Part:
    """Usable images of one range."""

    images_read: int
    paths: list[str]
    image_ids: np.ndarray
    sizes_wh: np.ndarray
    counts: np.ndarray
    classes: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    rows_read: int
    unlabelled: int
    log: ProblemLog


def _scan(
    group: _Files, start: int, stop: int, spec: DatasetSpec, *, single_cls: bool, problems_kept: int
) -> _Part:
    log = ProblemLog(problems_kept)
    sizes = np.zeros((stop - start, 2), np.int32)
    for at in range(start, stop):
        try:
            sizes[at - start] = _size_of(group.images[at], group.stamps[at])
        except DataError as error:
            what = error.what.removeprefix(f"image {group.images[at]} ")
            kind = "image-missing" if group.stamps[at] == ABSENT else "image-unreadable"
            log.add(Problem(group.images[at], None, what, kind))
    raw = group.rows(start, stop, sizes, log)
    rows_read = len(raw.image) + log.rows_dropped
    if single_cls:
        raw.values[:, 0] = np.where(np.isfinite(raw.values[:, 0]), 0, np.nan)
    cleaned = clean(raw, 1 if single_cls else len(spec.names), drop_duplicates=isinstance(group, YoloFiles))
    for row, what, kind in cleaned.complaints:
        path, line, opening = group.place(start + int(raw.image[row]), int(raw.mark[row]))
        log.add(Problem(path, line, opening + what, kind))

    usable = np.asarray((sizes > 0).all(1))
    usable[list(raw.unusable)] = False
    keep = cleaned.keep & usable[raw.image]
    kept_images = np.flatnonzero(usable)
    boxes = cleaned.boxes_cxcywh_unit[keep]
    size = sizes[raw.image[keep]].astype(np.float64)
    own_area = boxes[:, 2].astype(np.float64) * size[:, 0] * boxes[:, 3] * size[:, 1]
    area = raw.area_px[keep]
    log.kept = [problem.below(spec.root) for problem in log.kept]
    log.kept.sort(key=lambda problem: (problem.path, problem.line or 0))
    return _Part(
        images_read=stop - start,
        paths=[group.images[start + at] for at in kept_images.tolist()],
        image_ids=group.image_ids[start + kept_images] if isinstance(group, CocoFiles) else kept_images,
        sizes_wh=sizes[usable],
        counts=np.bincount(raw.image[keep], minlength=stop - start)[usable],
        classes=raw.values[keep, 0].astype(np.int32),
        boxes_cxcywh_unit=boxes,
        crowd=raw.crowd[keep],
        area_px=np.where(np.isfinite(area), area, own_area),
        rows_read=rows_read,
        unlabelled=raw.unlabelled,
        log=log,
    )


def _size_of(path: str, stamp: Stamp) -> tuple[int, int]:
    """Return width and height in pixels after rotation, without decoding. Raises DataError as reading would."""
    if stamp == ABSENT:
        raise DataError(f"image {path} does not exist")
    try:
        header = header_of_file(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if header is None:
        what = "is of no known image format" if stamp[0] else "is empty (0 bytes)"
        raise DataError(f"image {path} {what}")
    if header.fault:
        raise DataError(f"image {path} {header.fault}")
    return header.size_wh


def _join(
    parts: Sequence[_Part],
    groups: Sequence[_Files],
    log: ProblemLog,
    spec: DatasetSpec,
    split: str,
    total: int,
) -> dict[str, Any]:
    """The arrays and counts of the whole split. Raises DataError where it is not usable."""
    for part in parts:
        log.merge(part.log)
    for group in groups:
        if isinstance(group, CocoFiles) and group.table.stray:
            what = f"{group.table.stray} annotations have no usable bbox or are of no listed image"
            problem = Problem(group.table.path, None, what, "label-stray")
            log.add(problem.below(spec.root), group.table.stray)
    paths = [path for part in parts for path in part.paths]
    rows_read = sum(part.rows_read for part in parts)
    if len(paths) * 2 < total:
        raise _unusable(spec, split, f"{total - len(paths)} of {total} images cannot be used", log)
    if log.rows_dropped * 2 > rows_read:
        raise _unusable(spec, split, f"{log.rows_dropped} of {rows_read} labels cannot be used", log)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    classes = joined("classes")
    if split == "train" and not len(classes):
        what = f"none of the {len(paths)} train images has a label"
        raise DataError(what, source=spec.origin, hint=_where_labels_belong(groups))
    encoded = [os.fsencode(path) for path in paths]
    return {
        "path_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "path_offsets": _offsets(np.array([len(path) for path in encoded], np.int64)),
        "image_ids": _image_ids(parts, groups, paths),
        "sizes_wh": joined("sizes_wh"),
        "offsets": _offsets(joined("counts")),
        "classes": classes,
        "boxes_cxcywh_unit": joined("boxes_cxcywh_unit"),
        "crowd": joined("crowd"),
        "area_px": joined("area_px"),
        "problems": tuple(log.kept),
        "problem_count": log.count,
        "problem_kinds": dict(log.kinds),
        "unlabelled": sum(part.unlabelled for part in parts),
    }


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _image_ids(parts: Sequence[_Part], groups: Sequence[_Files], paths: Sequence[str]) -> np.ndarray:
    if all(isinstance(group, CocoFiles) for group in groups):
        ids = np.concatenate([part.image_ids for part in parts])
    else:
        stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
        if not all(stem.isascii() and stem.isdecimal() and len(stem) <= 18 for stem in stems):
            return np.arange(len(paths))
        ids = np.array([int(stem) for stem in stems], np.int64)
    return ids if len(np.unique(ids)) == len(ids) else np.arange(len(paths))


def _unusable(spec: DatasetSpec, split: str, what: str, log: ProblemLog) -> DataError:
    lines = [problem.words for problem in log.kept[:10]]  # nothing was done about them: the set is refused
    lines += [f"... and {log.count - len(lines)} more"] if log.count > len(lines) else []
    return DataError(
        f"{what} in the {split} split\n  " + "\n  ".join(lines),
        source=spec.origin,
        hint=f"correct the files, or the names; yolofleet data check {spec.origin} lists more",
    )


def _where_labels_belong(groups: Sequence[_Files]) -> str | None:
    for group in groups:
        if not isinstance(group, CocoFiles):
            return f"for {group.images[0]} I looked in {group.labels[0]}"
    return None


def _digest(names: tuple[str, ...], arrays: dict[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
    text, ends = arrays["path_bytes"].tobytes(), arrays["path_offsets"].tolist()
    for start, stop in itertools.pairwise(ends):
        digest.update(os.path.basename(text[start:stop]) + b"\0")
    for name in ("image_ids", "sizes_wh", "offsets", "classes", "boxes_cxcywh_unit", "crowd", "area_px"):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _drop_repeats(groups: Sequence[_Files], log: ProblemLog) -> None:
    """An image that is listed twice would count twice: the first is kept."""
    seen: set[str] = set()
    for group in groups:
        if isinstance(group, CocoFiles):  # its images have ids of their own
            continue
        fresh = []
        for at, path in enumerate(group.images):
            if path in seen:
                log.add(Problem(path, None, "is listed more than once", "image-twice"))
            else:
                seen.add(path)
                fresh.append(at)
        if len(fresh) < len(group.images):
            for name in ("images", "stamps", "labels", "label_stamps"):
                column = getattr(group, name)
                setattr(group, name, [column[at] for at in fresh])
