# Paths are strings here: there may be millions.
# ruff: noqa: PTH118, PTH119, PTH120, PTH122, PTH208
"""Pascal VOC: ``Annotations/*.xml``, ``JPEGImages/``, ``ImageSets/Main/<split>.txt``; also XML files beside any images.

Coordinates are pixel numbers from 1, both ends included (VOC2012 devkit, section 4): xmin 1, xmax W is the full
width. ``difficult`` objects become crowd regions.

Expat is used directly, because messages need the line of each object, which ``xml.etree`` does not keep. A file with
a document type (DOCTYPE) is refused, so no entity is expanded and nothing is fetched.
"""

from __future__ import annotations

import math
import os
import re
import xml.parsers.expat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.annotations import (
    around_rotated,
    files_beside,
    files_found,
    files_in,
    flag_of,
    number_of,
    size_of_boxes,
    stated_size,
    summaries,
    unknown_class,
)
from yolofleet.data.datasets.labels import Problem, ProblemLog
from yolofleet.data.datasets.reader import (
    ABSENT,
    LabelError,
    LabelFiles,
    LabelRow,
    Stamp,
    class_list,
    existing,
    existing_folder,
    is_in_main,
    list_lines,
    lists_of,
    other_names,
    pair_of,
    read_labels,
    spellings,
    stamp,
    unicode_forms,
)
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, Format, Splits, SplitSource
from yolofleet.data.datasets.yolotxt import YoloFiles, images_of, walk
from yolofleet.data.images.header import has_image_suffix
from yolofleet.support.errors import DataError, YolofleetError
from yolofleet.support.text import listed

_MAX_XML_BYTES = 16 << 20
_ENCODINGS = {  # as a file declares them -> the codec of Python: text and nothing else
    **dict.fromkeys(("gbk", "gb2312", "gb18030", "cp936"), "gb18030"),
    **{name: name for name in ("big5", "shift_jis", "cp932", "euc_jp", "euc_kr", "cp949")},
}
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_IMAGES = ("JPEGImages", "images", "data")
_ANNOTATIONS = ("Annotations", "annotations", "labels", "xml")
_XML_FOLDERS = (*_ANNOTATIONS, "xmls", "Labels")  # beside a folder of images, or its parent


@dataclass
class VocObject:
    """One ``<object>`` of an annotation file; ``line`` is where it begins, ``problem`` why it cannot be used.

    ``polygon`` has the x and the y of the points, and ``rotated`` the numbers of roLabelImg; they give the corners of an
    object without ``bndbox``. ``boxes`` is the number of those, and ``remark`` says which box is taken.
    """

    line: int = 0
    name: str = ""
    difficult: bool = False
    corners: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    polygon: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    rotated: dict[str, float] = field(default_factory=dict)
    boxes: int = 0
    remark: str = ""


