"""The images and annotations of one COCO JSON file as flat arrays, and what collects them."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.annotations import around_rotated, flag_of, number_of, same_number, stated_size
from yolofleet.data.datasets.labels import Id, Outlines, offsets_of
from yolofleet.data.geometry import rle
from yolofleet.support.errors import DataError

MOST_COUNTS = 1 << 22  # run lengths of a mask, or characters of them: more than that of any drawn object
HINT = "use an instances_*.json: an object with the lists images, annotations and categories"


@dataclass(frozen=True)
class CocoTable:
    """The content of one JSON file. Legend: N images ordered by id, M annotations ordered by image.

    Attributes:
        categories: (id, name, whether an annotation of a listed image has it, supercategory), ordered by id.
        image_ids: N ids, as they stand in the file.
        sizes_wh: int32 [N, 2] pixels as the file states them; 0 where it does not.
        file_names: N names, relative to a folder that the file does not name.
        offsets: int64 [N + 1]: annotations of image i are offsets[i]:offsets[i + 1].
        annotation_ids: int64 [M]; -n: the n-th annotation of the file, if its id is not a whole number.
        category_at: int64 [M], numbers in ``categories``.
        boxes_xywh_px: float64 [M, 4].
        crowd: bool [M], a crowd region, or ``ignore`` is set.
        area_px: float64 [M], NaN where not given.
        polygon_counts, point_counts: as in ``Outlines``; points_px: float32 [P, 2], float64 if masks are read.
        rle_rows: int64 [K] annotations with a mask as run lengths; -1 for one of no listed image.
        rle_hw, rle_offsets, rle_text: int64 [K, 2] the sizes of these masks, int64 [K + 1] and uint8, their counts as JSON. Of
            no use if masks are not read: then they are empty.
        evidence: see ``forms.evidence_of``; of the stated sizes.
        problems: of the file: (kind, the first one in words, how many there are).
    """

    path: str
    categories: tuple[tuple[Id, str, bool, str], ...]
    image_ids: tuple[Id, ...]
    sizes_wh: np.ndarray
    file_names: tuple[str, ...]
    offsets: np.ndarray
    annotation_ids: np.ndarray
    category_at: np.ndarray
    boxes_xywh_px: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    polygon_counts: np.ndarray
    point_counts: np.ndarray
    points_px: np.ndarray
    rle_rows: np.ndarray
    rle_hw: np.ndarray
    rle_offsets: np.ndarray
    rle_text: np.ndarray
    evidence: np.ndarray
    problems: tuple[tuple[str, str, int], ...]

    def counts_text(self, number: int) -> str:
        """Return the counts of the mask ``number`` of the K masks, as JSON."""
        start, stop = self.rle_offsets[number : number + 2].tolist()
        return self.rle_text[start:stop].tobytes().decode("ascii")


def runs_of(text: str, size_hw: tuple[int, int]) -> np.ndarray:
    """Return the run lengths of a mask, from its ``counts`` as JSON. Raise ValueError, with the reason, if they are not usable."""
    counts = json.loads(text)
    if not isinstance(counts, str | list):
        raise ValueError("counts is neither a text nor a list")
    if len(counts) > MOST_COUNTS:
        raise ValueError(f"counts has {len(counts)} entries")
    try:
        return rle.from_text(counts, size_hw) if isinstance(counts, str) else rle.checked(counts, size_hw)
    except (TypeError, OverflowError):
        raise ValueError("run lengths must be whole numbers") from None


def order_of_ids(ids: Iterable[Id]) -> list[tuple[bool, float, str]]:
    """Return keys that sort ids: numbers and texts of numbers by value, then other texts."""
    numbers = map(number_of, ids := list(ids))
    return [
        (number != number, 0.0 if number != number else number, str(value))
        for value, number in zip(ids, numbers, strict=True)
    ]


def annotation_text(number: int) -> str:
    """Return the words for an annotation; see ``CocoTable.annotation_ids``."""
    return f"annotation {number}" if number >= 0 else f"annotation no. {-number}"


class TableBuilder:
    """Collects images, annotations and categories in any order; takes about 65 bytes an annotation."""

    def __init__(self, path: str, *, masks: bool = False) -> None:
        self.path, self._masks = path, masks
        self._images, self._categories = dict[Id, int](), dict[Id, int]()  # numbers in the order of the file
        self._image_at, self._sizes_wh = array("q"), array("i")
        self._file_names: list[str] = []
        self._of_image, self._ids, self._category_at = array("q"), array("q"), array("q")
        self._boxes_xywh_px, self._crowd, self._area_px = array("d"), array("b"), array("d")
        self._polygon_counts, self._point_counts = array("q"), array("q")
        self._points_px = array("d" if masks else "f")
        self._rle_rows, self._rle_hw, self._rle_ends, self._rle_text = (
            array("q"),
            array("q"),
            array("q"),
            bytearray(),
        )
        self._names: dict[int, str] = {}  # by number of the category
        self._parents: dict[int, str] = {}
        self._problems: dict[tuple[str, str], tuple[str, int]] = {}

    def _problem(self, kind: str, field: str, what: str, count: int = 1) -> None:
        """Count a problem of a field of the entries; the first of its kind is kept in words."""
        first, before = self._problems.get((kind, field), (what, 0))
        self._problems[kind, field] = first, before + count

    def _error(self, what: str, hint: str | None = HINT) -> DataError:
        return DataError(f"{self.path}: {what}", hint=hint)

    def add_image(self, entry: dict[str, Any]) -> None:
        """Add an image. LVIS names its file by the last two parts of ``coco_url``. Raises DataError."""
        number, name, url = (entry.get(key) for key in ("id", "file_name", "coco_url"))
        if not isinstance(name, str) or not name:
            if not isinstance(url, str) or not url:
                raise self._error(f"image {number!r:.40} has no file_name")
            name = "/".join(url.split("/")[-2:])
        for side in ("width", "height"):
            if isinstance(value := entry.get(side), str) and value and math.isnan(number_of(value)):
                raise self._error(f"image {number!r:.40}: {side} is {value!r:.40}, not a number")
        self._sizes_wh.extend(stated_size(entry.get("width"), entry.get("height")))
        self._file_names.append(name)
        self._image_at.append(at := _number(self._images, number))
        if at < 0:
            raise self._error(f"an image has id {number!r:.40}, not a number or a text")

    def add_category(self, entry: dict[str, Any]) -> None:
        """Add a category. Raise DataError if it has no name or id, or if two with its id have different names."""
        number, name, parent = (entry.get(key) for key in ("id", "name", "supercategory"))
        if not isinstance(name, str) or not name:
            raise self._error(f"category {number!r:.40} has no name")
        at = _number(self._categories, number)
        if at < 0:
            raise self._error(f"a category has id {number!r:.40}, not a number or a text")
        if self._names.setdefault(at, name) != name:
            raise self._error(f"category {number} is {self._names[at]!r} and {name!r}", None)
        self._parents[at] = parent if isinstance(parent, str) else ""

    def add_annotation(self, entry: dict[str, Any], place: int) -> None:
        """Add the annotation at a place of the file, from 1, or count it as one that cannot be used.

        ``table`` reports images and categories that are not listed.
        """
        box, number = entry.get("bbox"), entry.get("id")
        where = f"annotation no. {place}: " if number is None else f"annotation {number!r:.40}: "
        flags = {name: flag_of(entry.get(name)) for name in ("iscrowd", "ignore")}
        for name, flag in flags.items():
            if flag is None:
                self._problem("label-unreadable", name, f"{where}{name} is {entry[name]!r:.40}, not 0 or 1")
                return
        outline = entry.get("segmentation")
        polygons, broken = ([], "") if flags["iscrowd"] and not self._masks else _polygons_of(outline)
        if not box and polygons:
            corners = np.concatenate([np.reshape(polygon, (-1, 2)) for polygon in polygons])
            low, high = corners.min(0), corners.max(0)
            box = [*low.tolist(), *(high - low).tolist()]
            what = f"{where}it has no bbox, so the box around its polygons is taken"
            self._problem("box-derived", "bbox", what)
        if broken and self._masks:
            polygons = []
            self._problem("mask-unreadable", "polygon", f"{where}its mask cannot be read: {broken}")
        if not box and isinstance(outline, dict):
            box, what = _box_of_mask(outline)
            if box:
                self._problem(
                    "box-derived", "bbox", f"{where}it has no bbox, so the box around its mask is taken"
                )
            else:
                self._problem(
                    "label-stray", "mask", f"{where}it has no bbox, and its mask cannot be read: {what}"
                )
                return
        if not isinstance(box, list) or len(box) != 4:
            self._problem("label-stray", "bbox", f"{where}it has no bbox of four numbers")
            return
        numbers = [number_of(value) for value in box]
        for value, found in zip(box, numbers, strict=True):
            if found != found and value == value:  # not the NaN that JSON of Python may hold
                self._problem("label-unreadable", "bbox", f"{where}bbox has {value!r:.40}, not a number")
                return
        given = entry.get("attributes")
        turn = number_of(given.get("rotation", 0)) if isinstance(given, dict) else 0.0
        if turn % 360 > 0 and not polygons:  # CVAT states the box before the rotation
            x, y, width, height = numbers
            across, down = around_rotated(width, height, math.radians(turn))
            numbers = [x + (width - across) / 2, y + (height - down) / 2, across, down]
            self._problem("box-derived", "rotation", f"{where}the box around its rotated rectangle is taken")
        if flags["iscrowd"] and isinstance(outline, dict) and isinstance(given, dict) and "occluded" in given:
            what = f"{where}a crowd region, neither learned nor counted; but CVAT writes iscrowd 1 for every painted mask"
            self._problem(
                "crowd-of-cvat", "iscrowd", f"{what}. If each is one object, set it to 0 in the file"
            )
        area = number_of(entry.get("area"))
        if math.isnan(area) and entry.get("area") not in (None, ""):
            what = f"{where}area is {entry['area']!r:.40}, not a number: width x height is taken"
            self._problem("area-unreadable", "area", what)
        self._of_image.append(_number(self._images, entry.get("image_id")))
        number = same_number(number) if isinstance(number, str) else number
        self._ids.append(number if type(number) is int and 0 <= number < 1 << 63 else -place)
        self._category_at.append(_number(self._categories, entry.get("category_id")))
        self._boxes_xywh_px.extend(numbers)
        self._crowd.append(bool(flags["iscrowd"] or flags["ignore"]))
        self._area_px.append(area)
        self._polygon_counts.append(len(polygons))
        for polygon in polygons:
            self._point_counts.append(len(polygon) // 2)
            self._points_px.extend(polygon)
        if isinstance(outline, dict) and (self._masks or not flags["iscrowd"]):
            self._rle_rows.append(len(self._ids) - 1)
            if self._masks:
                size, counts = _size_of_mask(outline), outline.get("counts")
                self._rle_hw.extend(size or (0, 0))
                self._rle_text += json.dumps(counts if isinstance(counts, str | list) else None).encode()
            self._rle_ends.append(len(self._rle_text))

    def table(self) -> CocoTable:
        """Return the sorted table. Raise DataError if an image id occurs twice or a category is not listed."""
        listed, ids = list(self._image_at), list(self._images)
        first: dict[int, int] = {}
        for at, number in enumerate(listed):
            if first.setdefault(number, at) != at:
                names = f"{self._file_names[first[number]]}, {self._file_names[at]}"
                raise self._error(f"image id {ids[number]} is given twice ({names})", None)
        found = self._meant(self._images, np.frombuffer(self._of_image, np.int64), set(listed), "image_id")
        place = np.full(len(ids) + 1, -1)  # the last one is that of -1
        keys = order_of_ids(ids)
        by_id = sorted(range(len(listed)), key=lambda at: keys[listed[at]])
        place[np.array(listed, np.int64)[by_id]] = np.arange(len(listed))
        owner = place[found]
        numbers = np.frombuffer(self._ids, np.int64)
        if strays := int((owner < 0).sum()):
            what = f"{annotation_text(numbers[np.argmax(owner < 0)])} belongs to no listed image"
            self._problem("label-stray", "image_id", what, strays)
        given = np.sort(numbers[numbers >= 0])
        if len(twice := given[1:][given[1:] == given[:-1]]):
            what = f"another annotation has the id of {annotation_text(twice[0])}: both are used, pycocotools uses one twice"
            self._problem("id-twice", "id", what, len(twice))
        rows = np.flatnonzero(owner >= 0)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        category_at, categories = self._sorted_categories(rows)
        counts = np.frombuffer(self._polygon_counts, np.int64), np.frombuffer(self._point_counts, np.int64)
        points = np.frombuffer(self._points_px, self._points_px.typecode).reshape(-1, 2)
        rle_rows = np.frombuffer(self._rle_rows, np.int64)
        outlines = Outlines(*counts, points).in_order(rows)
        boxes = np.frombuffer(self._boxes_xywh_px, np.float64).reshape(-1, 4)[rows]
        if len(boxes) and (boxes <= 1).all():
            what = f"all {len(boxes)} boxes lie between 0 and 1, such as {boxes[0].tolist()}: fractions, not pixels"
            hint = "multiply them by the width and height of their images; x and y are the upper left corner"
            raise self._error(what, hint)
        sizes = np.frombuffer(self._sizes_wh, np.int32).reshape(-1, 2)[by_id]
        area = np.frombuffer(self._area_px, np.float64)[rows]
        return CocoTable(
            path=self.path,
            categories=categories,
            image_ids=tuple(ids[listed[at]] for at in by_id),
            sizes_wh=sizes,
            file_names=tuple(self._file_names[at] for at in by_id),
            offsets=offsets_of(np.bincount(owner[rows], minlength=len(listed))),
            annotation_ids=numbers[rows],
            category_at=category_at,
            boxes_xywh_px=boxes,
            crowd=np.frombuffer(self._crowd, np.int8)[rows].astype(bool),
            area_px=area,
            polygon_counts=outlines.polygon_counts,
            point_counts=outlines.point_counts,
            points_px=outlines.points,
            rle_rows=places_of(rows, len(owner))[rle_rows],
            rle_hw=np.frombuffer(self._rle_hw, np.int64).reshape(-1, 2),
            rle_offsets=np.append(0, np.frombuffer(self._rle_ends, np.int64)),
            rle_text=np.frombuffer(bytes(self._rle_text), np.uint8),
            evidence=forms.evidence_of(boxes, sizes[owner[rows]], area),
            problems=tuple(
                (kind, f"{what} (entries like this: {count})" if count > 1 else what, count)
                for (kind, _), (what, count) in self._problems.items()
            ),
        )

    def _meant(
        self, ids: dict[Id, int], found: np.ndarray, listed: Collection[int], field: str
    ) -> np.ndarray:
        """Return the numbers of ids with each text of a number replaced by the number, where only that is listed."""
        aliases = {}
        for value, number in ids.items():
            if number not in listed and (other := ids.get(same_number(value), -1)) in listed:
                aliases[number] = other
        if not aliases:
            return found
        values, one = list(ids), next(iter(aliases))
        what = f"{field} {values[one]!r:.60} is taken as {values[aliases[one]]!r:.60}"
        self._problem("id-as-number", field, what, int(np.isin(found, list(aliases)).sum()))
        meant = np.arange(-1, len(ids))
        meant[np.array(list(aliases)) + 1] = list(aliases.values())
        return np.asarray(meant[found + 1])

    def _sorted_categories(
        self, rows: np.ndarray
    ) -> tuple[np.ndarray, tuple[tuple[Id, str, bool, str], ...]]:
        """Return the number of the category of each annotation, and the categories, ordered by id.

        Raises:
            DataError: annotations of listed images have categories that are not listed.
        """
        found = np.frombuffer(self._category_at, np.int64)[rows]
        found = self._meant(self._categories, found, self._names, "category_id")
        unknown = np.flatnonzero(~np.isin(found, list(self._names)))
        ids = list(self._categories)
        if len(unknown):
            shown = "".join(
                f"\n  {annotation_text(self._ids[rows[at]])}: category {ids[found[at]] if found[at] >= 0 else 'of another type'!r:.40}"
                for at in unknown[:10].tolist()
            )
            raise self._error(f"{len(unknown)} annotations have categories that it does not list{shown}")
        keys = order_of_ids(ids)
        in_order = sorted(self._names, key=lambda at: keys[at])
        place = np.zeros(len(ids) + 1, np.int64)
        place[in_order] = np.arange(len(in_order))
        used = set(np.unique(found).tolist())
        categories = tuple((ids[at], self._names[at], at in used, self._parents[at]) for at in in_order)
        return place[found], categories


def places_of(rows: np.ndarray, count: int) -> np.ndarray:
    """Return where each of ``count`` rows is in ``rows``; -1 if it is not there: int64 [count]."""
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    return places


def _size_of_mask(found: dict[str, Any]) -> tuple[int, int] | None:
    """Return height and width that a mask states; None if they are not possible."""
    size = found.get("size")
    if isinstance(size, list) and len(size) == 2:
        width, height = stated_size(size[1], size[0])
        return (height, width) if height and width else None
    return None


def _box_of_mask(found: dict[str, Any]) -> tuple[list[float], str]:
    """Return x, y, width, height of the box around a mask as run lengths; or [] and what is wrong."""
    size = _size_of_mask(found)
    if not size:
        return [], f"size is {found.get('size')!r:.40}"
    try:
        box = rle.box(runs_of(json.dumps(found.get("counts")), size), size[0])
    except ValueError as problem:
        return [], str(problem)
    return ([*map(float, box)], "") if box[2] else ([], "it is empty")


def _number(ids: dict[Id, int], value: Any) -> int:
    """Return the number of an id, which is added if it is new; -1 if the value can be none."""
    if isinstance(value, bool) or not isinstance(value, Id):
        return -1
    if isinstance(value, float) and not math.isfinite(value):
        return -1
    return ids.setdefault(value, len(ids))


def _polygons_of(found: object) -> tuple[list[list[float]], str]:
    """Return the polygons of a ``segmentation``, also one alone without a list around it, and what is wrong with one, or "".

    Those that are not rows of finite numbers are left out, and those of fewer than three points, if there are others.
    """
    if not isinstance(found, list):
        return [], ""
    if found and not isinstance(found[0], list | dict):
        found = [found]
    broken, polygons = "", list[list[float]]()
    for one in found:
        numbers = [number_of(value) for value in one] if isinstance(one, list) else [math.nan]
        if not math.isfinite(sum(numbers)):
            broken = broken or f"{one!r:.40} is not a row of numbers"
        elif len(numbers) % 2:
            broken = broken or f"a polygon has {len(numbers)} numbers, not pairs of x and y"
        elif len(numbers) >= 6:
            polygons.append(numbers)
    short = next((len(one) // 2 for one in found if one and isinstance(one, list)), 0)
    return polygons, broken or (f"a polygon has {short} points" if short and not polygons else "")
