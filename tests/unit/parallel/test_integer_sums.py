"""Integer sums keep small gradients of parameters whose first gradient was 0, with equal bits for every partition."""

from __future__ import annotations

import itertools

import pytest
import torch

from yolofleet.training.parallel.exact import MOST_WIDE_STEPS, IntegerFormat

LATE = (
    1e-9,
    5e-8,
    1e-6,
    5e-5,
    3e-9,
)  # the second parameter's gradients after the first step; none grows 64-fold


def summed(parts: list[list[list[float]]], formats: list[IntegerFormat]) -> torch.Tensor:
    """Return the sum of a step whose micro-batches the formats share, on all of them."""
    for format, share in zip(formats, parts, strict=True):
        format.begin(sum(map(len, parts)))
        for gradient in share:
            format.flat.copy_(torch.tensor(gradient))
            format.accumulate()
    for other in formats[1:]:
        formats[0].add(other)
    for other in formats[1:]:
        other.message().copy_(formats[0].message())
    for format in formats:
        format.write_back(torch.zeros(()))
    return formats[0].flat.clone()


@pytest.mark.parametrize("zero_steps", [1, 3])
def test_a_parameter_without_a_gradient_in_the_first_steps_keeps_its_small_gradients(zero_steps):
    format = IntegerFormat(torch.zeros(4), [2, 2])
    for value in (*[0.0] * zero_steps, *LATE):
        found = summed([[[1e-3, 2e-3, value, -value]]], [format])
        assert found[:2].tolist() == pytest.approx([1e-3, 2e-3], rel=1e-5)
        assert found[2:].tolist() == pytest.approx([value, -value], rel=0.01, abs=1e-11)
    assert format.message().dtype == torch.int32  # no more bytes than float32, from then on


def test_a_parameter_without_any_gradient_costs_twice_the_bytes_for_some_steps_only():
    format = IntegerFormat(torch.zeros(4), [2, 2])
    for step in range(MOST_WIDE_STEPS + 1):
        again = IntegerFormat(torch.zeros(4), [2, 2])
        again.restore_grid(format.grid())  # as after a resume
        found, others = (summed([[[1e-3, 2e-3, 0.0, 0.0]]], [one]) for one in (format, again))
        assert found.equal(others) and format.message().dtype == again.message().dtype == torch.int64, step
    summed([[[1e-3, 2e-3, 0.0, 0.0]]], [format])
    assert format.message().dtype == torch.int32
    assert summed([[[1e-3, 2e-3, 0.0, 0.5]]], [format])[3] == 0.5


def test_partitions_have_equal_bits_while_a_parameter_waits_for_its_first_gradient():
    drawn = torch.Generator().manual_seed(0)
    steps = [
        (torch.randn(3, 4, generator=drawn) * torch.tensor([1, 1, late, late])).tolist()
        for late in (0, 0, *LATE)
    ]
    found = []
    for borders in ([0, 3], [0, 1, 3], [0, 1, 2, 3]):
        formats = [IntegerFormat(torch.zeros(4), [2, 2]) for _ in borders[1:]]
        shares = [[step[a:b] for a, b in itertools.pairwise(borders)] for step in steps]
        found.append(torch.stack([summed(parts, formats) for parts in shares]))
    assert found[0].equal(found[1]) and found[0].equal(found[2])


def test_a_state_in_which_every_parameter_has_a_grid_goes_on_with_it():
    """States of earlier versions have 2^22 for parameters without a gradient."""
    format = IntegerFormat(torch.zeros(4), [2, 2])
    format.restore_grid(torch.tensor([2.0**30, 2.0**22]))
    assert summed([[[1e-3, 2e-3, 1e-8, 0.5]]], [format])[2:].tolist() == [0.0, 0.5]
    assert format.message().dtype == torch.int32
