# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH120
"""A data set whose description was checked: class names, and the files of each split."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from yolofleet.data.datasets.labels import Id, ProblemLog, RawLabels
from yolofleet.data.datasets.reader import ABSENT, SplitReader, class_list, is_inside, stamp
from yolofleet.data.datasets.yolotxt import YoloFiles
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.text import listed, nearest, shown

if TYPE_CHECKING:
    from yolofleet.data.datasets.reader import LabelFiles

SPLITS = ("train", "val", "test")
Reader = TypeVar("Reader", bound=SplitReader)
Kind = Literal["yolo", "coco", "voc", "labelme", "list"]
LabelledImage = tuple[str | Path, Sequence[Sequence[float]]]  # path; rows of class, cx, cy, w, h (0..1)


@dataclass(frozen=True)
class SplitSource:
    """Where the images and labels of a split, or of a part of it, are.

    Attributes:
        kind: yolo (a folder, or a .txt list of images; labelme's labels are read if there are no YOLO labels), labelme (a
            folder), coco (a JSON file) or voc (an ImageSets/Main list); list: ``images`` has them.
        path: that folder or file.
        image_roots: coco: folders that may hold the images, most likely first.
        images: list: path and labels of each image.
    """

    kind: Kind
    path: Path
    image_roots: tuple[Path, ...] = ()
    images: tuple[LabelledImage, ...] = ()


@dataclass(frozen=True)
class DatasetSpec:
    """A data set whose files were found.

    Attributes:
        name: short, for folders and tables.
        names: of the classes, by number.
        splits: the splits whose files exist.
        origin: the file or folder that the description was read from.
        root: paths in messages are relative to it.
        category_ids: COCO's category of each class, as val has them; None if the data set is not COCO.
        missing: why a split that the description names is not in ``splits``.
        notes: what a person should know that is not an error.
        within: the folder that images and labels must not leave, because a list in a store must not name files of this machine.
        kpt_shape: key points of each label, and numbers of each key point; None if rows of YOLO labels have none.
    """

    name: str
    names: tuple[str, ...]
    splits: dict[str, tuple[SplitSource, ...]]
    origin: str
    root: Path
    category_ids: tuple[Id, ...] | None = None
    missing: dict[str, YolofleetError] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    within: Path | None = None
    kpt_shape: tuple[int, int] | None = None

    @property
    def has_val(self) -> bool:
        """Whether the description has validation images, also if their files are missing. Else a training validates nothing."""
        return "val" in self.splits or "val" in self.missing

    def sources(self, split: str) -> tuple[SplitSource, ...]:
        """Return the sources of a split. Raise the error met when its files were looked for, or ConfigError."""
        if split in self.missing:
            raise self.missing[split]
        if split not in self.splits:
            has = ", ".join(self.splits) or "none"
            raise ConfigError(
                f"data set {self.name} has no split {split!r} (it has: {has})",
                source=self.origin,
                hint=f"{split}: images/{split}"
                if self.origin.endswith((".yaml", ".yml"))
                else f"add a list or annotations of the {split} images, or a data.yaml with train, val and names",
            )
        return self.splits[split]

    def readers(self, split: str) -> list[SplitReader]:
        """Return a reader for each source of a split. Raises as ``sources`` does, and DataError."""
        return [self.confined(_reader(source, self)) for source in self.sources(split)]

    def confined(self, reader: Reader) -> Reader:
        """Return a reader. Raise DataError if it would read an image or a label file out of ``within``."""
        if self.within is not None:
            files = (one for at, image in enumerate(reader.images) for one in (image, reader.label_file(at)))
            for folder, file in {os.path.dirname(file): file for file in files if file}.items():
                if not is_inside(folder, self.within):
                    raise DataError(f"{file} lies outside of the data set", source=self.origin)
        return reader


class ImageList(SplitReader):
    """A reader of images and labels that a program lists, without label files: see :func:`listed_dataset`."""

    bare_rows = True
    columns = ("images", "stamps", "_rows")

    def __init__(self, listed: Iterable[LabelledImage]) -> None:
        every = list(listed)
        self.images = [str(Path(path).resolve()) for path, _ in every]
        self.stamps = [stamp(path) for path in self.images]
        self._rows = [np.asarray(rows, np.float64).reshape(-1, 5).tolist() for _, rows in every]

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Return the labels of images ``start:stop``; see ``SplitReader.rows``."""
        rows = [
            (at - start, number, row, False, list[float]())
            for at in range(start, stop)
            for number, row in enumerate(self._rows[at])
        ]
        return RawLabels.of_rows(rows)

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.images[image], None, f"label {mark}: "


