"""Instance masks as COCO's run lengths: exact, and small for images of any size.

A mask of an image of height h and width w is uint32 [r], the lengths of runs of pixels, column by column: outside of the
object, inside, outside, ... The first may be 0, the others are at least 1, and their sum is h x w. Places are numbers of pixels
in that order, so row y of column x is place x * h + y.

Results are those of pycocotools, whose C code defines them, bit by bit: tests/unit/geometry/test_rle.py.

Legend: n masks, R runs of all of them, r of one, k points of a polygon, P pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from yolofleet.data.geometry.table import ranges

Runs = NDArray[np.uint32]
Places = NDArray[np.int64]

_FINER = 5  # COCO moves the corners of a polygon to a grid of fifths of a pixel
_LIMIT = 1 << 40  # of a place in fifths of a pixel, so that products with it are exact
_QUERIES_AT_ONCE = 1 << 19  # about 30 MB of temporaries
_CHARACTER_BITS, _MORE, _SIGN = 5, 0x20, 0x10
_MOST_CHARACTERS = 7  # of a number of 32 bits with its sign


class Mask(NamedTuple):
    """A mask, and the size (height, width) of its image in pixels."""

    size_hw: tuple[int, int]
    runs: Runs

    def coco(self) -> dict[str, Any]:
        """Return COCO's compressed form, for JSON."""
        return {"size": list(self.size_hw), "counts": to_text(self.runs)}


# making ---------------------------------------------------------------------------------------------------


def checked(runs: Sequence[Any] | NDArray[Any], size_hw: tuple[int, int]) -> Runs:
    """Return run lengths from a file in the form of this module. Raise ValueError, with the reason, if they fit no such image."""
    counts = np.asarray(runs)
    if counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu":
        raise ValueError("run lengths must be whole numbers")
    pixels = size_hw[0] * size_hw[1]
    if counts.min() < 0 or counts.max() > pixels:
        raise ValueError(f"a run length is {counts.min() if counts.min() < 0 else counts.max()}")
    ends = np.cumsum(counts, dtype=np.int64)
    if ends[-1] != pixels:
        raise ValueError(f"run lengths add up to {ends[-1]}, the image has {pixels} pixels")
    return _of_changes(ends[:-1], pixels)


def from_polygons(polygons: Sequence[NDArray[Any]], size_hw: tuple[int, int]) -> Runs:
    """Return the union of polygons [k, 2] x, y in pixels, which may leave the image."""
    pixels = size_hw[0] * size_hw[1]
    return union([_of_changes(_crossings(polygon, size_hw), pixels) for polygon in polygons], size_hw)


