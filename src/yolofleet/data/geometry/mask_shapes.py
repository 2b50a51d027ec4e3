"""Labels with instance masks: polygons that move with their boxes, and their rasters for a loss.

n labels, R rings, P points of all rings. A ring is closed, its points are x, y as fractions of the image, and its signed area is
sum(x_i y_(i+1) - x_(i+1) y_i) / 2 with y pointing down. A ring of positive area adds what is inside it, one of negative area
takes it away: a hole, or what a pasted object hides. A mask is where the sum of all windings is above 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.shapes import LARGEST_ASPECT, SMALLEST_AREA_LEFT, SMALLEST_SIDE_PX, Shapes
from yolofleet.data.geometry.table import as_objects
from yolofleet.data.geometry.view import Look, View

if TYPE_CHECKING:
    from typing_extensions import Self

# of what is left of a ring after a cut, as a fraction of the image; less is a line along the border
SMALLEST_AREA = 1e-9
NUDGE = 1e-6  # from a corner of a window to a point inside it


@dataclass(frozen=True)
class MaskShapes(Shapes):
    """Labels with masks.

    Attributes:
        rings: object [n], of each label a list of float32 [k, 2]. An empty list: it has a box and no mask.
    """

    rings: np.ndarray

    @classmethod
    def of_image(
        cls, classes: np.ndarray, boxes: np.ndarray, rings: Sequence[list[np.ndarray]] | None = None
    ) -> Self:
        """Return the labels of one image; without ``rings`` they have no masks."""
        rings = [[] for _ in classes] if rings is None else rings
        return cls(rings=as_objects(rings), **vars(Shapes.of_image(classes, boxes)))

    @property
    def has_mask(self) -> np.ndarray:
        """bool [n]."""
        return np.fromiter(map(bool, self.rings), bool, len(self))

    def mapped(self, places: np.ndarray, view: View, look: Look) -> Self:
        """Return the labels as the network sees them; drop those of which too little is left.

        The box of a mask that was cut or turned is the box of what is left of it. It is never larger than the moved box.
        """
        numbered = replace(self, image=np.arange(len(self)))
        moved = super(MaskShapes, numbered).mapped(places, view, look)
        kept, moved = moved.image, replace(moved, image=self.image[moved.image])
        rings = _Rings.of(moved.rings)
        if not len(rings.points):
            return moved

        shown = np.array(view.shown_hw[::-1])
        flips = np.array([look.mirrored, look.upside_down])
        stretch = np.where(flips, -1, 1) / shown  # from pixels of the output to fractions of what is shown
        shift = flips - (view.output_px - shown) / 2 * stretch
        at = places[kept][rings.label]
        rings = rings._replace(points=rings.points * at[:, :2] + at[:, 2:])  # to pixels of the canvas
        matrix, canvas = view.to_output, np.array([[0.0], [view.canvas_px]]) * np.ones(2)
        low, high = np.zeros(2), np.ones(2)
        if view.is_crop:
            factor, offset = view.scale * stretch, matrix[:2, 2] * stretch + shift
            rings = rings._replace(points=rings.points * factor + offset)
            border = np.sort(canvas * factor + offset, axis=0)
            low, high = np.maximum(border[0], low), np.minimum(border[1], high)
        else:
            rings = rings.clipped(*canvas)
            points = rings.points @ matrix[:2, :2].T + matrix[:2, 2]
            points /= rings.points @ matrix[2:, :2].T + 1
            rings = rings._replace(points=points * stretch + shift)
        if flips[0] != flips[1]:
            rings = rings.reversed()

        outside = ((rings.points < low) | (rings.points > high)).any(axis=1)
        is_cut = np.zeros(len(moved), bool)
        is_cut[rings.label[outside]] = True
        is_new = is_cut if view.is_crop else moved.has_mask
        if not is_new.any():
            return replace(moved, rings=rings.lists(len(moved)))
        of_new = is_new[rings.label]
        whole, others = rings.of_points(of_new), rings.of_points(~of_new)
        rest = whole.clipped(low, high)
        corners = _box_of_rest(whole, rest, low, high, len(moved))
        rings = rest.without_slivers(is_cut).beside(others)
        boxes = moved.boxes.astype(np.float64)
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        corners = np.stack([np.maximum(corners[0], middle - half), np.minimum(corners[1], middle + half)])
        sides = (corners[1] - corners[0]) * shown
        before = self.rows(kept)._in_canvas(places[kept], view)
        shorter, longer = sides.min(axis=1), sides.max(axis=1)
        keep = (shorter > SMALLEST_SIDE_PX) & (longer < LARGEST_ASPECT * shorter)
        keep &= shorter * longer > SMALLEST_AREA_LEFT * before
        lists = rings.lists(len(moved))
        keep &= np.fromiter(map(bool, lists), bool, len(moved))
        changed = keep & is_new
        low, high = corners[:, changed]
        boxes[changed] = np.concatenate([(low + high) / 2, high - low], axis=1)
        return replace(moved, boxes=boxes.astype(np.float32), rings=lists).rows(keep | ~is_new)

    def _in_canvas(self, places: np.ndarray, view: View) -> np.ndarray:
        """Return the area of the part of each box within the canvas, in pixels of the output: [n]."""
        centre = self.boxes[:, :2] * places[:, :2] + places[:, 2:]
        half = self.boxes[:, 2:] * places[:, :2] / 2
        sides = np.minimum(centre + half, view.canvas_px) - np.maximum(centre - half, 0)
        area: np.ndarray = (sides * view.scale).prod(axis=1)
        return area

    def letterboxed(self, size_wh: np.ndarray, back: Letterbox) -> Self:
        size, pad = np.array(back.size_hw[::-1]), np.array([back.pad_left, back.pad_top])
        rings = _Rings.of(self.rings)
        points = (rings.points * size_wh * back.ratio + pad) / size
        return replace(
            super().letterboxed(size_wh, back), rings=rings._replace(points=points).lists(len(self))
        )

    def with_pasted(
        self, pasted: Sequence[tuple[int, np.ndarray, list[np.ndarray]]], size_wh: np.ndarray
    ) -> Self:
        """Return these labels without what the pasted objects hide, and those of the objects, each on top of those before."""
        labels = self
        width, height = size_wh.tolist()
        for number, box, polygons in pasted:
            rings = [(polygon / size_wh).astype(np.float32) for polygon in polygons]
            middle, sides = (box[:2] + box[2:]) / 2 / size_wh, (box[2:] - box[:2]) / size_wh
            new = self.of_image(np.array([number]), np.concatenate([middle, sides])[None], [rings])
            corners = labels.corners_px(width, height)
            meets = ((corners[:, :2] < box[2:]) & (corners[:, 2:] > box[:2])).all(axis=1) & labels.has_mask
            below = labels.rows(meets)._without(rings, size_wh)
            labels = (
                self.joined([labels.rows(~meets), below, new]) if meets.any() else self.joined([labels, new])
            )
        return labels

    def _without(self, hiding: list[np.ndarray], size_wh: np.ndarray) -> Self:
        """Return what of these masks is left beside some rings, and without the labels of which nothing is left.

        A side of a box moves if more than a pixel of it is hidden.
        """
        width, height = size_wh.tolist()
        boxes, rings, is_left = self.corners_px(width, height), [], []
        for own, box in zip(self.rings, boxes, strict=True):
            cover = _Rings.of(as_objects([hiding])).clipped(box[:2] / size_wh, box[2:] / size_wh)
            # where parts of the mask overlap, its winding is their number
            rings.append([*own, *cover.reversed().lists(1)[0] * len(own)])
            seen = _Rings.of(as_objects(rings[-1:])).coverage((height, width), 1)[0].box()
            is_left.append(seen is not None)
            if seen is not None:
                inner = np.append(np.maximum(seen[:2], box[:2]), np.minimum(seen[2:], box[2:]))
                box[:] = np.where(np.abs(inner - box) > 1, inner, box)
        low, high = boxes[:, :2] / size_wh, boxes[:, 2:] / size_wh
        changed = np.concatenate([(low + high) / 2, high - low], axis=1).astype(np.float32)
        return replace(self, boxes=changed, rings=as_objects(rings)).rows(np.array(is_left, bool))

    def rasters(self, size_hw: tuple[int, int]) -> np.ndarray:
        """Return the share of each pixel of a map over the whole image that is inside a mask: uint8 [n, h, w] in 1/255.

        Exact up to rounding, except where rings cross within a pixel.
        """
        rasters = np.zeros((len(self), *size_hw), np.uint8)
        for raster, (left, top, cells) in zip(
            rasters, _Rings.of(self.rings).coverage(size_hw, len(self)), strict=True
        ):
            height, width = cells.shape
            raster[top : top + height, left : left + width] = cells
        return rasters

    def __reduce__(self) -> tuple[Any, ...]:
        # thousands of small arrays take 10 times as long between processes as three large ones
        rings = list(itertools.chain.from_iterable(self.rings))
        lengths = np.fromiter(map(len, rings), np.int64, len(rings))
        points = np.concatenate(rings) if rings else np.zeros((0, 2), np.float32)
        counts = np.fromiter(map(len, self.rings), np.int64, len(self))
        return _unpacked, (self.image, self.classes, self.boxes, points, lengths, counts)


def _unpacked(image: np.ndarray, classes: np.ndarray, boxes: np.ndarray, *rings: np.ndarray) -> MaskShapes:
    points, lengths, counts = rings
    numbers = np.repeat(np.arange(len(counts)), counts)
    ring = np.repeat(np.arange(len(lengths)), lengths)
    return MaskShapes(image, classes, boxes, _Rings(points, ring, numbers).lists(len(counts)))


class _Cells(NamedTuple):
    """The part of a raster around a mask: the column and row of its corner, and uint8 [h, w]."""

    left: int
    top: int
    cells: np.ndarray

    def box(self) -> np.ndarray | None:
        """Return the box x1, y1, x2, y2 around the pixels of which at least half is inside; None if there is no such pixel."""
        rows, columns = (np.flatnonzero((self.cells > 127).any(axis=axis)) for axis in (1, 0))
        if not len(rows):
            return None
        corner = self.left, self.top
        return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) + corner * 2


class _Rings(NamedTuple):
    """The rings of some labels as flat arrays, in the order of the labels."""

    points: np.ndarray  # float64 [P, 2]
    ring: np.ndarray  # int64 [P], ascending; numbers may be missing
    owners: np.ndarray  # int64 [R] the label of each ring, ascending

    @classmethod
    def of(cls, lists: np.ndarray) -> _Rings:
        rings = list(itertools.chain.from_iterable(lists))
        owners = np.repeat(np.arange(len(lists)), np.fromiter(map(len, lists), np.int64, len(lists)))
        points = np.concatenate(rings, dtype=np.float64) if rings else np.zeros((0, 2))
        ring = np.repeat(np.arange(len(rings)), np.fromiter(map(len, rings), np.int64, len(rings)))
        return cls(points, ring, owners)

    @property
    def label(self) -> np.ndarray:
        """int64 [P] the label of each point."""
        label: np.ndarray = self.owners[self.ring]
        return label

    def lists(self, labels: int) -> np.ndarray:
        """Return the rings of each label as ``MaskShapes`` has them: object [labels]."""
        result: list[list[np.ndarray]] = [[] for _ in range(labels)]
        points, first, last = self.points.astype(np.float32), *self._ends()
        numbers = self.label[first].tolist()
        for label, start, stop in zip(numbers, first.tolist(), (last + 1).tolist(), strict=True):
            result[label].append(points[start:stop])
        return as_objects(result)

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the first and the last point of each ring are."""
        borders = np.flatnonzero(self.ring[1:] != self.ring[:-1])
        count = [len(self.ring) - 1] if len(self.ring) else []
        last = np.concatenate([borders, np.array(count, np.int64)])
        return last - np.diff(last, prepend=-1) + 1, last

    def of_points(self, chosen: np.ndarray) -> _Rings:
        """Return the rings without the points that ``chosen`` does not mark, bool [P]."""
        return self._replace(points=self.points[chosen], ring=self.ring[chosen])

    def beside(self, others: _Rings) -> _Rings:
        """Return these rings and other ones of the same labels."""
        ring = np.concatenate([self.ring, others.ring])
        order = np.argsort(ring, kind="stable")
        return self._replace(points=np.concatenate([self.points, others.points])[order], ring=ring[order])

    def following(self) -> np.ndarray:
        """Return where the next point of the ring of each point is: int64 [P]."""
        following, (first, last) = np.arange(1, len(self.ring) + 1), self._ends()
        following[last] = first
        return following

    def reversed(self) -> _Rings:
        """Return the rings in the other direction."""
        first, last = self._ends()
        ends = np.repeat(first + last, last - first + 1)
        return self._replace(points=self.points[ends - np.arange(len(ends))])

    def clipped(self, low: np.ndarray, high: np.ndarray) -> _Rings:
        """Return the parts of the rings within a rectangle, [2] x, y of its corners (Sutherland and Hodgman).

        The parts of a ring stay one ring: lines along the border, which have no area, join them.
        """
        rings = self
        for axis, bound, sign in ((0, low[0], 1), (0, high[0], -1), (1, low[1], 1), (1, high[1], -1)):
            is_in = (rings.points[:, axis] - bound) * sign >= 0
            if is_in.all():
                continue
            following = rings.following()
            crosses = is_in != is_in[following]
            start, stop = rings.points[crosses], rings.points[following[crosses]]
            share = (bound - start[:, axis]) / (stop[:, axis] - start[:, axis])
            slots, is_used = np.empty((len(is_in), 2, 2)), np.stack([is_in, crosses], axis=1)
            slots[:, 0] = rings.points
            crossings = start + share[:, None] * (stop - start)
            crossings[:, axis] = bound
            slots[crosses, 1] = crossings
            rings = _Rings(slots[is_used], np.repeat(rings.ring, is_used.sum(axis=1)), rings.owners)
        return rings

    def without_slivers(self, of: np.ndarray) -> _Rings:
        """Return the rings without those of no area, of the labels that ``of`` marks."""
        x, y = self.points.T
        following = self.following()
        areas = np.bincount(self.ring, x * y[following] - x[following] * y, len(self.owners)) / 2
        return self.of_points((~of[self.owners] | (np.abs(areas) > SMALLEST_AREA))[self.ring])

    def coverage(self, size_hw: tuple[int, int], labels: int) -> list[_Cells]:
        """Return the part of a raster of the whole image around each mask.

        Each edge adds to its cell the area to the right of it there, and its height to all cells further right, by one running
        sum: edges that go up add, edges that go down take away. So inside of a ring is 1 and the rest is exact areas.
        """
        nothing = _Cells(0, 0, np.zeros((0, 0), np.uint8))
        if not len(self.points):
            return [nothing] * labels
        height, width = size_hw
        points = np.minimum(np.maximum(self.points * (width, height), 0.0), (width, height))
        label = self.label
        starts = np.flatnonzero(np.append(True, label[1:] != label[:-1]))
        low = np.floor(np.minimum.reduceat(points, starts)).astype(np.int64)
        sides = np.maximum(np.ceil(np.maximum.reduceat(points, starts)).astype(np.int64) - low, 1)
        stride = sides[:, 0] + 2  # an edge on the right border begins in a column beyond it
        begins = np.concatenate([[0], np.cumsum(stride * sides[:, 1])])
        number = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(label))))

        points -= low[number]
        ends = points[self.following()]
        sloped = points[:, 1] != ends[:, 1]
        points, ends, number = points[sloped], ends[sloped], number[sloped]
        goes_up = points[:, 1] > ends[:, 1]
        upper, lower = (np.where(goes_up[:, None], *pair) for pair in ((ends, points), (points, ends)))
        edge, row = _cells_between(upper[:, 1], lower[:, 1])
        (x_upper, y_upper), (x_lower, y_lower) = upper.T, lower.T
        slope = (x_lower - x_upper) / (y_lower - y_upper)
        top, bottom = np.maximum(y_upper[edge], row), np.minimum(y_lower[edge], row + 1)
        most = np.maximum(x_upper, x_lower)[edge]
        x_top, x_bottom = (
            np.minimum(np.maximum(x_upper[edge] + (y - y_upper[edge]) * slope[edge], 0), most)
            for y in (top, bottom)
        )
        signed = np.where(goes_up[edge], bottom - top, top - bottom)
        begin = begins[number[edge]] + row * stride[number[edge]]

        left, right = np.minimum(x_top, x_bottom), np.maximum(x_top, x_bottom)
        piece, column = _cells_between(left, right)
        left, right = left[piece], right[piece]
        inner_left, inner_right = np.maximum(left, column), np.minimum(right, column + 1)
        across = right - left
        # a line straight down has one piece
        part = np.divide(inner_right - inner_left, across, out=np.ones_like(across), where=across > 0)
        part *= signed[piece]
        to_left = part * ((inner_left + inner_right) / 2 - column)
        cell = begin[piece] + column
        sums = np.bincount(
            np.concatenate([cell, cell + 1]), np.concatenate([part - to_left, to_left]), int(begins[-1]) + 1
        )
        share = np.cumsum(sums)
        np.minimum(np.maximum(share, 0, out=share), 1, out=share)
        levels = (share * 255 + 0.5).astype(np.uint8)

        result = [nothing] * labels
        rows = zip(label[starts].tolist(), low.tolist(), sides.tolist(), begins[:-1].tolist(), strict=True)
        for owner, (x, y), (w, h), start in rows:
            window = levels[start : start + (w + 2) * h].reshape(h, w + 2)
            result[owner] = _Cells(x, y, window[:, :w])
        return result


