"""The crop-and-resize path against a whole canvas and a warp, boxes worked by hand, colour, flips, mixing."""

import cv2
import numpy as np
import pytest
from label_rows import shapes_of

from yolofleet.config.schema import Recipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.geometry.view import Look, View
from yolofleet.data.images.decode import Seen
from yolofleet.data.input import augment
from yolofleet.data.input.augment import Scene, Tile, finish
from yolofleet.support.random_numbers import generator

AS_IS = Look(None, False, False)
STILL = Recipe(scale=0, translate=0, degrees=0, shear=0, perspective=0)


def scene(number: int, width: int = 96, height: int = 96) -> tuple[np.ndarray, Shapes]:
    """A smooth picture with two rectangles of known place, and their labels."""
    rng = np.random.default_rng(number)
    image = cv2.resize(
        rng.integers(40, 215, (6, 6, 3), dtype=np.uint8), (width, height), interpolation=cv2.INTER_CUBIC
    )
    image[10:30, 20:50] = rng.integers(0, 255, 3)
    image[50:80, 60:90] = rng.integers(0, 255, 3)
    boxes = np.array([[35, 20, 30, 20], [75, 65, 30, 30]]) / [width, height, width, height]
    return image, Shapes.of_image(np.full(2, number), boxes)


def render(tiles: list[Tile], view: View) -> tuple[np.ndarray, np.ndarray]:
    """The pixels in the order of the images, and [n, 5] class, x1, y1, x2, y2 px of the labels."""
    out = np.empty((view.output_px, view.output_px, 3), np.uint8)
    augment.render(tiles, view, None, out)
    labels = Scene(tiles, view).labels(AS_IS, shapes_of([]))
    return out, np.column_stack([labels.classes, labels.corners_px(view.output_px, view.output_px)])


def on_whole_canvas(tiles: list[Tile], view: View) -> np.ndarray:
    """The straightforward way: paint all of the canvas, warp it once."""
    side = view.canvas_px
    canvas = np.full((side, side, 3), 114, np.uint8)
    for tile in tiles:
        x1, x2 = max(tile.left, 0), min(tile.left + tile.image.shape[1], side)
        for y, row in enumerate(tile.image, start=tile.top):
            if 0 <= y < side and x1 < x2:
                canvas[y, x1:x2] = row[x1 - tile.left : x2 - tile.left]
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(half) @ view.to_output @ half
    size = (view.output_px, view.output_px)
    return cv2.warpPerspective(canvas, matrix, size, flags=cv2.INTER_LINEAR, borderValue=(114, 114, 114))


RECIPES = {
    "default": Recipe(),
    "strong scale": Recipe(scale=0.9, translate=0.3),
    "rotated": Recipe(degrees=30, shear=5),
    "perspective": Recipe(degrees=5, perspective=0.0005),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["mosaic4", "mosaic9", "alone"])
def test_only_what_is_seen_is_painted_and_it_looks_like_the_whole_canvas(name, kind):
    side = 96
    for trial in range(8):

        def build(read: augment.Read, trial: int = trial) -> tuple[list[Tile], View]:
            rng = generator(trial, "augment")
            if kind == "alone":
                view = augment.draw_view(rng, RECIPES[name], side, side)
                return augment.centred(read, 2, view), view
            view = augment.draw_view(rng, RECIPES[name], 2 * side, side)
            if kind == "mosaic4":
                return augment.mosaic4(rng, read, range(4), view), view
            return augment.mosaic9(rng, read, range(9), view), view

        def whole(number: int, seen: object = None) -> tuple[np.ndarray, Shapes]:
            return scene(number, 96, 64 + 4 * number)

        def partly(number: int, seen: Seen | None) -> tuple[np.ndarray, Shapes]:
            """An image with other pixels where no one needs them."""
            image, labels = whole(number)
            if seen is None:
                return image, labels
            x1, y1, x2, y2 = seen(*image.shape[1::-1])
            assert x1 >= 0 and y1 >= 0 and x2 <= image.shape[1] and y2 <= image.shape[0]
            changed = 255 - image
            changed[y1 : max(y2, y1), x1 : max(x2, x1)] = image[y1 : max(y2, y1), x1 : max(x2, x1)]
            return changed, labels

        tiles, view = build(whole)
        assert np.array_equal(render(*build(partly))[0], render(tiles, view)[0])
        image, _ = render(tiles, view)
        difference = np.abs(image.astype(int) - on_whole_canvas(tiles, view))
        # OpenCV's warps place samples on a grid of 1/32 pixel, its resize does not: rows at sharp edges differ.
        assert image.shape == (side, side, 3)
        assert difference.mean() < 0.6
        assert (difference > 12).mean() < 0.01


