"""The outlines of masks as flat arrays: chosen, moved, cut by a window, and rasterised.

n labels, R rings, P points of all rings. A ring is closed, and its signed area is sum(x_i y_(i+1) - x_(i+1) y_i) / 2 with y
pointing down. A ring of positive area adds what is inside it, one of negative area takes it away: a hole, or what a pasted
object hides. A mask is where the sum of all windings is above 0.

``_rings.c`` cuts and rasterises in one pass over the points. Where that extension was not built, NumPy does the same with the same
bits (test_rings.py compares both), but takes ten times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from yolofleet.data.geometry.table import ranges

_VERSION = 2  # of the extension; an older one, from before an update of the sources, is not used
try:
    from yolofleet.data.geometry import _rings
except ImportError:  # installed without a C compiler
    COMPILED = False
else:
    COMPILED = _rings.VERSION == _VERSION

# of what is left of a ring after a cut, as a fraction of the image; less is a line along the border
SMALLEST_AREA = 1e-9
NUDGE = 1e-6  # from a corner of a window to a point inside it
MOST_FACTOR = 6  # each of four cuts leaves at most 1.5 times as many points


@dataclass(frozen=True)
class Rings:
    """The rings of labels, a column of a table.

    Attributes:
        points: [P, 2] x, y as fractions of the image: float32, and float64 while they move.
        lengths: int64 [R] number of points of each ring, at least 1.
        counts: int64 [n] number of rings of each label, in the order of the labels.
    """

    points: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, lists: Sequence[Sequence[np.ndarray]]) -> Rings:
        """Return the rings [k, 2] of each label."""
        rings = list(itertools.chain.from_iterable(lists))
        points = np.concatenate(rings, dtype=np.float32) if rings else np.zeros((0, 2), np.float32)
        return cls(points, _lengths(rings), _lengths(lists))

    @classmethod
    def joined(cls, parts: Sequence[Rings]) -> Rings:
        """Concatenate at least one."""
        return cls(
            np.concatenate([part.points for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, chosen: np.ndarray | slice) -> Rings:
        """Return the rings of the labels that ``chosen`` (numbers, flags or a slice) selects, in its order."""
        numbers = np.arange(len(self))[chosen]
        if COMPILED:
            points, *others = _rings.take(self.points, self.lengths, self.counts, numbers)
            lengths, counts = (np.frombuffer(one, np.int64) for one in others)
            return Rings(np.frombuffer(points, self.points.dtype).reshape(-1, 2), lengths, counts)
        return self.plain_rows(numbers)

    def plain_rows(self, numbers: np.ndarray) -> Rings:
        """Return the rings of the labels of these numbers, without the extension."""
        counts = self.counts[numbers]
        rings = ranges((np.cumsum(self.counts) - self.counts)[numbers], counts)
        lengths = self.lengths[rings]
        points = ranges((np.cumsum(self.lengths) - self.lengths)[rings], lengths)
        return Rings(self.points[points], lengths, counts)

    def lists(self) -> list[list[np.ndarray]]:
        """Return the rings of each label."""
        points = np.split(self.points, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []
        rest = iter(points)
        return [list(itertools.islice(rest, count)) for count in self.counts.tolist()]

    @property
    def points_per_label(self) -> np.ndarray:
        """int64 [n]."""
        ends = np.append(0, np.cumsum(self.lengths))[np.append(0, np.cumsum(self.counts))]
        return np.diff(ends)

    def scaled(self, factors: np.ndarray, offsets: np.ndarray) -> Rings:
        """Return the rings with points times the factor plus the offset of their label, float64 [n, 2] or [2]."""
        if factors.ndim == 2:
            per_label = self.points_per_label
            factors, offsets = factors.repeat(per_label, axis=0), offsets.repeat(per_label, axis=0)
        return replace(self, points=self.points * factors + offsets)

    def reversed(self) -> Rings:
        """Return the rings in the other direction."""
        last = np.cumsum(self.lengths)
        places = np.repeat(2 * last - self.lengths - 1, self.lengths) - np.arange(len(self.points))
        return replace(self, points=self.points[places])

    def cut(
        self,
        low: np.ndarray,
        high: np.ndarray,
        factors: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
        *,
        turned: bool = False,
    ) -> Cut:
        """Return the parts of the rings within a rectangle, [2] x, y of its corners.

        The parts of a ring stay one ring: lines along the border, which have no area, join them. Rings without area are dropped.

        Args:
            factors, offsets: float64 [n, 2]; the rings move as in :meth:`scaled` before the cut.
            turned: return the rings in the other direction.
        """
        labels = len(self)
        factors = np.ones((labels, 2)) if factors is None else factors
        offsets = np.zeros((labels, 2)) if offsets is None else offsets
        if not COMPILED:
            return plain_cut(self, low, high, factors, offsets, turned)
        points, lengths = np.empty((MOST_FACTOR * len(self.points), 2)), np.empty_like(self.lengths)
        counts, is_cut, boxes = np.empty_like(self.counts), np.empty(labels, bool), np.empty((labels, 4))
        outputs = points, lengths, counts, is_cut, boxes
        window = (*low.tolist(), *high.tolist())
        at, rings = _rings.cut(
            self.points, self.lengths, self.counts, factors, offsets, turned, window, *outputs
        )
        return Cut(Rings(points[:at], lengths[:rings], counts), is_cut, boxes)

    def rasters(self, size_hw: tuple[int, int]) -> np.ndarray:
        """Return the share of each pixel of a map over the whole image that is inside a mask: uint8 [n, h, w] in 1/255.

        Exact up to rounding, except where rings cross within a pixel.
        """
        height, width = size_hw
        windows = np.full((len(self), 4), [0, height, 0, width])
        return self.in_windows(size_hw, windows).reshape(-1, height, width)

    def in_windows(self, size_hw: tuple[int, int], windows: np.ndarray) -> np.ndarray:
        """Return the pixels of a window of each raster, one after the other: uint8 [sum of areas].

        Args:
            windows: int64 [n, 4] top, bottom, left and right of the windows, in pixels.
        """
        areas = (windows[:, 1] - windows[:, 0]) * (windows[:, 3] - windows[:, 2])
        out = np.zeros(int(areas.sum()), np.uint8)
        fill = _rings.raster if COMPILED else plain_raster
        points = np.ascontiguousarray(self.points, np.float64)
        fill(points, self.lengths, self.counts, size_hw, windows, out)
        return out


class Cut(NamedTuple):
    """What is left of rings.

    Attributes:
        is_cut: bool [n] whether a point of the label was outside.
        boxes: float64 [n, 4] x1, y1, x2, y2 of what is left of each mask; infinite if nothing is.
    """

    rings: Rings
    is_cut: np.ndarray
    boxes: np.ndarray


def _lengths(values: Sequence[Sequence[object]] | Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, values), np.int64, len(values))


# the same without the extension -----------------------------------------------------------------------------


def plain_cut(
    rings: Rings, low: np.ndarray, high: np.ndarray, factors: np.ndarray, offsets: np.ndarray, turned: bool
) -> Cut:
    """Do what ``Rings.cut`` does, without the extension (Sutherland and Hodgman)."""
    whole = rings.scaled(factors, offsets)
    whole = whole.reversed() if turned else whole
    labels = len(whole)
    owner = np.repeat(np.arange(labels), whole.counts)
    ring = np.repeat(np.arange(len(owner)), whole.lengths)
    is_cut = np.zeros(labels, bool)
    is_cut[owner[ring[((whole.points < low) | (whole.points > high)).any(axis=1)]]] = True

    rest, of = whole.points, ring
    for axis, bound, sign in ((0, low[0], 1), (0, high[0], -1), (1, low[1], 1), (1, high[1], -1)):
        is_in = (rest[:, axis] - bound) * sign >= 0
        if is_in.all():
            continue
        following = _following(of)
        crosses = is_in != is_in[following]
        start, stop = rest[crosses], rest[following[crosses]]
        share = (bound - start[:, axis]) / (stop[:, axis] - start[:, axis])
        slots, is_used = np.empty((len(is_in), 2, 2)), np.stack([is_in, crosses], axis=1)
        slots[:, 0] = rest
        crossings = start + share[:, None] * (stop - start)
        crossings[:, axis] = bound
        slots[crosses, 1] = crossings
        rest, of = slots[is_used], np.repeat(of, is_used.sum(axis=1))

    boxes = _boxes_of_rest(whole.points, owner[ring], _following(ring), rest, of, owner, low, high, labels)
    x, y = rest.T
    following = _following(of)
    areas = np.bincount(of, x * y[following] - x[following] * y, len(owner)) / 2
    lengths = np.bincount(of, minlength=len(owner))
    keep = (lengths > 0) & (~is_cut[owner] | (np.abs(areas) > SMALLEST_AREA))
    counts = np.bincount(owner[keep], minlength=labels)
    return Cut(Rings(rest[keep[of]], lengths[keep], counts), is_cut, boxes)


def _following(ring: np.ndarray) -> np.ndarray:
    """Return where the next point of the ring of each point is: int64 [P], from the number of the ring, ascending."""
    following, is_last = np.arange(1, len(ring) + 1), np.ones(len(ring), bool)
    is_last[:-1] = ring[1:] != ring[:-1]
    last = np.flatnonzero(is_last)
    following[last] = np.append(0, last[:-1] + 1)[: len(last)]
    return following


def _boxes_of_rest(
    whole: np.ndarray,
    label: np.ndarray,
    next_whole: np.ndarray,
    rest: np.ndarray,
    ring: np.ndarray,
    owner: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    labels: int,
) -> np.ndarray:
    """Return the ``boxes`` of ``Cut``.

    Lines along the border may have no area, so the box holds the ends of all other edges, and the corners of the rectangle that
    are inside of the mask.
    """
    boxes = np.concatenate([np.full((labels, 2), np.inf), np.full((labels, 2), -np.inf)], axis=1)
    lows, highs = boxes[:, :2], boxes[:, 2:]
    of, following = owner[ring], _following(ring)
    at_side = (rest == low) | (rest == high)
    is_border = ((rest == rest[following]) & at_side).any(axis=1)
    is_end = ~is_border
    is_end[following[~is_border]] = True
    if is_end.any():
        ends, of_ends = rest[is_end], of[is_end]
        starts = np.flatnonzero(np.append(True, of_ends[1:] != of_ends[:-1]))
        lows[of_ends[starts]] = np.minimum.reduceat(ends, starts)
        highs[of_ends[starts]] = np.maximum.reduceat(ends, starts)

    has_corner = np.zeros(labels, bool)
    has_corner[of[at_side.all(axis=1)]] = True
    if not has_corner.any():
        return boxes
    x, y = whole.T
    next_x, next_y = whole[next_whole].T
    for corner in itertools.product((0, 1), (0, 1)):
        at_x, at_y = np.where(corner, high - NUDGE, low + NUDGE).tolist()
        turns = np.sign(next_y - y) * ((y <= at_y) != (next_y <= at_y))
        crossing = np.flatnonzero(turns)
        slope = (next_x[crossing] - x[crossing]) / (next_y[crossing] - y[crossing])
        turns = turns[crossing] * (x[crossing] + (at_y - y[crossing]) * slope > at_x)
        inside = (np.bincount(label[crossing], turns, labels) > 0) & has_corner
        lows[inside] = np.minimum(lows[inside], np.where(corner, high, low))
        highs[inside] = np.maximum(highs[inside], np.where(corner, high, low))
    return boxes


def plain_raster(
    points: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    size_hw: tuple[int, int],
    windows: np.ndarray,
    out: np.ndarray,
) -> None:
    """Do what the extension does: fill ``out``, zeros, as ``Rings.in_windows`` returns it.

    Each edge adds to its cell the area to the right of it there, and its height to all cells further right, by one running
    sum: edges that go up add, edges that go down take away. So inside of a ring is 1 and the rest is exact areas.
    """
    if not len(points):
        return
    height, width = size_hw
    points = np.minimum(np.maximum(points * (width, height), 0.0), (width, height))
    owner = np.repeat(np.arange(len(counts)), counts)
    ring = np.repeat(np.arange(len(owner)), lengths)
    label = owner[ring]
    starts = np.flatnonzero(np.append(True, label[1:] != label[:-1]))
    low = np.floor(np.minimum.reduceat(points, starts)).astype(np.int64)
    sides = np.maximum(np.ceil(np.maximum.reduceat(points, starts)).astype(np.int64) - low, 1)
    stride = sides[:, 0] + 2  # an edge on the right border begins in a column beyond it
    begins = np.concatenate([[0], np.cumsum(stride * sides[:, 1])])
    number = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(label))))

    points -= low[number]
    ends = points[_following(ring)]
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
        np.stack([cell, cell + 1], axis=1).ravel(),
        np.stack([part - to_left, to_left], axis=1).ravel(),
        int(begins[-1]) + 1,
    )
    areas = (windows[:, 1] - windows[:, 0]) * (windows[:, 3] - windows[:, 2])
    places = (np.cumsum(areas) - areas).tolist()
    rows = zip(label[starts].tolist(), low.tolist(), sides.tolist(), begins[:-1].tolist(), strict=True)
    for one, (x, y), (w, h), start in rows:
        share = np.cumsum(sums[start : start + (w + 2) * h]).reshape(h, w + 2)[:, :w]
        levels = (np.minimum(np.maximum(share, 0), 1) * 255 + 0.5).astype(np.uint8)
        top, bottom, left, right = windows[one].tolist()
        window = out[places[one] : places[one] + areas[one]].reshape(bottom - top, right - left)
        from_x, to_x, from_y, to_y = max(x, left), min(x + w, right), max(y, top), min(y + h, bottom)
        if from_x < to_x and from_y < to_y:
            seen = levels[from_y - y : to_y - y, from_x - x : to_x - x]
            window[from_y - top : to_y - top, from_x - left : to_x - left] = seen


def _cells_between(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit cells that intervals [m] meet, at least one of each: the number of the interval, and the cell."""
    first = np.floor(low).astype(np.int64)
    counts = np.maximum(np.ceil(high).astype(np.int64) - first, 1)
    return np.repeat(np.arange(len(low)), counts), ranges(first, counts)
