# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH119
"""Images and labels of one split as flat arrays in a file that all processes of a machine map.

The index is stored in the cache folder, not in the data set. Its key is a hash of the names, sizes and modification
times of all images and label files, so a changed data set gets a new index. If several processes need the same index,
one builds it and the others wait. On a file system without locks, each builds it and the last rename wins, with the
same content. If the ranks of a run need the same index, each reads a part of the files, and all exchange what they
found. A checksum detects a file that a crash damaged, and the index is built again.

Legend: N images, M labels, C classes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from yolofleet.data.datasets.arrayfile import arrays_of, read_arrays, write_arrays
from yolofleet.data.datasets.labels import (
    KINDS,
    MAX_PROBLEMS_KEPT,
    OUTLINE_UNIT,
    Id,
    Outlines,
    Problem,
    ProblemLog,
    in_order,
    offsets_of,
)
from yolofleet.data.datasets.reader import SplitReader, without_repeats
from yolofleet.data.datasets.scan import CHUNK, Ranks, SplitScan, outline_arrays
from yolofleet.data.datasets.sources import DatasetSpec
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.storage.atomic import in_turn
from yolofleet.storage.caches import cache_folder, is_mirrored
from yolofleet.support.errors import DataError

__all__ = ["DataIndex", "build_index"]

_FORMAT = 13
_THREADS = 8  # they mostly wait for the disk or the network; reading an image's header and labels takes 60 us
_COUNTS = ("problem_count", "problem_kinds", "assumed", "unlabelled", "empty", "given_ids")


@dataclass(frozen=True, eq=False)
class DataIndex:
    """The images and labels of one split. Read-only.

    The arrays are views of a mapped file if the index could be stored. Pickling sends the name of that file, not the
    arrays.

    Attributes:
        key: name of this index in the cache folder; another machine with the same data has another key.
        digest: hash of class names, image file names, sizes and labels; equal on every machine with the same data.
        names: of the classes; a single name if all classes are treated as one.
        path_bytes, path_offsets: uint8 [...], int64 [N + 1]: image i is bytes offsets[i]:offsets[i + 1].
        stamps: int64 [N, 2]: size in bytes and modification time in ns of each image file.
        image_ids: int64 [N]: COCO's ids; else the file names if these are distinct whole numbers; else 0..N-1.
        given_ids: N of COCO's ids if they are not distinct whole numbers; else ().
        sizes_wh: int32 [N, 2] pixels, after EXIF rotation.
        offsets: int64 [N + 1]: labels of image i are rows offsets[i]:offsets[i + 1].
        classes: int32 [M].
        boxes_cxcywh_unit: float32 [M, 4] fractions of the image.
        crowd: bool [M], COCO's iscrowd and VOC's difficult.
        area_px: float64 [M], COCO's area, else width x height, in square pixels of the image.
        polygon_offsets: int64 [M + 1]: polygons of label j are polygon_offsets[j]:polygon_offsets[j + 1]; none for a box.
            int64 [1] if all labels are boxes, because 8 bytes a label are a fifth of an index.
        point_offsets: int64 [Q + 1]: points of polygon q are rows point_offsets[q]:point_offsets[q + 1].
        points: uint16 [P, 2] x, y in ``OUTLINE_UNIT`` of the image's sides.
        run_offsets: int64 [M + 1]: the mask of label j has the run lengths run_offsets[j]:run_offsets[j + 1]; none if it has no
            mask. int64 [1] if masks were not read.
        run_lengths: uint32 [R], COCO's run lengths, at the size of the image.
        problems: the first of ``problem_count`` problems.
        problem_kinds: number of labels or images that each kind of problem or assumption concerns (``labels.KINDS``).
        assumed: a line for each assumption about what the labels mean.
        unlabelled: images without a label file; a part of ``background``.
        empty: images whose label file is empty (COCO: without an annotation); a part of ``background``.
        file: where the index is stored; None if storing it failed.
    """

    key: str
    digest: str
    split: str
    names: tuple[str, ...]
    path_bytes: np.ndarray
    path_offsets: np.ndarray
    stamps: np.ndarray
    image_ids: np.ndarray
    sizes_wh: np.ndarray
    offsets: np.ndarray
    classes: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    polygon_offsets: np.ndarray
    point_offsets: np.ndarray
    points: np.ndarray
    problems: tuple[Problem, ...] = ()
    problem_count: int = 0
    problem_kinds: dict[str, int] = field(default_factory=dict)
    assumed: Sequence[str] = ()
    unlabelled: int = 0
    empty: int = 0
    given_ids: Sequence[Id] = ()
    file: Path | None = field(default=None)
    run_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    run_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def is_mirrored(self) -> bool:
        """Whether the image files are those of a store (``storage/mirrored.py``)."""
        return len(self) > 0 and is_mirrored(self.path(0))

    def path(self, image: int) -> str:
        """Return the path of an image."""
        start, stop = self.path_offsets[image : image + 2].tolist()
        return os.fsdecode(self.path_bytes[start:stop].tobytes())

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths; each call decodes them again."""
        return tuple(self.path(image) for image in range(len(self)))

    @property
    def ids(self) -> list[Id]:
        """Return the id of each image as its annotations state it."""
        return list(self.given_ids) or self.image_ids.tolist()

    def images_key(self) -> str:
        """Return a hash of the paths, sizes and times of the image files; labels do not matter. Takes 60 ns an image."""
        return _hash(self.path_bytes, self.path_offsets, self.stamps)

    def labels(self, image: int) -> Shapes:
        """Return the labels to train on, without crowd regions."""
        start, stop = self.offsets[image : image + 2].tolist()
        labels = Shapes.of_image(self.classes[start:stop], self.boxes_cxcywh_unit[start:stop])
        crowd = self.crowd[start:stop]
        return labels.rows(~crowd) if crowd.any() else labels

    def outlines(self, image: int) -> list[list[np.ndarray]]:
        """Return the polygons of each label of :meth:`labels`, each float32 [k, 2] as fractions of the image.

        If masks were read, the direction of a polygon says whether it is a part or a hole; see ``MaskShapes``.
        """
        start, stop = self.offsets[image : image + 2].tolist()
        crowd = self.crowd[start:stop].tolist()
        if not len(self.points):
            return [[] for is_crowd in crowd if not is_crowd]
        borders = self.polygon_offsets[start : stop + 1].tolist()
        ends = self.point_offsets[borders[0] : borders[-1] + 1]
        points = self.points[ends[0] : ends[-1]].astype(np.float32) / OUTLINE_UNIT
        polygons = [points[a:b] for a, b in itertools.pairwise((ends - ends[0]).tolist())]
        numbers = itertools.pairwise(border - borders[0] for border in borders)
        return [polygons[a:b] for (a, b), is_crowd in zip(numbers, crowd, strict=True) if not is_crowd]

    def outline(self, row: int) -> list[np.ndarray]:
        """Return the polygons of one of the M labels, each float32 [k, 2] as fractions of the image."""
        if not len(self.points):
            return []
        first, stop = self.polygon_offsets[row : row + 2].tolist()
        ends = self.point_offsets[first : stop + 1].tolist()
        return [self.points[a:b].astype(np.float32) / OUTLINE_UNIT for a, b in itertools.pairwise(ends)]

    @property
    def has_runs(self) -> bool:
        """Whether masks were read."""
        return len(self.run_offsets) > 1

    def runs(self, row: int) -> np.ndarray:
        """Return the run lengths of the mask of one of the M labels, uint32; none if it has no mask."""
        start, stop = self.run_offsets[row : row + 2].tolist()
        return self.run_lengths[start:stop]

    def with_rows(self, keep: np.ndarray) -> DataIndex:
        """Return the index with only the labels that ``keep`` marks, bool [M]; all images stay. It is not stored."""
        return self.reordered(np.flatnonzero(keep), np.concatenate([[0], np.cumsum(keep)])[self.offsets])

    def reordered(self, rows: np.ndarray, offsets: np.ndarray) -> DataIndex:
        """Return the index with these labels, int64 [m] row numbers, in this order, and their offsets. It is not stored."""
        columns = ("classes", "boxes_cxcywh_unit", "crowd", "area_px")
        moved: dict[str, Any] = {name: getattr(self, name)[rows] for name in columns}
        if len(self.points):
            counts = np.diff(self.polygon_offsets), np.diff(self.point_offsets)
            moved |= outline_arrays(Outlines(*counts, self.points).in_order(rows))
        if self.has_runs:
            run_counts = np.diff(self.run_offsets)
            moved["run_offsets"] = offsets_of(run_counts[rows])
            moved["run_lengths"] = in_order(self.run_lengths, run_counts, rows)
        return replace(self, offsets=offsets, file=None, **moved)

    def class_counts(self) -> np.ndarray:
        """Return the number of labels of each class, without crowd regions: int64 [C]."""
        return np.bincount(self.classes[~self.crowd], minlength=len(self.names))

    @property
    def background(self) -> int:
        """Return the number of images without a label to learn; crowd regions do not count."""
        owners = np.repeat(np.arange(len(self)), np.diff(self.offsets))[~self.crowd]
        return len(self) - len(np.unique(owners))

    def part(self, images: np.ndarray) -> DataIndex:
        """Return an index of only these images, int64 [n] ascending. It is not stored; its digest is that of its content."""
        kept = np.zeros(len(self), bool)
        kept[images] = True
        lengths = np.diff(self.path_offsets)
        part = replace(
            self.with_rows(np.repeat(kept, np.diff(self.offsets))),
            path_bytes=self.path_bytes[np.repeat(kept, lengths)],
            path_offsets=offsets_of(lengths[images]),
            offsets=offsets_of(np.diff(self.offsets)[images]),
            stamps=self.stamps[images],
            image_ids=self.image_ids[images],
            given_ids=tuple(self.given_ids[at] for at in images.tolist()) if self.given_ids else (),
            sizes_wh=self.sizes_wh[images],
        )
        without_rows = int((np.diff(part.offsets) == 0).sum())
        digest = _digest(self.names, arrays_of(part))
        # the index does not know which images have no label file and which have an empty one
        return replace(
            part,
            digest=digest,
            unlabelled=without_rows if self.unlabelled else 0,
            empty=without_rows if self.empty and not self.unlabelled else 0,
        )

    def none_of(self, split: str) -> DataIndex:
        """Return an index of a split without images, for a data set that does not have it."""
        nothing = {"problems": (), "problem_count": 0, "problem_kinds": {}, "assumed": ()}
        return replace(self.part(np.zeros(0, np.int64)), split=split, **cast(dict[str, Any], nothing))

    def outline_digest(self) -> str:
        """Return a hash of the polygons; equal on every machine with the same data."""
        return _hash(self.polygon_offsets, self.point_offsets, self.points)

    def problems_text(self, limit: int = 10) -> str:
        """Return one line for each of the first problems and their number; '' if there are none."""
        lines = [str(problem) for problem in self.problems[:limit]]
        if self.problem_count > len(lines):
            lines.append(f"... and {self.problem_count - len(lines)} more")
        return "\n".join(lines)

    def totals(self) -> dict[str, int]:
        """Return what the split has and what became of its files, by a name for people: images, labels, ..."""
        kinds, lost = self.problem_kinds, Counter[str]()
        for kind, count in kinds.items():
            lost[KINDS[kind].loses] += count
        masks: dict[str, int] = {}
        if len(self.run_lengths):
            masks["labels without a mask"] = int(((np.diff(self.run_offsets) == 0) & ~self.crowd).sum())
        return {
            "images": len(self),
            "labels": int((~self.crowd).sum()),
            "images without labels": self.background,
            "images without a label file": self.unlabelled,
            "empty label files": self.empty,
            "label files without an image": kinds.get("labels-without-image", 0),
            "crowd regions": int(self.crowd.sum()),
            "images whose boxes were scaled": kinds.get("size-differs", 0),
            "labels clipped": kinds.get("box-sticks-out", 0),
            "labels left out": lost["labels"],
            "images left out": lost["images"],
            "counted once": kinds.get("image-twice", 0) + kinds.get("label-twice", 0),
            **masks,
        }

    def totals_text(self) -> str:
        """Return the totals in one line; those that are 0 are left out."""
        found = {name: number for name, number in self.totals().items() if number}
        parts = (f"{n} {name if n > 1 else name.replace('s', '', 1)}" for name, n in found.items())
        return f"{self.split}: {', '.join(parts)}"

    def save(self, file: Path) -> None:
        """Write the index to a file. Raises OSError."""
        meta = {
            "format": str(_FORMAT),
            "key": self.key,
            "digest": self.digest,
            "split": self.split,
            "names": json.dumps(self.names),
            "counts": json.dumps({name: getattr(self, name) for name in _COUNTS}),
        }
        problems = json.dumps([astuple(problem) for problem in self.problems]).encode()
        arrays = arrays_of(self)
        if not self.has_runs:  # as an older version stored it
            del arrays["run_offsets"], arrays["run_lengths"]
        write_arrays(file, {**arrays, "problems": np.frombuffer(problems, np.uint8)}, meta)

    @staticmethod
    def load(file: Path, *, verify: bool = True) -> DataIndex | None:
        """Map a stored index. Return None if the file is absent, damaged or of another version."""
        read = read_arrays(file, verify=verify)
        if read is None or read[1].get("format") != str(_FORMAT):
            return None
        arrays, meta = read
        return DataIndex(
            key=meta["key"],
            digest=meta["digest"],
            split=meta["split"],
            names=tuple(json.loads(meta["names"])),
            problems=tuple(Problem(*row) for row in json.loads(arrays.pop("problems").tobytes())),
            file=file,
            **json.loads(meta["counts"]),
            **cast(dict[str, Any], arrays),
        )

    def __reduce__(self) -> tuple[Callable[..., DataIndex], tuple[Any, ...]]:
        if self.file is not None:
            return _reload, (self.file,)
        return DataIndex, tuple(getattr(self, name) for name in self.__dataclass_fields__)


