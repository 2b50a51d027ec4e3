# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH120
"""A data set whose description was checked: class names, and the files of each split; and the table of label formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.data.datasets.labels import Id
from yolofleet.data.datasets.reader import SplitReader, is_inside
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.text import listed, shown

SPLITS = ("train", "val", "test")
FORMATS = {  # kind of source -> the module with its ``FORMAT``, in the order in which they are tried on a folder
    "labelme": "labelme",
    "voc": "vocxml",
    "coco": "cocojson",
    "masks": "maskfiles",
    "yolo": "yolotxt",
    "list": "listed",
}
Reader = TypeVar("Reader", bound=SplitReader)
LabelledImage = tuple[str | Path, Sequence[Sequence[float]]]  # path; rows of class, cx, cy, w, h (0..1)


@dataclass(frozen=True)
class SplitSource:
    """Where the images and labels of a split, or of a part of it, are.

    Attributes:
        kind: a key of ``FORMATS``. yolo: a folder, or a .txt list of images, also of those with label files of another format;
            labelme, masks: a folder; coco: a JSON file; voc: an ImageSets/Main list, or a folder; list: ``images`` has them.
        image_roots: coco: folders that may hold the images, most likely first.
        images: list: path and labels of each image.
    """

    kind: str
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
        masks: readers shall read masks, not only boxes.
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
    masks: bool = False

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
        return [reader_of(source, self) for source in self.sources(split)]

    def confined(self, reader: Reader) -> Reader:
        """Return a reader. Raise DataError if it would read an image or a label file out of ``within``."""
        if self.within is not None:
            files = (one for at, image in enumerate(reader.images) for one in (image, reader.label_file(at)))
            for folder, file in {os.path.dirname(file): file for file in files if file}.items():
                if not is_inside(folder, self.within):
                    raise DataError(f"{file} lies outside of the data set", source=self.origin)
        return reader


Splits = dict[str, tuple[SplitSource, ...]]


@dataclass(frozen=True)
class Format:
    """How the labels of one format are found and read. A process imports only the formats that it reads.

    A folder, a list or an entry of a YAML file has the kind "yolo". If its images have no YOLO labels, ``has_files`` of each
    format is asked in the order of ``FORMATS``, so a format with one file an image needs only that and ``reader``.

    Attributes:
        reader: returns the reader of a source. The third argument are the ``YoloFiles`` of its folder or list if they were
            found already, else None (``yolotxt.images_of`` finds them). Raises DataError.
        suffix: of a file with the labels of many images, which ``source`` takes (".json" is COCO's); "": there are none.
        source: returns what a file of the suffix stands for. ``folders``: where its images may be, beside those near the file.
        in_folder: returns the splits of a folder without a description, {} if the folder has another format; and why a split
            is missing. Asked in the order of ``FORMATS``; a folder without splits is train and val. Raises DataError.
        has_files: whether images without YOLO labels have label files of this format. Called with their folder or list, and
            their ``YoloFiles``.
        with_classes: returns the description with the class names or categories that the annotations of this format state.
            ``names_at``: where the names of the description stand, for messages. Raises ConfigError, DataError.
    """

    reader: Callable[[SplitSource, DatasetSpec, Any], SplitReader]
    suffix: str = ""
    source: Callable[[Path, Sequence[Path]], SplitSource] | None = None
    in_folder: Callable[[Path], tuple[Splits, dict[str, YolofleetError]]] = lambda root: ({}, {})
    has_files: Callable[[Path, Any], bool] = lambda path, images: False
    with_classes: Callable[[DatasetSpec, str], DatasetSpec] = lambda spec, names_at: spec


def format_of(kind: str) -> Format:
    """Return a format of the table, and import its module."""
    found: Format = import_module(f"yolofleet.data.datasets.{FORMATS[kind]}").FORMAT
    return found


def reader_of(source: SplitSource, spec: DatasetSpec) -> SplitReader:
    """Return the reader of a source. Raises DataError."""
    return spec.confined(format_of(source.kind).reader(source, spec, None))


def source_of_file(path: Path, *folders: Path) -> SplitSource | None:
    """Return what a file with the labels of many images stands for; None if no format has files of its suffix."""
    for found in map(format_of, FORMATS):
        if found.source and path.suffix.lower() == found.suffix:
            return found.source(path, folders)
    return None


def kind_of_files(path: Path, images: Any) -> str:
    """Return the format whose label files images without YOLO labels have; "" if no format has any. See ``Format.has_files``."""
    return next((kind for kind in FORMATS if format_of(kind).has_files(path, images)), "")


def listed_dataset(
    data: str, names: Sequence[str], splits: Mapping[str, Iterable[LabelledImage]]
) -> DatasetSpec:
    """Return a data set from lists of images with their labels, for ``TrainingRecipe.dataset``.

    Args:
        splits: for "train", "val" and "test": (path, rows) of each image; a row is class number, cx, cy, width, height
            as fractions of the image.
    """
    sources: Splits = {
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
    for kind in FORMATS:
        if any(source.kind == kind for source in sources):
            spec = format_of(kind).with_classes(spec, names_at)
    names = spec.names
    if not names:
        readers = [reader_of(source, spec) for source in dict.fromkeys(sources)]
        names = tuple(sorted(set().union(*(reader.label_names() for reader in readers))))
        problems = (reader.first_problem() for reader in readers)
        if not names and (problem := next(filter(None, problems), "")):
            raise DataError(
                problem, source=spec.origin, hint="correct the label files, which name the classes"
            )
    if not names:
        what = f"data set {spec.name} has no class names{remark}"
        raise ConfigError(what, source=spec.origin, hint="names: [cat, dog]")
    twice = [name for name, count in Counter(names).items() if count > 1]
    more = (f"names of several classes: {listed([shown(name) for name in twice], most=8)}",) if twice else ()
    return replace(spec, names=names, notes=spec.notes + more)
