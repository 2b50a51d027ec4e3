# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH116, PTH117, PTH118, PTH121
"""The interface between the index and the label formats.

Each format of ``spec.FORMATS`` has a subclass of ``SplitReader``. The index names none of them.

Legend: N images, M label rows.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.labels import Id, Outline, Problem, ProblemLog, RawLabels
from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import DataError

FIRST_FILES = 200  # that show what the numbers of all label files of a split mean
MAX_LIST_BYTES = 256 << 20  # of a text file that lists images: memory holds the text twice, and its lines
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of such a text

Stamp = tuple[int, int]  # size in bytes, modification time in ns
ABSENT: Stamp = (-1, -1)  # the file does not exist

_Reader = TypeVar("_Reader", bound="SplitReader")
LabelRow = tuple[int, list[float], bool, Outline]  # mark, values, crowd, outline: see ``RawLabels.of_rows``


class LabelError(ValueError):
    """Why a label file is not usable."""


class SplitReader:
    """The images and labels of one source of a split (one folder, list or annotation file).

    Attributes:
        images: N paths, in the order of the index.
        stamps: the stamp of each image; ``ABSENT`` if there is no such file.
        given_ids: N ids that the annotations give to images; None if the format has none.
        columns: names of the attributes with N values, on which the key of the index depends.
        key_text: what else the key must depend on.
        bare_rows: whether labels are YOLO's rows of fractions: a repeated row is a mistake, and a large number is in
            pixels. False where each label is an object or annotation of its own, with a box in pixels.
        form: which of ``forms.FORMS`` the numbers of a box have in this format; None: shapes have points of their own.
        problems: what concerns the source as a whole, such as labels that belong to no image, and how many labels or
            images each concerns.
    """

    images: Sequence[str]
    stamps: Sequence[Stamp]
    given_ids: Sequence[Id] | None = None
    key_text = ""
    columns: Sequence[str] = ("images", "stamps")
    bare_rows = False
    form: int | None = forms.CENTRE
    problems: Sequence[tuple[Problem, int]] = ()

    @property
    def has_masks(self) -> bool:
        """Whether some of the first labels have masks that are no single polygon, which are read only where masks are asked for."""
        return False

    def files(self, start: int, stop: int) -> list[str]:
        """Return the files of images ``start:stop`` that exist, and those that hold their labels alone."""
        return [self.images[at] for at in range(start, stop) if self.stamps[at] != ABSENT]

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Read the labels of images ``start:stop`` and add unreadable ones to ``log``.

        Args:
            sizes_wh: int32 [stop - start, 2] pixels, from the image files; 0 for unusable images.
        """
        raise NotImplementedError

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        """Return file, line and opening words for a message about the row ``mark`` of an image."""
        raise NotImplementedError

    def label_file(self, image: int) -> str | None:
        """Return the file where the labels of an image are expected; None if all share one file."""
        return None

    def label_names(self) -> set[str]:
        """Return the names of classes in all labels, where each label states one."""
        return set()

    def first_problem(self) -> str:
        """Return which of the first label files cannot be read, and why; "" if all can."""
        return ""

    def without(self: _Reader, images: Iterable[int]) -> _Reader:
        """Return this reader without these images. Called only if ``given_ids`` is None."""
        dropped, fewer = set(images), copy(self)
        kept = [image for image in range(len(self.images)) if image not in dropped]
        for column in self.columns:
            setattr(fewer, column, [getattr(self, column)[image] for image in kept])
        return fewer


