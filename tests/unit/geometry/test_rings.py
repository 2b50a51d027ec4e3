"""The compiled loops over outlines against NumPy: equal bits. What they compute is in test_mask_shapes.py."""

from __future__ import annotations

import numpy as np
import pytest

from yolofleet.data.geometry import rings as module
from yolofleet.data.geometry.rings import Rings, plain_cut, plain_raster

compiled = pytest.mark.skipif(not module.COMPILED, reason="installed without a C compiler")


def any_rings(rng: np.random.Generator) -> Rings:
    """Return rings in both directions, with labels that have none, many points on whole numbers, and stars that meet themselves."""
    lists = []
    for _ in range(int(rng.integers(0, 12))):
        own = []
        for _ in range(int(rng.integers(0, 4))):
            points = rng.uniform(-0.3, 1.3, (int(rng.integers(1, 30)), 2))
            if rng.random() < 0.5:
                points = np.rint(points * 8) / 8  # on the borders of pixels and of windows
            own.append(points)
        lists.append(own)
    return Rings.of(lists)


@compiled
def test_compiled_cuts_are_the_plain_ones():
    rng, cut_labels, dropped = np.random.default_rng(0), 0, 0
    for _ in range(400):
        rings, turned = any_rings(rng), bool(rng.random() < 0.5)
        factors, offsets = np.ones((len(rings), 2)), np.zeros((len(rings), 2))
        moves: tuple[np.ndarray | None, np.ndarray | None] = None, None
        if rng.random() < 0.5:
            moves = factors, offsets = rng.uniform(-1, 1, factors.shape), rng.uniform(-1, 1, factors.shape)
        low, high = rng.choice([0.0, 0.125, 0.21]), rng.choice([0.5, 0.77, 1.0])
        window = np.array([low, 0.0]), np.array([1.0, high])
        fast = rings.cut(window[0], window[1], moves[0], moves[1], turned=turned)
        plain = plain_cut(rings, window[0], window[1], factors, offsets, turned)
        for name in ("points", "lengths", "counts"):
            assert np.array_equal(getattr(fast.rings, name), getattr(plain.rings, name)), name
        assert np.array_equal(fast.is_cut, plain.is_cut) and np.array_equal(fast.boxes, plain.boxes)
        cut_labels += fast.is_cut.sum()
        dropped += len(rings.lengths) - len(fast.rings.lengths)
    assert cut_labels > 100 and dropped > 10


@compiled
def test_compiled_rasters_are_the_plain_ones():
    rng = np.random.default_rng(1)
    for _ in range(400):
        rings = any_rings(rng)
        size = int(rng.integers(1, 40)), int(rng.integers(1, 40))
        ends = [np.sort(rng.integers(0, side + 1, (len(rings), 2)), axis=1) for side in size]
        windows = np.concatenate(ends, axis=1)
        found = rings.in_windows(size, windows)
        plain = np.zeros_like(found)
        points = rings.points.astype(np.float64)
        plain_raster(points, rings.lengths, rings.counts, size, windows, plain)
        assert np.array_equal(found, plain)
        maps = zip(rings.rasters(size), windows.tolist(), strict=True)
        parts = [one[top:bottom, left:right].ravel() for one, (top, bottom, left, right) in maps]
        assert found.tolist() == [cell for part in parts for cell in part.tolist()]


def test_labels_are_chosen_with_their_rings():
    rng = np.random.default_rng(2)
    rings = Rings.joined([any_rings(rng) for _ in range(4)])
    lists = rings.lists()
    flags = rng.random(len(rings)) < 0.5
    for chosen in (flags, np.flatnonzero(flags)[::-1], np.array([], int), slice(1, 3)):
        expected = [lists[at] for at in np.arange(len(rings))[chosen]]
        found, plain = rings[chosen].lists(), rings.plain_rows(np.arange(len(rings))[chosen]).lists()
        assert str(found) == str(plain)
        assert [len(own) for own in found] == [len(own) for own in expected]
        assert all(
            np.array_equal(a, b)
            for x, y in zip(found, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
    turned = rings.reversed().lists()
    assert all(
        np.array_equal(a[::-1], b)
        for x, y in zip(turned, lists, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@compiled
def test_wrong_rings_are_refused():
    good = Rings.of([[np.zeros((3, 2))], [np.ones((4, 2))]]).scaled(np.ones(2), np.zeros(2))
    out, whole = np.zeros((2, 4, 4), np.uint8), np.array([[0, 4, 0, 4]] * 2)
    for lengths, counts in (
        ([3, 3], [1, 1]),
        ([3, 5], [1, 1]),
        ([3, 4], [1, 2]),
        ([3, 4], [1]),
        ([0, 7], [1, 1]),
        ([-1, 8], [1, 1]),
        ([3, 4], [2**62, 1]),
    ):
        with pytest.raises(ValueError, match="add up"):
            module._rings.raster(good.points, np.array(lengths), np.array(counts), (4, 4), whole, out)
    for size, windows in (((0, 4), whole), ((4, 3), whole), ((9, 9), np.add(whole, [0, 1, 0, 0])), ((4, 4), whole[:1]),
                          ((9, 9), whole - [1, 0, 0, 0]), ((9, 9), whole[:, [1, 0, 2, 3]])):  # fmt: skip
        with pytest.raises(ValueError, match="windows are"):
            module._rings.raster(
                good.points, good.lengths, good.counts, size, np.ascontiguousarray(windows), out
            )
    for points in (np.full((7, 2), np.nan), np.full((7, 2), np.inf), np.full((7, 2), -1e300)):
        module._rings.raster(points, good.lengths, good.counts, (4, 4), whole, out)
    for number in (-1, 2):
        with pytest.raises(IndexError):
            module._rings.take(good.points, good.lengths, good.counts, np.array([number]))
    small = np.empty((7, 2)), good.lengths.copy(), good.counts.copy(), np.empty(2, bool), np.empty((2, 4))
    with pytest.raises(ValueError, match="too small"):
        module._rings.cut(
            good.points,
            good.lengths,
            good.counts,
            np.ones((2, 2)),
            np.ones((2, 2)),
            False,
            (0.0, 0.0, 1.0, 1.0),
            *small,
        )
