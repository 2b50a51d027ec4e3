import numpy as np
import pytest

from yolofleet.runs.report import draw
from yolofleet.runs.report.draw import (
    PALETTE,
    Picture,
    colour,
    draw_boxes,
    drawable,
    picture_grid,
    text_colour,
)

NAMES = ("person", "bicycle", "a class with a very long name indeed")


def grey(height, width):
    return np.full((height, width, 3), 128, np.uint8)


def test_the_palette_has_twenty_different_colours_and_repeats():
    assert len(set(PALETTE)) == 20
    assert colour(3) == colour(23)


def test_text_is_black_on_light_and_white_on_dark_colours():
    assert text_colour((255, 255, 255)) == (0, 0, 0) and text_colour((128, 0, 0)) == (255, 255, 255)
    assert {text_colour(c) for c in PALETTE} == {(0, 0, 0), (255, 255, 255)}


def test_a_box_is_drawn_on_its_border_in_the_colour_of_its_class_and_the_image_stays():
    image = grey(200, 300)
    drawn = draw_boxes(
        image, np.array([[50.0, 60.0, 150.0, 160.0]]), np.array([1]), NAMES, line_width=2, hide_labels=True
    )
    assert (image == 128).all()
    for y, x in ((60, 100), (160, 100), (110, 50), (110, 150)):
        assert tuple(drawn[y, x]) == colour(1)
    assert (drawn[100:120, 90:110] == 128).all()  # the inside is free
    changed = np.argwhere((drawn != 128).any(axis=2))
    assert changed.min(axis=0).tolist() == pytest.approx([59, 49], abs=1)


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 30, 20),
        (280, 0, 300, 20),
        (0, 190, 20, 200),
        (290, 190, 300, 200),
        (-50, -50, 400, 300),
        (5, 5, 5, 5),
    ],
)
def test_labels_stay_inside_the_image(box, monkeypatch):
    strips = []
    rectangle = draw.cv2.rectangle

    def watched(image, low, high, *rest):
        if draw.cv2.FILLED in rest:
            strips.append((*low, *high))
        return rectangle(image, low, high, *rest)

    monkeypatch.setattr(draw.cv2, "rectangle", watched)
    draw_boxes(grey(200, 400), np.array([box], float), np.array([2]), NAMES, np.array([0.5]))
    ((left, top, right, bottom),) = strips
    assert left >= 0 and top >= 0 and right <= 400 and bottom <= 200


def test_no_boxes_and_unknown_classes_are_fine():
    assert (draw_boxes(grey(20, 20), np.zeros((0, 4)), np.zeros(0, int), NAMES, np.zeros(0)) == 128).all()
    draw_boxes(grey(20, 20), np.array([[1.0, 1, 10, 10]]), np.array([7]), NAMES)


def test_the_surest_box_is_drawn_last():
    boxes = np.array([[20.0, 20, 80, 80]] * 2)
    drawn = draw_boxes(grey(100, 100), boxes, np.array([0, 1]), NAMES, np.array([0.9, 0.3]), hide_labels=True)
    assert tuple(drawn[20, 50]) == colour(0)


def test_names_that_this_opencv_cannot_draw_lose_accents_or_become_numbers(monkeypatch):
    monkeypatch.setattr(draw, "UNICODE", False)
    assert drawable("dog", "class 3") == "dog"
    assert drawable("café", "class 3") == "cafe"
    assert drawable("人", "class 3") == "class 3"
    monkeypatch.setattr(draw, "UNICODE", True)
    assert drawable("人", "class 3") == "人"


def test_a_grid_holds_sixteen_pictures_of_any_shape_within_its_size():
    shapes = [(480, 640), (640, 480), (100, 1000), (33, 17)] * 5
    none = np.zeros((0, 4))
    grid = picture_grid(
        [Picture(grey(*s), none, np.zeros(0, int), title="a.jpg") for s in shapes], NAMES, side_px=800
    )
    assert max(grid.shape) <= 800 and grid.dtype == np.uint8
    small = picture_grid([Picture(grey(64, 64), none, np.zeros(0, int))], NAMES, side_px=300)
    assert small.shape == (200, 200, 3)  # enlarged


def test_boxes_in_a_grid_lie_where_they_lie_in_the_picture():
    picture = Picture(grey(100, 100), np.array([[20.0, 20, 80, 80]]), np.array([0]))
    same = picture_grid([picture] * 4, NAMES, side_px=200)
    half = picture_grid([picture] * 4, NAMES, side_px=100)
    double = picture_grid([picture] * 4, NAMES, side_px=600)
    assert tuple(same[80, 50]) == tuple(same[180, 150]) == colour(0)  # lower borders of cells 0 and 3
    assert tuple(half[40, 25]) == tuple(double[160, 100]) == colour(0)
