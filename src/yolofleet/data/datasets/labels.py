"""Labels in the form that all formats share, the kinds of problems, and the rules about which labels are usable.

Legend: M label rows, C classes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from yolofleet.data.geometry.rle import Mask
from yolofleet.data.geometry.table import ranges
from yolofleet.support.text import screen_line

MAX_PROBLEMS_KEPT = 1000  # all are counted; a broken set of millions must not fill memory with messages
EDGE_TOLERANCE = 1e-3  # fraction of the image by which a box may stick out unchanged: other programs round
MAX_FRACTION = 2.0  # a larger number is taken for pixels, not for a fraction of the image


ASSUMED = "assumed"


class Kind(NamedTuple):
    """What is done about a kind of problem.

    Attributes:
        action: in words. ``ASSUMED``: what was meant is clear, so it is a note with a count, not a problem.
        loses: "images" or "labels": what is left out because of it.
    """

    action: str
    loses: str = ""


KINDS = {
    "image-missing": Kind("image left out", loses="images"),
    "image-unreadable": Kind("image left out", loses="images"),
    "image-unread": Kind("image left out", loses="images"),  # its suffix is that of a format that is not read
    "image-16-bit": Kind(ASSUMED),
    "image-with-alpha": Kind(ASSUMED),
    "image-rotated": Kind(ASSUMED),  # only where the size that labels state does not show it
    "image-twice": Kind("counted once"),
    # only ``data check`` looks for this kind and the next four
    "image-undecodable": Kind("stops a training", loses="images"),
    "image-damaged": Kind("used as it is"),
    "image-dark": Kind("used as it is"),
    "image-in-two-splits": Kind("used in both"),
    "image-copy": Kind("used twice"),
    # an image without its labels would be trained on as background
    "labels-unreadable": Kind("image left out", loses="images"),
    "label-unreadable": Kind("dropped", loses="labels"),
    "label-of-pose": Kind("dropped", loses="labels"),
    "corners-boxed": Kind(ASSUMED),
    "polygons-or-poses": Kind(ASSUMED),
    "label-stray": Kind("dropped", loses="labels"),
    "label-twice": Kind("counted once"),
    "label-repeated": Kind(ASSUMED),  # in a format whose labels are objects of their own: all are used
    # names and labels disagree; build_index drops these labels if it is not strict
    "wrong-class": Kind("train refuses", loses="labels"),
    "box-not-finite": Kind("dropped", loses="labels"),
    "box-in-pixels": Kind("dropped", loses="labels"),
    "box-empty": Kind("dropped", loses="labels"),
    "box-outside": Kind("dropped", loses="labels"),
    "box-sticks-out": Kind("clipped"),
    "size-differs": Kind("boxes scaled"),
    "size-unsure": Kind("see the message"),  # what the stated size means is not certain
    "box-derived": Kind(ASSUMED),  # the box around polygons or a rotated box; the first of several
    "id-as-number": Kind(ASSUMED),  # the text "7" is the id 7
    "id-twice": Kind(ASSUMED),  # all entries are used; pycocotools or the results may differ
    "area-unreadable": Kind(ASSUMED),  # width x height is taken
    "mask-unreadable": Kind("used as a box"),
    "crowd-of-cvat": Kind(ASSUMED),  # a crowd region, although it may be one object that was painted
    "labels-without-image": Kind("not used"),
    "shape-without-box": Kind("not used"),
    "label-joined": Kind("part of another label"),
    "numbers-assumed": Kind(ASSUMED),  # the numbers of boxes mean something else than the format says
    "name-assumed": Kind(ASSUMED),  # a file was found under another name than the one that the labels state
}


Id = int | float | str  # of an image, an annotation or a category in COCO's files


@dataclass(frozen=True)
class Problem:
    """Something wrong with an image or label.

    Attributes:
        path: image or label file; relative to the data set if the file is inside it.
        line: 1-based, of a text file.
        what: what is wrong, with the values.
        kind: a key of ``KINDS``.
    """

    path: str
    line: int | None
    what: str
    kind: str

    @property
    def action(self) -> str:
        """Return what was done about it."""
        return KINDS[self.kind].action

    def below(self, root: Path) -> Problem:
        """Return the problem with a path relative to ``root`` if the file is inside it."""
        prefix = str(root).rstrip(os.sep) + os.sep
        return replace(self, path=self.path.removeprefix(prefix))

    @property
    def words(self) -> str:
        """Return place and problem in one line that is safe for a screen."""
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return screen_line(f"{place}: {self.what}")

    def __str__(self) -> str:
        return f"{self.words} -> {self.action}"


@dataclass
class ProblemLog:
    """Counts all problems and keeps the first ones in full.

    Attributes:
        kept: the first ``limit`` of ``count`` problems.
        kinds: number of labels or images that each kind of problem or assumption concerns.
        assumed: the assumptions, which are no problems.
    """

    limit: int = MAX_PROBLEMS_KEPT
    kept: list[Problem] = field(default_factory=list)
    assumed: list[Problem] = field(default_factory=list)
    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def rows_dropped(self) -> int:
        """Return the number of dropped labels, without stray ones, which belong to no image."""
        lost = (kind for kind, (_, loses) in KINDS.items() if loses == "labels" and kind != "label-stray")
        return sum(self.kinds[kind] for kind in lost)

    def add(self, problem: Problem, count: int = 1) -> None:
        """Add a problem or assumption that concerns ``count`` labels or images."""
        self.kinds[problem.kind] += count
        if problem.action == ASSUMED:
            self._assume(problem)
            return
        self.count += 1
        # A few wrong classes are kept beyond the limit, because the error about them must show examples.
        if len(self.kept) < self.limit or (problem.kind == "wrong-class" and self.kinds["wrong-class"] <= 10):
            self.kept.append(problem)

    def merge(self, later: ProblemLog) -> None:
        """Append the problems of another log."""
        self.count += later.count
        self.kinds.update(later.kinds)
        self.kept += later.kept[: max(0, self.limit - len(self.kept))]
        for problem in later.assumed:
            self._assume(problem)

    def _assume(self, problem: Problem) -> None:
        """Keep the first of equal assumptions; ``{count}`` in its text will be replaced by the number of its kind."""
        if all(problem.what != known.what for known in self.assumed):
            self.assumed.append(problem)

    def assumptions(self) -> tuple[str, ...]:
        """Return a line for each assumption."""
        return tuple(one.words.replace("{count}", str(self.kinds[one.kind])) for one in self.assumed)


OUTLINE_UNIT = 65535  # outlines are stored in this fraction of the image's sides: 0.01 px at 640 px


@dataclass(frozen=True)
class Outlines:
    """Polygons around the objects of M labels. An object may have several parts, or no polygon.

    Attributes:
        polygon_counts: int64 [M], polygons of each label.
        point_counts: int64 [Q], points of each polygon.
        points: [P, 2] x, y: float64 fractions of the image as they stand in the files, or uint16 in ``OUTLINE_UNIT``.
    """

    polygon_counts: np.ndarray
    point_counts: np.ndarray
    points: np.ndarray

    @staticmethod
    def none(labels: int) -> Outlines:
        """Return the outlines of labels that are boxes."""
        return Outlines(np.zeros(labels, np.int64), np.zeros(0, np.int64), np.zeros((0, 2)))

    def in_order(self, rows: np.ndarray) -> Outlines:
        """Return the outlines of these labels, int64 [m] row numbers, in this order."""
        polygons = ranges(offsets_of(self.polygon_counts)[rows], self.polygon_counts[rows])
        points = ranges(offsets_of(self.point_counts)[polygons], self.point_counts[polygons])
        return Outlines(self.polygon_counts[rows], self.point_counts[polygons], self.points[points])

    def packed(self) -> Outlines:
        """Return the outlines with points in ``OUTLINE_UNIT``, limited to the image."""
        with np.errstate(invalid="ignore"):
            points = np.rint(np.nan_to_num(self.points).clip(0, 1) * OUTLINE_UNIT).astype(np.uint16)
        return Outlines(self.polygon_counts, self.point_counts, points)

    def numbers(self) -> np.ndarray:
        """Return a number for each label of at most one polygon: int64 [M], the same for equal polygons; 0: a box."""
        parts = iter(np.split(self.points, np.cumsum(self.point_counts)[:-1]))
        return np.array([hash(next(parts).tobytes()) if has else 0 for has in self.polygon_counts.tolist()])


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Return where each group of these sizes begins, and the end: int64 [len(counts) + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def in_order(values: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the values of some groups, int64 [m] their numbers, in this order; each group has so many values."""
    chosen: np.ndarray = values[ranges(offsets_of(counts)[rows], counts[rows])]
    return chosen


