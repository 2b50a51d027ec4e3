# Paths are strings here: there may be millions.
# ruff: noqa: PTH112, PTH118, PTH122, PTH208
"""COCO's instances JSON as flat arrays, parsed once per machine and stored in the cache folder.

Parsing takes 10 s for a million boxes, so the arrays are stored under a hash of the file's path, size and modification
time. ``bigjson`` reads the file entry by entry and takes at most 200 bytes of memory a box; in the file, a box with
its outline takes hundreds to thousands of bytes. Format: cocodataset.org/#format-data.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.annotations import size_of_boxes, turned
from yolofleet.data.datasets.arrayfile import arrays_of, cached_arrays
from yolofleet.data.datasets.bigjson import JsonError, read_lists
from yolofleet.data.datasets.cocotable import (
    HINT,
    CocoTable,
    TableBuilder,
    annotation_text,
    order_of_ids,
    places_of,
    runs_of,
)
from yolofleet.data.datasets.labels import Id, Outlines, Problem, ProblemLog, RawLabels, offsets_of
from yolofleet.data.datasets.reader import (
    ABSENT,
    SeenFiles,
    SplitReader,
    Stamp,
    other_names,
    spellings,
    stamp,
)
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, Format, Splits, SplitSource
from yolofleet.data.geometry.rle import Mask
from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.text import listed, nearest, screen_line

_FORMAT = 8


class CocoFiles(SplitReader):
    """Images and labels of one JSON file, ordered by image id."""

    form = forms.SIDES

    def __init__(
        self, table: CocoTable, roots: tuple[Path, ...], category_ids: Sequence[Id], names: Sequence[str] = ()
    ) -> None:
        """Find the images, and join the entries of one image.

        Args:
            roots: folders that may hold the images; see ``_image_paths``.
            category_ids: the category of each class number, which counts if names are not given or not distinct.
        """
        images, stamps, assumed = _image_paths(table.file_names, roots)
        table, kept = _joined(table, images)
        problems = [(Problem(table.path, None, what, kind), count) for kind, what, count in table.problems]
        self.table, self.problems = table, problems + other_names(table.path, assumed)
        self.images, self.stamps = [images[at] for at in kept], [stamps[at] for at in kept]
        self.given_ids = table.image_ids
        self.key_text = repr((table.path, stamp(table.path), table.problems))
        known = {category: number for number, category in enumerate(category_ids)}
        if names and len(set(names)) == len(names):  # files may number the same names in other ways
            known = {one: names.index(name) for one, name, *_ in table.categories if name in names}
        classes = [known.get(category, -1) for category, *_ in table.categories]
        self._classes = np.array(classes, np.float64)[table.category_at]

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Read the labels of images ``start:stop``; see ``SplitReader.rows`` and ``labels.size_of_boxes``."""
        table = self.table
        stated = table.sizes_wh[start:stop]
        sizes = np.where(sizes_wh > 0, sizes_wh, np.maximum(stated, 1))
        first, last = int(table.offsets[start]), int(table.offsets[stop])
        xywh = table.boxes_xywh_px[first:last]
        turns = np.ones(len(sizes), np.int64)
        differs = (stated > 0).all(1) & (sizes_wh > 0).all(1) & (stated != sizes_wh).any(1)
        for at in np.flatnonzero(differs).tolist():
            own = xywh[table.offsets[start + at] - first : table.offsets[start + at + 1] - first]
            most = (own[:, :2] + own[:, 2:]).max(0, initial=0.0)
            sizes[at], turns[at] = size_of_boxes(
                tuple(stated[at].tolist()),
                tuple(sizes_wh[at].tolist()),
                tuple(most.tolist()),
                self.images[start + at],
                log,
                drawn_on_pixels=self._is_whole,
            )

        image = np.repeat(np.arange(stop - start), np.diff(table.offsets[start : stop + 1]))
        size, turn = sizes[image].astype(np.float64), turns[image]
        centres, sides = (xywh[:, :2] + xywh[:, 2:] / 2) / size, xywh[:, 2:] / size
        if (turn > 1).any():
            centres, sides = turned(centres, turn), np.where(turn[:, None] > 1, sides[:, ::-1], sides)
        values = np.concatenate([self._classes[first:last, None], centres, sides], axis=1)
        return RawLabels(
            image,
            table.annotation_ids[first:last],
            values,
            table.crowd[first:last],
            table.area_px[first:last],
            empty=int((np.diff(table.offsets[start : stop + 1]) == 0).sum()),
            outlines=self._outlines(first, last, size, turn),
            masks=self._masks(start, first, last, image, sizes_wh, log),
        )

    def _masks(
        self, start: int, first: int, last: int, image: np.ndarray, sizes_wh: np.ndarray, log: ProblemLog
    ) -> dict[int, Mask]:
        """Return the masks of annotations ``first:last`` that stand as run lengths, by their place in it; report the others.

        Args:
            start: the number of the first image; ``image`` [last - first] counts from it.
            sizes_wh: of the images as they are; a mask must have this size.
        """
        found: dict[int, Mask] = {}
        for row in sorted(self._mask_at.keys() & set(range(first, last))) if len(self.table.rle_hw) else ():
            number, at = self._mask_at[row], int(image[row - first])
            size = tuple(self.table.rle_hw[number].tolist())
            height, width = sizes_wh[at].tolist()[::-1]
            try:
                if min(height, width) <= 0:
                    continue
                if size != (height, width):
                    raise ValueError(f"it is {size[1]} x {size[0]} pixels, and the image {width} x {height}")
                found[row - first] = Mask(size, runs_of(self.table.counts_text(number), size))
            except ValueError as problem:
                path, line, opening = self.place(start + at, int(self.table.annotation_ids[row]))
                log.add(
                    Problem(path, line, f"{opening}its mask cannot be read: {problem}", "mask-unreadable")
                )
        return found

    @property
    def has_masks(self) -> bool:
        return bool(len(self.table.rle_rows))

    @cached_property
    def _mask_at(self) -> dict[int, int]:
        """The number of the mask of each annotation that has run lengths."""
        return {row: number for number, row in enumerate(self.table.rle_rows.tolist()) if row >= 0}

    @cached_property
    def _is_whole(self) -> bool:
        """Whether all boxes of the file are whole numbers of pixels."""
        return bool((self.table.boxes_xywh_px == np.rint(self.table.boxes_xywh_px)).all())

    def _outlines(self, first: int, last: int, sizes_wh: np.ndarray, turns: np.ndarray) -> Outlines | None:
        """Return the polygons of annotations ``first:last``; sizes [last - first, 2] and turns [last - first] of their images."""
        table, (polygon_starts, point_starts) = self.table, self._starts
        polygons = slice(polygon_starts[first], polygon_starts[last])
        points = table.points_px[point_starts[polygons.start] : point_starts[polygons.stop]]
        if not len(points):
            return None
        polygon_counts, point_counts = table.polygon_counts[first:last], table.point_counts[polygons]
        size = sizes_wh.repeat(polygon_counts, axis=0).repeat(point_counts, axis=0)
        turn = turns.repeat(polygon_counts).repeat(point_counts)
        points = points / size
        return Outlines(polygon_counts, point_counts, turned(points, turn) if (turn > 1).any() else points)

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the first polygon of each annotation, and of the first point of each polygon."""
        counts = self.table.polygon_counts, self.table.point_counts
        starts = [offsets_of(count) for count in counts]
        return starts[0], starts[1]

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.table.path, None, f"{annotation_text(mark)} of {self.table.file_names[image]}: "


def _image_paths(
    file_names: Sequence[str], roots: Sequence[Path]
) -> tuple[list[str], list[Stamp], list[tuple[str, str]]]:
    """Return path and stamp of each image, and name and path of those that were found under another name.

    Most images lie in the first folder that holds at least one of ten sampled names, whole or without first folders:
    Objects365 writes ``images/v1/patch8/x.jpg`` for a file that lies in ``train/patch8/x.jpg``. An image that is not there
    is looked for by itself (``FileFinder``). A file that two names would share by that is taken for neither.
    """
    sample = np.linspace(0, len(file_names) - 1, 10).astype(int).tolist() if file_names else []
    options = [(root, parts) for parts in (0, 2, 1) for root in map(str, roots)]

    def has_one(root: str, parts: int) -> bool:
        return any(stamp(os.path.join(root, _last_parts(file_names[at], parts))) != ABSENT for at in sample)

    root, parts = next((option for option in options if has_one(*option)), options[0])
    paths = [os.path.join(root, _last_parts(name, parts)) for name in file_names]
    if parts:
        of_path = dict.fromkeys(zip(paths, map(os.path.normpath, file_names), strict=True))
        names = Counter(path for path, _ in of_path)
        both = zip(paths, file_names, strict=True)
        paths = [path if names[path] == 1 else os.path.join(root, name) for path, name in both]
    stamps = list(map(stamp, paths))
    absent = [at for at, found in enumerate(stamps) if found == ABSENT]
    if not absent:
        return paths, stamps, []
    finder = FileFinder(map(str, roots))
    tried = {at: path for at in absent if (path := finder.find(file_names[at]))}
    taken = Counter(map(os.path.normpath, [*paths, *tried.values()]))
    tried = {at: path for at, path in tried.items() if taken[os.path.normpath(path)] == 1}
    for at, path in tried.items():
        paths[at], stamps[at] = path, stamp(path)
    return paths, stamps, [(file_names[at], path) for at, path in tried.items()]


def _last_parts(name: str, parts: int) -> str:
    """Return the last ``parts`` components of a path; 0 means all of it."""
    return "/".join(name.split("/")[-parts:]) if parts else name


def _joined(table: CocoTable, images: Sequence[str]) -> tuple[CocoTable, list[int]]:
    """Join the entries of one image into the first one; equal labels of such an image count once.

    Returns:
        the table of the images that are kept, and their numbers.

    Raises:
        DataError: the entries state different sizes, so their boxes have different scales.
    """
    first, files = dict[str, int](), SeenFiles()
    owner = np.array([first.setdefault(files.first(path), at) for at, path in enumerate(images)], np.int64)
    kept = sorted(first.values())
    if len(kept) == len(images):
        return table, kept
    others = np.flatnonzero(owner != np.arange(len(images)))

    def in_words(at: int) -> str:
        ids = f"{table.image_ids[owner[at]]!r} and {table.image_ids[at]!r}"
        return f"images {ids} are one file, {table.file_names[at]}"

    for at in others.tolist():
        one, other = (table.sizes_wh[entry].tolist() for entry in (owner[at], at))
        if one != other:
            sizes = f"with the sizes {one[0]} x {one[1]} and {other[0]} x {other[1]}"
            raise DataError(f"{table.path}: {in_words(at)}, {sizes}", hint="list each image once")
    what = f"{in_words(others[0])}: labels joined (entries like this: {len(others)})"
    problems = [("image-twice", what, len(others))]
    owner_of = owner[np.repeat(np.arange(len(images)), np.diff(table.offsets))]
    rows = np.flatnonzero(np.isin(owner_of, owner[others]))
    values = np.column_stack([owner_of, table.category_at, table.crowd, table.boxes_xywh_px])[rows]
    again = np.setdiff1d(rows, rows[np.unique(values, axis=0, return_index=True)[1]])
    if len(again):
        what = f"{annotation_text(table.annotation_ids[again[0]])} repeats one of the same image under another id"
        problems.append(("label-twice", f"{what} (entries like this: {len(again)})", len(again)))
    order = np.argsort(owner_of, kind="stable")
    order = order[~np.isin(order, again)]
    counts = np.bincount(owner_of[order], minlength=len(images))[kept]
    outlines = Outlines(table.polygon_counts, table.point_counts, table.points_px).in_order(order)
    columns = ("annotation_ids", "category_at", "boxes_xywh_px", "crowd", "area_px")
    joined = replace(
        table,
        image_ids=tuple(table.image_ids[at] for at in kept),
        sizes_wh=table.sizes_wh[kept],
        file_names=tuple(table.file_names[at] for at in kept),
        offsets=offsets_of(counts),
        polygon_counts=outlines.polygon_counts,
        point_counts=outlines.point_counts,
        points_px=outlines.points,
        rle_rows=np.append(places_of(order, len(owner_of)), -1)[table.rle_rows],
        problems=(*table.problems, *problems),
        **{name: getattr(table, name)[order] for name in columns},
    )
    return joined, kept


def table_with_sides(path: Path, paths: Iterable[Path], *, masks: bool = False) -> CocoTable:
    """Return the table of a file; boxes of another form of ``forms.FORMS`` become x, y, width, height.

    Args:
        paths: all files of the data set; a file whose boxes show nothing is like these.
    Raises:
        DataError: the boxes do not fit their images, and more than one other form fits.
    """
    table = load_table(path)
    own = table.evidence
    whole = forms.form_of(sum((load_table(one).evidence for one in paths), np.zeros_like(own)), forms.SIDES)
    form = whole if whole is not None and own[1 + whole] * 100 <= own[0] else forms.form_of(own, forms.SIDES)
    if form == forms.SIDES:
        return load_table(path, masks=True) if masks else table
    what = forms.form_in_words(own, forms.SIDES)
    if form is None:
        raise DataError(f"{path}: {what}", hint="write x, y, width, height in pixels")
    low, high = forms.low_and_high(form, table.boxes_xywh_px)
    table = load_table(path, masks=masks)
    problem = ("numbers-assumed", f"{what}: taken as {forms.FORMS[form]}", len(low))
    return replace(
        table, boxes_xywh_px=np.concatenate([low, high - low], axis=1), problems=(*table.problems, problem)
    )


def categories_of(paths: Sequence[Path]) -> tuple[dict[Id, str], str]:
    """Return the names of the categories of some files by id, in the order of the ids, and a note, or "".

    A category without annotations that others state as their parent is no class: Roboflow writes one.

    Raises:
        ConfigError: a category has two names.
        DataError: a file cannot be read.
    """
    names: dict[Id, str] = {}
    used, own_parent, parents = set[Id](), set[Id](), set[str]()
    for path in paths:
        for number, name, has_labels, parent in load_table(path).categories:
            parents.add(parent)
            if parent == name:  # as COCO's person: a class, not only a group
                own_parent.add(number)
            if has_labels:
                used.add(number)
            if names.setdefault(number, name) != name:
                what = f"category {number} is {names[number]!r} in one file and {name!r} in another"
                hint = "a YAML with train:, val: and names: [FIRST, SECOND] matches the categories of each file by name"
                raise ConfigError(what, source=str(path), hint=hint)
    left_out = [n for n, name in names.items() if used and name in parents and n not in used | own_parent]
    in_order = [number for _, number in sorted(zip(order_of_ids(names), names, strict=True))]
    kept = {number: names[number] for number in in_order if number not in left_out}
    shown = listed([f"{number} {screen_line(names[number])}" for number in left_out])
    note = f"categories without annotations that are only parents of others are left out: {shown}"
    return kept, note if left_out else ""


def load_table(path: Path, *, masks: bool = False) -> CocoTable:
    """Return the table of an annotation file, from the cache folder if it is stored there. Raises DataError.

    Args:
        masks: with masks, and with outlines as exact as they stand in the file.
    """
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}") from None
    return _load_table(str(path.absolute()), about.st_size, about.st_mtime_ns, masks)


@lru_cache(maxsize=8)  # of train and val, with masks and without, and of another set
def _load_table(path: str, size: int, modified_ns: int, masks: bool) -> CocoTable:
    text = f"{_FORMAT}\0{path}\0{size}\0{modified_ns}" + "\0masks" * masks
    return _unpack(path, *cached_arrays("coco", text, lambda: _pack(parse_json(path, masks=masks))))


_AS_TEXT = ("file_names", "categories", "image_ids", "problems")  # of CocoTable


def _pack(table: CocoTable) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    texts = {name: json.dumps(getattr(table, name)).encode() for name in _AS_TEXT}
    return arrays_of(table) | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}, {}


def _unpack(path: str, arrays: dict[str, np.ndarray], meta: dict[str, str]) -> CocoTable:
    columns: dict[str, Any] = dict(arrays)
    for name in _AS_TEXT:
        found = json.loads(arrays[name].tobytes())
        columns[name] = tuple(tuple(one) if isinstance(one, list) else one for one in found)
    return CocoTable(path=path, **columns)


def parse_json(path: str, *, masks: bool = False) -> CocoTable:
    """Parse a COCO instances file. Raises DataError."""
    builder = TableBuilder(path, masks=masks)
    add = {"images": builder.add_image, "categories": builder.add_category}
    seen: Counter[str] = Counter()  # entries of each list, and one for its beginning
    try:
        for key, entry in read_lists(Path(path), ("images", "annotations", "categories")):
            seen[key] += 1
            if entry is None and seen[key] == 1:  # read_lists yields None once, before the entries of a list
                continue
            if not isinstance(entry, dict):
                raise DataError(f"annotations {path}: {key} is not a list of objects", hint=HINT)
            elif key == "annotations":
                builder.add_annotation(entry, seen[key] - 1)
            else:
                add[key](entry)
    except (OSError, JsonError, MemoryError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}", hint=HINT) from None
    for key in add:
        if key not in seen:
            raise DataError(f"annotations {path} have no list of {key}", hint=HINT)
    return builder.table()


class FileFinder:
    """Finds the image that is meant by a name without a file. Lists each folder once, so a name costs no system call.

    A name is tried in its ``spellings`` below each of the folders. There, a file is taken whose name differs only in upper
    and lower case, in the form of Unicode (macOS separates accents), or by a suffix that the name leaves out, if it is
    the only one.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = [folder for folder in folders if os.path.isdir(folder)]
        self._files: dict[str, dict[str, list[str]]] = {}

    def find(self, name: str) -> str:
        """Return the path of the file, or "" if no file matches."""
        for option in spellings(name):
            for root in self._folders:
                folder, base = os.path.split(os.path.join(root, option))
                found = self._in(folder).get(_folded(base), [])
                if base in found or len(found) == 1:
                    return os.path.join(folder, base if base in found else found[0])
        return ""

    def _in(self, folder: str) -> dict[str, list[str]]:
        """Return the files of a folder by their folded names, images also without suffix."""
        if folder not in self._files:
            names: dict[str, list[str]] = {}
            with suppress(OSError, ValueError):
                for file in os.listdir(folder):
                    stem, suffix = os.path.splitext(file)
                    for key in {file, stem if suffix.lower() in IMAGE_SUFFIXES else file}:
                        names.setdefault(_folded(key), []).append(file)
            self._files[folder] = names
        return self._files[folder]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _reader(source: SplitSource, spec: DatasetSpec, _: object) -> CocoFiles:
    table = table_with_sides(source.path, _files_of(spec, spec.splits), masks=spec.masks)
    return CocoFiles(table, source.image_roots, spec.category_ids or (), spec.names)


