"""The masks of labels as an index stores them: outlines whose direction says what is inside, and COCO's run lengths.

M labels. A label's mask stands in its file as polygons, of which each adds what is inside it, or as run lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from yolofleet.data.datasets.labels import OUTLINE_UNIT, Outlines, RawLabels
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.rings import Rings

_MOST_SIDES = 128  # of a polygon whose sides are compared: that takes less time than pixels
_DECIMALS = 9  # of pixels: a number of a file that became a fraction of the image's side is that number again


def masks_of(
    raw: RawLabels, keep: np.ndarray, sizes_wh: np.ndarray
) -> tuple[Outlines, np.ndarray, np.ndarray]:
    """Return the masks of the labels that ``keep`` marks: packed outlines, numbers of runs int64, and all runs uint32.

    Args:
        sizes_wh: [N, 2] pixels of the images of ``raw``.
    """
    rows = np.flatnonzero(keep)
    outlines = (raw.outlines or Outlines.none(len(keep))).in_order(rows)
    packed = outlines.packed()
    ends = np.cumsum(outlines.point_counts)[:-1]
    exact, rounded = (iter(np.split(points, ends)) for points in (outlines.points, packed.points))
    counts, runs, rings = [], [], []
    for row, polygons in zip(rows.tolist(), outlines.polygon_counts.tolist(), strict=True):
        width, height = size_wh = sizes_wh[raw.image[row]].tolist()
        own: list[np.ndarray] = []
        for_mask = [(next(exact), next(rounded)) for _ in range(polygons)]
        mask = raw.masks.get(row)
        found = mask.runs if mask else np.zeros(0, np.uint32)
        if polygons and not mask:
            pixels = [np.nan_to_num(np.round(points * size_wh, _DECIMALS)) for points, _ in for_mask]
            found = rle.from_polygons(pixels, (height, width))
            own = [ring for _, polygon in for_mask for ring in rings_of(polygon)]
        # polygons that cross themselves or leave the image are no such rings
        is_simple = polygons == len(own) == 1 and _is_simple(for_mask[0][0], own[0])
        if len(found) and not (is_simple or (own and _are_rings_of(found, own, (height, width)))):
            scale = OUTLINE_UNIT / np.array(size_wh)
            own = [np.rint(ring * scale).astype(np.uint16) for ring in rle.rings(found, (height, width))]
        counts.append(len(found))
        runs.append(found)
        rings.append(own)
    every = [ring for own in rings for ring in own]
    return (
        Outlines(
            np.array([len(own) for own in rings], np.int64),
            np.array([len(ring) for ring in every], np.int64),
            np.concatenate([np.zeros((0, 2), np.uint16), *every]),
        ),
        np.array(counts, np.int64),
        np.concatenate([np.zeros(0, np.uint32), *runs]),
    )


def _is_simple(points: np.ndarray, ring: np.ndarray) -> bool:
    """Return whether a polygon, fractions of the image, lies in it, and its ring has few sides that meet as neighbours only."""
    if len(ring) > _MOST_SIDES or points.min() < 0 or points.max() > 1:
        return False
    x, y = ring.astype(np.int64).T
    dx, dy = np.roll(x, -1) - x, np.roll(y, -1) - y
    # the side of each point
    of_line = np.sign(dx[:, None] * (y - y[:, None]) - dy[:, None] * (x - x[:, None]))
    meets = of_line * np.roll(of_line, -1, axis=1) <= 0
    return int((meets & meets.T).sum()) == 3 * len(ring)  # each with itself and its two neighbours


def _are_rings_of(runs: np.ndarray, rings: list[np.ndarray], size_hw: tuple[int, int]) -> bool:
    """Return whether rings, in ``OUTLINE_UNIT``, show a mask."""
    found = Rings.of([[ring / np.float32(OUTLINE_UNIT) for ring in rings]])
    left, top, width, height = rle.box(runs, size_hw[0])
    low, high = found.points.min(axis=0) * size_hw[::-1], found.points.max(axis=0) * size_hw[::-1]
    (x1, y1), (x2, y2) = np.floor(low).astype(int).tolist(), np.ceil(high).astype(int).tolist()
    if width:
        x1, y1, x2, y2 = min(x1, left), min(y1, top), max(x2, left + width), max(y2, top + height)
    shares = found.in_windows(size_hw, np.array([[y1, y2, x1, x2]])).reshape(y2 - y1, x2 - x1)
    return _are_alike(shares > 127, rle.decode(runs, size_hw, (x1, x2))[y1:y2])


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether no square of 3 x 3 pixels is inside one of two bitmaps alone."""
    wrong, square = (one != other).astype(np.uint8), np.ones((3, 3), np.uint8)
    return not cv2.erode(wrong, square, borderType=cv2.BORDER_CONSTANT, borderValue=0).any()