def _reload(file: Path) -> DataIndex:
    index = DataIndex.load(file, verify=False)
    if index is None:
        what = f"the index {file} was deleted during the run"
        raise DataError(what, hint="keep the cache folder; start again")
    return index


def build_index(
    spec: DatasetSpec,
    split: str,
    *,
    single_cls: bool = False,
    masks: bool | None = False,
    workers: int = 0,
    strict: bool = True,
    problems_kept: int = MAX_PROBLEMS_KEPT,
    on_progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> DataIndex:
    """Return the stored index of a split, or build and store it if its files changed.

    Unusable labels are dropped, clipped or counted once, and reported as problems (rules: ``labels.clean``). Images
    that are missing, cut off or unreadable are left out and reported.

    Args:
        masks: read masks too; ``outlines`` are then rings of ``MaskShapes``. None: if labels have any.
        workers: number of threads; 0 means 8.
        strict: raise if a label has a class that the data set does not have; else such labels are dropped.
        problems_kept: number of problems to keep in full; an index that was stored with fewer is built again.
        on_progress: called in this thread with (images read, all images that this process reads).
        ranks: the ranks of a run. Then this is collective: every rank. If their files have equal names, sizes and
            times and no rank has the index, they divide the files.
    Raises:
        DataError: no images; most images or most labels are unusable; wrong classes (see ``strict``); a train split
            without any label.
        ConfigError: the data set has no such split.
    """
    if masks is None:
        again = functools.partial(
            build_index,
            spec,
            split,
            single_cls=single_cls,
            workers=workers,
            strict=strict,
            problems_kept=problems_kept,
            on_progress=on_progress,
            ranks=ranks,
        )
        boxes = again()
        if not len(boxes.points) and not any(reader.has_masks for reader in spec.readers(split)):
            return boxes
        return again(masks=True)
    log = ProblemLog(problems_kept)
    spec = replace(spec, masks=bool(masks))
    readers = without_repeats(spec.readers(split), log)
    total = sum(len(reader.images) for reader in readers)
    if not total:
        places = ", ".join(str(source.path) for source in spec.sources(split))
        seen = [f"{problem.what}; " for reader in readers for problem, _ in reader.problems]
        hint = "".join(seen) + "check the path; images end in .jpg, .png, .bmp, .webp or .tif"
        raise DataError(f"no images in {places}", source=spec.origin, hint=hint)
    more = {"masks": True} if masks else {}
    key = _key(spec, split, readers, single_cls=single_cls, strict=strict, **more)
    file = cache_folder("index") / f"{key}.arrays"

    def stored() -> DataIndex | None:
        index = DataIndex.load(file)
        if index is not None and len(index.problems) < min(index.problem_count, problems_kept):
            return None
        return index

    split_scan = SplitScan(spec, split, readers, log, single_cls, strict, workers or _THREADS, on_progress)

    def build(ranks: Ranks | None = None) -> DataIndex:
        values = split_scan.values(ranks)
        return DataIndex(key=key, digest=_digest(values["names"], values), split=split, **values)

    found, index = stored(), None
    if ranks is not None and ranks.size > 1:
        every = ranks.all_gather_bytes(f"{key} {found is not None}".encode())
        if found is None and len(set(every)) == 1:
            index = build(ranks)
    if found is not None:
        return found
    with in_turn(file.with_suffix(".lock")):
        if (found := stored()) is not None:  # the process that held the lock has stored it
            return found
        index = index or build()
        try:
            index.save(file)
        except OSError:
            return index  # the cache folder cannot be written, so each process keeps its own copy in memory
    return DataIndex.load(file, verify=False) or index


def _key(spec: DatasetSpec, split: str, readers: Sequence[SplitReader], **choices: bool) -> str:
    """Return a hash of everything that the index depends on: files, class names and choices, but no content."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps([_FORMAT, split, spec.names, spec.category_ids, choices]).encode())
    for reader in readers:
        digest.update(reader.key_text.encode())
        columns = [getattr(reader, name) for name in reader.columns]
        for start in range(0, len(reader.images), CHUNK):
            digest.update(repr([column[start : start + CHUNK] for column in columns]).encode())
    return digest.hexdigest()


def _hash(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _digest(names: tuple[str, ...], arrays: dict[str, Any]) -> str:
    """Return a hash of what a training learns from; it does not depend on the folder of the data set.

    Polygons are part of it only where masks were read, because else only ``copy_paste`` uses them; see
    :meth:`DataIndex.outline_digest`.
    """
    digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
    text, ends = arrays["path_bytes"].tobytes(), arrays["path_offsets"].tolist()
    for start, stop in itertools.pairwise(ends):
        digest.update(os.path.basename(text[start:stop]) + b"\0")
    columns = ["image_ids", "sizes_wh", "offsets", "classes", "boxes_cxcywh_unit", "crowd", "area_px"]
    if len(arrays["run_offsets"]) > 1:
        columns += ["polygon_offsets", "point_offsets", "points"]
    for name in columns:
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
