"""The generated data set is what its description promises, and its boxes are exact."""

import hashlib
from pathlib import Path

import cv2
import numpy as np
import pytest

from yolofleet.data.datasets import shapes
from yolofleet.data.datasets.shapes import NAMES, draw_picture, iou, make_shapes
from yolofleet.support.random_numbers import generator

IMAGES, VAL_IMAGES, IMG = 60, 20, 160


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_shapes(
        tmp_path_factory.mktemp("generated shapes"), images=IMAGES, val_images=VAL_IMAGES, img=IMG
    )


@pytest.fixture(scope="module")
def labels(made) -> list[np.ndarray]:
    return [np.loadtxt(file, ndmin=2) for file in sorted((made.parent / "labels").rglob("*.txt"))]


def corners(boxes: np.ndarray) -> np.ndarray:
    return np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])


def test_layout_is_that_of_a_yolo_data_set(made):
    assert made.name == "data.yaml"
    for kind, ending in (("images", "png"), ("labels", "txt")):
        assert len(list((made.parent / kind / "train").glob(f"*.{ending}"))) == IMAGES
        assert len(list((made.parent / kind / "val").glob(f"*.{ending}"))) == VAL_IMAGES
    picture = cv2.imread(str(made.parent / "images/train/000000.png"))
    assert picture is not None and picture.shape == (IMG, IMG, 3)


def test_five_objects_an_image_of_at_least_four_classes(labels):
    assert len(NAMES) >= 4
    assert np.mean([len(rows) for rows in labels]) >= 5
    classes = np.concatenate(labels)[:, 0].astype(int)
    assert np.bincount(classes, minlength=len(NAMES)).min() >= 0.15 * len(classes)


def test_a_fifth_of_the_objects_is_small_but_not_unreadable(labels):
    sides = np.concatenate(labels)[:, 3:5]
    assert (sides.min(axis=1) < 0.1).mean() >= 0.2
    assert sides.max(axis=1).min() * IMG >= 9


def test_one_in_seven_objects_overlaps_another(labels):
    overlapped, total = 0, 0
    for rows in labels:
        boxes = corners(rows[:, 1:])
        total += len(boxes)
        overlapped += sum(
            any(iou(a, b) > 0.1 for j, b in enumerate(boxes) if j != i) for i, a in enumerate(boxes)
        )
    assert overlapped / total >= 0.15


def test_boxes_lie_inside_the_image(labels):
    boxes = corners(np.concatenate(labels)[:, 1:])
    assert boxes.min() > 0 and boxes.max() < 1


@pytest.mark.parametrize("kind", range(len(NAMES)))
def test_a_box_is_tight_around_what_is_painted(kind, monkeypatch):
    # The pixels of one object show only on a black ground, which no seed gives.
    monkeypatch.setattr(shapes, "_ground", lambda _, img: np.zeros((img, img, 3), np.float32))
    # one object
    monkeypatch.setattr(shapes, "_whole", lambda _, low, high: kind if high == len(NAMES) - 1 else 1)
    monkeypatch.setattr(shapes, "PARTNER_SHARE", 0.0)
    monkeypatch.setattr(shapes, "NOISE", 0.0)
    for trial in range(20):
        picture, rows = draw_picture(generator(trial, "test"), IMG)
        x1, y1, x2, y2 = corners(rows[:, 1:])[0] * IMG
        ys, xs = np.nonzero(picture.max(axis=2) > 0)
        # A corner covers little of its last pixel, which may round to black.
        assert x1 - 1 <= xs.min() <= x1 + 1 and x2 - 1 <= xs.max() + 1 <= x2 + 1
        assert y1 - 1 <= ys.min() <= y1 + 1 and y2 - 1 <= ys.max() + 1 <= y2 + 1


def test_half_of_every_object_can_be_seen():
    for trial in range(60):
        objects: list[shapes._Object] = []
        rng = generator(trial, "test")
        for _ in range(3):
            thing = shapes._place(rng, objects, 40, IMG, beside=None)
            if thing is not None:
                objects.append(thing)
                partner = shapes._place(rng, objects, 40, IMG, beside=thing)
                objects += [partner] if partner is not None else []
        # painted in order, with their numbers
        seen = np.zeros((IMG, IMG), int)
        for number, thing in enumerate(objects, start=1):
            points = [np.round((thing.outline_px - 0.5) * 16).astype(np.int32)]
            alone = cv2.fillPoly(np.zeros((IMG, IMG), np.uint8), points, 1, shift=4)
            thing.area_px = alone.sum()
            seen[alone == 1] = number
        for number, thing in enumerate(objects, start=1):
            assert (seen == number).sum() >= 0.45 * thing.area_px


def test_equal_arguments_give_equal_bytes_and_more_images_the_same_first_ones(made, tmp_path):
    again = make_shapes(tmp_path / "again", images=5, val_images=2, img=IMG)
    for file in sorted(again.parent.rglob("*.*")):
        twin = made.parent / file.relative_to(again.parent)
        assert hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(twin.read_bytes()).digest(), (
            file.name
        )


def test_splits_and_seeds_differ(made, tmp_path):
    def first(root: Path, split: str) -> bytes:
        return (root / "images" / split / "000000.png").read_bytes()

    other = make_shapes(tmp_path / "other", images=1, val_images=1, img=IMG, seed=1).parent
    pictures = [
        first(made.parent, "train"),
        first(made.parent, "val"),
        first(other, "train"),
        first(other, "val"),
    ]
    assert len(set(pictures)) == 4
