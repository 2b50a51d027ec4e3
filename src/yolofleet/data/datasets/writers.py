# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH103, PTH118, PTH119, PTH120, PTH122, PTH211
"""Write a converted data set: images, named and linked or copied, and labels as YOLO, COCO or Pascal VOC.

The readers are ``yolotxt``, ``cocojson`` and ``vocxml``.

Numbers have enough digits to restore the box: YOLO's fractions all bits of float32, COCO's and VOC's pixels three
decimals, or nine if a side of a box is below 0.01 pixels.

Legend: N images, M labels.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

import numpy as np

from yolofleet import __version__
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import Id
from yolofleet.data.datasets.maskrows import polygon_of, signed_area
from yolofleet.data.geometry import rle
from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.storage.caches import is_mirrored
from yolofleet.storage.foreign import copy_foreign
from yolofleet.storage.mirrored import download

LEAST_SIDE_PX = 1e-6  # a smaller box would have no width or height in the decimals of COCO and VOC
_CHUNK = 4096  # images whose numbers are converted to text together


Images = Literal["link", "copy", "symlink", "none"]
AT_ONCE = 256  # images of a store that are read together
LAYOUT_FOLDERS = ("images", "labels", "jpegimages")  # readers derive label files from these names


def below_common_folder(paths: Sequence[str]) -> list[str]:
    """Return the paths relative to their deepest common folder, separated by /."""
    folders = {os.path.dirname(path) for path in paths}
    try:
        common = os.path.commonpath(folders)
    except ValueError:  # the paths are on several Windows drives
        return [os.path.basename(path) for path in paths]
    return [os.path.relpath(path, common).replace(os.sep, "/") for path in paths]


def free_names(names: Sequence[str], split: str, taken: set[str], *, flat: bool) -> list[str]:
    """Return names that are allowed in the layout and distinct even without suffix and in lower case.

    Two images that differ only in suffix or case would share a label file. If a name is ``taken`` by another split, all
    names of this split begin with ``<split>-``. Adds the names to ``taken``.
    """
    parts = [_suitable(name, flat=flat) for name in names]
    front = f"{split}-" if any(stem.casefold() in taken for stem, _ in parts) else ""
    free = []
    for stem, suffix in parts:
        stem = front + stem
        options = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        option = next(option for option in options if option.casefold() not in taken)
        taken.add(option.casefold())
        free.append(option + suffix)
    return free


def _suitable(name: str, *, flat: bool) -> tuple[str, str]:
    """Return (stem, suffix) of a name that is allowed in the layout; without folders if ``flat``.

    Left out or replaced: folders that have a meaning in a layout, control characters, leading dots and spaces, and
    suffixes that are not those of images.
    """
    parts = [part for part in name.split("/") if part]
    parts = [part for part in parts[:-1] if part.lower() not in LAYOUT_FOLDERS] + parts[-1:]
    parts = ["".join("_" if c < " " or c == "\x7f" else c for c in part).strip() for part in parts]
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    stem, suffix = os.path.splitext("__".join(parts) if flat else "/".join(parts))
    if suffix.lower() in IMAGE_SUFFIXES:
        return stem.rstrip(), suffix
    return stem + suffix, ".jpg"  # any image suffix will do, because decoders look at the content


def place(jobs: Sequence[tuple[str, str]], how: Images) -> int:
    """Link or copy images (from, to); return how many were copied. Those of a store are always copied."""
    copied = 0
    for first in range(0, len(jobs), AT_ONCE):
        download([path for path, _ in jobs[first : first + AT_ONCE]])
        copied += sum(_place(path, to, how) for path, to in jobs[first : first + AT_ONCE])
    return copied


def _place(path: str, to: str, how: Images) -> bool:
    source = os.path.realpath(path)
    if is_mirrored(source):  # the cache may be deleted
        copy_foreign(source, to)
        return True
    if how == "symlink":
        os.symlink(source, to)
        return False
    if how == "link":
        with suppress(OSError):  # another disk, a file system without links, or a file of another user
            os.link(source, to)
            return False
    shutil.copyfile(source, to)
    return True


def write_yolo(
    folder: Path, split: str, names: Sequence[str], index: DataIndex, *, masks: bool = False
) -> int:
    """Write ``labels/<split>/<name>.txt`` for each image, even if it has no labels. Crowd regions are left out.

    Args:
        names: [N] paths of the images below ``images/<split>``, separated by /.
        masks: write the polygons of labels that have them.
    Returns:
        the number of labels left out because they repeat an earlier one; the reader would drop them.
    """
    root, twice = str(folder / "labels" / split), 0
    for parent in {os.path.dirname(name) for name in names}:
        os.makedirs(os.path.join(root, parent), exist_ok=True)
    for at, name in enumerate(names):
        if at % _CHUNK == 0:
            first, last = index.offsets[at], index.offsets[min(at + _CHUNK, len(names))]
            # NumPy writes the shortest text that gives the same float32; + 0 turns -0 into 0.
            boxes = (index.boxes_cxcywh_unit[first:last] + np.float32(0)).astype("U16")
            classes = index.classes[first:last].tolist()
        start, stop = (index.offsets[at : at + 2] - first).tolist()
        crowd = index.crowd[first + start : first + stop].tolist()
        shapes = boxes[start:stop].tolist()
        if masks:
            size_hw = tuple(index.sizes_wh[at].tolist()[::-1])
            polygons = (_polygon_text(index, row, size_hw) for row in range(first + start, first + stop))
            shapes = [polygon or box for polygon, box in zip(polygons, shapes, strict=True)]
        rows = [
            f"{number} {' '.join(shape)}\n"
            for number, shape, is_crowd in zip(classes[start:stop], shapes, crowd, strict=True)
            if not is_crowd
        ]
        distinct = dict.fromkeys(rows)
        twice += len(rows) - len(distinct)
        _write(os.path.join(root, os.path.splitext(name)[0] + ".txt"), "".join(distinct))
    return twice


def _polygon_text(index: DataIndex, row: int, size_hw: tuple[int, int]) -> list[str]:
    """Return the coordinates of one polygon that has all rings of a mask; none for a box."""
    rings = index.outline(row)
    return polygon_of(rings, index.runs(row), size_hw).ravel().round(6).astype("U8").tolist() if rings else []


def joined_masks(index: DataIndex) -> str:
    """Return what became of the masks that are more than one polygon, for ``Converted.notes``."""
    outlines = [rings for at in range(len(index)) for rings in index.outlines(at)]
    holes = sum(any(signed_area(ring) < 0 for ring in rings) for rings in outlines)
    parts = sum(sum(signed_area(ring) > 0 for ring in rings) > 1 for rings in outlines)
    return (
        f"{sum(map(bool, outlines))} masks are written as polygons: seams join the parts of {parts} and the holes of {holes}, which "
        "other programs may fill"
    )


def write_coco(
    folder: Path, split: str, names: Sequence[str], index: DataIndex, category_ids: Sequence[Id], origin: str
) -> None:
    """Write ``annotations/instances_<split>.json`` with an image or annotation on each line.

    Args:
        names: [N] paths of the images below ``images/<split>``, separated by /.
        origin: name of the source, for ``info``.
    """
    path = folder / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"description": f"{origin} {split}, written by yolofleet {__version__}"}
    categories = [
        {"id": number, "name": name} for number, name in zip(category_ids, index.names, strict=True)
    ]
    ids = index.ids
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.write(f'{{"info": {json.dumps(about)},\n"images": [')
        for at, name in enumerate(names):
            width, height = index.sizes_wh[at].tolist()
            image = {"id": ids[at], "file_name": name, "width": width, "height": height}
            file.write((",\n" if at else "\n") + json.dumps(image))
        file.write('\n],\n"annotations": [')
        number = 0
        for at, boxes_xyxy_px in _boxes_px(index):
            image_id, start = ids[at], int(index.offsets[at])
            digits = _digits(boxes_xyxy_px)
            boxes_xyxy_px[:, 2:] -= boxes_xyxy_px[:, :2]
            for row, box in enumerate(boxes_xyxy_px.round(digits).tolist(), start):
                number += 1
                annotation = {
                    "id": number,
                    "image_id": image_id,
                    "category_id": category_ids[index.classes[row]],
                    "bbox": box,
                    "area": round(float(index.area_px[row]), 3),
                    "iscrowd": int(index.crowd[row]),
                }
                width, height = index.sizes_wh[at].tolist()
                polygons = [(xy.astype(np.float64) * (width, height)).round(4) for xy in index.outline(row)]
                runs = index.runs(row) if index.has_runs else np.zeros(0, np.uint32)
                # an outline in the file is as exact as in the index, which may not be enough for the same pixels
                if len(runs) and not np.array_equal(rle.from_polygons(polygons, (height, width)), runs):
                    annotation["segmentation"] = rle.Mask((height, width), runs).coco()
                elif polygons:
                    annotation["segmentation"] = [polygon.ravel().tolist() for polygon in polygons]
                file.write((",\n" if number > 1 else "\n") + json.dumps(annotation))
        file.write(f'\n],\n"categories": {json.dumps(categories)}}}\n')


def write_voc(folder: Path, names: Sequence[str], index: DataIndex) -> None:
    """Write ``Annotations/<stem>.xml`` for each image. Crowd regions become ``difficult`` objects.

    Args:
        names: [N] file names of the images in ``JPEGImages``.
    """
    root = str(folder / "Annotations")
    os.makedirs(root, exist_ok=True)
    for at, boxes_xyxy_px in _boxes_px(index):
        width, height = index.sizes_wh[at].tolist()
        start = int(index.offsets[at])
        shown = "".join(c if c.isprintable() else "_" for c in names[at])
        lines = [
            "<annotation>",
            "  <folder>JPEGImages</folder>",
            f"  <filename>{escape(shown)}</filename>",
            f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>",
            "  <segmented>0</segmented>",
        ]
        digits = _digits(boxes_xyxy_px)
        boxes_xyxy_px[:, :2] += 1  # VOC numbers pixels from 1 and includes both ends
        for row, box in enumerate(boxes_xyxy_px.round(digits).tolist(), start):
            corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
            lines += [
                "  <object>",
                f"    <name>{escape(index.names[index.classes[row]])}</name>",
                "    <pose>Unspecified</pose>",
                "    <truncated>0</truncated>",
                f"    <difficult>{int(index.crowd[row])}</difficult>",
                "    <bndbox>"
                + "".join(f"<{key}>{value:.15g}</{key}>" for key, value in corners)
                + "</bndbox>",
                "  </object>",
            ]
        lines += ["</annotation>", ""]
        _write(os.path.join(root, os.path.splitext(names[at])[0] + ".xml"), "\n".join(lines))


def lost_numbers(index: DataIndex, names: Sequence[str]) -> list[str]:
    """Return what neither YOLO nor VOC can store, with numbers, for ``Converted.notes``."""
    lost = []
    sizes = np.repeat(index.sizes_wh.astype(np.float64), np.diff(index.offsets), axis=0)
    own = (index.boxes_cxcywh_unit[:, 2:].astype(np.float64) * sizes).prod(1)
    areas = int((np.abs(own - index.area_px) > 0.01 * own + 1).sum())
    if areas:
        lost.append(f"{areas} areas of outlines: written as width x height")
    stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
    if index.given_ids or (
        not np.array_equal(index.image_ids, np.arange(len(index)))
        and not all(
            stem.isascii() and stem.isdecimal() and int(stem) == number
            for stem, number in zip(stems, index.image_ids.tolist(), strict=True)
        )
    ):
        lost.append("image ids: predictions in COCO's format then have other ids")
    return lost


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a list of images, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


def _boxes_px(index: DataIndex) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (image, its boxes float64 [n, 4] xyxy in pixels)."""
    for at in range(len(index)):
        start, stop = index.offsets[at : at + 2].tolist()
        boxes = index.boxes_cxcywh_unit[start:stop].astype(np.float64)
        size = np.tile(index.sizes_wh[at].astype(np.float64), 2)
        yield at, np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1) * size


def _digits(boxes_xyxy_px: np.ndarray) -> int:
    """Return the number of decimals for the boxes of an image."""
    sides = boxes_xyxy_px[:, 2:] - boxes_xyxy_px[:, :2]
    return 3 if sides.min(initial=1.0) >= 0.01 else 9


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
