"""The images and annotations of one COCO JSON file as flat arrays, and what collects them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolofleet.datasets.labels import Outlines
from yolofleet.errors import DataError

HINT = "use an instances_*.json: an object with the lists images, annotations and categories"
_NO_CATEGORY = -(1 << 63)


@dataclass(frozen=True)
class CocoTable:
    """The content of one JSON file. Legend: N images ordered by id, M annotations ordered by image.

    Attributes:
        categories: (id, name), ordered by id.
        image_ids: int64 [N].
        sizes_wh: int32 [N, 2] pixels as the file states them; 0 where it does not.
        file_names: N names, relative to a folder that the file does not name.
        offsets: int64 [N + 1]: annotations of image i are offsets[i]:offsets[i + 1].
        annotation_ids, category_ids: int64 [M].
        boxes_xywh_px: float64 [M, 4].
        crowd: bool [M].
        area_px: float64 [M], NaN where not given.
        polygon_counts, point_counts: as in ``Outlines``; points_px: float32 [P, 2].
        stray: number of annotations that have no usable box or belong to no listed image.
    """

    path: str
    categories: tuple[tuple[int, str], ...]
    image_ids: np.ndarray
    sizes_wh: np.ndarray
    file_names: tuple[str, ...]
    offsets: np.ndarray
    annotation_ids: np.ndarray
    category_ids: np.ndarray
    boxes_xywh_px: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    polygon_counts: np.ndarray
    point_counts: np.ndarray
    points_px: np.ndarray
    stray: int


class TableBuilder:
    """Collects images and annotations in any order; takes about 65 bytes an annotation."""

    def __init__(self) -> None:
        self._image_ids, self._sizes_wh = array("q"), array("i")
        self._file_names: list[str] = []
        self._of_image, self._ids, self._categories = array("q"), array("q"), array("q")
        self._boxes_xywh_px, self._crowd, self._area_px = array("d"), array("b"), array("d")
        self._polygon_counts, self._point_counts, self._points_px = array("q"), array("q"), array("f")
        self._odd_categories: dict[int, str] = {}  # by row: the first 1000 that are not whole numbers
        self.stray = 0

    def add_image(self, number: int, name: str, width: int, height: int) -> None:
        """Add an image; sizes in pixels, 0 if unknown."""
        self._image_ids.append(number)
        self._file_names.append(name)
        self._sizes_wh.extend((width, height))

    def add_box(
        self,
        image: int,
        number: int,
        category: Any,
        box: Iterable[float],
        crowd: bool,
        area: float,
        polygons: Sequence[Sequence[float]] = (),
    ) -> None:
        """Add an annotation.

        Args:
            category: of any type; ``table`` reports one that is not a whole number.
            box: x, y, width, height in pixels.
            area: square pixels; NaN if unknown.
            polygons: each x1, y1, x2, y2, ... in pixels.
        """
        if type(category) is not int or abs(category) >= 1 << 63:
            if len(self._odd_categories) < 1000:
                self._odd_categories[len(self._ids)] = f"{category!r:.40}"
            category = _NO_CATEGORY
        self._of_image.append(image)
        self._ids.append(number)
        self._categories.append(category)
        self._boxes_xywh_px.extend(box)
        self._crowd.append(crowd)
        self._area_px.append(area)
        self._polygon_counts.append(len(polygons))
        for polygon in polygons:
            self._point_counts.append(len(polygon) // 2)
            self._points_px.extend(polygon)

    def table(self, path: str, categories: Mapping[int, str]) -> CocoTable:
        """Return the sorted table. Raises DataError if an image id occurs twice or a category is not listed."""
        image_ids = np.frombuffer(self._image_ids, np.int64)
        by_id = np.argsort(image_ids, kind="stable")
        image_ids = image_ids[by_id]
        twice = np.flatnonzero(image_ids[1:] == image_ids[:-1])
        if len(twice):
            first, second = (self._file_names[by_id[at]] for at in (twice[0], twice[0] + 1))
            raise DataError(f"{path}: image id {image_ids[twice[0]]} is given twice ({first}, {second})")
        of_image = np.frombuffer(self._of_image, np.int64)
        owner = np.searchsorted(image_ids, of_image)
        if len(image_ids):
            known = image_ids[np.minimum(owner, len(image_ids) - 1)] == of_image
        else:
            known = np.zeros(len(owner), bool)
        category_ids = np.frombuffer(self._categories, np.int64)
        self._check_categories(path, category_ids, known, categories)
        rows = np.flatnonzero(known)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        counts = np.bincount(owner[rows], minlength=len(image_ids))
        outlines = self._outlines(rows)
        return CocoTable(
            path=path,
            categories=tuple(sorted(categories.items())),
            image_ids=image_ids,
            sizes_wh=np.frombuffer(self._sizes_wh, np.int32).reshape(-1, 2)[by_id],
            file_names=tuple(self._file_names[at] for at in by_id.tolist()),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            annotation_ids=np.frombuffer(self._ids, np.int64)[rows],
            category_ids=category_ids[rows],
            boxes_xywh_px=np.frombuffer(self._boxes_xywh_px, np.float64).reshape(-1, 4)[rows],
            crowd=np.frombuffer(self._crowd, np.int8)[rows].astype(bool),
            area_px=np.frombuffer(self._area_px, np.float64)[rows],
            polygon_counts=outlines.polygon_counts,
            point_counts=outlines.point_counts,
            points_px=outlines.points,
            stray=self.stray + int(len(known) - len(rows)),
        )

    def _outlines(self, rows: np.ndarray) -> Outlines:
        """Return the polygons of these annotations, in this order."""
        counts = np.frombuffer(self._polygon_counts, np.int64), np.frombuffer(self._point_counts, np.int64)
        points = np.frombuffer(self._points_px, np.float32).reshape(-1, 2)
        starts = [np.cumsum(count) - count for count in counts]
        polygons = _ranges(starts[0][rows], counts[0][rows])
        picked = _ranges(starts[1][polygons], counts[1][polygons])
        return Outlines(counts[0][rows], counts[1][polygons], points[picked])

    def _check_categories(
        self, path: str, category_ids: np.ndarray, known: np.ndarray, categories: Mapping[int, str]
    ) -> None:
        """Raise DataError if annotations of listed images have categories that are not listed."""
        unknown = np.flatnonzero(known & ~np.isin(category_ids, np.array(list(categories), np.int64)))
        if len(unknown):
            shown = "\n  ".join(
                f"annotation {self._ids[row]}: category {self._odd_categories.get(row, category_ids[row])}"
                for row in unknown[:10].tolist()
            )
            what = f"{len(unknown)} annotations have categories that it does not list\n  {shown}"
            raise DataError(f"{path}: {what}", hint=HINT)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers start, start + 1, ... of each range, one range after the other: int64 [sum of the counts]."""
    before = np.cumsum(counts) - counts
    numbers: np.ndarray = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return numbers