def test_unseen_quarters_of_a_mosaic_are_not_read():
    recipe = Recipe(scale=0.5)
    reads = []
    for trial in range(200):
        rng = generator(trial, "augment")
        view = augment.draw_view(rng, recipe, 192, 96)
        seen: list[int] = []

        def read(number: int, part: object, seen: list[int] = seen) -> tuple[np.ndarray, Shapes]:
            seen.append(number)
            return scene(number)

        tiles = augment.mosaic4(rng, read, range(4), view)
        reads.append(len(seen))
        assert view.is_crop and len(tiles) == len(seen)
    assert min(reads) in (1, 2) and max(reads) == 4
    assert 3.2 < np.mean(reads) < 3.9


def test_mosaic_corners_meet_in_the_middle_half_of_the_canvas():
    view = augment.draw_view(generator(0, "view"), STILL, 192, 96)
    for trial in range(50):
        tiles = augment.mosaic4(generator(trial, "m"), lambda n, _: scene(n, 96, 80), range(4), view)
        by_number = {int(tile.labels.classes[0]): tile for tile in tiles}
        if len(by_number) == 4:
            x, y = by_number[3].left, by_number[3].top
            assert 48 <= x < 144 and 48 <= y < 144
            assert (by_number[0].left + 96, by_number[0].top + 80) == (x, y)
            assert (by_number[1].left, by_number[1].top + 80) == (x, y)
            assert (by_number[2].left + 96, by_number[2].top) == (x, y)


def test_nine_images_touch_and_leave_no_gap_when_square():
    side = 40
    view = View(np.eye(3), 1.0, (0, 0, 2 * side, 2 * side), False, 2 * side, 2 * side, (2 * side, 2 * side))
    colours = [np.full((side, side, 3), 10 + 20 * n, np.uint8) for n in range(9)]
    for trial in range(20):
        tiles = augment.mosaic9(
            generator(trial, "m"), lambda n, _: (colours[n], Shapes.none()), range(9), view
        )
        image, _ = render(tiles, view)
        assert not (image == 114).all(axis=2).any()
        assert {10, 30, 50, 70, 90, 110, 130, 150, 170} >= set(np.unique(image))


def test_a_still_view_of_one_image_is_the_image_and_keeps_its_labels():
    image, labels = scene(1, 96, 96)
    view = augment.draw_view(generator(0, "v"), STILL, 96, 96)
    out, boxes = render(augment.centred(lambda *_: (image, labels), 0, view), view)
    assert np.array_equal(out, image)
    assert np.allclose(boxes, [[1, 20, 10, 50, 30], [1, 60, 50, 90, 80]], atol=1e-4)


def test_letterbox_of_a_wide_image_pads_above_and_below():
    image, labels = scene(1, 96, 81)
    view = augment.draw_view(generator(0, "v"), STILL, 96, 96)
    out, boxes = render(augment.centred(lambda *_: (image, labels), 0, view), view)
    assert (out[:7] == 114).all() and (out[88:] == 114).all()  # 15 missing rows: 7 above, 8 below
    assert np.array_equal(out[7:88], image)
    assert np.allclose(boxes[0], [1, 20, 17, 50, 37], atol=1e-4)


def view_of(matrix: list[list[float]], scale: float, canvas: int, output: int, crop: bool = False) -> View:
    return View(
        np.array(matrix, float), scale, (0, 0, canvas, canvas), crop, canvas, output, (output, output)
    )