class SeenFiles:
    """Finds files that are named again, also in another spelling: ``./a.jpg``, or ``A.JPG`` on a disk where that is ``a.jpg``."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # by the path in lower case; a second file of that name by its path

    def first(self, path: str) -> str:
        """Return the path that named this file first: ``path`` itself if it is new."""
        if "//" in path or "/." in path:
            path = os.path.normpath(path)
        before = self._first.setdefault(path.casefold(), path)
        if before == path or _is_same(before, path):
            return before
        return self._first.setdefault(path, path)


def _is_same(one: str, other: str) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samefile(one, other)
    return False


class LabelFiles(SplitReader):
    """The part of a reader that formats with one label file per image share.

    Attributes:
        labels, label_stamps: the label file of each image and its stamp; ``ABSENT`` if there is no such file.
    """

    columns = ("images", "stamps", "labels", "label_stamps")
    labels: list[str]
    label_stamps: list[Stamp]

    def files(self, start: int, stop: int) -> list[str]:
        """See ``SplitReader.files``. Labels stand between images: a store answers for small files while the link is busy."""
        columns = (self.images, self.stamps), (self.labels, self.label_stamps)
        return [files[at] for at in range(start, stop) for files, stamps in columns if stamps[at] != ABSENT]

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterable[LabelRow]:
        """Yield the labels of one image; add unreadable ones to ``log``. Raises LabelError."""
        raise NotImplementedError

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Read the labels of images ``start:stop``; see ``SplitReader.rows``."""
        rows: list[tuple[int, int, list[float], bool, Outline]] = []
        unlabelled, empty, unusable = 0, 0, []
        for at in range(start, stop):
            if self.label_stamps[at] == ABSENT:
                unlabelled += 1
                continue
            before = len(rows) + log.count
            try:
                rows += [(at - start, *row) for row in self.labels_of(at, sizes_wh[at - start], log)]
            except LabelError as error:
                log.add(Problem(self.labels[at], None, str(error), "labels-unreadable"))
                unusable.append(at - start)
            empty += len(rows) + log.count == before
        return RawLabels.of_rows(rows, unlabelled=unlabelled, empty=empty, unusable=tuple(unusable))

    def label_file(self, image: int) -> str:
        return self.labels[image]

    def corners_in(self, file: str) -> list[list[float]]:
        """Return x1, y1, x2, y2 of the boxes in a label file as they stand there. Raises LabelError."""
        raise NotImplementedError

    def has_fractions(self, corners: Sequence[Sequence[float]]) -> bool:
        """Return whether the corners of a file are fractions of its image, as far as that or the first files show it."""
        are = forms.are_fractions(corners)
        return self._first_have_no_pixels if are is None else are

    @cached_property
    def _first_have_no_pixels(self) -> bool:
        existing = (at for at, about in enumerate(self.label_stamps) if about != ABSENT)
        for at in islice(existing, FIRST_FILES):
            with suppress(LabelError):
                corners = self.corners_in(self.labels[at])
                if corners and forms.are_fractions(corners) is False:
                    return False
        return True

    def first_problem(self) -> str:
        existing = (at for at, about in enumerate(self.label_stamps) if about != ABSENT)
        for at in islice(existing, 100):
            try:
                list(self.labels_of(at, np.zeros(2, np.int32), ProblemLog()))
            except LabelError as error:
                return f"{self.labels[at]} {error}"
        return ""


def other_names(path: str, assumed: Sequence[tuple[str, str]]) -> list[tuple[Problem, int]]:
    """Return the assumption that names in ``path`` without a file mean other files: (name, file) of each."""
    what = f"names without a file: {len(assumed)}; others are used, as "
    return [
        (Problem(path, None, what + " -> ".join(one), "name-assumed"), len(assumed)) for one in assumed[:1]
    ]


def read_labels(path: str, limit_bytes: int) -> bytes:
    """Return the content of a label file. Raises LabelError."""
    try:
        return read_foreign(path, limit_bytes=limit_bytes)
    except OSError as error:
        raise LabelError(f"cannot be read ({error.strerror})") from None


def list_lines(path: Path) -> list[str]:
    """Return the lines of a file that lists names, in UTF-8 or UTF-16 and with the line ends of any system. Raises OSError."""
    data = read_foreign(path, limit_bytes=MAX_LIST_BYTES)
    is_16 = data.startswith(UTF_16)
    text = data.decode("utf-16" if is_16 else "utf-8-sig", "replace" if is_16 else "surrogateescape")
    return re.split("\r\n?|\n", text)  # not splitlines: a name may hold a form feed or U+2028


def is_inside(path: str | Path, folder: Path | None) -> bool:
    """Return whether a file that a data set names lies in this folder, also if a link or ``..`` is on the way to it.

    Args:
        folder: None: the files may lie anywhere.
    """
    try:
        return folder is None or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except ValueError:  # a NUL character
        return False


def class_list(file: Path, root: Path) -> tuple[str, ...]:
    """Return the class names of a file that has one on each line, () if there is no such file.

    Raises:
        DataError: a link out of the data set, whose target would be stored in all weights.
    """
    if not is_inside(file, root):
        hint = "replace the link with a copy of the file that it leads to"
        raise DataError(f"{file} leads out of the data set", hint=hint)
    with suppress(OSError):
        return tuple(line.strip() for line in list_lines(file) if line.strip())
    return ()