class Parts(NamedTuple):
    """The polygons of an object of several parts, each x1, y1, x2, y2, ..."""

    parts: list[list[float]]


# of a label: one polygon x1, y1, x2, y2, ... ([]: it is a box), several polygons, or a bitmap
Outline = list[float] | Parts | Mask


@dataclass(frozen=True)
class RawLabels:
    """Labels of a range of images, as they stand in the files.

    Attributes:
        image: int64 [M], number of the image within the range, not decreasing.
        mark: int64 [M], line, annotation id or object number, for messages.
        values: float64 [M, 5], class number, cx, cy, w, h as fractions of the image.
        crowd: bool [M], a region that is neither learned nor counted as missed.
        area_px: float64 [M]; NaN means the area of the box.
        unlabelled: number of images without a label file.
        empty: number of images whose label file has no row, or which a file of all labels lists without one.
        unusable: images (as in ``image``) whose label file cannot be read. They are left out, because an image
            without its labels would be trained on as background.
        outlines: of the labels that are polygons; None: all are boxes.
        masks: of the labels that state run lengths or a bitmap, at the size of their image. Read only where masks are asked for.
    """

    image: np.ndarray
    mark: np.ndarray
    values: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    unlabelled: int = 0
    empty: int = 0
    unusable: tuple[int, ...] = ()
    outlines: Outlines | None = None
    masks: Mapping[int, Mask] = field(default_factory=dict)

    @staticmethod
    def of_rows(rows: Sequence[tuple[int, int, list[float], bool, Outline]], **counts: Any) -> RawLabels:
        """Return labels without areas; a row is (image, mark, values, crowd, its outline)."""
        image, mark, values, crowd, found = zip(*rows, strict=True) if rows else ((),) * 5
        masks = {row: one for row, one in enumerate(found) if isinstance(one, Mask)}
        of_label = [
            [] if row in masks else one.parts if isinstance(one, Parts) else [one] if one else []
            for row, one in enumerate(found)
        ]
        polygons = [polygon for parts in of_label for polygon in parts]
        points = [number for polygon in polygons for number in polygon]
        outlines = Outlines(
            np.array([len(parts) for parts in of_label], np.int64),
            np.array([len(polygon) // 2 for polygon in polygons], np.int64),
            np.array(points).reshape(-1, 2),
        )
        return RawLabels(
            np.array(image, np.int64),
            np.array(mark, np.int64),
            np.array(values, np.float64).reshape(len(rows), 5),
            np.array(crowd, bool),
            np.full(len(rows), np.nan),
            outlines=outlines if points else None,
            masks=masks,
            **counts,
        )


@dataclass(frozen=True)
class CleanLabels:
    """The verdict on ``RawLabels``.

    Attributes:
        keep: bool [M], rows that are usable.
        boxes_cxcywh_unit: float32 [M, 4], clipped if necessary; valid only where ``keep``.
        problems: (row, what, kind of problem), ordered by row.
    """

    keep: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    problems: list[tuple[int, str, str]]


def clean(raw: RawLabels, class_count: int, *, bare_rows: bool) -> CleanLabels:
    """Apply the rules about labels, and report each row that breaks one:

    - The class number is not a whole number from 0 to C-1: the row is dropped.
    - A number is not finite or exceeds ``MAX_FRACTION``, the box has no width or height, or it is wholly outside the
      image: the row is dropped.
    - The box sticks out by more than ``EDGE_TOLERANCE``, or its centre is outside: it is clipped.
    - The same class, box and polygon occur twice in an image: the first is kept if labels are ``bare_rows``, else all.

    A row that breaks no rule keeps its numbers exactly (float32 of the text).
    """
    classes = raw.values[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        boxes = raw.values[:, 1:].astype(np.float32)
        wide = boxes.astype(np.float64)
        low, high = wide[:, :2] - wide[:, 2:] / 2, wide[:, :2] + wide[:, 2:] / 2  # [M, 2] x and y
        wrong_class = ~((classes == np.floor(classes)) & (classes >= 0) & (classes < class_count))
        odd = np.asarray(~np.isfinite(wide).all(1))
        pixels = np.asarray(~odd & (np.abs(wide) > MAX_FRACTION).any(1))
        flat = np.asarray(~odd & ~pixels & (wide[:, 2:] <= 0).any(1))
        negative = flat & (wide[:, 2:] < 0).any(1)
        outside = ~odd & ~pixels & ~flat & ((high <= 0) | (low >= 1)).any(1)
        dropped = wrong_class | odd | pixels | flat | outside
        sticks_out = np.asarray((low < -EDGE_TOLERANCE).any(1) | (high > 1 + EDGE_TOLERANCE).any(1))
        sticks_out |= (wide[:, :2] < 0).any(1) | (wide[:, :2] > 1).any(1)
        sticks_out &= ~dropped
    if sticks_out.any():
        low, high = low[sticks_out].clip(0, 1), high[sticks_out].clip(0, 1)
        boxes[sticks_out] = np.concatenate([(low + high) / 2, high - low], axis=1)

    rules = (
        (sticks_out, "sticks out of the image", "box-sticks-out"),
        (odd, "is not finite", "box-not-finite"),
        (pixels & bare_rows, "is not given as fractions of the image (pixels?)", "box-in-pixels"),
        (pixels, "lies outside the image, or is more than twice as large", "box-outside"),
        (negative, "has no width or height: a side is negative (xmin > xmax?)", "box-empty"),
        (flat, "has no width or height", "box-empty"),
        (outside, "lies outside the image", "box-outside"),
    )
    problems: list[tuple[int, str, str]] = []
    unit = "" if bare_rows else " (cx cy w h, fractions)"
    for row in np.flatnonzero(dropped | sticks_out).tolist():
        shown = " ".join(f"{value:.6g}" for value in raw.values[row, 1:]) + unit
        if wrong_class[row]:
            what = f"class {classes[row]:.6g} but names has {class_count} (0..{class_count - 1})"
            problems.append((row, what, "wrong-class"))
        else:
            words, kind = next((words, kind) for broken, words, kind in rules if broken[row])
            problems.append((row, f"box {shown} {words}", kind))

    keep = ~dropped
    rows = np.flatnonzero(keep)
    repeats = _repeats(columns := [*boxes[rows].T, classes[rows], raw.image[rows]])
    if bare_rows and raw.outlines is not None and repeats.any():  # another polygon may have the same box
        numbers = raw.outlines.in_order(rows).numbers()
        repeats &= _repeats([*columns, numbers]) | (numbers == 0)
    for row in rows[repeats].tolist():
        keep[row] = not bare_rows
        problems.append((row, *(_TWICE if bare_rows else _REPEATED)))
    problems.sort()
    return CleanLabels(keep, boxes, problems)


_TWICE = ("repeats the class and box of an earlier row", "label-twice")
_REPEATED = ("a label repeats another one of its image (labels like this: {count})", "label-repeated")


def _repeats(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return which rows of columns [M] equal an earlier row: bool [M]."""
    order = np.lexsort(columns)  # a stable sort, so of equal rows the first comes first
    equal_before = [column[order[1:]] == column[order[:-1]] for column in columns]
    repeats = np.zeros(len(order), bool)
    repeats[order[1:][np.logical_and.reduce(equal_before)]] = True
    return repeats
