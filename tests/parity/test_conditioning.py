"""The check that comparisons are well conditioned, checked itself."""

import ast
from collections.abc import Iterator
from itertools import chain
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
        AssertionError, match="not well conditioned:\nseed 0 moves 1 of 1 values of comparison 0"
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


BOUNDING = {"abs", "max", "amax", "norm"}  # a call of these below a bound is a comparison within a tolerance
COMPARING = {"approx", "assert_close", "assert_allclose", "assert_array_almost_equal", "isclose", "allclose"}


def comparisons_within_a_tolerance(source: str) -> list[int]:
    """Return the lines of ``source`` that compare within a tolerance without ``conditioning.compare``."""
    found = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr) and names_called(node, itself=True) & COMPARING:
            found.add(node.lineno)
        if isinstance(node, ast.Assert):
            for smaller, larger in chain.from_iterable(map(ordered_pairs, ast.walk(node))):
                values = [getattr(n, "value", None) for side in (smaller, larger) for n in ast.walk(side)]
                if names_called(smaller) & BOUNDING or any(isinstance(value, float) for value in values):
                    found.add(node.lineno)
    return sorted(found)


def names_called(tree: ast.AST, *, itself: bool = False) -> set[str]:
    calls = [n.func for n in ([tree] if itself else ast.walk(tree)) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}


def ordered_pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the two sides of each < <= > >= of a comparison, the side that must be smaller first."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Lt | ast.LtE):
                yield left, right
            elif isinstance(operator, ast.Gt | ast.GtE):
                yield right, left


def test_every_comparison_within_a_tolerance_can_be_checked():
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        lines = comparisons_within_a_tolerance(file.read_text())
        assert not lines, f"{file.name}, lines {lines}: use conditioning.compare"


@pytest.mark.parametrize(
    "line",
    [
        "assert (values - prior).abs().max() <= width**-0.5 + 1e-6",
        "assert np.abs(ours - theirs).max() < tolerance",
        "assert tolerance >= max(distances)",
        "assert (error < 5e-4).all()",
        "assert ours == pytest.approx(theirs)",
        "np.testing.assert_allclose(ours, theirs)",
        "assert torch.allclose(ours, theirs)",
        "assert not ((ours - theirs).norm() > 1e-3 * scale)",
    ],
)
def test_a_comparison_that_cannot_be_checked_is_found(line):
    assert comparisons_within_a_tolerance(line) == [1]


@pytest.mark.parametrize(
    "line", ["assert scores.max() > 100", "assert (steps > 0).all()", "compare(x, y, atol=1e-3)"]
)
def test_other_lines_pass(line):
    assert comparisons_within_a_tolerance(line) == []