class VocFiles(LabelFiles):
    """Images and their XML files: of a list in ``ImageSets/Main``, of a list of "image xml" pairs, or of a folder.

    The XML file of an image has its name, and lies where ``_XML_FOLDERS`` says.
    """

    form = forms.CORNERS

    def __init__(self, path: Path, names: tuple[str, ...], files: YoloFiles | None = None) -> None:
        """Find the files.

        Args:
            files: the images of ``path``, if it is not a list of Pascal VOC.
        Raises:
            DataError: the list or the folder of images cannot be read.
        """
        self._classes = {name: number for number, name in enumerate(names)}
        self._assumed: list[tuple[str, str]] = []  # a line of the list, and the name that is used for it
        self._xml: dict[str, dict[str, str]] = {}  # files of each folder of labels; see ``files_in``
        self._stems: set[str] = set()  # of all images of a data set with lists
        try:
            if files is not None:
                self.images = list(files.images)
                labels, self._xml = files_beside(self.images, ".xml", _xml_folders)
                self.labels = [labels.get(at) or f"{os.path.splitext(at)[0]}.xml" for at in self.images]
            else:
                pairs = list(self._listed(path))
                self.images, self.labels = [image for image, _ in pairs], [label for _, label in pairs]
        except (OSError, ValueError) as error:
            raise DataError(f"VOC split {path} cannot be read: {error}") from None
        self.stamps = [stamp(image) for image in self.images]
        self.label_stamps = [stamp(label) for label in self.labels]
        strays = [(file, "belongs to no image") for file in self._strays()]
        self.problems = other_names(str(path), self._assumed) + files_found("labels-without-image", strays)

    def _strays(self) -> list[str]:
        """Return the XML files without an image of any split, which may share a folder of labels."""
        used = set(self.labels)
        unused = [file for files in self._xml.values() for file in files.values() if file not in used]
        stems = set(self._stems)
        for folder in dict.fromkeys(map(os.path.dirname, self.images)) if unused else ():
            # a list may name any folder of the disk, so its sub-folders are not visited
            with suppress(OSError, ValueError):
                stems.update(map(_stem_of, filter(has_image_suffix, os.listdir(folder))))
        return [file for file in unused if _stem_of(file) not in stems]

    def _listed(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield the image and the XML file of each line of a list: a name without suffix, or both paths."""
        root = voc_root(path)
        pictures, annotations = existing_folder(root, _IMAGES), existing_folder(root, _ANNOTATIONS)
        by_stem: dict[str, str] = {}
        twins: dict[str, str] = {}
        if pictures.is_dir():
            for image, _ in walk(str(pictures)):
                stem = os.path.splitext(os.path.relpath(image, pictures))[0].replace(os.sep, "/")
                if by_stem.setdefault(stem, image) != image:
                    twins[stem] = image
            self._stems.update(map(_stem_of, by_stem.values()))
            self._xml[str(annotations)] = files_in(str(annotations), ".xml")
        folders = [str(path.parent), str(root), str(path.parent.parent)]
        for line in filter(None, map(str.strip, list_lines(path))):
            image, xml_file = pair_of(line)
            if xml_file:
                self._xml.clear()  # the list names all files
                yield self._named(image, folders), self._named(xml_file, folders)
                continue
            stem = self._stem(line, by_stem, annotations)
            if stem in twins:
                what = (
                    f"{stem} of {path} and {annotations / stem}.xml may mean {by_stem[stem]} or {twins[stem]}"
                )
                raise DataError(what, hint="rename or remove one of the images")
            found = [by_stem, self._xml.get(str(annotations), {})]
            files = [next(filter(None, map(names.get, unicode_forms(stem))), "") for names in found]
            yield files[0] or str(pictures / f"{stem}.jpg"), files[1] or str(annotations / f"{stem}.xml")

    def _named(self, name: str, folders: list[str]) -> str:
        """Return the file that a name in a list of pairs stands for, or the path where a missing file should be."""
        found = existing(name, [*folders])
        if found and found[2]:
            self._assumed.append((name, found[0]))
        return found[0] if found else os.path.normpath(os.path.join(folders[0], name))

    def _stem(self, line: str, by_stem: Mapping[str, str], annotations: Path) -> str:
        """Return the name without suffix that a line of a list states.

        Lists of one class have lines such as ``stem 1`` and ``stem -1``, but a file name may contain a space, too.
        """
        if line in by_stem or (annotations / f"{line}.xml").is_file():
            return line
        words = re.sub(r"\s+(1|-1|0)$", "", line)
        for name in spellings(words):
            stem = os.path.splitext(name)[0] if has_image_suffix(name) else name
            if stem in by_stem:
                if stem != words:
                    self._assumed.append((line, stem))
                return stem
        return words

    def labels_of(self, image: int, size_wh: np.ndarray, log: ProblemLog) -> Iterator[LabelRow]:
        """Yield the labels of one image; see ``LabelFiles``. For the stated size see ``labels.size_of_boxes``."""
        stated_wh, objects = read_annotation(self.labels[image])
        size: tuple[int, int] = tuple(size_wh.tolist())
        corners, first = _corners_of(objects), 1
        if self.has_fractions(corners):
            log.add(Problem(self.labels[image], None, forms.FRACTIONS, "numbers-assumed"), len(corners))
            size, first = (1, 1) if all(size) else size, 0
        elif all(size):
            x, y = (max((box[side] for box in corners), default=0.0) for side in (2, 3))
            size, _ = size_of_boxes(stated_wh, size, (x, y), self.images[image], log)
        for number, found in enumerate(objects, 1):
            what, kind = f"object {number} ({found.name})", "label-unreadable"
            if found.problem:
                what += f": {found.problem}"
            elif found.name not in self._classes:
                what, kind = f"object {number}: {unknown_class(found.name, self._classes)}", "wrong-class"
            elif len(found.corners) < 4:
                what += " has no complete bndbox"
            else:
                if found.remark:
                    log.add(Problem(self.labels[image], None, found.remark, "box-derived"))
                if all(size):
                    box = _unit_box(found.corners, *size, first)
                    yield number, [self._classes[found.name], *box], found.difficult, []
                continue
            log.add(Problem(self.labels[image], found.line, what, kind))

    def corners_in(self, file: str) -> list[list[float]]:
        return _corners_of(read_annotation(file)[1])

    def label_names(self) -> set[str]:
        """Return the names of all objects of these images, and of the XML files beside theirs."""
        others = (file for files in self._xml.values() for file in files.values())
        own = zip(self.labels, self.label_stamps, strict=True)
        files = sorted({*others, *(label for label, about in own if about != ABSENT)})

        def of_file(file: str) -> list[str]:
            return sorted({label.name for label in read_annotation(file)[1]})

        return {name for names in summaries("voc", files, of_file) for name in names or ()}

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        label = self.labels[image]
        return label, _lines_of(label, self.label_stamps[image])[mark - 1], f"object {mark}: "


def _corners_of(objects: Sequence[VocObject]) -> list[list[float]]:
    complete = [found.corners for found in objects if len(found.corners) == 4]
    return [[box[side] for side in _CORNERS] for box in complete]


@lru_cache(maxsize=16)  # one for each thread, and for each problem of a file
def _lines_of(path: str, _: Stamp) -> list[int]:
    """Return the line of each object of a file."""
    return [found.line for found in read_annotation(path)[1]]


def _stem_of(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _xml_folders(folder: str) -> list[str]:
    """Return where the XML files of the images of a folder may be, the most likely place first."""
    parent, name = os.path.split(folder)
    beside = [os.path.join(parent, other) for other in _XML_FOLDERS]
    return [folder, *beside, *(os.path.join(os.path.dirname(parent), other, name) for other in _XML_FOLDERS)]


def voc_root(listing: Path) -> Path:
    """Return ``<root>`` of a list ``<root>/ImageSets/Main/train.txt``; the folder of another list."""
    return listing.parent.parent.parent if is_in_main(listing) else listing.parent


def read_annotation(path: str) -> tuple[tuple[int, int], list[VocObject]]:
    """Return the width and height that an annotation file states (0: none) and its objects. Raises LabelError."""
    data = read_labels(path, _MAX_XML_BYTES)
    objects: list[VocObject] = []
    stated = {"width": "", "height": ""}
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
            if (difficult := flag_of(content.replace("Unspecified", "0"))) is None:
                objects[-1].problem = f"difficult is {content!r:.40}, not 0 or 1"
            objects[-1].difficult = bool(difficult)
        elif inside == ["object", "bndbox"]:
            objects[-1].boxes += 1
        elif inside[:-1] == ["object", "bndbox"] and tag in _CORNERS and objects[-1].boxes:
            objects[-1].remark = "objects with several bndbox, of which the first is taken: {count}"
        elif inside[:-1] == ["object", "robndbox"] and tag in ("cx", "cy", "w", "h", "angle"):
            objects[-1].rotated[tag] = number_of(content)
        elif inside[:-1] == ["object", "bndbox"] and tag in _CORNERS:
            objects[-1].corners[tag] = number = number_of(content)
            if number != number:
                objects[-1].problem = f"{tag} is {content!r:.40}, not a number"
        elif inside[:2] == ["object", "polygon"] and tag[0] in "xy":
            objects[-1].polygon["xy".index(tag[0])].append(number_of(content))
        elif inside == ["object"] and not objects[-1].corners and len(objects[-1].rotated) == 5:
            cx, cy, width, height, angle = map(
                objects[-1].rotated.__getitem__, ("cx", "cy", "w", "h", "angle")
            )
            across, down = around_rotated(width, height, angle)
            box = (cx - across / 2 + 1, cy - down / 2 + 1, cx + across / 2, cy + down / 2)
            objects[-1].corners = dict(zip(_CORNERS, box, strict=True))
            objects[-1].remark = "rotated boxes, of which the box around is taken: {count}"
        elif inside == ["object"] and not objects[-1].corners and all(objects[-1].polygon):
            x, y = objects[-1].polygon
            if math.isfinite(sum(x) + sum(y)):
                objects[-1].corners = dict(zip(_CORNERS, (min(x), min(y), max(x), max(y)), strict=True))
        elif inside[:-1] == ["size"] and tag in stated:
            stated[tag] = content

    declared = re.match(rb"""\s*<\?xml[^>]*?\bencoding\s*=\s*["']([\w.-]+)""", data)
    codec = _ENCODINGS.get(declared[1].decode().lower().replace("-", "_")) if declared else None
    if codec:  # expat reads encodings of one byte alone
        try:
            data = data.decode(codec).encode()
        except UnicodeError:
            raise LabelError(f"is not text in {codec}") from None
    parser = xml.parsers.expat.ParserCreate("utf-8" if codec else None)
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
    return stated_size(**stated), objects


def _unit_box(corners: dict[str, float], width: int, height: int, first: int) -> list[float]:
    """Return cx, cy, w, h as fractions of an image of this size in pixels, which are numbered from ``first``."""
    left, top = (corners["xmin"] - first) / width, (corners["ymin"] - first) / height
    right, bottom = corners["xmax"] / width, corners["ymax"] / height
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]


