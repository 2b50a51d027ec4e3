# ruff: noqa: PTH122, PTH208
"""Pascal VOC: ``Annotations/*.xml``, ``JPEGImages/``, ``ImageSets/Main/<split>.txt``.

Coordinates are pixel numbers from 1, both ends included (VOC2012 devkit, section 4): xmin 1, xmax W is the full
width. ``difficult`` objects become crowd regions.

Expat is used directly, because messages need the line of each object, which ``xml.etree`` does not keep. A file with
a document type (DOCTYPE) is refused, so no entity is expanded and nothing is fetched.
"""

from __future__ import annotations

import json
import os
import xml.parsers.expat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from yolofleet.datasets.labels import Problem, ProblemLog, unknown_class
from yolofleet.datasets.reader import MAX_LIST_BYTES, LabelError, LabelFiles, LabelRow, read_labels, stamp
from yolofleet.errors import DataError
from yolofleet.files.arrayfile import cached_arrays
from yolofleet.files.foreign import read_foreign
from yolofleet.images.header import IMAGE_SUFFIXES

_MAX_XML_BYTES = 16 << 20
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass
class VocObject:
    """One ``<object>`` of an annotation file; ``line`` is where it begins."""

    line: int = 0
    name: str = ""
    difficult: bool = False
    corners: dict[str, float] = field(default_factory=dict)


class VocFiles(LabelFiles):
    """Images and labels of one ``ImageSets/Main`` list."""

    def __init__(self, listing: Path, names: tuple[str, ...]) -> None:
        """Find the files that a list names. Raises DataError if the list or the image folder cannot be read."""
        root = voc_root(listing)
        try:
            text = read_foreign(listing, limit_bytes=MAX_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
            files = sorted(os.listdir(root / "JPEGImages"))
        except (OSError, ValueError) as error:
            raise DataError(f"VOC split {listing} cannot be read: {error}") from None
        by_stem = {
            os.path.splitext(name)[0]: name
            for name in files
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
        }
        stems = [_stem(line.strip(), by_stem, root) for line in text.split("\n") if line.strip()]
        self.images = [str(root / "JPEGImages" / by_stem.get(stem, f"{stem}.jpg")) for stem in stems]
        self.labels = [str(root / "Annotations" / f"{stem}.xml") for stem in stems]
        self.stamps = [stamp(image) for image in self.images]
        self.label_stamps = [stamp(label) for label in self.labels]
        self._classes = {name: number for number, name in enumerate(names)}

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``."""
        width, height = size_wh.tolist()
        for number, found in enumerate(read_objects(self.labels[image]), 1):
            if found.name not in self._classes:
                what = f"object {number}: {unknown_class(found.name, self._classes)}"
                log.add(Problem(self.labels[image], found.line, what, "wrong-class"))
            elif len(found.corners) < 4:
                what = f"object {number} ({found.name}) has no complete bndbox"
                log.add(Problem(self.labels[image], found.line, what, "label-unreadable"))
            elif width and height:
                box = _unit_box(found.corners, width, height)
                yield number, [self._classes[found.name], *box], found.difficult, []

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        label = self.labels[image]
        return label, read_objects(label)[mark - 1].line, f"object {mark}: "


def _stem(line: str, by_stem: Mapping[str, str], root: Path) -> str:
    """Return the file name (without suffix) that a line of a list names.

    Lists of one class have lines such as ``stem 1`` and ``stem -1``, but a file name may contain a space, too.
    """
    is_whole = line in by_stem or not any(c.isspace() for c in line)
    return line if is_whole or (root / "Annotations" / f"{line}.xml").is_file() else line.split()[0]


def voc_root(listing: Path) -> Path:
    """Return ``<root>`` of a list ``<root>/ImageSets/Main/train.txt``."""
    return listing.parent.parent.parent


def class_names(root: Path) -> tuple[str, ...]:
    """Return the names of all objects below ``root`` in alphabetical order, which is VOC's own order of its 20 classes.

    Every annotation is read once per machine, and the names are stored in the cache folder. Unusable files are
    skipped here; the index of the split that uses them reports them. Raises DataError if the folder cannot be listed.
    """
    try:
        files = sorted(
            entry.path for entry in os.scandir(root / "Annotations") if entry.name.endswith(".xml")
        )
    except OSError as error:
        raise DataError(f"annotations of {root} cannot be listed: {error}") from None
    text = "\n".join(f"{path}\0{stamp(path)}" for path in files)

    def names() -> tuple[dict[str, np.ndarray], dict[str, str]]:
        found: set[str] = set()
        for path in files:
            with suppress(LabelError):
                found.update(label.name for label in read_objects(path))
        return {}, {"names": json.dumps(sorted(found))}

    return tuple(json.loads(cached_arrays("voc", text, names)[1]["names"]))


def read_objects(path: str) -> list[VocObject]:
    """Return the objects of one annotation file; some may lack corners. Raises LabelError."""
    data = read_labels(path, _MAX_XML_BYTES)
    objects: list[VocObject] = []
    where: list[str] = []
    text: list[str] = []

    def refuse(*_: object) -> None:
        raise LabelError("has a document type (DOCTYPE), which is not allowed: remove it")

    def enter(tag: str, _: dict[str, str]) -> None:
        where.append(tag)
        text.clear()
        if len(where) > 64:
            raise LabelError("is nested more than 64 deep")
        if where[1:] == ["object"]:
            objects.append(VocObject(parser.CurrentLineNumber))

    def leave(tag: str) -> None:
        inside, content = where[1:], "".join(text).strip()
        where.pop()
        text.clear()
        if inside == ["object", "name"]:
            objects[-1].name = content
        elif inside == ["object", "difficult"]:
            objects[-1].difficult = content == "1"
        elif inside[:-1] == ["object", "bndbox"] and tag in _CORNERS:
            try:
                objects[-1].corners[tag] = float(content)
            except ValueError:
                raise LabelError(f"object {len(objects)}: {tag} {content[:40]!r} is not a number") from None

    parser = xml.parsers.expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = enter
    parser.EndElementHandler = leave
    parser.CharacterDataHandler = text.append
    try:
        parser.Parse(data, True)
    except xml.parsers.expat.ExpatError as error:
        raise LabelError(f"is not XML ({error})") from None
    except LabelError:
        raise
    except (ValueError, LookupError, TypeError) as error:  # an encoding that is unknown or not for text
        raise LabelError(f"is not readable XML ({error})") from None
    return objects


def _unit_box(corners: dict[str, float], width: int, height: int) -> list[float]:
    """Return cx, cy, w, h as fractions of an image of this size in pixels."""
    left, top = (corners["xmin"] - 1) / width, (corners["ymin"] - 1) / height
    right, bottom = corners["xmax"] / width, corners["ymax"] / height
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
