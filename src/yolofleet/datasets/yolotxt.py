# Paths are strings here: there may be millions.
# ruff: noqa: PTH116, PTH117, PTH118, PTH122
"""YOLO labels: a text file per image. A line is ``class cx cy w h`` (box) or ``class x1 y1 x2 y2 x3 y3 ...`` (polygon).

Coordinates are fractions of the image. The label file of an image is found by replacing the last ``images`` folder of
its path with ``labels``. If that folder has no labels, the reader tries a ``labels`` folder beside the image's folder,
then the image's own folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from yolofleet.datasets.labels import Problem, ProblemLog
from yolofleet.datasets.reader import ABSENT, MAX_LIST_BYTES, LabelFiles, LabelRow, Stamp, read_labels, stamp
from yolofleet.errors import DataError
from yolofleet.files.foreign import read_foreign
from yolofleet.images.header import IMAGE_SUFFIXES

_MAX_LABEL_BYTES = 64 << 20


class YoloFiles(LabelFiles):
    """The images of a folder (with its sub-folders) or of a list file, and their label files.

    Images of a folder are sorted by path; images of a list keep its order.
    """

    repeats_are_duplicates = True

    def __init__(self, path: Path) -> None:
        """List images and label files. Raises DataError if ``path`` cannot be read."""
        self._folders: dict[str, dict[str, Stamp]] = {}
        self._label_folders: dict[str, str] = {}
        try:
            found = list(walk(str(path)) if path.is_dir() else _listed(path))
        except (OSError, ValueError) as error:
            raise DataError(f"images of {path} cannot be listed: {error}") from None
        self.images = [image for image, _ in found]
        self.stamps = [stamp for _, stamp in found]
        self.labels: list[str] = []
        self.label_stamps: list[Stamp] = []
        for image in self.images:
            folder, name = os.path.split(image)
            label_folder = self._label_folder(folder)
            label = os.path.splitext(name)[0] + ".txt"
            self.labels.append(os.path.join(label_folder, label))
            self.label_stamps.append(self._folder(label_folder).get(label, ABSENT))

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``. ``size_wh`` is not used."""
        return _parse(read_labels(self.labels[image], _MAX_LABEL_BYTES), self.labels[image], log)

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.labels[image], mark, ""

    def _folder(self, folder: str) -> dict[str, Stamp]:
        """Return names and stamps of the ``.txt`` files in a folder; empty if there is no such folder."""
        if folder not in self._folders:
            files: dict[str, Stamp] = {}
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.name.endswith(".txt"):
                            # Of a link whose target is gone, (0, 0): reading it reports that.
                            about = stamp(entry.path)
                            files[entry.name] = (0, 0) if about == ABSENT else about
            except (OSError, ValueError):  # ValueError: a list may name a folder with a NUL character
                pass
            self._folders[folder] = files
        return self._folders[folder]

    def _label_folder(self, folder: str) -> str:
        """Return the folder of the label files of the images in ``folder``."""
        if folder not in self._label_folders:
            path = Path(folder)
            parts = list(path.parts)
            candidates = []
            if "images" in parts:
                last = len(parts) - 1 - parts[::-1].index("images")
                candidates.append(Path(*parts[:last], "labels", *parts[last + 1 :]))
            candidates += [path.parent / "labels" / path.name, path.parent / "labels", path]
            with_labels = [str(candidate) for candidate in candidates if self._folder(str(candidate))]
            self._label_folders[folder] = (with_labels or [str(candidates[0])])[0]
        return self._label_folders[folder]


def walk(root: str, suffixes: Collection[str] = IMAGE_SUFFIXES) -> Iterator[tuple[str, Stamp]]:
    """Yield images (or files of other suffixes) below ``root``, sorted by path so that the order is the same on every disk.

    Links are followed once.
    """
    seen: set[tuple[int, int]] = set()
    found: list[tuple[str, Stamp]] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen and about.st_ino:
            continue  # a link to a folder that was visited already
        seen.add((about.st_dev, about.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # macOS writes ._name.jpg files that are not images
                    continue
                if os.path.splitext(entry.name)[1].lower() in suffixes:
                    found.append((entry.path, stamp(entry.path)))
                elif entry.is_dir():
                    waiting.append(entry.path)
    found.sort(key=lambda item: item[0].replace(os.sep, "/"))
    yield from found


def _listed(path: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the images that a list file names: absolute, or relative to the list's folder or that folder's parent."""
    text = read_foreign(path, limit_bytes=MAX_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
    folders = [str(path.parent), str(path.parent.parent)]
    for line in text.split("\n"):  # not splitlines: a name may hold a form feed or U+2028
        name = line.strip()
        if not name:
            continue
        if os.path.isabs(name):
            yield name, stamp(name)
            continue
        options = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
        stamps = [stamp(option) for option in options]
        best = 1 if stamps[0] == ABSENT and stamps[1] != ABSENT else 0
        if best == 1:
            folders.reverse()  # the next image is most likely in the same folder, so it is tried first
        yield options[best], stamps[best]


def _parse(data: bytes, path: str, log: ProblemLog) -> Iterator[LabelRow]:
    """Yield each readable row; add a problem for each other row."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    has_underscore = b"_" in data
    for line, text in enumerate(data.splitlines(), 1):
        columns = text.split()
        if not columns:
            continue
        try:
            if has_underscore and b"_" in text:  # float() accepts 0.5_0; other programs do not
                raise ValueError
            numbers = list(map(float, columns))
        except ValueError:
            what = f"{text[:60].decode('ascii', 'backslashreplace')!r} is not a row of numbers"
            log.add(Problem(path, line, what, "label-unreadable"))
            continue
        if len(numbers) == 5:
            yield line, numbers, False, []
        elif len(numbers) >= 7 and len(numbers) % 2:
            box = _box_of_polygon(numbers[1::2], numbers[2::2])
            yield line, [numbers[0], *box], False, numbers[1:]
        else:
            what = f"has {len(numbers)} columns; expected 5 (class cx cy w h), or 7, 9, ... for a polygon"
            log.add(Problem(path, line, what, "label-unreadable"))


def _box_of_polygon(x: list[float], y: list[float]) -> list[float]:
    """Return cx, cy, w, h of the box around the corners of a polygon; NaN if a coordinate is not finite."""
    if not math.isfinite(sum(x) + sum(y)):  # min and max ignore a NaN that is not the first value
        return [math.nan] * 4
    left, right, top, bottom = min(x), max(x), min(y), max(y)
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
