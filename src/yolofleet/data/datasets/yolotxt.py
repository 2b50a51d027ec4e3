# Paths are strings here: there may be millions.
# ruff: noqa: PTH116, PTH118, PTH119, PTH120, PTH122, PTH208
"""YOLO labels: a text file per image. A line is ``class cx cy w h`` (box) or ``class x1 y1 x2 y2 x3 y3 ...`` (polygon).

With ``kpt_shape`` in the description, a line is ``class cx cy w h`` or that with the key points of a pose behind it.
Coordinates are fractions of the image. The label file of an image is found by replacing the last ``images`` folder of
its path with ``labels``. If that folder has no labels of its images, the reader tries a ``labels`` folder beside the
image's folder, then the image's own folder. Images that remain without labels: see ``YoloFiles._look_elsewhere``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from yolofleet.data.datasets.labels import Problem, ProblemLog
from yolofleet.data.datasets.reader import (
    ABSENT,
    UTF_16,
    LabelError,
    LabelFiles,
    LabelRow,
    SplitReader,
    Stamp,
    existing,
    list_lines,
    other_names,
    read_labels,
    stamp,
    unicode_forms,
)
from yolofleet.data.datasets.spec import DatasetSpec, Format, SplitSource, format_of, kind_of_files
from yolofleet.data.datasets.yolorows import are_mostly_polygons, parse_rows
from yolofleet.data.images.header import IMAGE_SUFFIXES, UNREAD_SUFFIXES, has_image_suffix
from yolofleet.support.errors import DataError
from yolofleet.support.text import nearest

_MAX_LABEL_BYTES = 16 << 20  # rows need up to 60 times the memory
_LABEL_FOLDERS = ("labels", "Labels", "LABELS")
# the first word of text files that programs write beside labels
_NOT_LABELS = re.compile(
    r"(?i)(classes|predefined_classes|label_?(list|map)|names|(autosplit_)?(train(val)?|val(id)?|test)|readme|license|notes)\."
)


class YoloFiles(LabelFiles):
    """The images of a folder (with its sub-folders) or of a list file, and their label files.

    Images of a folder are sorted by path; images of a list keep its order.
    """

    bare_rows = True

    def __init__(
        self, path: Path, kpt_shape: tuple[int, int] | None = None, others: Sequence[Path] = ()
    ) -> None:
        """List images and label files. Raise DataError if ``path`` cannot be read.

        Args:
            kpt_shape: number of key points of each label, and numbers of each key point: 2, or 3 with the visibility.
            others: the other folders and lists of the data set, whose label files belong to an image.
        """
        self.kpt_shape = kpt_shape
        self._folders: dict[str, dict[str, tuple[str, Stamp]]] = {}
        self._folders_in: dict[str, list[str]] = {}
        self._stated: dict[int, tuple[str, Stamp]] = {}  # label files that a list names
        self._assumed: list[tuple[str, str]] = []  # a name, and the file that is used for it
        unread: list[str] = []
        try:
            found = list(walk(str(path), unread=unread) if path.is_dir() else self._listed(path))
        except (OSError, ValueError) as error:
            raise DataError(f"images of {path} cannot be listed: {error}") from None
        self.images = [image for image, _ in found]
        self.stamps = [stamp for _, stamp in found]
        self._find_labels()
        self.problems = list(self._found(str(path), unread, others))
        self.key_text = repr((kpt_shape, self.problems))

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``. ``size_wh`` is not used."""
        data = read_labels(self.labels[image], _MAX_LABEL_BYTES)
        if data.startswith(UTF_16):
            raise LabelError("is text in UTF-16, as PowerShell writes it; save it as UTF-8")
        if data.count(0) * 3 > len(data):
            raise LabelError("consists of NUL bytes: a crash has damaged it, or it is text in UTF-16")
        return parse_rows(data, self.labels[image], log, self.kpt_shape, lambda: self._are_polygons)

    @cached_property
    def _are_polygons(self) -> bool:
        """Whether the first label files show that long rows are polygons."""
        existing = (at for at, about in enumerate(self.label_stamps) if about != ABSENT)
        files = []
        for at in islice(existing, 200):
            with suppress(LabelError):
                files.append(read_labels(self.labels[at], _MAX_LABEL_BYTES)[: 1 << 16])
        return are_mostly_polygons(files)

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.labels[image], mark, ""

    def _folder(self, folder: str) -> dict[str, tuple[str, Stamp]]:
        """Return path and stamp of the ``.txt`` files in a folder by the name without suffix; {} if there is no such folder."""
        if folder not in self._folders:
            files: dict[str, tuple[str, Stamp]] = {}
            inside = self._folders_in[folder] = []
            with suppress(OSError, ValueError), os.scandir(folder) as entries:  # ValueError: a NUL character
                for entry in entries:
                    stem, suffix = entry.name[:-4], entry.name[-4:]
                    if suffix.lower() == ".txt" and not stem.startswith("._"):
                        if suffix == ".txt" or stem not in files:
                            about = stamp(entry.path)
                            # Of a link whose target is gone, (0, 0): reading it reports that.
                            files[stem] = entry.path, (0, 0) if about == ABSENT else about
                    elif entry.is_dir(follow_symlinks=False):
                        inside.append(entry.path)
            self._folders[folder] = files
        return self._folders[folder]

    def _find_labels(self) -> None:
        """Set the label file of each image, and the label folder of each folder of images."""
        self._stems = [os.path.splitext(os.path.basename(image))[0] for image in self.images]
        self.labels, self.label_stamps = [""] * len(self.images), [ABSENT] * len(self.images)
        self._images_in: dict[str, list[int]] = {}
        self.label_folder: dict[str, str] = {}
        for at, image in enumerate(self.images):
            self._images_in.setdefault(os.path.dirname(image), []).append(at)
        for folder, images in self._images_in.items():
            options = _label_folders(folder)
            stems = [self._stems[at] for at in images]
            fits = (option for option in options if not self._folder(option).keys().isdisjoint(stems))
            others = (option for option in options if any(map(_may_be_labels, self._folder(option))))
            chosen = self.label_folder[folder] = next(fits, None) or next(others, options[0])
            for at, stem in zip(images, stems, strict=True):
                usual = os.path.join(chosen, f"{stem}.txt")
                self.labels[at], self.label_stamps[at] = self._folder(chosen).get(stem, (usual, ABSENT))
                if not self.labels[at].endswith(".txt"):
                    self._assumed.append((f"{stem}.txt", self.labels[at]))
        for at, (label, about) in self._stated.items():
            self.labels[at], self.label_stamps[at] = label, about
        self._look_elsewhere()

    def _look_elsewhere(self) -> None:
        """Find the labels of images that have none in the label folder of their folder.

        They are taken from a name in another form of Unicode, or from another usual folder that has labels for none of the images that have theirs. If a folder
        has no labels at all, they are also taken from the label folders above it, where some programs collect the
        labels of all sub-folders. A file that could be the labels of two images is not used.
        """
        used = set(self.labels)
        claims: dict[tuple[str, str], list[int]] = {}
        for folder, images in self._images_in.items():
            left = [at for at in images if self.label_stamps[at] == ABSENT]
            have = [self._stems[at] for at in images if self.label_stamps[at] != ABSENT]
            own = self.label_folder[folder]
            for at in left:
                for stem in unicode_forms(self._stems[at])[1:]:
                    if stem in self._folder(own):
                        claims.setdefault((own, stem), []).append(at)
            for option in _label_folders(folder, above=not have) if left else ():
                if self._folder(option).keys().isdisjoint(have):
                    for at in left:
                        if self._stems[at] in self._folder(option):
                            claims.setdefault((option, self._stems[at]), []).append(at)
        for (folder, stem), (at, *others) in claims.items():
            label, about = self._folder(folder)[stem]
            if not others and label not in used and self.label_stamps[at] == ABSENT:
                self._assumed.append((self.labels[at], label))
                self.labels[at], self.label_stamps[at] = label, about

    def _found(self, path: str, unread: list[str], others: Sequence[Path]) -> Iterator[tuple[Problem, int]]:
        """Yield what was assumed, label files that belong to no image, and images in formats that are not read."""
        yield from other_names(path, self._assumed)
        if unread:
            kinds = Counter(os.path.splitext(name)[1].lower() for name in unread)
            many = ", ".join(f"{suffix}: {count}" for suffix, count in kinds.items())
            what = f"images in formats that are not read: {many}, as {os.path.basename(unread[0])}"
            yield Problem(path, None, f"{what}; convert them to PNG or JPEG", "image-unread"), len(unread)
        strays = self._strays(others)
        if strays:
            what = f"label files without an image: {len(strays)}, as {os.path.basename(strays[0])}"
            left = [at for at, about in enumerate(self.label_stamps) if about == ABSENT]
            by_stem = {self._stems[at]: self.images[at] for at in left[:1000]}
            for stray in strays[:3] if by_stem else ():
                if near := nearest(os.path.basename(stray)[:-4], by_stem):
                    what += f"; is {stray} that of {by_stem[near]}, which has none?"
                    break
            yield Problem(os.path.dirname(strays[0]), None, what, "labels-without-image"), len(strays)

    def _strays(self, others: Sequence[Path]) -> list[str]:
        """Return the label files, in and below the folders that may have labels, that belong to no image of the data set."""
        used, strays = set(self.labels), []
        folders, chosen = dict.fromkeys(self._folders), set(self.label_folder.values())
        for folder in (waiting := list(folders)):
            unused = {stem: file for stem, (file, _) in self._folder(folder).items() if file not in used}
            if unused := {stem: file for stem, file in unused.items() if _may_be_labels(stem)}:
                of = [images for images, labels in self.label_folder.items() if labels == folder]
                stems = _image_stems([folder, *of, *_image_folders(folder)])
                strays += [file for stem, file in unused.items() if stem not in stems]
            # folders in a folder of images are folders of images, too
            if folder in chosen and folder not in self.label_folder:
                new = [inside for inside in self._folders_in[folder] if inside not in folders]
                waiting += new
                folders |= dict.fromkeys(new)
                chosen.update(new)
        for other in others if strays else ():
            try:
                used.update(YoloFiles(other).labels)
            except DataError:
                continue  # reading that split reports it
        return sorted(stray for stray in strays if stray not in used)

    def _listed(self, path: Path) -> Iterator[tuple[str, Stamp]]:
        """Yield the images that a list file names: absolute, or relative to the list's folder or that folder's parent.

        A name without a file is tried in other spellings. A line may name a label file behind the image.
        """
        folders = [str(path.parent), str(path.parent.parent)]
        images = 0
        for number, line in enumerate(list_lines(path), 1):
            name = line.strip()
            if not name:
                continue
            columns = name.split()
            found, is_pair = None, has_image_suffix(columns[0]) and len(columns) > 1
            if is_pair and all(stamp(os.path.join(folder, name)) == ABSENT for folder in folders):
                found = existing(columns[0], folders)
            if found:
                label = existing(columns[1], folders)
                if label is None or not columns[1].lower().endswith(".txt"):
                    raise DataError(
                        f"{path}:{number} has an image and {columns[1]!r:.60}, as lists of PaddleDetection and others",
                        hint="a list of image files alone, or a data set in another format of docs/data.md",
                    )
                self._stated[images] = label[:2]
            found = found or existing(name, folders)
            if found is None and name[0] in "'\"":
                found = existing(name.strip("'\""), folders)
            if found is None and name.startswith("#"):
                continue
            images += 1
            if found is None:
                yield os.path.normpath(os.path.join(folders[0], name)), ABSENT
                continue
            if found[2]:
                self._assumed.append((name, found[0]))
            yield found[:2]