def test_boxes_follow_a_rotation_by_a_quarter_turn():
    # (x, y) -> (100 - y, x): the box 10..30 x 20..60 goes to 40..80 x 10..30
    labels = shapes_of([[0, 0.2, 0.4, 0.2, 0.4]])
    tile = Tile(np.zeros((100, 100, 3), np.uint8), labels, 0, 0)
    _, boxes = render([tile], view_of([[0, -1, 100], [1, 0, 0], [0, 0, 1]], 1.0, 100, 100))
    assert np.allclose(boxes, [[0, 40, 10, 80, 30]], atol=1e-4)


def test_boxes_divide_by_the_perspective():
    # w = 1 + x / 100: the corner (100, 100) goes to (50, 50), (100, 50) to (50, 25), (50, 100) to (33.3, 66.7)
    labels = shapes_of([[0, 0.75, 0.75, 0.5, 0.5]])
    tile = Tile(np.zeros((100, 100, 3), np.uint8), labels, 0, 0)
    _, boxes = render([tile], view_of([[1, 0, 0], [0, 1, 0], [0.01, 0, 1]], 1.0, 100, 100))
    assert np.allclose(boxes, [[0, 100 / 3, 25, 50, 200 / 3]], atol=1e-3)


@pytest.mark.parametrize(
    ("box", "kept"),
    [
        ((10, 10, 13, 30), True),
        ((10, 10, 12, 30), False),  # 2 px wide: not larger than 2
        ((-89, 10, 11.5, 30), True),  # 11.5 of 100.5 px are left: but the canvas had cut it before
        ((0, 40, 100, 42.5), True),  # 40 : 1
    ],
)
def test_boxes_too_small_to_learn_are_dropped(box, kept):
    x1, y1, x2, y2 = box
    labels = shapes_of([[0, (x1 + x2) / 200, (y1 + y2) / 200, (x2 - x1) / 100, (y2 - y1) / 100]])
    tile = Tile(np.zeros((100, 100, 3), np.uint8), labels, 0, 0)
    _, boxes = render([tile], view_of([[1, 0, 0], [0, 1, 0], [0, 0, 1]], 1.0, 100, 100))
    assert len(boxes) == kept


def test_boxes_of_which_a_tenth_or_less_is_seen_are_dropped():
    labels = shapes_of([[0, 0.5, 0.5, 1.0, 0.2], [1, 0.5, 0.2, 0.98, 0.2]])
    tile = Tile(np.zeros((100, 100, 3), np.uint8), labels, 0, 0)
    # a view that begins at x = 90: 10 of 100 columns of the first box, 9 of 98 of the second
    _, boxes = render([tile], view_of([[1, 0, -90], [0, 1, 0], [0, 0, 1]], 1.0, 100, 100))
    assert len(boxes) == 0
    _, boxes = render([tile], view_of([[1, 0, -88], [0, 1, 0], [0, 0, 1]], 1.0, 100, 100))
    assert boxes[:, 0].tolist() == [0, 1]


