# Paths are strings here: there may be millions.
# ruff: noqa: PTH116, PTH117, PTH118, PTH122
"""YOLO labels: one ``.txt`` beside each image, ``class cx cy w h`` or ``class x1 y1 x2 y2 x3 y3 ...`` a line,
fractions of the image.

Which file belongs to an image: the last ``images`` folder of its path becomes ``labels``. Where that finds no
labels: a ``labels`` folder beside the image's folder, then the image's own folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from yolofleet.datasets.labels import Problem, ProblemLog, RawLabels
from yolofleet.errors import DataError
from yolofleet.files.foreign import read_foreign

IMAGE_SUFFIXES = {
    *(".bmp", ".dib", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo"),
    *(".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
}
_MAX_LABEL_BYTES = 64 << 20
MAX_LIST_BYTES = 256 << 20  # the text is held twice, and its lines once

Stamp = tuple[int, int]  # size in bytes, modification time in ns
ABSENT: Stamp = (-1, -1)


class YoloFiles:
    """The images of a folder (with its sub-folders) or of a list file, and their label files.

    Attributes:
        images: paths, sorted within a folder, in file order in a list.
        stamps, label_stamps: ``ABSENT`` where there is no such file.
    """

    def __init__(self, path: Path) -> None:
        """Raises DataError when ``path`` cannot be read."""
        self._folders: dict[str, dict[str, Stamp]] = {}
        self._label_folders: dict[str, str] = {}
        try:
            found = list(_walk(str(path)) if path.is_dir() else _listed(path))
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

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Labels of images start:stop; ``sizes_wh`` is not needed here."""
        image: list[int] = []
        mark: list[int] = []
        values: list[list[float]] = []
        unusable: list[int] = []
        unlabelled = 0
        for at in range(start, stop):
            if self.label_stamps[at] == ABSENT:
                unlabelled += 1
                continue
            data = _read(self.labels[at], log)
            if data is None:
                unusable.append(at - start)
                continue
            for line, row in _parse(data, self.labels[at], log):
                image.append(at - start)
                mark.append(line)
                values.append(row)
        return RawLabels.of_rows(image, mark, values, unlabelled, unusable)

    def place(self, at: int, mark: int) -> tuple[str, int | None, str]:
        """File, line and opening words for a message about a label."""
        return self.labels[at], mark, ""

    def _folder(self, folder: str) -> dict[str, Stamp]:
        """Names and stamps of the ``.txt`` files in a folder; empty when there is none."""
        if folder not in self._folders:
            files: dict[str, Stamp] = {}
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.name.endswith(".txt"):
                            files[entry.name] = _stamp_of_label(entry)
            except (OSError, ValueError):  # a list may name a folder with a NUL character
                pass
            self._folders[folder] = files
        return self._folders[folder]

    def _label_folder(self, folder: str) -> str:
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


def _walk(root: str) -> Iterator[tuple[str, Stamp]]:
    """Images under ``root``, links followed once, in an order that is the same wherever the folder lies."""
    seen: set[tuple[int, int]] = set()
    found: list[tuple[str, Stamp]] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen and about.st_ino:
            continue  # a link that leads back
        seen.add((about.st_dev, about.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # macOS leaves ._name.jpg files that are no images
                    continue
                if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:
                    found.append((entry.path, stamp(entry.path)))
                elif entry.is_dir():
                    waiting.append(entry.path)
    found.sort(key=lambda item: item[0].replace(os.sep, "/"))
    yield from found


def _listed(path: Path) -> Iterator[tuple[str, Stamp]]:
    """Images named by a list file: absolute, or relative to the file's folder or that folder's parent."""
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
            folders.reverse()  # the next line is most likely the same
        yield options[best], stamps[best]


def stamp(path: str) -> Stamp:
    try:
        about = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL character in a name from a file
        return ABSENT
    return about.st_size, about.st_mtime_ns


def _stamp_of_label(entry: os.DirEntry[str]) -> Stamp:
    try:
        about = entry.stat()
    except OSError:  # a link that leads nowhere: reported when it is read, the other labels count
        return 0, 0
    return about.st_size, about.st_mtime_ns


def _read(path: str, log: ProblemLog) -> bytes | None:
    """None, reported, when the file is no readable label file."""
    try:
        return read_foreign(path, limit_bytes=_MAX_LABEL_BYTES)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    log.add(Problem(path, None, what, "labels-unreadable"))
    return None


def _parse(data: bytes, path: str, log: ProblemLog) -> Iterator[tuple[int, list[float]]]:
    """(line, [class, cx, cy, w, h]) of each readable row."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    has_underscore = b"_" in data
    for line, text in enumerate(data.splitlines(), 1):
        columns = text.split()
        if not columns:
            continue
        try:
            if has_underscore and b"_" in text:  # float() reads 0.5_0; other programs do not
                raise ValueError
            numbers = list(map(float, columns))
        except ValueError:
            what = f"{text[:60].decode('ascii', 'backslashreplace')!r} is not a row of numbers"
            log.add(Problem(path, line, what, "label-unreadable"))
            continue
        if len(numbers) == 5:
            yield line, numbers
        elif len(numbers) >= 7 and len(numbers) % 2:
            yield line, [numbers[0], *_box_of_polygon(numbers[1::2], numbers[2::2])]
        else:
            what = f"{len(numbers)} columns; 5 are a box (class cx cy w h), 7, 9, ... a polygon"
            log.add(Problem(path, line, what, "label-unreadable"))


def _box_of_polygon(x: list[float], y: list[float]) -> list[float]:
    if not math.isfinite(sum(x) + sum(y)):  # min and max would pass over a NaN
        return [math.nan] * 4
    left, right, top, bottom = min(x), max(x), min(y), max(y)
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