def _label_folders(folder: str, *, above: bool = False) -> list[str]:
    """Return the folders that may hold the labels of the images in ``folder``, most likely first.

    Args:
        above: also those of the folders above it.
    """
    path = Path(folder)
    parts, options = path.parts, list[Path]()
    if last := _last(parts, "images"):
        rest = parts[last + 1 :]
        for length in range(len(rest), -1 if above else len(rest) - 1, -1):
            options += [Path(*parts[:last], name, *rest[:length]) for name in _LABEL_FOLDERS]
    options += [path.parent / name / path.name for name in _LABEL_FOLDERS]
    options += [path.parent / name for name in _LABEL_FOLDERS]
    return list(dict.fromkeys(map(str, [*options, path])))


def _image_folders(label_folder: str) -> list[str]:
    """Return the folders whose images may have their labels in a folder."""
    parts = Path(label_folder).parts
    last = _last(parts, "labels")
    names = ("images", "Images", "IMAGES") if last else ()
    return [str(Path(*parts[:last], name, *parts[last + 1 :])) for name in names]


def _last(parts: Sequence[str], name: str) -> int:
    """Return the place of the last part with a name, in any case; 0 if there is none."""
    return next((at for at in range(len(parts) - 1, 0, -1) if parts[at].lower() == name), 0)


