"""The masks of labels as an index stores them: outlines whose direction says what is inside, and COCO's run lengths.

M labels. A label's mask stands in its file as polygons, of which each adds what is inside it, or as run lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from yolofleet.data.datasets.labels import OUTLINE_UNIT, Outlines, RawLabels
from yolofleet.data.geometry import rle

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
        found = np.zeros(0, np.uint32)
        for_mask = [(next(exact), next(rounded)) for _ in range(polygons)]
        if mask := raw.masks.get(row):
            found = mask.runs
            scale = OUTLINE_UNIT / np.array(size_wh)
            own = [np.rint(ring * scale).astype(np.uint16) for ring in rle.rings(found, (height, width))]
        elif polygons:
            pixels = [np.nan_to_num(np.round(points * size_wh, _DECIMALS)) for points, _ in for_mask]
            found = rle.from_polygons(pixels, (height, width))
            own = [ring for _, polygon in for_mask for ring in rings_of(polygon)]
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


def rings_of(polygon: np.ndarray) -> list[np.ndarray]:
    """Return the rings of a polygon uint16 [k, 2], in which each part has a positive area.

    Programs that write one polygon for each object join its parts by a line that they walk twice, and its holes to the ring
    around them. So a polygon is divided where it comes back to a point. A ring within the largest one that turns the other way
    is a hole: its area is negative. Rings without area are left out.
    """
    points = polygon.astype(np.int64)
    keys = (points[:, 0] << 16 | points[:, 1]).tolist()
    loops = [list(range(len(keys)))] if len(set(keys)) == len(keys) else _loops(keys)
    rings = [(points[loop], _doubled_area(points[loop])) for loop in loops if len(loop) > 2]
    rings = [(ring, area) for ring, area in rings if area]
    largest, most = max(rings, key=lambda one: abs(one[1]), default=(points, 0))
    found = []
    for ring, area in rings:
        is_hole = area * most < 0 and _is_within(ring, largest)
        found.append((ring[::-1] if (area < 0) != is_hole else ring).astype(np.uint16))
    return found


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


def _doubled_area(ring: np.ndarray) -> int:
    after = np.roll(ring, -1, axis=0)
    return int((ring[:, 0] * after[:, 1] - after[:, 0] * ring[:, 1]).sum())


def _is_within(ring: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the middle of the first side of a ring lies in another one."""
    x, y = ring[:2].mean(axis=0) + 1e-3
    after = np.roll(other, -1, axis=0)
    crossed = (other[:, 1] <= y) != (after[:, 1] <= y)
    start, end = other[crossed], after[crossed]
    at = start[:, 0] + (y - start[:, 1]) * (end[:, 0] - start[:, 0]) / (end[:, 1] - start[:, 1])
    return bool((at > x).sum() % 2)
