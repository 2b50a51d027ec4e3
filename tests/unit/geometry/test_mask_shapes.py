"""Masks move with their boxes, are cut with them, and are rasterised by area; numbers are worked by hand or by brute force."""

from __future__ import annotations

import pickle

import cv2
import numpy as np
import pytest

from yolofleet.data.geometry.letterbox import letterbox
from yolofleet.data.geometry.mask_shapes import MaskShapes
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.geometry.view import Look, View

STILL = Look(None, False, False)
SQUARE = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)  # of positive area


def square(x1: float, y1: float, x2: float, y2: float) -> np.ndarray:
    return (SQUARE * [x2 - x1, y2 - y1] + [x1, y1]).astype(np.float32)


def box_around(*rings: np.ndarray) -> list[float]:
    points = np.concatenate(rings)
    low, high = points.min(0), points.max(0)
    return [*((low + high) / 2), *(high - low)]


def labels_of(*rings: list[np.ndarray]) -> MaskShapes:
    """Return a label for each list of rings, with the box around them."""
    boxes = np.array([box_around(*own) for own in rings]).reshape(-1, 4)
    return MaskShapes.of_image(np.arange(len(rings)), boxes, list(rings))


def blobs(seed: int, count: int, points: int = 40) -> MaskShapes:
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(count):
        turn = np.sort(rng.random(points)) * 2 * np.pi
        radius = rng.uniform(0.02, 0.12) * rng.uniform(0.5, 1, points)
        ring = rng.uniform(0.15, 0.85, 2) + np.stack([np.cos(turn), np.sin(turn)], 1) * radius[:, None]
        lists.append([ring.astype(np.float32)])
    return labels_of(*lists)


def crop(
    scale: float, left: float, top: float, canvas: int, output: int, shown_hw: tuple[int, int] | None = None
) -> View:
    matrix = np.array([[scale, 0, -left * scale], [0, scale, -top * scale], [0, 0, 1]])
    side = round(output / scale)
    window = (round(left), round(top), round(left) + side, round(top) + side)
    return View(matrix, scale, window, True, canvas, output, shown_hw or (output, output))


def warp(matrix: np.ndarray, scale: float, canvas: int, output: int) -> View:
    return View(matrix, scale, (0, 0, canvas, canvas), False, canvas, output, (output, output))


def winding_raster(rings: list[np.ndarray], size_hw: tuple[int, int], fine: int) -> np.ndarray:
    """Return the share of points of a fine grid in each pixel that rings wind around."""
    height, width = size_hw
    y, x = np.mgrid[0 : height * fine, 0 : width * fine]
    x, y = (x + 0.5) / fine, (y + 0.5) / fine
    winding = np.zeros(x.shape)
    for ring in rings:
        points = ring.astype(np.float64) * [width, height]
        for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, 0), strict=True):
            if ay != by:
                crossed = (np.minimum(ay, by) <= y) & (y < np.maximum(ay, by))
                winding += crossed * (ax + (y - ay) * (bx - ax) / (by - ay) > x) * np.sign(by - ay)
    return (winding > 0).reshape(height, fine, width, fine).mean((1, 3))


@pytest.mark.parametrize(
    "look", [STILL, Look(None, True, False), Look(None, False, True), Look(None, True, True)]
)
def test_masks_that_are_rectangles_move_as_boxes_do(look):
    rng = np.random.default_rng(0)
    for trial in range(50):
        corners = np.sort(rng.random((30, 2, 2)), axis=1)
        labels = labels_of(*([square(*low, *high)] for low, high in corners))
        scale = rng.uniform(0.4, 1.6)
        view = crop(
            scale, rng.uniform(-20, 60), rng.uniform(-20, 60), 128, 64, (48, 64) if trial % 2 else None
        )
        places = np.array([[80, 60, *rng.integers(-30, 90, 2)]] * 30, float)
        boxes = Shapes(labels.image, labels.classes, labels.boxes).mapped(places, view, look)
        masks = labels.mapped(places, view, look)
        assert masks.classes.tolist() == boxes.classes.tolist()
        assert np.allclose(masks.boxes, boxes.boxes, atol=1e-4)
        around = np.array([box_around(*rings) for rings in masks.rings.lists()]).reshape(-1, 4)
        assert np.allclose(around, boxes.boxes, atol=1e-4)
        areas = masks.rasters((48, 64)).sum((1, 2)) / 255
        assert np.allclose(areas, masks.boxes[:, 2:].prod(1) * 48 * 64, atol=0.3)