def _source(path: Path, folders: Sequence[Path]) -> SplitSource:
    """Return a file with the folders that may hold its images; see ``Format.source``."""
    part = re.sub(r"^(instances|image_info|person_keypoints|zhiyuan_objv2)_", "", path.stem)
    parent = path.absolute().parent
    # part: for example train2017
    below = ("", "images", "Images", "data", part, f"images/{part}", f"{part}/images")
    roots = dict.fromkeys(root / name for root in (parent, parent.parent, *folders) for name in below)
    return SplitSource("coco", path, tuple(roots))


def _in_folder(root: Path) -> tuple[Splits, dict[str, YolofleetError]]:
    """Return the splits of a folder of COCO, Roboflow or Objects365; see ``Format.in_folder``."""
    splits: Splits = {}
    for split in SPLITS:
        objects365 = (root / place / f"zhiyuan_objv2_{split}.json" for place in ("", "annotations", split))
        files = [
            *root.glob(f"annotations/instances_{split}*.json"),
            *root.glob(f"{split}*/_annotations.coco.json"),
            *(file for file in objects365 if file.is_file()),
        ]
        if files:
            splits[split] = tuple(_source(file, [root]) for file in sorted(files))
    return splits, {}


def _with_classes(spec: DatasetSpec, names_at: str) -> DatasetSpec:
    """Return the description with the names of the categories, or with the category of each of its names.

    Raises:
        ConfigError: names that the annotations do not have.
        DataError: a file cannot be read.
    """
    jsons = _files_of(spec, spec.splits)
    if spec.names:  # each file may number the categories in its own way; predictions get the ids of val
        jsons.sort(key=lambda path: path not in _files_of(spec, ["val"]))
    found = [categories_of(group) for group in ([[one] for one in jsons] if spec.names else [jsons])]
    notes = (*spec.notes, *dict.fromkeys(note for _, note in found if note))
    categories = [entry for group, _ in found for entry in group.items()]
    if spec.names:
        names, ids = spec.names, _ids_of_names(spec.names, categories, names_at)
    else:
        names, ids = tuple(name for _, name in categories), tuple(one for one, _ in categories)
    return replace(spec, names=names, category_ids=ids, notes=notes)


def _files_of(spec: DatasetSpec, splits: Iterable[str]) -> list[Path]:
    """Return the COCO files of some splits."""
    sources = (source for split in splits for source in spec.splits.get(split, ()) if source.kind == "coco")
    return list(dict.fromkeys(source.path for source in sources))


def _ids_of_names(names: Sequence[str], categories: Iterable[Any], names_at: str) -> tuple[Id, ...]:
    """Return the category of each class, -1 for a class without one; the first one if two share a name."""
    by_name: dict[str, Id] = {}
    for number, name in categories:
        by_name.setdefault(name, number)
    for name in by_name:
        if name not in names:
            near = nearest(name, names)
            raise ConfigError(
                f"category {name!r} of the annotations is not in names ({listed(names, most=8)})",
                source=names_at,
                hint=f"nearest: {near}" if near else "leave names out to take the annotations' own",
            )
    return tuple(by_name.get(name, -1) for name in names)


FORMAT = Format(_reader, ".json", _source, _in_folder, with_classes=_with_classes)
