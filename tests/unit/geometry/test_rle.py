"""Run lengths of masks: numbers worked by hand, stored answers of pycocotools, and the package itself if it is installed."""

import numpy as np
import pytest

from yolofleet.data.geometry import rle

# pycocotools 2.0.11: polygon, (height, width), counts, area, box
STORED = [
    ([(2, 1), (7, 1), (7, 5), (2, 5)], (6, 9), "=420000000;", 20, (2, 1, 5, 4)),
    ([(0.5, 0.5), (8.2, 3.1), (3.3, 7.9)], (9, 9), ":273N1NO1O2N1O7", 25, (1, 1, 7, 7)),
    ([(-3, -2), (4, -2), (4, 12), (-3, 12)], (8, 10), "0P1`1", 32, (0, 0, 4, 8)),
    ([(1, 1), (6, 6), (6, 1), (1, 6)], (7, 8), "844N80H2<", 12, (1, 1, 5, 4)),
]


def test_runs_go_down_the_columns_and_begin_outside():
    inside = np.array([[1, 0, 0], [1, 1, 0]], bool)
    runs = rle.encode(inside)
    assert runs.tolist() == [0, 2, 1, 1, 2] and runs.dtype == np.uint32
    assert (rle.decode(runs, (2, 3)) == inside).all()
    assert (rle.decode(runs, (2, 3), (1, 3)) == inside[:, 1:]).all()
    assert (rle.area(runs), rle.box(runs, 2)) == (3, (0, 0, 2, 2))
    empty = rle.encode(np.zeros((2, 3), bool))
    assert (empty.tolist(), rle.area(empty), rle.box(empty, 2)) == ([6], 0, (0, 0, 0, 0))
    assert rle.rings(empty, (2, 3)) == []
    window = rle.encode(np.ones((2, 1), bool), (2, 4), (1, 0))
    assert window.tolist() == [2, 2, 4]


def test_rings_of_a_hole_and_of_pixels_that_touch_at_a_corner():
    ring = np.ones((3, 3), bool)
    ring[1, 1] = False
    outer, hole = rle.rings(rle.encode(ring), (3, 3))
    assert outer.tolist() == [[0, 0], [3, 0], [3, 3], [0, 3]]
    assert _signed(hole) == -1
    for inside in (np.eye(2, dtype=bool), ~np.eye(2, dtype=bool)):
        parts = rle.rings(rle.encode(inside), (2, 2))
        assert [_signed(part) for part in parts] == [1, 1]
        assert (rle.from_rings(parts, (2, 2)) == rle.encode(inside)).all()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([3, -1, 4], "a run length is -1"),
        ([3, 99], "a run length is 99"),
        ([3, 2], "add up to 5, the image has 6 pixels"),
        ([0.5, 5.5], "must be whole numbers"),
        ([], "must be whole numbers"),
        ([[6]], "must be whole numbers"),
    ],
)
def test_run_lengths_that_fit_no_image_are_refused(counts, said):
    with pytest.raises(ValueError, match=said):
        rle.checked(counts, (2, 3))


def test_runs_of_others_with_empty_ones_get_one_form():
    assert rle.checked([2, 0, 1, 2, 1, 0], (2, 3)).tolist() == [3, 2, 1]
    assert rle.checked([0, 0, 6], (2, 3)).tolist() == [6]


@pytest.mark.parametrize("text", ["", "abc\x7f", "o", "ooooooo0", "00000000000", "1é", "54"])
def test_text_that_fits_no_image_is_refused(text):
    with pytest.raises(ValueError, match=r"counts|run length"):
        rle.from_text(text, (2, 3))


def test_polygons_at_any_distance_take_no_more_memory_than_the_image():
    far = np.array([(-1e30, -1e30), (1e30, -1e30), (1e30, 1e30), (-1e30, 1e30)])
    assert rle.from_polygons([far], (5, 4)).tolist() == [0, 20]
    assert rle.from_polygons([far + 2e30], (5, 4)).tolist() == [20]
    assert rle.from_polygons([], (5, 4)).tolist() == [20]


def test_polygons_have_the_stored_runs_of_pycocotools():
    for polygon, size, counts, area, box in STORED:
        runs = rle.from_polygons([np.array(polygon)], size)
        assert rle.to_text(runs) == counts
        assert (rle.from_text(counts, size) == runs).all()
        assert (rle.area(runs), rle.box(runs, size[0])) == (area, box)