def voc_listing(root: Path, split: str) -> Path:
    """Return the list of a split of a VOC folder. Raise DataError if the folder has no such list.

    train is train.txt, or trainval.txt if there is neither train.txt nor val.txt, whose images it would have, too; val is
    val.txt, valid.txt or test.txt. CVAT writes default.txt alone.
    """
    folder = lists_of(root) or root / "ImageSets" / "Main"
    train = ("train",) if (folder / "val.txt").is_file() else ("train", "trainval")
    choices: Sequence[str] = {"train": train, "val": ("val", "valid", "test"), "test": ("test",)}[split]
    is_alone = [path.name for path in folder.glob("*.txt")] == ["default.txt"]
    for choice in (*choices, *(("default",) if is_alone and split != "test" else ())):
        if (folder / f"{choice}.txt").is_file():
            return folder / f"{choice}.txt"
    raise DataError(
        f"VOC folder {root} has no list of its {split} images",
        hint=f"write {folder / choices[0]}.txt, a file name without .jpg on each line; none that another list has",
    )


def _reader(source: SplitSource, spec: DatasetSpec, images: YoloFiles | None) -> VocFiles:
    if images is None and source.path.is_dir():
        images = images_of(source, spec)
    return VocFiles(source.path, spec.names, images)


def _in_folder(root: Path) -> tuple[Splits, dict[str, YolofleetError]]:
    """Return the splits of a folder with lists; see ``Format.in_folder``."""
    splits: Splits = {}
    missing: dict[str, YolofleetError] = {}
    for split in SPLITS if lists_of(root) else ():
        try:
            splits[split] = (SplitSource("voc", voc_listing(root, split)),)
        except DataError as error:
            if split != "test":  # VOC2012 has no list of test images
                missing[split] = error
    if missing and not splits:
        raise missing["train"]
    return splits, missing


def _has_files(_: Path, files: YoloFiles) -> bool:
    return bool(files_beside(files.images, ".xml", _xml_folders)[0])


def _with_classes(spec: DatasetSpec, _: str) -> DatasetSpec:
    """Take the names of PaddleDetection's ``label_list.txt``. Raises DataError."""
    names = spec.names or class_list(spec.root / "label_list.txt", spec.root)
    note = f"names from label_list.txt: {listed(names, most=8)}"
    return replace(spec, names=names, notes=(*spec.notes, note)) if names != spec.names else spec


FORMAT = Format(_reader, in_folder=_in_folder, has_files=_has_files, with_classes=_with_classes)