def test_boxes_stay_on_their_objects():
    """Solid rectangles are found again in the output, where their boxes say."""
    for trial in range(40):
        rng = generator(trial, "augment")
        recipe = Recipe(degrees=0 if trial % 2 else 1e-9, scale=0.5)  # every other time through the warp
        view = augment.draw_view(rng, recipe, 96, 96)
        image = np.full((96, 96, 3), 20, np.uint8)
        image[30:60, 40:70] = 240
        labels = shapes_of([[0, 55 / 96, 45 / 96, 30 / 96, 30 / 96]])
        out, boxes = render([Tile(image, labels, 0, 0)], view)
        bright = out[:, :, 0].astype(float)
        mask = bright > 177  # half way from the fill (114) or the background to the object
        ys, xs = np.nonzero(mask)
        assert np.allclose(boxes[0, 1:], [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=0.9)


def test_draws_cover_the_recipe_s_ranges():
    scales, shifts = [], []
    for trial in range(500):
        view = augment.draw_view(generator(trial, "v"), Recipe(scale=0.5, translate=0.1), 640, 320)
        scales.append(view.scale)
        shifts.append((view.to_output @ [320, 320, 1])[:2] / 320 - 0.5)  # where the canvas's centre goes
    assert 0.5 <= min(scales) < 0.52 and 1.48 < max(scales) <= 1.51
    assert abs(np.mean(scales) - 1) < 0.06
    assert -0.103 < np.min(shifts) < -0.095 and 0.095 < np.max(shifts) < 0.103


def test_extreme_recipes_give_an_image():
    recipe = Recipe(scale=1.0, translate=1.0, degrees=180, shear=90, perspective=0.001)
    flat = recipe.model_copy(update={"perspective": 0.0})
    for trial in range(30):
        for some in (recipe, flat, Recipe(scale=1.0, translate=1.0)):
            rng = generator(trial, "augment")
            view = augment.draw_view(rng, some, 128, 64)
            image, boxes = render(augment.mosaic4(rng, lambda n, _: scene(n, 96, 96), range(4), view), view)
            assert image.shape == (64, 64, 3) and np.isfinite(boxes).all()
            assert (boxes[:, 1:] > -1e-4).all() and (boxes[:, 1:] < 64 + 1e-4).all()


@pytest.mark.parametrize("degrees", [0, 10])
def test_a_look_is_applied_on_every_path(degrees):
    recipe = Recipe(degrees=degrees)
    view = augment.draw_view(generator(1, "v"), recipe, 96, 96)
    tiles = augment.centred(lambda *_: scene(2), 0, view)
    plain, _ = render(tiles, view)
    out = np.empty_like(plain)
    augment.render(tiles, view, Look(None, True, True), out)
    assert view.is_crop == (degrees == 0)
    assert np.array_equal(out, plain[::-1, ::-1, ::-1])


def test_colour_gains_follow_the_recipe():
    assert augment.colour_gains(generator(0, "c"), Recipe(hsv_h=0, hsv_s=0, hsv_v=0)) is None
    recipe = Recipe(hsv_h=0.015, hsv_s=0.7, hsv_v=0.4)
    gains = [augment.colour_gains(generator(trial, "c"), recipe) or () for trial in range(300)]
    assert np.allclose(np.min(gains, axis=0), [0.985, 0.3, 0.6], atol=0.03)
    assert np.allclose(np.max(gains, axis=0), [1.015, 1.7, 1.4], atol=0.03)


@pytest.mark.parametrize(
    ("horizontal", "vertical"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_flips_move_boxes_with_the_pixels(horizontal, vertical):
    image = np.zeros((60, 60, 3), np.uint8)
    image[5:10, 8:20] = 255
    labels = shapes_of([[3, 14 / 60, 7.5 / 60, 12 / 60, 5 / 60]])
    look, out = Look(None, horizontal, vertical), np.empty_like(image)
    finish(image, look, out)
    view = view_of([[1, 0, 0], [0, 1, 0], [0, 0, 1]], 1.0, 60, 60)
    moved = Scene([Tile(image, labels, 0, 0)], view).labels(look, shapes_of([]))
    ys, xs = np.nonzero(out[:, :, 0])
    found = moved.corners_px(60, 60)[0].tolist()
    assert found == pytest.approx([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], abs=1e-4)


def test_mixing_weighs_two_images_by_a_beta_32_32():
    weights = [augment.mixing_weight(generator(k, "m")) for k in range(800)]
    # mean 1/2, variance 1 / (4 * 65)
    assert abs(np.mean(weights) - 0.5) < 4 * 0.062 / 800**0.5
    assert abs(np.std(weights) - (1 / 260) ** 0.5) < 0.006


def test_an_image_without_labels_is_fine():
    image, _ = scene(1)
    view = augment.draw_view(generator(0, "v"), Recipe(), 96, 96)
    _, boxes = render(augment.centred(lambda *_: (image, Shapes.none()), 0, view), view)
    assert boxes.shape == (0, 5)
