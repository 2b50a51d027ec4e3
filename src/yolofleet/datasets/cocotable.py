"""The images and annotations of one COCO JSON file as flat arrays, and what collects them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from yolofleet.datasets.labels import Id, Outlines, number_of, same_number
from yolofleet.errors import DataError

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
        polygon_counts, point_counts: as in ``Outlines``; points_px: float32 [P, 2].
        faults: findings about the file: (kind, the first one in words, how many there are).
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
    faults: tuple[tuple[str, str, int], ...]


class _Ids:
    """Numbers the ids of images or categories, in the order in which a file names them."""

    def __init__(self) -> None:
        self.numbers: dict[Id, int] = {}

    def number(self, value: Any) -> int:
        """Return the number of an id; -1 if the value can be none."""
        if (
            isinstance(value, bool)
            or not isinstance(value, Id)
            or (isinstance(value, float) and not isfinite(value))
        ):
            return -1
        return self.numbers.setdefault(value, len(self.numbers))

    def aliases(self, known: Collection[int]) -> dict[int, int]:
        """Return for each id that is not known, but known as a number instead of a text or the reverse, the one that is."""
        found = {}
        for value, number in self.numbers.items():
            if number in known:
                continue
            meant = self.numbers.get(same_number(value), -1)
            if meant in known:
                found[number] = meant
        return found


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

    def __init__(self, path: str) -> None:
        self.path = path
        self._images, self._categories = _Ids(), _Ids()
        self._image_at, self._sizes_wh = array("q"), array("i")
        self._file_names: list[str] = []
        self._of_image, self._ids, self._category_at = array("q"), array("q"), array("q")
        self._boxes_xywh_px, self._crowd, self._area_px = array("d"), array("b"), array("d")
        self._polygon_counts, self._point_counts, self._points_px = array("q"), array("q"), array("f")
        self._names: dict[int, str] = {}  # by number of the category
        self._parents: dict[int, str] = {}
        self._faults: dict[tuple[str, str], tuple[str, int]] = {}

    def fault(self, kind: str, field: str, what: str, count: int = 1) -> None:
        """Count a finding about a field of the entries; the first of its kind is kept in words."""
        first, before = self._faults.get((kind, field), (what, 0))
        self._faults[kind, field] = first, before + count

    def add_image(self, number: Any, name: str, width: int, height: int) -> None:
        """Add an image; sizes in pixels, 0 if unknown. Raises DataError if its id can be none."""
        at = self._images.number(number)
        if at < 0:
            raise DataError(f"{self.path}: an image has id {number!r:.40}, not a number or a text", hint=HINT)
        self._image_at.append(at)
        self._file_names.append(name)
        self._sizes_wh.extend((width, height))

    def add_category(self, number: Any, name: str, parent: object) -> None:
        """Add a category. Raises DataError if its id can be none, or two with this id have different names."""
        at = self._categories.number(number)
        if at < 0:
            raise DataError(
                f"{self.path}: a category has id {number!r:.40}, not a number or a text", hint=HINT
            )
        if self._names.setdefault(at, name) != name:
            raise DataError(f"{self.path}: category {number} is {self._names[at]!r} and {name!r}")
        self._parents[at] = parent if isinstance(parent, str) else ""

    def add_box(
        self,
        image: Any,
        number: Any,
        category: Any,
        box: Iterable[float],
        crowd: bool,
        area: float,
        polygons: Sequence[Sequence[float]] = (),
        *,
        place: int = 1,
    ) -> None:
        """Add an annotation.

        Args:
            image, category: ids of any type; ``table`` reports those that are not listed.
            number: id, of any type.
            place: of the annotation in the file, from 1.
            box: x, y, width, height in pixels.
            area: square pixels; NaN if unknown.
            polygons: each x1, y1, x2, y2, ... in pixels.
        """
        self._of_image.append(self._images.number(image))
        number = same_number(number) if isinstance(number, str) else number
        self._ids.append(number if type(number) is int and 0 <= number < 1 << 63 else -place)
        self._category_at.append(self._categories.number(category))
        self._boxes_xywh_px.extend(box)
        self._crowd.append(crowd)
        self._area_px.append(area)
        self._polygon_counts.append(len(polygons))
        for polygon in polygons:
            self._point_counts.append(len(polygon) // 2)
            self._points_px.extend(polygon)

    def table(self) -> CocoTable:
        """Return the sorted table. Raises DataError if an image id occurs twice or a category is not listed."""
        listed = list(self._image_at)
        first: dict[int, int] = {}
        for at, number in enumerate(listed):
            if first.setdefault(number, at) != at:
                names = f"{self._file_names[first[number]]}, {self._file_names[at]}"
                raise DataError(
                    f"{self.path}: image id {self._id(self._images, number)} is given twice ({names})"
                )
        owner = self._meant(self._images, np.frombuffer(self._of_image, np.int64), listed, "image_id")
        place = np.full(len(self._images.numbers) + 1, -1)  # the last one is that of -1
        keys = order_of_ids(self._images.numbers)
        by_id = sorted(range(len(listed)), key=lambda at: keys[listed[at]])
        place[np.array(listed, np.int64)[by_id]] = np.arange(len(listed))
        owner = place[owner]
        if strays := int((owner < 0).sum()):
            first_stray = annotation_text(self._ids[int(np.argmax(owner < 0))])
            self.fault("label-stray", "image_id", f"{first_stray} belongs to no listed image", strays)
        given = np.sort(np.frombuffer(self._ids, np.int64))
        given = given[given >= 0]
        if len(twice := given[1:][given[1:] == given[:-1]]):
            what = f"another annotation has the id of {annotation_text(twice[0])}: both are used, pycocotools uses one twice"
            self.fault("id-twice", "id", what, len(twice))
        rows = np.flatnonzero(owner >= 0)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        category_at, categories = self._sorted_categories(rows)
        counts = np.bincount(owner[rows], minlength=len(listed))
        outlines = self._outlines(rows)
        ids = list(self._images.numbers)
        boxes = np.frombuffer(self._boxes_xywh_px, np.float64).reshape(-1, 4)[rows]
        if len(boxes) and (boxes <= 1).all():
            what = f"all {len(boxes)} boxes lie between 0 and 1, such as {boxes[0].tolist()}: fractions, not pixels"
            raise DataError(
                f"{self.path}: {what}", hint="multiply them by the width and height of their images"
            )
        return CocoTable(
            path=self.path,
            categories=categories,
            image_ids=tuple(ids[listed[at]] for at in by_id),
            sizes_wh=np.frombuffer(self._sizes_wh, np.int32).reshape(-1, 2)[by_id],
            file_names=tuple(self._file_names[at] for at in by_id),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            annotation_ids=np.frombuffer(self._ids, np.int64)[rows],
            category_at=category_at,
            boxes_xywh_px=boxes,
            crowd=np.frombuffer(self._crowd, np.int8)[rows].astype(bool),
            area_px=np.frombuffer(self._area_px, np.float64)[rows],
            polygon_counts=outlines.polygon_counts,
            point_counts=outlines.point_counts,
            points_px=outlines.points,
            faults=tuple(
                (kind, f"{what} (entries like this: {count})" if count > 1 else what, count)
                for (kind, _), (what, count) in self._faults.items()
            ),
        )

    @staticmethod
    def _id(ids: _Ids, number: int) -> Id:
        return next(value for value, at in ids.numbers.items() if at == number)

    def _meant(self, ids: _Ids, found: np.ndarray, listed: Iterable[int], field: str) -> np.ndarray:
        """Return the numbers of ids with each text of a number replaced by the number, where only that is listed."""
        aliases = ids.aliases(set(listed))
        if not aliases:
            return found
        meant = np.arange(-1, len(ids.numbers))
        for number, other in aliases.items():
            meant[number + 1] = other
        first = self._id(ids, next(iter(aliases)))
        count = int(np.isin(found, list(aliases)).sum())
        what = f"{field} {first!r:.60} is taken as {self._id(ids, aliases[ids.numbers[first]])!r:.60}"
        self.fault("id-as-number", field, what, count)
        result: np.ndarray = meant[found + 1]
        return result

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
        ids = list(self._categories.numbers)
        if len(unknown):
            shown = "\n  ".join(
                f"{annotation_text(self._ids[rows[at]])}: category {ids[found[at]] if found[at] >= 0 else 'of another type'!r:.40}"
                for at in unknown[:10].tolist()
            )
            raise DataError(
                f"{self.path}: {len(unknown)} annotations have categories that it does not list\n  {shown}",
                hint=HINT,
            )
        keys = order_of_ids(ids)
        in_order = sorted(self._names, key=lambda at: keys[at])
        place = np.zeros(len(ids) + 1, np.int64)
        place[in_order] = np.arange(len(in_order))
        used = set(np.unique(found).tolist())
        categories = tuple((ids[at], self._names[at], at in used, self._parents[at]) for at in in_order)
        return place[found], categories

    def _outlines(self, rows: np.ndarray) -> Outlines:
        """Return the polygons of these annotations, in this order."""
        counts = np.frombuffer(self._polygon_counts, np.int64), np.frombuffer(self._point_counts, np.int64)
        points = np.frombuffer(self._points_px, np.float32).reshape(-1, 2)
        return Outlines(*counts, points).in_order(rows)
