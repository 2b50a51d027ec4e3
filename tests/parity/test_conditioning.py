"""The check that comparisons are well conditioned, checked itself."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conditioning import check, compare, perturbed
from ties import for_each_order


def test_a_difference_of_nearly_equal_numbers_is_found():
    def difference():
        x, y = perturbed(np.array([1.0])), perturbed(np.array([0.999]))
        compare(x - y, [0.001], rtol=1e-3)

    with pytest.raises(
        AssertionError, match="not well conditioned: seed 0 moves 1 of 1 values of comparison 0"
    ):
        check(difference)


def test_a_choice_between_nearly_equal_numbers_is_found():
    def choice():
        compare(perturbed(np.array([1.0, 1.0 + 1e-7])).argmax(), 1)

    with pytest.raises(AssertionError, match="by up to inf of the tolerance"):
        check(choice)


def test_a_sum_passes():
    check(lambda: compare(perturbed(np.arange(1000.0)).sum(), 499500, rtol=1e-5))


def test_a_test_that_perturbs_nothing_is_found():
    with pytest.raises(AssertionError, match="perturbs nothing"):
        check(lambda: compare(1.001, 1, rtol=1e-2))


def test_gradients_of_a_near_tie_go_either_way():
    x = torch.tensor([[[[3.0, 3.0001], [1.0, 2.0]]]], requires_grad=True)

    def gradient():
        (found,) = torch.autograd.grad(F.max_pool2d(F.max_pool2d(x, 2, 1), 1), x)
        return found.flatten().tolist()

    assert list(for_each_order(gradient)) == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert F.max_pool2d(x, 2, 1).item() == x[0, 0, 0, 1].item()


def test_every_comparison_within_a_tolerance_can_be_checked():
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        found = re.findall(r"\b(?:approx|assert_close|assert_allclose|isclose|allclose)\(", file.read_text())
        assert not found or file.name == Path(__file__).name, f"{file.name}: use conditioning.compare"