# A format is added here and in ``Kind``; ``description`` and ``layouts`` recognise its files.
def _reader(source: SplitSource, spec: DatasetSpec) -> SplitReader:
    """Return the reader of a source. A process imports only the readers of the formats that it reads."""
    if source.kind == "coco":
        from yolofleet.data.datasets.cocojson import CocoFiles, table_with_sides

        paths = (one.path for group in spec.splits.values() for one in group if one.kind == "coco")
        table = table_with_sides(source.path, dict.fromkeys(paths))
        return CocoFiles(table, source.image_roots, spec.category_ids or (), spec.names)
    if source.kind == "list":
        return ImageList(source.images)
    every = dict.fromkeys(one.path for group in spec.splits.values() for one in group if one.kind == "yolo")
    return _label_files(source, spec, [path for path in every if path != source.path])


def _label_files(source: SplitSource, spec: DatasetSpec, others: Sequence[Path] = ()) -> LabelFiles:
    """Return the reader of a source with a label file for each image: YOLO's if the images have such, or no others.

    Args:
        others: see ``YoloFiles``.
    """
    if source.kind == "voc" and not source.path.is_dir():
        from yolofleet.data.datasets.vocxml import VocFiles

        return spec.confined(VocFiles(source.path, spec.names))
    files = spec.confined(YoloFiles(source.path, spec.kpt_shape, others))
    if source.kind == "yolo" and any(about != ABSENT for about in files.label_stamps):
        return files
    from yolofleet.data.datasets import labelme, vocxml

    if source.kind == "labelme" or (source.kind == "yolo" and labelme.has_files(source.path, files)):
        return spec.confined(labelme.LabelmeFiles(source.path, files, spec.names))
    if source.kind == "voc" or vocxml.has_files(files):
        return vocxml.VocFiles(source.path, spec.names, files)
    return files


def listed_dataset(
    data: str, names: Sequence[str], splits: Mapping[str, Iterable[LabelledImage]]
) -> DatasetSpec:
    """Return a data set from lists of images with their labels, for ``TrainingRecipe.dataset``.

    Args:
        data: its name, for messages.
        names: of the classes.
        splits: for "train", "val" and "test": (path, rows) of each image; a row is class number, cx, cy, width, height
            as fractions of the image.
    """
    sources: dict[str, tuple[SplitSource, ...]] = {
        split: (SplitSource("list", Path(data), images=tuple(images)),) for split, images in splits.items()
    }
    return DatasetSpec(data, tuple(names), sources, data, Path())


def with_class_names(spec: DatasetSpec, *, names_at: str, remark: str = "") -> DatasetSpec:
    """Take class names that the description lacks from the annotations, and find COCO's category of each class.

    Args:
        names_at: where the names of the description stand, for messages.
        remark: what the message about missing names should add.
    Raises:
        ConfigError: no names, names that the annotations do not have, or formats that cannot be mixed.
        DataError: annotations cannot be read.
    """
    sources = [source for group in spec.splits.values() for source in group]
    coco = [source.path for source in sources if source.kind == "coco"]
    names, category_ids, notes = spec.names, None, spec.notes
    if coco:
        from yolofleet.data.datasets import cocojson

        jsons = list(dict.fromkeys(coco))
        if names:  # each file may number the categories in its own way; predictions get the ids of val
            jsons.sort(key=lambda path: path not in [one.path for one in spec.splits.get("val", ())])
        found = [cocojson.categories_of(group) for group in ([[one] for one in jsons] if names else [jsons])]
        notes = (*notes, *dict.fromkeys(note for _, note in found if note))
        categories = [entry for group, _ in found for entry in group.items()]
        if not names:
            names, category_ids = tuple(name for _, name in categories), tuple(one for one, _ in categories)
        else:
            category_ids = _ids_of_names(names, categories, names_at)
    if not names and any(source.kind == "voc" for source in sources):
        names = class_list(spec.root / "label_list.txt", spec.root)
        notes = (*notes, f"names from label_list.txt: {listed(names, most=8)}") if names else notes
    if not names:
        files = [
            _label_files(one, spec) for one in dict.fromkeys(sources) if one.kind not in ("coco", "list")
        ]
        names = tuple(sorted(set().union(*(reader.label_names() for reader in files))))
        if not names and (fault := next(filter(None, (reader.fault() for reader in files)), "")):
            raise DataError(fault, source=spec.origin, hint="correct the label files, which name the classes")
    if not names:
        what = f"data set {spec.name} has no class names{remark}"
        raise ConfigError(what, source=spec.origin, hint="names: [cat, dog]")
    twice = [name for name, count in Counter(names).items() if count > 1]
    more = (f"names of several classes: {listed([shown(name) for name in twice], most=8)}",) if twice else ()
    return replace(spec, names=names, category_ids=category_ids, notes=notes + more)


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
