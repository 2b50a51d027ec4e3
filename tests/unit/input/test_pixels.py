"""The compiled loops over pixels against NumPy and OpenCV: equal bytes. Both against the formulas."""

from typing import Any, cast

import cv2
import numpy as np
import pytest

from yolofleet.data.geometry.view import Look
from yolofleet.data.input import augment

compiled = pytest.mark.skipif(not augment.COMPILED, reason="installed without a C compiler")
GAINS = [(1.0, 1.0, 1.0), (1.013, 1.41, 0.77), (0.986, 0.32, 1.39), (2.0, 0.0, 1.0), (0.0, 3.5, 1.0)]


def colours() -> np.ndarray:
    """A quarter of a million colours, with all greys, all edges of the cube, and all sums of two channels."""
    rng = np.random.default_rng(0)
    level = np.arange(256)
    one, two = np.meshgrid(level, level)
    none = np.zeros_like(one)
    planes = [np.stack(order, axis=-1) for order in ((one, two, none), (none, one, two), (two, two, one))]
    return np.concatenate([*planes, rng.integers(0, 256, (256, 256, 3))]).astype(np.uint8)


@compiled
@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize(("mirrored", "upside_down"), [(False, False), (True, False), (False, True)])
def test_compiled_colours_are_the_plain_ones(gains, mirrored, upside_down):
    image = colours()
    fast, plain = np.empty_like(image), np.empty_like(image)
    look = Look(gains, mirrored, upside_down)
    augment.finish(image, look, fast)
    augment.plain_finish(image, look, plain)
    assert np.array_equal(fast, plain)


@compiled
def test_compiled_scenes_are_the_plain_ones():
    rng = np.random.default_rng(1)
    for _ in range(200):
        side, canvas, window_px = (int(n) for n in rng.integers(1, (97, 200, 260)))
        x1, y1 = (int(n) for n in rng.integers(-60, 150, 2))
        window = (x1, y1, window_px)
        placed = [
            (rng.integers(0, 256, (*rng.integers(1, 120, 2), 3), dtype=np.uint8), int(left), int(top))
            for left, top in rng.integers(-100, 150, (int(rng.integers(0, 10)), 2))
        ]
        for look in (None, Look(None, True, False), Look((1.01, 0.6, 1.3), bool(rng.integers(2)), True)):
            fast, plain = np.empty((2, side, side, 3), np.uint8)
            augment._pixels.render(placed, window, canvas, look, fast)
            augment.plain_crop(placed, window, canvas, look, plain)
            assert np.array_equal(fast, plain)


@pytest.mark.parametrize("finish", [pytest.param(augment.finish, marks=compiled), augment.plain_finish])
@pytest.mark.parametrize("gains", GAINS)
def test_colours_are_rounded_values_of_the_formula(finish, gains):
    """Hue, saturation and value of 8 bits as OpenCV computes them; the way back in float64, by sextants."""
    image = colours()
    out = np.empty_like(image)
    finish(image, Look(gains, False, False), out)
    h, s, v = np.moveaxis(cv2.cvtColor(image, cv2.COLOR_BGR2HSV).astype(np.float32), -1, 0)
    hue, saturation, value = np.float32(gains)
    h = np.trunc(h * hue) % 180 / 30
    s, v = np.minimum(np.trunc(s * saturation), 255) / 255, np.minimum(np.trunc(v * value), 255)
    sextant, fraction = h.astype(int), h.astype(float) % 1
    levels = np.stack([v, v * (1 - s * fraction), v * (1 - s), v * (1 - s * (1 - fraction))], axis=-1)
    which = np.array([[0, 3, 2], [1, 0, 2], [2, 0, 3], [2, 1, 0], [3, 2, 0], [0, 2, 1]])[sextant]
    assert np.abs(out - np.take_along_axis(levels, which, axis=-1)).max() < 0.5 + 1e-3


@pytest.mark.parametrize("finish", [pytest.param(augment.finish, marks=compiled), augment.plain_finish])
def test_gains_of_one_change_nothing_but_rounding(finish):
    image = colours()
    out = np.empty_like(image)
    finish(image, Look((1.0, 1.0, 1.0), False, False), out)
    assert np.abs(out.astype(int) - image[..., ::-1]).max() <= 5  # 8-bit HSV holds 180 hues
    finish(image, Look(None, False, False), out)
    assert np.array_equal(out, image[..., ::-1])


@compiled
def test_wrong_arrays_are_refused():
    good, look = np.zeros((4, 4, 3), np.uint8), Look(None, False, False)
    for wrong in (good[:, ::2], good[..., 0], good.astype(np.float32), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises((ValueError, BufferError)):
            augment.finish(wrong, look, good)
        with pytest.raises((ValueError, BufferError)):
            augment._pixels.render([(wrong, 0, 0)], (0, 0, 4), 4, look, good)
    read_only = good.copy()
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        augment.finish(good, look, read_only)
    with pytest.raises(ValueError, match="one size"):
        augment.finish(good, look, np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="square"):
        augment._pixels.render([], (0, 0, 4), 4, look, np.zeros((4, 5, 3), np.uint8))
    least, most = -(1 << 63), (1 << 63) - 1  # on most systems, of a C long
    for place in ((0, 0, 0), (least, 0, 4), (0, least, 4), (0, 0, most), (1 << 16, 0, 4)):
        with pytest.raises((ValueError, OverflowError), match=r"out of range|too large"):
            augment._pixels.render([], place, 4, look, good)
    for position in ((least, 0), (0, least), (most, 0), (0, most), (1 << 16, 0)):
        with pytest.raises((ValueError, OverflowError), match=r"out of range|too large"):
            augment._pixels.render([(good, *position)], (0, 0, 4), 4, look, good.copy())
    with pytest.raises(TypeError, match="a tile is"):
        augment._pixels.render(cast(Any, [None]), (0, 0, 4), 4, look, good)
    with pytest.raises(ValueError, match="gains"):
        augment.finish(good, Look((2.5, 1.0, 1.0), False, False), good)
