# Paths are strings here: there may be millions.
# ruff: noqa: PTH110, PTH112, PTH118, PTH122, PTH208
"""Masks as images, of one class: a file for each image with a number or colour for each object, or a file for each object.

``masks/a.png`` belongs to ``images/a.jpg``: 0 (black) is background, and each other number or colour is an object. If
``masks/a`` is a folder, each file in it is an object, which is where it is not black. Splits are folders in both, or around
both. A folder for each image, with folders ``images`` and ``masks`` in it (Data Science Bowl 2018), is read too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np

from yolofleet.data.datasets.annotations import files_found
from yolofleet.data.datasets.labels import Problem, ProblemLog
from yolofleet.data.datasets.reader import ABSENT, LabelError, LabelFiles, LabelRow, Stamp, read_labels, stamp
from yolofleet.data.datasets.spec import DatasetSpec, Format, Splits, SplitSource
from yolofleet.data.datasets.yolotxt import walk
from yolofleet.data.geometry import rle
from yolofleet.data.images.header import has_image_suffix, header_of_file
from yolofleet.support.errors import YolofleetError

_SUFFIXES = (".png", ".tif", ".tiff", ".bmp")  # without loss: JPEG changes numbers
_MAX_BYTES = 256 << 20
_MOST_OBJECTS = 10_000  # of an image: a photo has more colours
_FEW = 16  # numbers that may all be of tiny objects
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_FIRST = 10  # images that show whether there are masks
NAME = "object"


class MaskFiles(LabelFiles):
    """The images of a folder, and the file or folder with the masks of each."""

    form = None

    def __init__(self, path: Path) -> None:
        """Find the masks of the images in ``path``: below a folder ``images``, or in folders for each image."""
        found = [(image, about) for image, about in walk(str(path)) if f"{os.sep}masks{os.sep}" not in image]
        self.images, self.stamps = [image for image, _ in found], [about for _, about in found]
        folders = dict[str, dict[str, str]]()
        self.labels = [_masks_of(image, folders) for image in self.images]
        self.label_stamps = [_stamp(file) for file in self.labels]
        self.problems = _strays(folders, set(self.labels))
        self.key_text = repr(self.problems)

    @property
    def has_masks(self) -> bool:
        return True

    def files(self, start: int, stop: int) -> list[str]:
        """See ``SplitReader.files``."""
        existing = [self.images[at] for at in range(start, stop) if self.stamps[at] != ABSENT]
        return existing + [file for at in range(start, stop) for file in _files(self.labels[at])]

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the objects of one image; see ``LabelFiles``."""
        width, height = size_wh.tolist()
        if min(width, height) <= 0:
            return
        is_folder = os.path.isdir(self.labels[image])
        number = 0
        for file in _files(self.labels[image]):
            try:
                numbers = _numbers(file, (width, height))
                objects = [numbers > 0] if is_folder else _objects(numbers)
            except LabelError as problem:
                if not is_folder:
                    raise
                log.add(Problem(file, None, str(problem), "label-unreadable"))
                continue
            for inside, (left, top) in map(_cropped, objects):
                number += 1
                if not inside.size:
                    log.add(Problem(file, None, "it is black: no object", "box-empty"))
                    continue
                h, w = inside.shape
                values = [0.0, (left + w / 2) / width, (top + h / 2) / height, w / width, h / height]
                runs = rle.encode(inside, (height, width), (left, top))
                yield number, values, False, rle.Mask((height, width), runs)

    def label_names(self) -> set[str]:
        return {NAME}

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.labels[image], None, f"object {mark}: "


def _masks_of(image: str, folders: dict[str, dict[str, str]]) -> str:
    """Return the file or folder with the masks of an image, or the path that such a file would have.

    Args:
        folders: ``_names_in`` of folders of masks; gets others.
    """
    folder, name = os.path.split(image)
    stem, parts = os.path.splitext(name)[0], list(Path(folder).parts)
    at = max((at for at, part in enumerate(parts) if part == "images"), default=len(parts))
    beside = os.path.join(*parts[:at], "masks", *parts[at + 1 :])
    if beside not in folders:
        folders[beside] = _names_in(beside)
    named, options = folders[beside], [*(stem + suffix for suffix in _SUFFIXES), stem]
    if own := next((named[option] for option in options if option in named), None):
        return os.path.join(beside, own)
    is_folder_of_image = at == len(parts) - 1 and parts[at - 1] == stem and os.path.isdir(beside)
    return beside if is_folder_of_image else os.path.join(beside, stem + _SUFFIXES[0])