def pair_of(line: str) -> tuple[str, str]:
    """Return the image and the XML file of a line of PaddleDetection's lists; "" instead of the latter in other lines."""
    suffixes = "|".join(map(re.escape, IMAGE_SUFFIXES))
    match = re.fullmatch(rf"(.+?(?:{suffixes}))[ \t]+(\S.*\.xml)", line, re.IGNORECASE)
    return (match[1], match[2]) if match else (line, "")


def is_list_of_pairs(path: Path) -> bool:
    """Return whether the first line of a list is a pair of an image and an XML file."""
    try:
        first = next(filter(None, map(str.strip, list_lines(path))), "")
    except OSError:
        return False
    return bool(pair_of(first)[1])


def existing_folder(root: Path, names: Sequence[str]) -> Path:
    """Return the first of these folders that exists, also in upper or lower case, else the first one."""
    found: dict[str, str] = {}
    with suppress(OSError, ValueError), os.scandir(root) as entries:
        found = {entry.name.casefold(): entry.name for entry in entries if entry.is_dir()}
    return root / next((found[name.casefold()] for name in names if name.casefold() in found), names[0])


def lists_of(root: Path) -> Path | None:
    """Return the folder with the lists of a VOC folder, or None if it has no lists.

    That is ``ImageSets/Main``, or the folder itself with PaddleDetection's lists of "image xml" pairs.
    """
    main = existing_folder(existing_folder(root, ["ImageSets"]), ["Main"])
    if any(main.glob("*.txt")):
        return main
    return root if any(is_list_of_pairs(root / f"{name}.txt") for name in ("train", "trainval")) else None


def is_in_main(listing: Path) -> bool:
    """Return whether a list lies in a folder ``ImageSets/Main``, in upper or lower case."""
    return [part.casefold() for part in listing.parts[-3:-1]] == ["imagesets", "main"]


def stamp(path: str) -> Stamp:
    """Return size and modification time of a file, or ``ABSENT``."""
    try:
        about = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name from a list may hold a NUL character
        return ABSENT
    return about.st_size, about.st_mtime_ns


def unicode_forms(name: str) -> list[str]:
    """Return a name, and its other forms of Unicode, if it has such: macOS separates accents from letters."""
    return list(dict.fromkeys([name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]))


def spellings(name: str) -> Iterator[str]:
    """Yield a file name as a label file states it, then the names that may be meant if there is no such file.

    Forms of Unicode differ between systems. Programs on Windows write ``\\``, and Label Studio writes ``%20`` for a space. Programs that do not know where the images
    will lie state folders of their own machine or project: the first folders are left out one by one.
    """
    yield name
    plain = name.replace("\\", "/")
    for text in dict.fromkeys(unicode_forms(plain) + unicode_forms(unquote(plain))):
        if text != name:
            yield text
        parts = text.split("/")
        for start in range(1, len(parts)):
            yield "/".join(parts[start:])


def existing(name: str, folders: list[str]) -> tuple[str, Stamp, bool] | None:
    """Return the file that a name of a list stands for, its stamp, and whether the name is spelled in another way.

    Args:
        folders: where a relative name may begin; the one that has the file becomes the first, as for the next name.
    """
    for spelling in spellings(name):
        for at, folder in enumerate(folders if spelling.strip("./") else ()):
            path = spelling if os.path.isabs(spelling) else os.path.normpath(os.path.join(folder, spelling))
            if (about := stamp(path)) != ABSENT:
                folders.insert(0, folders.pop(at))
                return path, about, spelling != name
    return None


def without_repeats(readers: Sequence[SplitReader], log: ProblemLog) -> list[SplitReader]:
    """Drop each image that is listed again, which would count twice; the first is kept.

    Raises:
        DataError: an image is in an annotation file and in another source, whose labels may contradict each other.
    """
    files, seen = SeenFiles(), set[str]()
    annotated: set[str] = set()  # files of readers with ids
    result = []
    for reader in readers:
        repeats, has_ids = [], reader.given_ids is not None
        for at, path in enumerate(map(files.first, reader.images)):
            if path in seen and (has_ids or path in annotated):
                hint = "keep each image in one annotation file"
                raise DataError(f"image {path} is in two sources of one split", hint=hint)
            if path in seen:
                log.add(Problem(path, None, "is listed more than once", "image-twice"))
                repeats.append(at)
            seen.add(path)
        annotated |= seen if has_ids else set()
        result.append(reader.without(repeats) if repeats else reader)
    return result
