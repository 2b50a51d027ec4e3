"""A loss that rises to a multiple of its lowest epoch."""

from __future__ import annotations

import math

import pytest

from yolofleet.training.advice import first_rise


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([], None),
        ([4.0], None),
        ([3.99, 3.9, 3.57, 4.09, 4.83, 4.2, 1.2], None),  # PP-YOLOE from random numbers, in order
        ([3.98, 4.0, 3.91, 3.92, 5.64, 16.5, 7.8, 0.01], (2, 5)),  # the same network, which learned nothing
        ([4.0, 1.0, 3.1, 9.0], (1, 2)),  # the first of several
        ([0.0, 2.0, 3.0], None),  # an epoch without a loss says nothing
        ([0.0, 2.0, 7.0], (1, 2)),
        ([math.nan, 2.0, math.nan, 5.0, 7.0], (1, 4)),  # all steps of an epoch were left out
        ([2.0, math.inf], (0, 1)),
    ],
)
def test_the_first_epoch_whose_loss_is_a_multiple_of_the_lowest(
    losses: list[float], found: tuple[int, int] | None
) -> None:
    assert first_rise(losses) == found