def test_everything_equals_pycocotools():
    theirs = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for _ in range(150):
        size = (int(rng.integers(1, 80)), int(rng.integers(1, 80)))
        polygons = [_polygon(rng, *size) for _ in range(int(rng.integers(1, 4)))]
        expected = [theirs.frPyObjects([polygon.ravel().tolist()], *size)[0] for polygon in polygons]
        for polygon, answer in zip(polygons, expected, strict=True):
            _equal(rle.from_polygons([polygon], size), answer, size, theirs)
        _equal(rle.from_polygons(polygons, size), theirs.merge(expected), size, theirs)
        noise = rng.random(size) < rng.random()
        _equal(rle.encode(noise), theirs.encode(np.asfortranarray(noise.astype(np.uint8))), size, theirs)


def test_a_window_is_a_part_of_the_image():
    rng = np.random.default_rng(1)
    for _ in range(50):
        image = np.zeros(rng.integers(1, 12, 2), bool)
        bottom, right = (int(rng.integers(1, side + 1)) for side in image.shape)
        top, left = int(rng.integers(bottom)), int(rng.integers(right))
        image[top:bottom, left:right] = rng.random((bottom - top, right - left)) < 0.6
        window = rle.encode(image[top:bottom, left:right], (len(image), len(image[0])), (left, top))
        assert (window == rle.encode(image)).all()


@pytest.mark.parametrize("at_once", [50, 1 << 19])
def test_pairs_have_the_overlaps_of_pycocotools(monkeypatch, at_once):
    theirs = pytest.importorskip("pycocotools.mask")
    monkeypatch.setattr(rle, "_QUERIES_AT_ONCE", at_once)
    rng, size = np.random.default_rng(2), (60, 80)
    masks = [rle.from_polygons([_polygon(rng, *size)], size) for _ in range(50)]
    masks += [rle.encode(rng.random(size) < share) for share in (0, 0.3, 1)]
    table = rle.RunTable(np.concatenate(masks), np.array([len(runs) for runs in masks]))
    answers = [rle.Mask(size, runs).coco() for runs in masks]
    assert table.areas.tolist() == theirs.area(answers).tolist()
    assert table.boxes_xywh(np.full(53, 60)).tolist() == theirs.toBbox(answers).tolist()
    first, second = (rows.ravel() for rows in np.meshgrid(np.arange(53), np.arange(53)))
    both = table.intersections(first, second)
    either = table.areas[first] + table.areas[second] - both
    overlaps = (both / np.maximum(either, 1)).reshape(53, 53)
    assert (overlaps == theirs.iou(answers, answers, [False] * 53)).all()


def _equal(runs, answer, size, theirs):
    assert rle.to_text(runs).encode() == answer["counts"]
    assert (rle.from_text(answer["counts"].decode(), size) == runs).all()
    assert (rle.decode(runs, size) == theirs.decode(answer)).all()
    assert (rle.encode(rle.decode(runs, size)) == runs).all()
    assert rle.area(runs) == theirs.area(answer)
    assert list(rle.box(runs, size[0])) == theirs.toBbox(answer).tolist()
    outlines = rle.rings(runs, size)
    assert (rle.from_rings(outlines, size) == runs).all()
    assert sum(map(_signed, outlines)) == rle.area(runs)


def _signed(ring):
    x, y = ring.T
    return int((x * np.roll(y, -1) - np.roll(x, -1) * y).sum()) // 2


def _polygon(rng, height, width):
    """Corners anywhere, outside too; whole numbers; round; one point; tenths of pixels; a line."""
    kind, k, longer = rng.integers(6), int(rng.integers(3, 12)), max(height, width)
    if kind == 0:
        return rng.uniform(-20, longer + 20, (k, 2))
    if kind == 1:
        return rng.integers(-5, longer + 5, (k, 2)).astype(float)
    if kind == 2:
        turn = np.sort(rng.uniform(0, 2 * np.pi, k))
        return np.stack([width / 2 + width / 3 * np.cos(turn), height / 2 + height / 3 * np.sin(turn)], 1)
    if kind == 3:
        return np.repeat(rng.uniform(0, width, (1, 2)), k, axis=0)
    if kind == 4:
        return np.round(rng.uniform(-3, longer + 3, (k, 2)) * 5) / 5 + rng.choice([0, 0.1, 0.5, -0.1])
    line = rng.uniform(0, width, (k, 2))
    line[:, rng.integers(2)] = round(rng.uniform(0, width), int(rng.integers(3)))
    return line
