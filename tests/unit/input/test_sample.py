"""A training sample is a function of (data, recipe, seed, epoch, position) and of nothing else."""

import hashlib
import math
from typing import Any

import cv2
import numpy as np
import pytest
from label_rows import rows_of

from yolofleet.config.schema import Recipe, closing_epoch
from yolofleet.data.geometry.mask_shapes import MaskShapes
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import MicroBatchKey, TrainSamples, train_loader
from yolofleet.support.errors import DataError
from yolofleet.support.random_numbers import permutation

IMG = 64


class Pictures:
    """Stands in for index and cache: n smooth pictures, each with labels of its own class."""

    def __init__(self, count: int = 12) -> None:
        self.images: list[np.ndarray] = []
        self.truth: list[Shapes] = []
        self.read: list[int] = []
        for number in range(count):
            rng = np.random.default_rng(number)
            height = int(rng.integers(40, IMG + 1))
            noise = rng.integers(0, 255, (5, 5, 3), dtype=np.uint8)
            self.images.append(cv2.resize(noise, (IMG, height), interpolation=cv2.INTER_CUBIC))
            centres, sides = rng.uniform(0.2, 0.8, (3, 2)), rng.uniform(0.1, 0.4, (3, 2))
            self.truth.append(Shapes.of_image(np.full(3, number), np.hstack([centres, sides])))

    def __len__(self) -> int:
        return len(self.images)

    def get(self, image: int, seen: object = None) -> np.ndarray:
        self.read.append(image)
        return self.images[image]

    def labels(self, image: int) -> Shapes:
        return self.truth[image]

    def outlines(self, image: int) -> list[list[np.ndarray]]:
        """Diamonds in the boxes of even images, none in the others."""
        if image % 2:
            return [[] for _ in self.truth[image].boxes]
        diamond = np.array([[0, -0.5], [0.5, 0], [0, 0.5], [-0.5, 0]])
        return [[box[:2] + diamond * box[2:]] for box in self.truth[image].boxes]


def samples(
    recipe: Recipe | None = None, *, seed: int = 0, epochs: int = 10, count: int = 12
) -> TrainSamples:
    pictures = Pictures(count)
    return TrainSamples(pictures, pictures, recipe or FULL, img=IMG, seed=seed, epochs=epochs)


FULL = Recipe(mosaic=0.7, mosaic9=0.3, mixup=0.4, flipud=0.3, degrees=5, shear=2)
PLAIN = Recipe(mosaic=0, scale=0, translate=0, hsv_h=0, hsv_s=0, hsv_v=0, fliplr=0)