def _names_in(folder: str) -> dict[str, str]:
    """Return the names in a folder by themselves, and with a suffix in lower case."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    lower = {stem + suffix.lower(): stem + suffix for stem, suffix in map(os.path.splitext, names)}
    return lower | dict(zip(names, names, strict=True))


def _strays(folders: dict[str, dict[str, str]], used: set[str]) -> list[tuple[Problem, int]]:
    """Return the images in folders of masks that belong to no image."""
    left = [
        os.path.join(folder, name)
        for folder in folders.keys() - used
        for name in set(folders[folder].values())
        if has_image_suffix(name)
    ]
    return files_found(
        "labels-without-image",
        [(file, "is no mask of an image") for file in sorted(left) if file not in used],
    )


def _files(masks: str) -> list[str]:
    """Return the files with the masks of an image."""
    if not os.path.isdir(masks):
        return [masks] if os.path.exists(masks) else []
    return [
        os.path.join(masks, name) for name in sorted(os.listdir(masks)) if name.lower().endswith(_SUFFIXES)
    ]


def _stamp(masks: str) -> Stamp:
    """Return the stamp of a file, or of all files of a folder together."""
    if not os.path.isdir(masks):
        return stamp(masks)
    every = [stamp(file) for file in _files(masks)]
    return (sum(size for size, _ in every), max(time for _, time in every)) if every else ABSENT


def _numbers(file: str, size_wh: tuple[int, int]) -> np.ndarray:
    """Return the number of each pixel, int32 [h, w]; a colour is one number. Raises LabelError."""
    try:
        header = header_of_file(file)
    except (OSError, ValueError) as problem:
        raise LabelError(f"cannot be read ({problem})") from None
    if header is None or header.problem:
        raise LabelError(header.problem if header else "is not an image")
    if header.size_wh != size_wh:  # before memory is taken for it
        raise LabelError("is {} x {} pixels, its image {} x {}".format(*header.size_wh, *size_wh))
    data = np.frombuffer(read_labels(file, _MAX_BYTES), np.uint8)
    try:
        pixels = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
    except cv2.error:
        pixels = None
    if pixels is None or pixels.shape[:2] != size_wh[::-1] or pixels.dtype.kind != "u":
        raise LabelError("cannot be decoded as whole numbers")
    if pixels.ndim == 2:
        return pixels.astype(np.int32)
    channels = pixels[..., : 3 if pixels.shape[2] > 2 else 1].astype(np.int64)  # without transparency
    colours = np.left_shift(channels, 16 * np.arange(channels.shape[2])).sum(axis=2)
    numbers: np.ndarray = np.searchsorted(np.unique(np.append(0, colours)), colours).astype(np.int32)
    return numbers  # black is 0


def _objects(numbers: np.ndarray) -> list[np.ndarray]:
    """Return bitmaps of the objects of an image, from numbers. Raises LabelError."""
    found = np.unique(numbers)
    if len(found) > _MOST_OBJECTS:
        raise LabelError(f"has {len(found)} numbers or colours: it is no mask of objects")
    here = numbers[1:, 1:]
    squares = (here == numbers[:-1, 1:]) & (here == numbers[1:, :-1]) & (here == numbers[:-1, :-1])
    if len(found) > _FEW and 2 * len(np.unique(here[squares])) < len(found):
        what = "most have nowhere 2 x 2 pixels: its edges are blended, as resizing and JPEG do"
        raise LabelError(f"has {len(found)} numbers or colours, of which {what}")
    return [numbers == number for number in found[found > 0].tolist()]


def _cropped(inside: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the part of a bitmap around what is inside, and the column and row of its corner."""
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return inside[:0], (0, 0)
    part = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return part, (int(columns[0]), int(rows[0]))


def _in_folder(root: Path) -> tuple[Splits, dict[str, YolofleetError]]:
    """Return the splits of a folder with masks as images; see ``Format.in_folder``."""
    if (root / "labels").is_dir():
        return {}, {}
    splits: Splits = {}
    for name, split in _SPLITS.items():
        for part in (root / "images" / name, root / name / "images", root / name):
            if split not in splits and part.is_dir() and any(_first_images(part)):
                splits[split] = (SplitSource("masks", part),)
    if not any(_has_masks(source.path) for (source,) in splits.values()):
        splits = {}
    whole = root / "images" if (root / "images").is_dir() else root
    if not splits and _has_masks(whole):
        splits = {split: (SplitSource("masks", whole),) for split in ("train", "val")}
    return splits, {}


def _has_masks(folder: Path) -> bool:
    """Return whether one of the first images has masks."""
    folders = dict[str, dict[str, str]]()
    return any(os.path.exists(_masks_of(image, folders)) for image in _first_images(folder))


def _first_images(folder: Path) -> Iterable[str]:
    """Return some images in a folder, or in the folder ``images`` of folders for each image."""
    for place in (folder, *sorted(folder.glob("*/images"))[:_FIRST]):
        names = sorted(
            path for path in place.iterdir() if path.suffix.lower() in (*_SUFFIXES, ".jpg", ".jpeg")
        )
        if names and (place.name == "images" or "images" in place.parts):
            yield from map(str, names[:_FIRST])


def _reader(source: SplitSource, spec: DatasetSpec, _: object) -> MaskFiles:
    return MaskFiles(source.path)


FORMAT = Format(_reader, in_folder=_in_folder)