def _cells_between(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit cells that intervals [m] meet, at least one of each: the number of the interval, and the cell."""
    first = np.floor(low).astype(np.int64)
    counts = np.maximum(np.ceil(high).astype(np.int64) - first, 1)
    owner = np.repeat(np.arange(len(low)), counts)
    return owner, np.arange(len(owner)) + np.repeat(first - np.cumsum(counts) + counts, counts)


def _box_of_rest(whole: _Rings, rest: _Rings, low: np.ndarray, high: np.ndarray, labels: int) -> np.ndarray:
    """Return the corners of the box of what is left of each mask within a rectangle: [2, labels, 2]; infinite if nothing is.

    Lines along the border may have no area, so the box holds the ends of all other edges, and the corners of the rectangle that
    are inside of the mask.
    """
    lows, highs = np.full((labels, 2), np.inf), np.full((labels, 2), -np.inf)
    start, following = rest.points, rest.following()
    at_side = (start == low) | (start == high)
    is_border = ((start == start[following]) & at_side).any(axis=1)
    is_end = ~is_border
    is_end[following[~is_border]] = True
    points, label = start[is_end], rest.label[is_end]
    if len(points):
        starts = np.flatnonzero(np.append(True, label[1:] != label[:-1]))
        lows[label[starts]] = np.minimum.reduceat(points, starts)
        highs[label[starts]] = np.maximum.reduceat(points, starts)

    if not at_side.all(axis=1).any():  # no ring goes through a corner
        return np.stack([lows, highs])
    x, y = whole.points.T
    next_x, next_y = whole.points[whole.following()].T
    for corner in itertools.product((0, 1), (0, 1)):
        at_x, at_y = np.where(corner, high - NUDGE, low + NUDGE).tolist()
        turns = np.sign(next_y - y) * ((y <= at_y) != (next_y <= at_y))
        crossing = np.flatnonzero(turns)
        slope = (next_x[crossing] - x[crossing]) / (next_y[crossing] - y[crossing])
        turns = turns[crossing] * (x[crossing] + (at_y - y[crossing]) * slope > at_x)
        inside = np.bincount(whole.label[crossing], turns, labels) > 0
        lows[inside] = np.minimum(lows[inside], np.where(corner, high, low))
        highs[inside] = np.maximum(highs[inside], np.where(corner, high, low))
    return np.stack([lows, highs])
