"""How often and in which order an epoch shows each image. Expected numbers are worked by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from yolofleet.data.input.order import (
    Orders,
    RectOrders,
    SampledOrders,
    build_orders,
    fraction_of,
)
from yolofleet.support.random_numbers import permutation


@dataclass
class Labels:
    """An index with these classes of labels in each image."""

    images: list[list[int]]
    sizes_wh: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), int))
    names: tuple[str, ...] = ("a", "b", "c")

    def __post_init__(self) -> None:
        self.offsets = np.concatenate([[0], np.cumsum([len(classes) for classes in self.images])])
        self.classes = np.array([c for classes in self.images for c in classes], np.int32)
        self.crowd = np.zeros(len(self.classes), bool)

    def __len__(self) -> int:
        return len(self.images)


def counts(orders: Orders, epochs: int, class_ap: tuple[float, ...] | None = None) -> np.ndarray:
    """How often the epochs show each image: [epochs, n]."""
    n = len(orders.index)
    return np.array([np.bincount(orders.order(e, class_ap), minlength=n) for e in range(epochs)])


LABELS: Any = Labels([[0, 0, 0], [0], [0, 1], []])


def test_without_a_sampler_an_epoch_is_a_permutation() -> None:
    orders = build_orders(LABELS, 3, "none", 0.001)
    assert orders.order(5).tolist() == permutation(3, 5, 4).tolist()
    assert [orders.partner(0, share) for share in (0.0, 0.49, 0.5, 0.99)] == [0, 1, 2, 3]


def test_balanced_shows_each_class_equally_often() -> None:
    # Class 0 is in 3 images, class 1 in one: weights 1/3, 1/3, 1/3 + 1, of sum 2, for the 3 labelled images.
    orders = SampledOrders(LABELS, 0, "balanced", 0.001)
    assert orders.expected_counts() == pytest.approx([0.5, 0.5, 2.0, 1.0])
    drawn = counts(orders, 200)
    assert (drawn.sum(axis=1) == 4).all() and drawn.mean(axis=0) == pytest.approx([0.5, 0.5, 2, 1], abs=0.12)
    assert (drawn[:, 2] == 2).all() and (drawn[:, 3] == 1).all() and set(drawn[:, 0].tolist()) == {0, 1}


def test_repeat_factor_follows_the_share_of_the_images_with_a_class() -> None:
    # Shares 3/4 and 1/4; t = 1: sqrt(4/3) and 2, and 1 for the image without labels.
    orders = SampledOrders(LABELS, 0, "repeat-factor", 1.0)
    factors = np.array([(4 / 3) ** 0.5, (4 / 3) ** 0.5, 2, 1])
    assert orders.expected_counts() == pytest.approx(factors * 4 / factors.sum())
    assert SampledOrders(LABELS, 0, "repeat-factor", 0.001).expected_counts() == pytest.approx([1, 1, 1, 1])


def test_weights_follow_the_accuracy_of_a_validation() -> None:
    orders = SampledOrders(LABELS, 0, "weights", 0.001)
    assert orders.expected_counts().tolist() == [1, 1, 1, 1]
    assert sorted(orders.order(0).tolist()) == [0, 1, 2, 3]
    # 5 labels of class 0 with AP 0.5, 1 of class 1 with AP 0: 0.05 and 1 for each label. Labelled: 0.15, 0.05, 1.05.
    assert orders.expected_counts((0.5, 0.0, -1.0)) == pytest.approx([0.36, 0.12, 2.52, 1])
    # Class 1 has no labels in the validation, so it gets the mean of the others, 0.5: 0.15, 0.05, 0.3 and 0.25 ...
    assert orders.expected_counts((0.5, -1.0, 0.5)) == pytest.approx([0.9, 0.3, 1.8, 1])
    assert orders.expected_counts((1.0, 1.0, 1.0)) == pytest.approx([1, 1, 1, 1])
    assert orders.partner(0, 0.6, (0.5, 0.0, -1.0)) == orders.order(0, (0.5, 0.0, -1.0))[2]


def test_an_epoch_does_not_depend_on_the_calls_before() -> None:
    wanted = {(e, ap): build_orders(LABELS, 7, "weights", 0.1).order(e, ap).tolist()
              for e in range(4) for ap in (None, (0.1, 0.2, 0.3))}  # fmt: skip
    orders = build_orders(LABELS, 7, "weights", 0.1)
    for e, ap in [*wanted, *reversed(wanted)]:
        assert [orders.image_of(e, at, ap) for at in range(4)] == wanted[e, ap]
    assert len(orders._kept) <= 3


@pytest.mark.parametrize("n", [3, 20, 23])
def test_micro_batches_of_rectangular_training_have_like_aspect_ratios(n: int) -> None:
    rng = np.random.default_rng(n)
    sizes = rng.integers(30, 90, (n, 2))
    index: Any = Labels([[0]] * n, sizes)
    orders = RectOrders(build_orders(index, 0, "none", 0), index, 4, 32)
    stream = [image for epoch in range(9) for image in orders.order(epoch).tolist()]
    for epoch in range(9):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))
    ratios = sizes[:, 1] / sizes[:, 0]
    micro_batches = [stream[at : at + 4] for at in range(0, len(stream) - 3, 4)]
    widest = sorted(range(n), key=lambda i: ratios[i])[: 2 * 4]
    for number, images in enumerate(micro_batches):
        within = number * 4 // n == (number * 4 + 3) // n
        if within and n > 4:  # neighbours in the order by ratio
            low, high = min(ratios[images]), max(ratios[images])
            assert sum(low <= r <= high for r in ratios) == 4
        elif n > 8:
            assert set(images) <= set(widest)
    if n > 8:
        assert len({tuple(images) for images in itertools.islice(micro_batches, 5)}) == 5
        assert orders.order(0).tolist() != orders.order(2).tolist()


def test_the_shape_of_a_micro_batch_holds_all_its_images() -> None:
    sizes = np.array([(640, 480), (640, 400), (500, 640), (64, 1000)])
    index: Any = Labels([[0]] * 4, sizes)
    orders = RectOrders(Orders(index, 0), index, 2, 32)
    assert orders.shape_hw([0, 1], 640) == (480, 640)
    assert orders.shape_hw([1], 640) == (416, 640)
    assert orders.shape_hw([1, 2], 640) == (640, 640)
    assert orders.shape_hw([3], 640) == (640, 64)
    assert orders.shape_hw([0], 320) == (256, 320)


def test_a_fraction_is_a_function_of_the_seed() -> None:
    some = fraction_of(100, 0.25, 0)
    assert len(some) == 25 == len(set(some.tolist())) and (np.diff(some) > 0).all()
    assert some.tolist() == fraction_of(100, 0.25, 0).tolist() != fraction_of(100, 0.25, 1).tolist()
    assert len(fraction_of(3, 0.01, 0)) == 1