def _image_stems(folders: Collection[str]) -> set[str]:
    """Return the names of the images in some folders, without suffix."""
    stems: set[str] = set()
    for folder in folders:
        with suppress(OSError, ValueError):
            parts = map(os.path.splitext, os.listdir(folder))
            stems.update(stem for stem, suffix in parts if suffix.lower() in IMAGE_SUFFIXES | UNREAD_SUFFIXES)
    return stems


def _may_be_labels(stem: str) -> bool:
    """Return whether a text file may be labels, unlike a ``classes.txt`` or a list of images."""
    return _NOT_LABELS.match(f"{stem}.") is None


def walk(
    root: str, suffixes: Collection[str] = IMAGE_SUFFIXES, *, unread: list[str] | None = None
) -> Iterator[tuple[str, Stamp]]:
    """Yield images (or files of other suffixes) below ``root``, sorted by path so that the order is the same on every disk.

    Links are followed once.

    Args:
        unread: gets the paths of images in formats that are not read.
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
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.is_dir(
                    follow_symlinks=False
                ):  # also frames in a folder with the name of their video
                    waiting.append(entry.path)
                elif suffix in suffixes:
                    found.append((entry.path, stamp(entry.path)))
                elif unread is not None and suffix in UNREAD_SUFFIXES:
                    unread.append(entry.path)
                elif entry.is_dir():
                    waiting.append(entry.path)
    found.sort(key=lambda item: item[0].replace(os.sep, "/"))
    yield from found


def images_of(source: SplitSource, spec: DatasetSpec) -> YoloFiles:
    """Return the images of a folder or list and their YOLO labels. Raises DataError."""
    group = (one for part in spec.splits.values() for one in part)
    others = dict.fromkeys(one.path for one in group if one.kind == source.kind and one.path != source.path)
    return spec.confined(YoloFiles(source.path, spec.kpt_shape, list(others)))


def _reader(source: SplitSource, spec: DatasetSpec, _: object) -> SplitReader:
    """Return the reader of the format whose label files the images have: YOLO's if the images have such, or no others."""
    files = images_of(source, spec)
    if any(about != ABSENT for about in files.label_stamps):
        return files
    kind = kind_of_files(source.path, files)
    return format_of(kind).reader(source, spec, files) if kind else files


FORMAT = Format(_reader)
