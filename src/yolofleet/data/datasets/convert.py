# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH100, PTH103, PTH116, PTH118, PTH120, PTH122
"""Convert a data set of any format into a new folder in YOLO, COCO or Pascal VOC layout.

The result is written into a hidden folder beside the target, read back with the readers of training, compared with
the source, and only then renamed. So a folder with the target's name is always complete.

Legend: N images, M labels, C classes.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from yolofleet.data.datasets import cocojson
from yolofleet.data.datasets.check import cancelled_early
from yolofleet.data.datasets.cocotable import order_of_ids
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.labels import Id, ProblemLog, clean
from yolofleet.data.datasets.reader import ABSENT, SplitReader
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.data.datasets.vocxml import VocFiles
from yolofleet.data.datasets.writers import (
    LEAST_SIDE_PX,
    Images,
    below_common_folder,
    free_names,
    joined_masks,
    lost_numbers,
    place,
    write_coco,
    write_lines,
    write_voc,
    write_yolo,
)
from yolofleet.data.datasets.yolotxt import YoloFiles
from yolofleet.data.geometry.table import ranges
from yolofleet.storage.atomic import whole_folder
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.text import nearest, shown

Target = Literal["yolo", "coco", "voc"]
TOLERANCE_PX = 0.01
_CHUNK = 1024
_THREADS = 8

Progress = Callable[[str, int, int], None]  # activity, number done, number in total


@dataclass
class Converted:
    """The result of a conversion.

    Attributes:
        splits: (images, labels) written for each split.
        copied: number of images that were copied; the others are links.
        notes: what a person should know: what the target cannot express, what was left out or renamed.
    """

    folder: Path
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    copied: int = 0
    notes: list[str] = field(default_factory=list)


def convert(
    spec: DatasetSpec,
    out: Path,
    target: Target,
    *,
    splits: Sequence[str] = (),
    names: Sequence[str] = (),
    images: Images = "link",
    masks: bool = False,
    on_progress: Progress = lambda what, done, total: None,
) -> Converted:
    """Write a data set as a new folder in another format.

    Args:
        out: a folder that does not exist yet, or is empty.
        splits: splits to convert; () means all that exist.
        names: classes to keep, in this order; labels of other classes are left out. () means all.
        images: hard links (copies if the file system refuses), copies, symbolic links, or none: labels only, for
            images that are elsewhere under the same names.
        masks: in YOLO's format, write polygons instead of the boxes of labels that have masks. COCO's has both.
    Raises:
        ConfigError: ``out`` is not empty; unknown splits or names; names that the target cannot store.
        DataError: the source is not usable for training.
        StorageError: a file cannot be written; nothing is left behind.
    """
    assert target in get_args(Target) and images in get_args(Images)
    check_free(out)
    for split in splits:
        spec.sources(split)
    done = Converted(out)
    if masks and target != "yolo":
        what = "COCO's format keeps them" if target == "coco" else "VOC's format has no masks"
        raise ConfigError(f"--masks --to {target}: {what}", source="command line", hint="leave out --masks")
    work = _Work(spec, target, images, masks, done, on_progress)
    work.read(splits or tuple(spec.splits), names)
    work.name_images()

    try:
        with whole_folder(out.absolute()) as folder:
            work.write(folder)
            work.place_images(folder)
            work.check(folder)
    except OSError as problem:
        hint = "--images copy" if images == "symlink" else None
        place = f" ({problem.filename})" if problem.filename else ""
        raise StorageError(
            f"{out} cannot be written: {problem.strerror or problem}{place}", hint=hint
        ) from None
    return done


def noted_index(spec: DatasetSpec, split: str, on_progress: Progress) -> tuple[DataIndex, list[str]]:
    """Return the index of a split, and notes about its problems and what was assumed. Raises as ``build_index``."""
    index = build_index(
        spec, split, masks=None, on_progress=functools.partial(on_progress, f"reading {split}")
    )
    text = index.problems_text().replace("\n", "\n  ")
    problems = [f"problems of {split}:\n  {text}"] if text else []
    return index, [*problems, *(f"{split}: {note}" for note in index.assumed)]


def lost_key_points(spec: DatasetSpec) -> list[str]:
    """Return a note if the labels have key points, which no index holds."""
    return [f"{spec.name} has key points: left out, only the boxes are written"] if spec.kpt_shape else []


def check_free(out: Path) -> None:
    """Raise ConfigError unless ``out`` does not exist or is an empty folder."""
    try:
        if "\0" in str(out):
            raise ValueError("it contains a NUL character")
        if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"--out {out} is not an empty folder", source="command line", hint="--out with a new folder"
            )
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--out {out} cannot be used: {problem}", source="command line") from None


@dataclass
class _Work:
    """One conversion. Two splits with the same files are written once.

    Attributes:
        indexes: the index of each split that is written.
        same_as: requested split -> the written split with the same files.
        names: for each written split, the N paths of its images below images/<split>, or in JPEGImages.
    """

    spec: DatasetSpec
    target: Target
    images: Images
    masks: bool
    done: Converted
    on_progress: Progress
    indexes: dict[str, DataIndex] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    category_ids: tuple[Id, ...] = ()

    def read(self, splits: Sequence[str], names: Sequence[str]) -> None:
        """Read the splits and select their classes. Raises ConfigError or DataError."""
        self.done.notes += lost_key_points(self.spec)
        for split in splits:
            sources = self.spec.sources(split)
            twin = next((s for s in self.indexes if self.spec.splits[s] == sources), None)
            self.same_as[split] = twin or split
            if twin:
                self.done.notes.append(f"{split} has the same files as {twin}: written once")
                continue
            index, notes = noted_index(self.spec, split, self.on_progress)
            self.done.notes += notes
            self.indexes[split] = index
        ids = self.spec.category_ids or tuple(range(1, len(self.spec.names) + 1))
        if names:
            keep = [self._class_number(name, names) for name in names]
            ids = tuple(ids[number] for number in keep)
            self.indexes = {split: _selected(index, keep) for split, index in self.indexes.items()}
        self.category_ids = distinct(ids)
        self._check_names(next(iter(self.indexes.values())).names)
        if self.target != "yolo":
            for split, index in self.indexes.items():
                self.indexes[split], specks = _without_specks(index)
                if specks:
                    self.done.notes.append(
                        f"{split}: {specks} boxes smaller than a millionth of a pixel: left out"
                    )

    def _class_number(self, name: str, names: Sequence[str]) -> int:
        """Return the class number of one of the chosen names. Raises ConfigError."""
        known = self.spec.names
        if names.count(name) > 1 or known.count(name) > 1:
            raise ConfigError(f"--names: class {shown(name)} occurs twice", source=self.spec.origin)
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"--names: {self.spec.name} has no class {shown(name)}",
                source=self.spec.origin,
                hint=f"did you mean {near}?" if near else f"it has {', '.join(known[:10])}",
            )
        return known.index(name)

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a class name that the target cannot store.

        COCO and VOC identify classes by name. XML has no control characters, and its readers strip spaces.
        """
        for name, count in Counter(names).items():
            problem = hint = None
            if self.target != "yolo" and count > 1:
                problem, hint = "occurs twice", "--to yolo"
            elif self.target == "voc" and (name != name.strip() or not name.isprintable()):
                problem, hint = "cannot be stored in XML", "--to yolo or --to coco"
            elif name.encode("utf-8", "replace").decode() != name:
                problem, hint = "is not valid Unicode", "correct it in the source"
            if problem:
                raise ConfigError(f"class name {name!r:.60} {problem}", source=self.spec.origin, hint=hint)

    def name_images(self) -> None:
        """Choose the path of each image in the new layout. Raise ConfigError if labels alone could not follow."""
        taken: dict[str, set[str]] = {}
        renamed = 0
        for split, index in self.indexes.items():
            plain = below_common_folder([os.path.abspath(path) for path in index.paths])
            folder = "" if self.target == "voc" else split  # VOC has one folder for the images of all splits
            used = taken.setdefault(folder, set())
            self.names[split] = free_names(plain, split, used, flat=self.target == "voc")
            renamed += sum(old != new for old, new in zip(plain, self.names[split], strict=True))
        if renamed and self.images == "none":
            raise ConfigError(
                f"{renamed} images need other names in {self.target}'s layout, so --images none would leave their "
                "labels without images",
                hint="--images link",
            )
        if renamed:
            self.done.notes.append(f"{renamed} images have new names or are in fewer folders")

    def write(self, folder: Path) -> None:
        """Write labels, lists and data.yaml."""
        entries: dict[str, str] = {}
        for number, (split, index) in enumerate(self.indexes.items()):
            self.on_progress("writing labels", number, len(self.indexes))
            names, labels = self.names[split], len(index.classes)
            lost = []
            if self.target == "coco":
                write_coco(folder, split, names, index, self.category_ids, self.spec.name)
                entries[split] = f"annotations/instances_{split}.json"
            elif self.target == "voc":
                write_voc(folder, names, index)
                (folder / "JPEGImages").mkdir(exist_ok=True)
                entries[split] = f"ImageSets/Main/{split}.txt"
                write_lines(folder / entries[split], [os.path.splitext(name)[0] for name in names])
            else:
                twice, crowd = (
                    write_yolo(folder, split, names, index, masks=self.masks),
                    int(index.crowd.sum()),
                )
                labels -= twice + crowd
                lost += [f"{crowd} crowd regions or difficult objects: left out"] if crowd else []
                lost += [f"{twice} repeated labels: written once"] if twice else []
                entries[split] = f"images/{split}"
                if self.images == "none":
                    entries[split] = f"{split}.txt"
                    write_lines(folder / f"{split}.txt", [f"./images/{split}/{name}" for name in names])
            if self.target != "coco":
                lost += lost_numbers(index, names)
            has_mask = (
                (np.diff(index.run_offsets) > 0) & ~index.crowd if index.has_runs else np.zeros(0, bool)
            )
            if self.masks and has_mask.any():
                self.done.notes.append(f"{split}: {joined_masks(index)}")
            elif has_mask.any() and self.target != "coco":
                ways = "--masks writes polygons" if self.target == "yolo" else "--to coco keeps them"
                self.done.notes.append(
                    f"{split}: {has_mask.sum()} masks: only their boxes are written; {ways}"
                )
            self.done.notes += [f"{split}: {self.target} cannot store {what}" for what in lost]
            self.done.splits[split] = len(index), labels
        class_names = next(iter(self.indexes.values())).names
        content = {split: entries[twin] for split, twin in self.same_as.items()}
        text = write_yaml({**content, "nc": len(class_names), "names": list(class_names)})
        (folder / "data.yaml").write_text(text, encoding="utf-8", newline="\n")

    def place_images(self, folder: Path) -> None:
        """Link or copy the images into the new layout. Raises OSError."""
        if self.images == "none":
            return
        jobs: list[tuple[str, str]] = []
        for split, index in self.indexes.items():
            root = str(folder / "JPEGImages") if self.target == "voc" else str(folder / "images" / split)
            jobs += [
                (path, os.path.join(root, *name.split("/")))
                for path, name in zip(index.paths, self.names[split], strict=True)
            ]
        for parent in sorted({os.path.dirname(to) for _, to in jobs}):
            os.makedirs(parent, exist_ok=True)
        starts = range(0, len(jobs), _CHUNK)
        with cancelled_early(ThreadPoolExecutor(_THREADS, thread_name_prefix="images")) as pool:
            placed = pool.map(lambda start: place(jobs[start : start + _CHUNK], self.images), starts)
            for start, copied in zip(starts, placed, strict=True):
                self.done.copied += copied
                self.on_progress("placing images", min(start + _CHUNK, len(jobs)), len(jobs))

    def check(self, folder: Path) -> None:
        """Read ``folder`` back; raise StorageError unless it holds what the indexes hold."""
        for split, index in self.indexes.items():
            self.on_progress(f"reading back {split}", 0, len(index))
            if difference := self._difference(folder, split, index):
                raise StorageError(
                    f"{split} differs when it is read back: {difference}",
                    hint="try again, in case the source changed meanwhile; check the disk",
                )

    def _difference(self, folder: Path, split: str, index: DataIndex) -> str | None:
        """Return the first difference between the written split and its index, None if they are equal."""
        reader, order = self._reader(folder, split, index)
        if len(order) != len(index):
            return f"{len(order)} of {len(index)} images"
        if self.images != "none":
            for at, image in enumerate(order.tolist()):
                if reader.stamps[at] == ABSENT or reader.stamps[at][0] != os.stat(index.path(image)).st_size:
                    return f"image {reader.images[at]}"
        for start in range(0, len(order), _CHUNK):
            here = order[start : start + _CHUNK]
            log = ProblemLog()
            raw = reader.rows(start, start + len(here), index.sizes_wh[here], log)
            found = clean(raw, len(index.names), bare_rows=reader.bare_rows)
            problems = [
                what for _, what, kind in found.problems if kind not in ("box-sticks-out", "label-repeated")
            ]
            if log.kept or problems:
                return str(log.kept[0]) if log.kept else problems[0]
            owner = raw.image
            expected = _rows_of(index, here, self.target, masks=self.masks)
            got = (owner, raw.values[:, 0].astype(np.int64), raw.crowd)
            if not all(np.array_equal(a, b) for a, b in zip(got, expected[:3], strict=True)):
                return f"labels of {reader.images[start]} to {reader.images[start + len(here) - 1]}"
            size = np.tile(index.sizes_wh[here][owner].astype(np.float64), (1, 2))
            off = np.abs(raw.values[:, 1:] - expected[3]) * size > TOLERANCE_PX
            if self.masks and raw.outlines:  # their boxes are those around the polygons
                off &= (raw.outlines.polygon_counts == 0)[:, None]
            if off.any():
                return f"boxes of {reader.images[start]} to {reader.images[start + len(here) - 1]}"
        return None

    def _reader(self, folder: Path, split: str, index: DataIndex) -> tuple[SplitReader, np.ndarray]:
        """Return a reader of the written split, and the image of ``index`` that each of its images came from."""
        reader: SplitReader
        if self.target == "coco":
            table = cocojson.parse_json(str(folder / "annotations" / f"instances_{split}.json"))
            reader = cocojson.CocoFiles(table, (folder / "images" / split,), self.category_ids)
            keys = order_of_ids(index.ids)
            by_id = np.array(sorted(range(len(index)), key=keys.__getitem__), np.int64)
            same = list(table.image_ids) == [index.ids[at] for at in by_id.tolist()]
            return reader, by_id if same else by_id[:0]
        if self.target == "voc":
            reader = VocFiles(folder / "ImageSets" / "Main" / f"{split}.txt", index.names)
            return reader, np.arange(len(reader.images))
        reader = YoloFiles(folder / (f"{split}.txt" if self.images == "none" else f"images/{split}"))
        root = str(folder / "images" / split)
        number = {name: at for at, name in enumerate(self.names[split])}
        found = [number.get(os.path.relpath(image, root).replace(os.sep, "/"), -1) for image in reader.images]
        return reader, np.array([at for at in found if at >= 0], np.int64)