def _crossings(polygon: NDArray[Any], size_hw: tuple[int, int]) -> Places:
    """Return the places before which the outline of a polygon crosses the middle of a column.

    COCO draws each side as a line of points on the finer grid, and looks where it goes from the second to the third fifth of a
    column. These points are computed alone, with the same operations on float64.
    """
    height, width = size_hw
    fine = np.clip(np.trunc(_FINER * np.asarray(polygon, np.float64) + 0.5), -_LIMIT, _LIMIT).astype(np.int64)
    ends = np.concatenate([fine, np.roll(fine, -1, axis=0)], axis=1)  # [k, 4] x1, y1, x2, y2 of each side
    dx, dy = np.abs(ends[:, 2] - ends[:, 0]), np.abs(ends[:, 3] - ends[:, 1])
    flat = dx >= dy
    backwards = np.where(flat, ends[:, 0] > ends[:, 2], ends[:, 1] > ends[:, 3])
    ends[backwards] = ends[backwards][:, [2, 3, 0, 1]]
    low, high = ends[:, [0, 2]].min(axis=1), ends[:, [0, 2]].max(axis=1)
    first = np.maximum((low + 2) // _FINER, 0)
    count = np.maximum(np.minimum((high - 3) // _FINER, width - 1) - first + 1, 0)
    side = np.repeat(np.arange(len(count)), count)
    column = ranges(first, count)
    x1, y1, x2, y2 = ends[side].T
    x, flat = _FINER * column + 2, flat[side]
    slope = np.where(flat, (y2 - y1) / np.maximum(dx[side], 1), (x2 - x1) / np.maximum(dy[side], 1))
    on_flat = np.minimum(np.trunc(y1 + slope * (x - x1) + 0.5), np.trunc(y1 + slope * (x + 1 - x1) + 0.5))
    # on a steep side: the last step before the line is past x + 0.5
    steep_slope = np.where(flat, 1.0, slope)
    guess = np.floor((x + 0.5 - x1) / steep_slope)
    before = np.zeros_like(guess)
    for step in (-1, 0, 1):
        at = x1 + steep_slope * (guess + step) + 0.5
        before += np.where(steep_slope > 0, at < x + 1, at >= x + 1)
    y = np.where(flat, on_flat, y1 + guess + before - 2).astype(np.int64)
    places: Places = column * height + np.clip((y + 2) // _FINER, 0, height)
    return places


def union(masks: Sequence[Runs], size_hw: tuple[int, int]) -> Runs:
    """Return the mask of the pixels that are inside any of these."""
    if len(masks) == 1:
        return masks[0]
    pixels = size_hw[0] * size_hw[1]
    changes = [np.cumsum(runs[:-1], dtype=np.int64) for runs in masks]
    steps = [1 - 2 * (np.arange(len(places)) % 2) for places in changes]
    return _where_positive(
        np.concatenate([*changes, np.zeros(0, np.int64)]),
        np.concatenate([*steps, np.zeros(0, np.int64)]),
        pixels,
    )


def _where_positive(places: Places, steps: NDArray[np.int64], pixels: int) -> Runs:
    """Return the mask of the pixels where the sum of the steps at or before their place is above 0."""
    order = np.argsort(places, kind="stable")
    places, level = places[order], np.cumsum(steps[order])
    last = np.append(places[1:] != places[:-1], True)[: len(places)]
    inside = level[last] > 0
    return _of_changes(places[last][inside != np.append(False, inside[:-1])[: len(inside)]], pixels)


def _of_changes(places: Places, pixels: int) -> Runs:
    """Return the mask that changes before each of these places; two changes at one place cancel."""
    places = np.sort(places)
    first = np.flatnonzero(np.append(True, places[1:] != places[:-1])[: len(places)])
    odd = np.diff(np.append(first, len(places))) % 2 == 1
    places = places[first[odd]]
    return np.diff(places[places < pixels], prepend=0, append=pixels).astype(np.uint32)


def encode(
    inside: NDArray[np.bool_], size_hw: tuple[int, int] | None = None, corner_xy: tuple[int, int] = (0, 0)
) -> Runs:
    """Return the mask of a bitmap [h, w], which is the whole image, or a window of an image of ``size_hw`` at ``corner_xy``."""
    rows, columns = inside.shape
    height, width = size_hw or (rows, columns)
    bits = np.zeros((columns, rows + 2), np.int8)  # with a row outside above and below
    bits[:, 1:-1] = inside.T
    column, row = np.nonzero(bits[:, 1:] != bits[:, :-1])
    return _of_changes((column + corner_xy[0]) * height + row + corner_xy[1], height * width)


def decode(runs: Runs, size_hw: tuple[int, int], columns: tuple[int, int] | None = None) -> NDArray[np.bool_]:
    """Return the bitmap [h, w] of a mask, or only the columns from the first to below the second."""
    height, width = size_hw
    left, right = columns or (0, width)
    ends = np.clip(np.cumsum(runs, dtype=np.int64), left * height, right * height)
    inside = np.arange(len(runs)) % 2 == 1
    whole = np.repeat(inside, np.diff(ends, prepend=left * height))
    bitmap: NDArray[np.bool_] = whole.reshape(right - left, height).T
    return bitmap


# text -----------------------------------------------------------------------------------------------------


def to_text(runs: Runs) -> str:
    """Return COCO's compressed ``counts``: differences to the run before the last, in characters of five bits."""
    values = runs.astype(np.int64)
    values[3:] -= runs[1:-2]
    columns, live = [], np.ones(len(values), bool)
    while live.any():
        five = values & 0x1F
        values = values >> _CHARACTER_BITS
        more = live & np.where(five & _SIGN, values != -1, values != 0)
        columns.append(np.where(live, five + 48 + _MORE * more, 0))
        live = more
    characters = np.stack(columns, axis=1).astype(np.uint8)  # [r, characters], 0 after the last one
    return characters[characters > 0].tobytes().decode("ascii")


def from_text(text: str, size_hw: tuple[int, int]) -> Runs:
    """Return the mask of COCO's compressed ``counts``. Raise ValueError, with the reason, if it fits no such image."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64) - 48
    if not len(codes) or codes.min() < 0 or codes.max() >= 2 * _MORE:
        raise ValueError("counts has characters other than those of compressed run lengths")
    is_last = codes & _MORE == 0
    ends = np.flatnonzero(is_last) + 1
    lengths = np.diff(ends, prepend=0)
    if not is_last[-1] or lengths.max() > _MOST_CHARACTERS:
        raise ValueError(
            "counts ends within a number" if not is_last[-1] else "counts has too large a number"
        )
    place = np.arange(len(codes)) - np.repeat(ends - lengths, lengths)
    values = np.add.reduceat((codes & 0x1F) << _CHARACTER_BITS * place, ends - lengths)
    negative = codes[ends - 1] & _SIGN != 0
    values -= negative.astype(np.int64) << _CHARACTER_BITS * lengths
    if len(values) > size_hw[0] * size_hw[1] + 1:
        raise ValueError("counts has more runs than the image has pixels")
    for chain in (values[1::2], values[2::2]):
        np.cumsum(chain, out=chain)
    return checked(values, size_hw)


# facts ----------------------------------------------------------------------------------------------------


def area(runs: Runs) -> int:
    """Return the number of pixels inside."""
    return int(runs[1::2].sum(dtype=np.int64))


def box(runs: Runs, height: int) -> tuple[int, int, int, int]:
    """Return left, top, width, height in pixels of the smallest box around the mask; zeros without pixels inside."""
    changes = np.cumsum(runs, dtype=np.int64)[: len(runs) // 2 * 2]
    if not len(changes):
        return 0, 0, 0, 0
    first, last = changes[0::2], changes[1::2] - 1
    left, right = int(first[0]) // height, int(last[-1]) // height
    if (first // height < last // height).any():
        top, bottom = 0, height - 1
    else:
        top, bottom = int((first % height).min()), int((last % height).max())
    return left, top, right - left + 1, bottom - top + 1


# rings ----------------------------------------------------------------------------------------------------


def rings(runs: Runs, size_hw: tuple[int, int]) -> list[NDArray[np.int64]]:
    """Return the outlines of a mask along the edges of its pixels: [k, 2] x, y of the corners, in pixels.

    The signed area of an outer ring is positive, that of a hole negative. Parts that touch at a corner have rings of their own.
    """
    left, _, width, _ = box(runs, size_hw[0])
    if not width:
        return []
    bits = np.pad(decode(runs, size_hw, (left, left + width)), 1).astype(np.int8)
    a, b, c, d = bits[:-1, :-1], bits[:-1, 1:], bits[1:, :-1], bits[1:, 1:]  # the pixels around each corner
    crossed = (a == d) & (b == c) & (a != b)
    number = np.where(crossed, 2, (a + b + c + d) % 2)
    y, x = np.nonzero(number)
    twice = crossed[y, x]
    # A corner that two pixels share is two corners: that of the left edge, then that of the right one.
    at = np.repeat(np.arange(len(y)), 1 + twice)
    second = np.append(False, at[1:] == at[:-1])
    x, y = x[at], y[at]
    beside = np.arange(len(x)) ^ 1  # the other end of the horizontal edge: corners come in pairs of a row
    is_upper = np.where(crossed[y, x], second == (b[y, x] == 1), False)  # of two corners: has the edge above
    by_column = np.lexsort((crossed[y, x] & ~is_upper, y, x))
    below = np.empty_like(by_column)
    below[by_column] = by_column[np.arange(len(x)) ^ 1]  # the other end of the vertical edge
    # With the object at the right hand, a ring goes right above pixels inside, and left below them.
    goes_right = d[y[0::2], x[0::2]] == 1
    start = np.where(goes_right, np.arange(0, len(x), 2), np.arange(1, len(x), 2)).tolist()
    partner, turn = beside.tolist(), below.tolist()
    points, found, left_over = np.stack([x + left, y], axis=1), [], dict.fromkeys(start)
    while left_over:
        corner = first = next(iter(left_over))
        order = []
        while True:
            del left_over[corner]
            order += [corner, partner[corner]]
            corner = turn[partner[corner]]
            if corner == first:
                break
        found.append(points[order])
    return found


def from_rings(outlines: Sequence[NDArray[np.int64]], size_hw: tuple[int, int]) -> Runs:
    """Return the mask of the pixels around which rings along the edges of pixels wind more often forwards than backwards."""
    height, width = size_hw
    places, steps = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for ring in outlines:
        after = np.roll(ring, -1, axis=0)
        low, count = np.minimum(ring[:, 0], after[:, 0]), np.abs(after[:, 0] - ring[:, 0])
        columns = ranges(low, count)
        places.append(columns * height + np.repeat(ring[:, 1], count))
        steps.append(np.repeat(np.sign(after[:, 0] - ring[:, 0]), count))
    return _where_positive(np.concatenate(places), np.concatenate(steps), height * width)


# pairs ----------------------------------------------------------------------------------------------------


class RunTable:
    """Many masks, and what is needed to compare pairs of them.

    Args:
        runs: uint32 [R] of all masks, one after another.
        lengths: int64 [n] number of runs of each.
    Attributes:
        areas: int64 [n] pixels.
    """

    def __init__(self, runs: Runs, lengths: NDArray[np.int64]) -> None:
        self.lengths, self.first = lengths, np.cumsum(lengths) - lengths
        owner = np.repeat(np.arange(len(lengths)), lengths)
        self._is_inside = (np.arange(len(runs)) - self.first[owner]) % 2 == 1
        every, inside = np.cumsum(runs, dtype=np.int64), np.cumsum(runs * self._is_inside, dtype=np.int64)
        before, inside_before = (np.append(0, sums)[self.first] for sums in (every, inside))
        self._ends, self._inside = every - before[owner], inside - inside_before[owner]
        self._stride = int(self._ends.max(initial=0)) + 1
        self._keys = self._ends + owner * self._stride
        self.areas = np.append(0, inside)[self.first + lengths] - inside_before

    def boxes_xywh(self, heights: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [n, 4] the boxes of :func:`box`, for the heights [n] of the images in pixels."""
        on = np.flatnonzero(self._is_inside)
        of = np.searchsorted(self.first, on, side="right") - 1
        height = heights[of]
        (x1, y1), (x2, y2) = np.divmod(self._ends[on - 1], height), np.divmod(self._ends[on] - 1, height)
        y1, y2 = np.where(x1 < x2, 0, y1), np.where(x1 < x2, height - 1, y2)
        low, high = np.zeros((len(heights), 2), np.int64), np.full((len(heights), 2), -1)
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        if len(starts):
            low[of[starts]] = np.minimum.reduceat(np.stack([x1, y1], axis=1), starts)
            high[of[starts]] = np.maximum.reduceat(np.stack([x2, y2], axis=1), starts)
        return np.concatenate([low, high - low + 1], axis=1)

    def intersections(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [P] the number of pixels inside mask ``first[i]`` and mask ``second[i]``, of one image."""
        fewer = self.lengths[first] <= self.lengths[second]
        asking, asked = np.where(fewer, first, second), np.where(fewer, second, first)
        found = np.zeros(len(asking), np.int64)
        counts = self.lengths[asking] // 2 * 2
        for part in slices_of(counts, _QUERIES_AT_ONCE):
            count = counts[part]
            pair = np.repeat(np.arange(len(count)), count)
            step = ranges(0, count)
            ends = self._ends[self.first[asking[part]][pair] + step]
            run = np.searchsorted(self._keys, ends + asked[part][pair] * self._stride)
            below = self._inside[run] - np.where(self._is_inside[run], self._ends[run] - ends, 0)
            sums = np.append(0, np.cumsum(np.where(step % 2 == 1, below, -below)))
            borders = np.cumsum(count)
            found[part] = sums[borders] - sums[borders - count]
        return found


def slices_of(counts: NDArray[np.int64], most: int) -> Iterator[slice]:
    """Yield slices of rows whose counts add up to about ``most``."""
    blocks = np.cumsum(counts) // most
    borders = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1)) if len(counts) else np.zeros(1, int)
    for start, stop in itertools.pairwise(borders.tolist()):
        yield slice(start, stop)