@pytest.mark.parametrize("kind", ["crop", "turn", "tilt"])
def test_masks_move_as_pixels_do(kind):
    labels = blobs(3, 12)
    side, canvas, output = 100, 128, 64
    views = {
        "crop": crop(0.8, 15, 20, canvas, output),
        "turn": warp(np.array([[0.6, -0.3, 10.0], [0.3, 0.6, -20], [0, 0, 1]]), 0.67, canvas, output),
        "tilt": warp(np.array([[0.7, -0.1, 3.0], [0.1, 0.6, -10], [8e-4, 6e-4, 1]]), 0.6, canvas, output),
    }
    view, left, top = views[kind], 10, 20
    places = np.array([[side, side, left, top]] * len(labels), float)
    moved = labels.mapped(places, view, Look(None, True, False))
    assert len(moved) > 3
    for number, rings, box in zip(moved.classes, moved.rings.lists(), moved.boxes, strict=True):
        share = np.zeros((1 + canvas, 1 + canvas))
        share[top : top + side, left : left + side] = winding_raster(
            labels.rings.lists()[number], (side, side), 6
        )
        painted = share[:canvas, :canvas].astype(np.float32)
        shift = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
        matrix = shift @ view.to_output @ np.linalg.inv(shift)
        expected = cv2.warpPerspective(painted, matrix, (output, output))[:, ::-1]
        ours = moved.rows(moved.classes == number).rasters((output, output))[0] / 255
        assert abs(ours - expected).mean() < 2e-3, number
        assert abs(ours.sum() - expected.sum()) < 0.03 * expected.sum() + 1
        rows, columns = (np.flatnonzero(expected.max(axis) > 0.1) for axis in (1, 0))
        seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        corners = np.concatenate([box[:2] - box[2:] / 2, box[:2] + box[2:] / 2]) * output
        assert abs(seen - corners).max() < 2.5
        x, y = np.concatenate([rings[0], rings[0][:1]]).T
        assert (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0  # a mirror does not turn a mask into a hole


def test_the_box_after_a_cut_is_that_of_what_is_left():
    # a letter U of 100 px that opens upwards: at the top only the arms 0..20 and 80..100 remain
    u = np.array([[0, 0], [0.2, 0], [0.2, 0.8], [0.8, 0.8], [0.8, 0], [1, 0], [1, 1], [0, 1]], np.float32)
    places = np.array([[100, 100, 0, 0]], float)
    # of the window of columns -10..70 and rows -10..70, the arm 0..20 x 0..70
    view = crop(1.0, -10, -10, 100, 80)
    moved = labels_of([u]).mapped(places, view, STILL)
    assert np.allclose(moved.boxes * 80, [[20, 45, 20, 70]], atol=2e-3)
    assert moved.rasters((80, 80)).sum() == 20 * 70 * 255
    # a window inside of the U sees nothing of it, though it sees its box
    assert not len(labels_of([u]).mapped(places, crop(1.0, 30, 10, 100, 40), STILL))
    # all of a window is inside of a mask
    whole = labels_of([square(0, 0, 1, 1)]).mapped(places, crop(1.0, 40, 40, 100, 40), STILL)
    assert np.allclose(whole.boxes, [[0.5, 0.5, 1, 1]], atol=1e-3)
    # and so but for a hole that reaches from column 50 to the right
    hole = labels_of([square(0, 0, 1, 1), square(0.5, 0.1, 0.9, 0.9)[::-1]])
    rest = hole.mapped(places, crop(1.0, 40, 40, 100, 40), STILL)
    assert np.allclose(rest.boxes, [[0.125, 0.5, 0.25, 1]], atol=1e-3)


def test_a_line_along_the_border_belongs_to_no_box():
    # a bow around the corner of the window: 20..30 of the upper and of the left border are inside, the corner is not
    bow = np.array(
        [[-20, 60], [-20, -20], [60, -20], [60, 2], [20, 4], [20, 0], [0, 0], [0, 20], [4, 20], [4, 60]]
    )
    bow = ((bow + 20) / 100).astype(np.float32)
    moved = labels_of([bow]).mapped(np.array([[100, 100, 0, 0]], float), crop(1.0, 20, 20, 100, 80), STILL)
    assert moved.rasters((80, 80))[0, :18, :18].sum() == 0
    assert np.allclose(moved.boxes[0] * 80, [30, 30, 60, 60], atol=1e-3)


def test_a_label_without_a_mask_stays_a_box():
    boxes = np.array([[0.5, 0.5, 0.4, 0.4], [0.2, 0.2, 0.2, 0.2]])
    labels = MaskShapes.of_image(np.array([4, 5]), boxes, [[], [square(0.1, 0.1, 0.3, 0.3)]])
    assert labels.has_mask.tolist() == [False, True]
    places = np.array([[100, 100, 0, 0]] * 2, float)
    for view in (
        crop(1.0, 40, 0, 100, 100),
        warp(np.array([[0.0, -1, 100], [1, 0, 0], [0, 0, 1]]), 1.0, 100, 100),
    ):
        moved = labels.mapped(places, view, STILL)
        plain = Shapes(labels.image, labels.classes, labels.boxes).mapped(places, view, STILL)
        assert moved.has_mask.tolist() == [number == 5 for number in plain.classes.tolist()]
        assert np.allclose(moved.boxes, plain.boxes, atol=1e-5)
    assert not labels.rasters((8, 8))[0].any()
    assert not len(MaskShapes.none().mapped(np.zeros((0, 4)), crop(1.0, 0, 0, 8, 8), STILL))
    assert MaskShapes.none().rasters((8, 8)).shape == (0, 8, 8)


def test_a_raster_is_the_exact_share_of_each_pixel():
    # a triangle with the corners (0, 0), (4, 0), (0, 4): pixels on the diagonal are half inside
    triangle = np.array([[0, 0], [1, 0], [0, 1]], np.float32)
    expected = np.array([[255, 255, 255, 128], [255, 255, 128, 0], [255, 128, 0, 0], [128, 0, 0, 0]])
    assert (labels_of([triangle]).rasters((4, 4))[0] == expected).all()
    # a square of 0.5..2.25 x 1..3 of 4 pixels
    share = labels_of([square(0.125, 0.25, 0.5625, 0.75)]).rasters((4, 4))[0]
    assert share[1:3].tolist() == [[128, 255, 64, 0]] * 2 and share.sum() == 2 * (128 + 255 + 64)


def test_rasters_of_any_rings_are_those_of_a_fine_grid():
    labels = [*blobs(1, 20).rings.lists(), *blobs(2, 3, 120).rings.lists()]
    outer, hole, apart = (
        square(0.1, 0.2, 0.55, 0.9),
        square(0.2, 0.33, 0.4, 0.71)[::-1],
        square(0.7, 0.05, 0.97, 0.5),
    )
    labels += [[outer, hole, apart], [outer, square(0.3, 0.3, 0.8, 0.6)], [square(0, 0, 1, 1)]]
    # two parts that a line joins which is walked twice, and a star that meets itself
    labels += [
        [
            np.array(
                [
                    [0.1, 0.1],
                    [0.3, 0.1],
                    [0.3, 0.3],
                    [0.6, 0.6],
                    [0.9, 0.6],
                    [0.9, 0.9],
                    [0.6, 0.9],
                    [0.6, 0.6],
                    [0.3, 0.3],
                    [0.1, 0.3],
                ]
            )
        ]
    ]
    rasters = labels_of(*labels).rasters((40, 56))
    for rings, raster in zip(labels, rasters, strict=True):
        expected = winding_raster(rings, (40, 56), 12)
        assert abs(raster / 255 - expected).max() < 0.06
        assert abs(raster / 255 - expected).mean() < 2e-3


def test_the_labels_of_a_letterboxed_image_are_padded_with_it():
    labels = labels_of([square(0.25, 0.25, 0.75, 0.5)])
    _, back = letterbox(np.zeros((50, 100, 3), np.uint8), 64)
    moved = labels.letterboxed(np.array([100, 50]), back)
    assert np.allclose(box_around(*moved.rings.lists()[0]), moved.boxes[0], atol=1e-6)
    # ratio 0.64, 16 rows of padding: columns 16..48, rows 16 + 8 .. 16 + 16
    assert np.allclose(moved.boxes[0] * 64, [32, 28, 32, 8], atol=1e-4)


def test_a_pasted_object_hides_what_is_below_it():
    size = np.array([100, 50])
    below = labels_of([square(0.1, 0.2, 0.5, 0.8)], [square(0.6, 0.2, 0.9, 0.8)])  # 10..50 and 60..90, 10..40
    object_ = square(40, 5, 70, 45).astype(np.float64)  # hides the right of one and the left of the other
    labels = below.with_pasted([(7, np.array([40.0, 5, 70, 45]), [object_])], size)
    assert sorted(labels.classes.tolist()) == [0, 1, 7]
    rasters = dict(zip(labels.classes.tolist(), labels.rasters((50, 100)), strict=True))
    assert rasters[0].sum() == 30 * 30 * 255 and rasters[1].sum() == 20 * 30 * 255
    assert rasters[7].sum() == 30 * 40 * 255 and not (rasters[0] & rasters[7]).any()
    corners = dict(zip(labels.classes.tolist(), labels.corners_px(100, 50), strict=True))
    assert np.allclose(corners[0], [10, 10, 40, 40], atol=1e-4)
    assert np.allclose(corners[1], [70, 10, 90, 40], atol=1e-4)
    # what looks through a hole of it stays, also of two parts that overlap; what is wholly hidden goes
    frame = [square(0, 0, 100, 50), square(20, 10, 40, 40)[::-1]]
    twice = labels_of([square(0.1, 0.2, 0.5, 0.8), square(0.3, 0.2, 0.5, 0.8)], [square(0.6, 0.2, 0.9, 0.8)])
    seen = twice.with_pasted([(7, np.array([0.0, 0, 100, 50]), frame)], size)
    assert seen.classes.tolist() == [0, 7]
    assert seen.rasters((50, 100))[0].sum() == 20 * 30 * 255
    assert np.allclose(seen.corners_px(100, 50)[0], [20, 10, 40, 40], atol=1e-4)


def test_labels_pass_between_processes_and_join():
    labels = MaskShapes.of_images(
        [blobs(1, 3), MaskShapes.of_image(np.array([1]), np.array([[0.5, 0.5, 1, 1]])), blobs(2, 2)]
    )
    copy = pickle.loads(pickle.dumps(labels))
    assert copy.image.tolist() == [0, 0, 0, 1, 2, 2] and copy.has_mask.tolist() == [1, 1, 1, 0, 1, 1]
    assert (copy.rasters((20, 20)) == labels.rasters((20, 20))).all()