def _selected(index: DataIndex, keep: Sequence[int]) -> DataIndex:
    """Return an index in which class ``keep[i]`` is class i, without labels of other classes; all images stay."""
    number = np.full(len(index.names), -1, np.int32)
    number[np.array(keep)] = np.arange(len(keep))
    classes = number[index.classes]
    renumbered = replace(index, names=tuple(index.names[at] for at in keep), classes=classes)
    return renumbered.with_rows(classes >= 0)


def _without_specks(index: DataIndex) -> tuple[DataIndex, int]:
    """Return the index without boxes below ``LEAST_SIDE_PX``, and how many these are."""
    sizes = np.repeat(index.sizes_wh, np.diff(index.offsets), axis=0)
    keep = (index.boxes_cxcywh_unit[:, 2:].astype(np.float64) * sizes >= LEAST_SIDE_PX).all(1)
    return (index if keep.all() else index.with_rows(keep)), int((~keep).sum())


def distinct(ids: Sequence[Id]) -> tuple[Id, ...]:
    """Return category ids in which classes without one (-1) get unused numbers."""
    free = (number for number in range(1, len(ids) * 2 + 1) if number not in ids)
    return tuple(next(free) if number == -1 else number for number in ids)


def _rows_of(
    index: DataIndex, images: np.ndarray, target: Target, *, masks: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what the target should hold for these images: image int64 [m], class, crowd, box (cxcywh, unit)."""
    counts = np.diff(index.offsets)[images]
    owner = np.repeat(np.arange(len(images)), counts)
    rows = ranges(index.offsets[images], counts)
    if target == "yolo":
        rows, owner = rows[~index.crowd[rows]], owner[~index.crowd[rows]]
        columns = np.column_stack([owner, index.classes[rows], index.boxes_cxcywh_unit[rows]])
        if masks and index.has_runs:  # whose polygons differ where their boxes are equal
            numbers = [hash(b"".join(ring.tobytes() for ring in index.outline(row))) for row in rows.tolist()]
            columns = np.column_stack([columns, np.unique(numbers, return_inverse=True)[1]])
        # YOLO's writer drops repeated labels
        first = np.sort(np.unique(columns, axis=0, return_index=True)[1])
        rows, owner = rows[first], owner[first]
    return (
        owner,
        index.classes[rows].astype(np.int64),
        index.crowd[rows],
        index.boxes_cxcywh_unit[rows].astype(np.float64),
    )