def rings_of(polygon: np.ndarray) -> list[np.ndarray]:
    """Return the rings of a polygon uint16 [k, 2], in which each part has a positive area.

    Programs that write one polygon for each object join its parts by a line that they walk twice, and its holes to the ring
    around them. So a polygon is divided where it comes back to a point. A ring within the largest one that turns the other way
    is a hole: its area is negative. Rings without area are left out.
    """
    points = polygon.astype(np.int64)
    keys = (points[:, 0] << 16 | points[:, 1]).tolist()
    loops = [list(range(len(keys)))] if len(set(keys)) == len(keys) else _loops(keys)
    rings = [(points[loop], signed_area(points[loop])) for loop in loops if len(loop) > 2]
    rings = [(ring, area) for ring, area in rings if area]
    largest, most = max(rings, key=lambda one: abs(one[1]), default=(points, 0))
    found = []
    for ring, area in rings:
        is_hole = area * most < 0 and _is_within(ring, largest)
        found.append((ring[::-1] if (area < 0) != is_hole else ring).astype(np.uint16))
    return found


def polygon_of(rings: Sequence[np.ndarray], runs: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """Return the rings of a mask, fractions of the image, as one polygon; rings along its pixels where parts overlap."""
    joined = joined_rings(rings)
    if len(rings) > 1:
        written = rle.from_polygons([joined.astype(np.float64) * size_hw[::-1]], size_hw)
        if not _are_alike(rle.decode(written, size_hw), rle.decode(runs, size_hw)):
            joined = joined_rings(rle.rings(runs, size_hw)) / size_hw[::-1]
    return joined


def joined_rings(rings: Sequence[np.ndarray]) -> np.ndarray:
    """Return rings [k, 2] as one polygon: lines that are walked twice, there and back, join parts and holes."""
    whole, *others = rings
    for ring in others:
        away = ((whole[:, None] - ring) ** 2).sum(axis=2)
        at, start = np.unravel_index(away.argmin(), away.shape)
        around = np.roll(ring, -int(start), axis=0)
        whole = np.concatenate([whole[: at + 1], around, around[:1], whole[at:]])
    return whole


def _loops(keys: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the points of each loop of a walk over points, which may come back to a point."""
    loops: list[list[int]] = []
    walk: list[int] = []
    place: dict[int, int] = {}
    for number, key in enumerate(keys):
        at = place.get(key)
        if at is None:
            place[key] = len(walk)
            walk.append(number)
            continue
        loops.append(walk[at:])
        for left in walk[at + 1 :]:
            del place[keys[left]]
        del walk[at + 1 :]
    return [walk, *loops]


def signed_area(ring: np.ndarray) -> float:
    """Return the area of a ring [k, 2], negative for a hole."""
    x, y = ring.T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


def _is_within(ring: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the middle of the first side of a ring lies in another one."""
    x, y = ring[:2].mean(axis=0) + 1e-3
    after = np.roll(other, -1, axis=0)
    crossed = (other[:, 1] <= y) != (after[:, 1] <= y)
    start, end = other[crossed], after[crossed]
    at = start[:, 0] + (y - start[:, 1]) * (end[:, 0] - start[:, 0]) / (end[:, 1] - start[:, 1])
    return bool((at > x).sum() % 2)