def digest(made: TrainSamples, keys: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
    result = {}
    for key in keys:
        image, labels = made.sample(*key)
        result[key] = hashlib.sha256(image.tobytes() + rows_of(labels).tobytes()).hexdigest()
    return result


def test_the_images_of_a_sample_are_known_before_they_are_read():
    made = samples(FULL.model_copy(update={"cutout": 0.5}))
    pictures: Any = made.cache
    for key in [(epoch, position) for epoch in range(5) for position in range(12)]:
        pictures.read.clear()
        first = digest(made, [key])
        assert made.images_of([key], {}) == pictures.read
        assert first == digest(made, [key])


def test_threads_of_opencv_do_not_matter():
    keys = [(0, position) for position in range(12)]
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(4)
        many = digest(samples(), keys)
        cv2.setNumThreads(0)
        assert many == digest(samples(), keys)
    finally:
        cv2.setNumThreads(before)


def test_seed_epoch_and_position_each_change_the_sample():
    one = digest(samples(), [(0, 0), (1, 0), (0, 1)])
    assert len(set(one.values()) | set(digest(samples(seed=1), [(0, 0)]).values())) == 4


def test_without_augmentation_an_epoch_is_every_image_once_letterboxed():
    made = samples(PLAIN)
    seen = []
    for position in range(12):
        image, labels = made.sample(3, position)
        number = int(labels.classes[0])
        seen.append(number)
        source = made.cache.get(number)
        top = (IMG - len(source)) // 2
        assert np.array_equal(image[top : top + len(source)], source[:, :, ::-1])
        assert (image[:top] == 114).all()
        expected = made.index.labels(number).boxes
        assert np.allclose(labels.boxes[:, 2], expected[:, 2], atol=1e-4)
        assert np.allclose(labels.boxes[:, 1] * IMG, expected[:, 1] * len(source) + top, atol=1e-3)
    assert seen == permutation(0, 3, 12).tolist()


def test_samples_are_arrays_as_promised():
    made = samples()
    for position in range(12):
        image, labels = made.sample(0, position)
        assert image.shape == (IMG, IMG, 3) and image.dtype == np.uint8 and image.flags.c_contiguous
        assert (labels.boxes.dtype, labels.classes.dtype) == (np.float32, np.int64)
        corners = labels.corners_px(1, 1)
        assert (corners > -1e-6).all() and (corners <= 1).all() and (labels.boxes[:, :2] < 1).all()


def test_a_given_buffer_is_filled_in_place():
    made = samples()
    buffer = np.zeros((2, IMG, IMG, 3), np.uint8)
    for recipe in (FULL, PLAIN):
        made = samples(recipe)
        image, _ = made.sample(0, 5, out=buffer[1])
        assert np.shares_memory(image, buffer)
        assert np.array_equal(buffer[1], made.sample(0, 5)[0])


def images_read(made: TrainSamples, epoch: int, position: int) -> list[int]:
    assert isinstance(made.cache, Pictures)
    made.cache.read.clear()
    made.sample(epoch, position)
    return list(made.cache.read)


def is_mosaic(made: TrainSamples, epoch: int, position: int) -> bool:
    return len(images_read(made, epoch, position)) > 1


def test_the_last_epochs_have_no_mosaic():
    made = samples(Recipe(close_mosaic=2, mixup=1.0, scale=0), epochs=5)
    mosaics = [sum(is_mosaic(made, epoch, position) for position in range(12)) for epoch in range(5)]
    assert mosaics == [12, 12, 12, 0, 0]


@pytest.mark.parametrize(
    ("last", "epochs", "first"),
    [(0, 9, math.inf), (2, 9, 7), (0.1, 132, 119), (0.5, 3, 1), (0.1, 4, math.inf)],
)  # 13.2, 1.5 and 0.4 epochs are rounded; half to even
def test_the_last_epochs_are_a_number_or_a_fraction(last: float, epochs: int, first: float):
    assert closing_epoch(last, epochs) == first


def test_the_last_epochs_are_only_flipped():
    many = FULL.model_copy(update={"close_augment": 0.4, "flipud": 0.5, "fliplr": 0.5})
    made = samples(many, epochs=5)
    plain = samples(PLAIN, epochs=5)
    for position in range(12):
        image, labels = made.sample(3, position)
        expected, boxes = plain.sample(3, position)
        flips = [expected, expected[:, ::-1], expected[::-1], expected[::-1, ::-1]]
        assert any(np.array_equal(image, flipped) for flipped in flips)
        assert np.allclose(labels.boxes[:, 2:], boxes.boxes[:, 2:], atol=1e-6)
        assert made.images_of([(3, position)], {}) == [made.orders.image_of(3, position)]
    before = [len(images_read(made, 2, position)) for position in range(12)]
    assert max(before) > 1


def test_mosaic_goes_on_past_the_last_epoch_when_it_is_never_closed():
    # The last step may straddle the end of the last epoch.
    made = samples(Recipe(scale=0), epochs=5)
    assert sum(is_mosaic(made, 5, position) for position in range(12)) == 12


def test_a_mosaic_holds_its_own_image_and_partners_from_the_whole_data_set():
    made = samples(Recipe(scale=0, translate=0), count=30)
    partners: set[int] = set()
    for position in range(30):
        read = images_read(made, 0, position)
        assert len(read) == 4 and made.orders.image_of(0, position) in read
        partners |= set(read) - {made.orders.image_of(0, position)}
    assert len(partners) > 25  # 90 draws of 30 leave 1.4 out on average


def test_own_image_stands_at_every_corner():
    made = samples(Recipe(scale=0, translate=0), count=30)
    places = {
        images_read(made, 0, position).index(made.orders.image_of(0, position)) for position in range(30)
    }
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(("mosaic", "mosaic9", "mixup"), [(0.25, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.3)])
def test_pictures_come_as_often_as_the_recipe_says(mosaic, mosaic9, mixup):
    made = samples(Recipe(mosaic=mosaic, mosaic9=mosaic9, mixup=mixup, scale=0, translate=0))
    keys = [(epoch, position) for epoch in range(20) for position in range(12)]
    # 2 of 4 where the corner is at the border
    counts = np.array([len(images_read(made, *key)) for key in keys])
    standard_error = 0.5 / 240**0.5
    assert set(counts.tolist()) <= {1, 2, 4, 6, 8, 9}
    assert abs((counts > 1).mean() - mosaic) < 3 * standard_error
    assert abs((counts == 9).mean() - mosaic9) < 3 * standard_error
    assert abs(((counts == 8) | (counts == 6)).mean() - mixup) < 3 * standard_error


def test_labels_of_mixed_mosaics_are_joined():
    single, double = samples(Recipe(mixup=0)), samples(Recipe(mixup=1))
    count = [sum(len(made.sample(0, position)[1]) for position in range(12)) for made in (single, double)]
    assert count[1] > 1.6 * count[0]


def test_a_worker_that_runs_ahead_keeps_few_orders():
    made = samples(PLAIN)
    for epoch in [0, 1, 0, 1, 2, 1, 2, 3, 4]:
        made.orders.image_of(epoch, 0)
    assert len(made.orders._kept) <= 3
    assert made.orders.image_of(0, 4) == permutation(0, 0, 12)[4]


class Broken(Pictures):
    """Some pictures cannot be read."""

    def __init__(self, broken: set[int]) -> None:
        super().__init__(12)
        self.broken = broken

    def get(self, image: int, seen: object = None) -> np.ndarray:
        if image in self.broken:
            raise DataError(f"image {image} is broken")
        return super().get(image)


def test_a_picture_that_cannot_be_read_is_replaced_by_rule_in_any_order():
    keys = [(epoch, position) for epoch in range(3) for position in range(12)]
    made = []
    for order in (keys, keys[::-1]):
        pictures = Broken({3, 5})
        stream = TrainSamples(pictures, pictures, FULL, img=IMG, seed=0, epochs=10)
        made.append(digest(stream, order))
        assert stream.unreadable == {3: "image 3 is broken", 5: "image 5 is broken"}
    whole = digest(samples(), keys)
    assert made[0] == made[1] != whole
    assert sum(made[0][key] == whole[key] for key in keys) >= 3, (
        "samples without these pictures stay as they were"
    )


def test_the_replacement_has_its_own_labels():
    pictures = Broken({3})
    stream = TrainSamples(pictures, pictures, PLAIN, img=IMG, seed=0, epochs=10)
    (position,) = (k for k in range(12) if stream.orders.image_of(0, k) == 3)
    _, labels = stream.sample(0, position)
    assert set(labels.classes) == {pictures.read[-1]} != {3}


def test_a_data_set_that_has_vanished_is_an_error():
    pictures = Broken(set(range(12)))
    with pytest.raises(DataError, match=r"image \d+ is broken, and 3 others"):
        TrainSamples(pictures, pictures, FULL, img=IMG, seed=0, epochs=10).sample(0, 0)


def test_a_rectangular_sample_is_the_middle_of_the_square_with_its_labels():
    recipe = Recipe(mosaic=0, translate=0.3, scale=0.5, flipud=0.5)
    made = samples(recipe)
    for position in range(12):
        image, labels = made.sample(1, position, shape_hw=(48, 64))
        assert image.shape == (48, IMG, 3) and image.flags.c_contiguous
        corners = labels.corners_px(1, 1)
        assert (corners > -1e-6).all() and (corners < 1 + 1e-6).all()
    still = samples(PLAIN)
    for position in range(12):
        (square, truth), (image, labels) = (
            still.sample(0, position),
            still.sample(0, position, None, None, (48, 64)),
        )
        assert np.array_equal(image, square[8:56])
        _, top, _, bottom = truth.corners_px(64, 64).T - 8
        inside = (bottom.clip(0, 48) - top.clip(0, 48) > 2.5) & (bottom - top > 3)
        assert len(labels) >= inside.sum()
        if len(labels) == len(truth):
            assert np.allclose(labels.boxes[:, 1] * 48, (top.clip(0, 48) + bottom.clip(0, 48)) / 2, atol=1e-2)
            assert np.allclose(labels.boxes[:, ::2], truth.boxes[:, ::2], atol=1e-4)


def test_copy_paste_and_cutout_leave_the_other_draws_as_they_are():
    # The own image is placed as before; what was pasted is new, and what was hidden is gone.
    keys = [(0, position) for position in range(12)]
    changed = Recipe(**PLAIN.model_dump() | {"copy_paste": 0.5, "fliplr": 0.5, "translate": 0.2})
    plain = samples(Recipe(**changed.model_dump() | {"copy_paste": 0}))
    pasted = 0
    for key in keys:
        before, after = (rows_of(made.sample(*key)[1]) for made in (plain, samples(changed)))
        assert np.array_equal(after[: len(before)], before)
        assert (after[len(before) :, 0] % 2 == 0).all()  # only even images have polygons
        pasted += len(after) - len(before)
    assert pasted > 3


def test_boxes_beside_pasted_objects_are_those_of_what_is_left_of_their_masks():
    pictures = Pictures()

    def labels(index: Pictures, image: int) -> MaskShapes:
        plain = index.labels(image)
        return MaskShapes.of_image(plain.classes, plain.boxes, index.outlines(image))

    recipe = Recipe(**PLAIN.model_dump() | {"copy_paste": 1.0, "fliplr": 0.5, "translate": 0.2})
    made = TrainSamples(pictures, pictures, recipe, img=IMG, seed=0, epochs=10, labels=labels)
    plain = samples(Recipe(**recipe.model_dump() | {"copy_paste": 0}))
    pasted = hidden = 0
    for key in [(epoch, position) for epoch in range(4) for position in range(12)]:
        found, before = made.sample(*key)[1], plain.sample(*key)[1]
        assert isinstance(found, MaskShapes)
        masked = found.rows(found.has_mask)
        for box, raster in zip(masked.corners_px(IMG, IMG), masked.rasters((IMG, IMG)), strict=True):
            rows, columns = (np.flatnonzero((raster > 127).any(axis=axis)) for axis in (1, 0))
            left = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            assert np.abs(left - box).max() < 2.5  # a diamond ends in points, less than half of a pixel
        own = found.rows(found.classes == before.classes[0]) if len(before) else found.rows(slice(0))
        pasted += len(found) - len(own)
        hidden += any(np.abs(before.boxes - box).max(axis=1).min() > 2 / IMG for box in own.boxes)
    assert pasted > 20 and hidden > 2


def test_samples_with_every_change_are_functions_of_their_keys():
    every = Recipe(**FULL.model_dump() | {"copy_paste": 0.5, "cutout": 0.5})
    keys = [(epoch, position) for epoch in range(3) for position in range(12)]
    assert digest(samples(every), keys) == digest(samples(every), keys[::-1])
    assert set(digest(samples(every), keys).values()).isdisjoint(
        digest(samples(every, seed=1), keys).values()
    )


def test_an_unreadable_image_to_paste_from_is_reported_and_nothing_is_pasted():
    pictures = Broken({0, 2, 4, 6, 8, 10})
    stream = TrainSamples(
        pictures, pictures, Recipe(**PLAIN.model_dump() | {"copy_paste": 1.0}), img=IMG, seed=0, epochs=1
    )
    for position in range(12):
        _, labels = stream.sample(0, position)
        assert (labels.classes % 2 == 1).all()
    assert set(stream.unreadable) == pictures.broken


def test_a_match_gets_seed_epoch_and_position_of_each_image():
    samples, got = TrainSamples(Pictures(), Pictures(), PLAIN, img=IMG, seed=7, epochs=2), []

    def match(labels, images, size_hw, keys=()):
        got.append(keys)

    keys = [MicroBatchKey(0, 0, ((0, 3), (0, 4))), MicroBatchKey(1, 0, ((1, 3),)), MicroBatchKey(1, 1, ())]
    with train_loader(samples, keys, match, workers=0) as batches:
        list(batches)
    assert got == [[(7, 0, 3), (7, 0, 4)], [(7, 1, 3)], []]
