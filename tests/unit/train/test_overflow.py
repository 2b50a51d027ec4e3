"""A step whose forward pass overflows leaves no trace: not in itself, and not in the good steps after it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from small_training import SmallRun, small_run

from yolofleet.support.errors import NumericsError

MODELS = ["yolov5-narrow", "yolov3-narrow", "ppyoloe-narrow"]
SUMS = [("fast", 1), ("fast", 2), ("exact", 1), ("exact", 2), ("sync-bn", 1)]
# a network has every kind of sum in one of the four ways, and each other one every second kind; the other pairs are slow
WAYS = list(product(("skip", "rollback"), (math.inf, 1e25)))
CASES = [
    pytest.param(model, *sums, *way, marks=() if WAYS[number % 4] == way and is_quick else pytest.mark.slow)
    for number, (model, sums) in enumerate(product(MODELS, SUMS))
    for is_quick in [number < len(SUMS) or number % 2]
    for way in WAYS
]


def assert_equal(one: SmallRun, other: SmallRun) -> None:
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    assert not [name for name, t in mine.items() if not t.isfinite().all()]
    assert not [name for name, t in mine.items() if not torch.equal(t, theirs[name])]


@pytest.mark.parametrize(("model", "sums", "per_pass", "goes_on", "factor"), CASES)
def test_good_steps_after_an_overflow_are_those_of_a_run_without_it(
    model: str, sums: str, per_pass: int, goes_on: str, factor: float
) -> None:
    settings: dict[str, Any] = {"model": model, "images": 4, "per_pass": per_pass}
    settings |= {"exact": sums == "exact", "sync_bn": sums == "sync-bn"}
    run, other = small_run(**settings), small_run(**settings)
    for one in (run, other):
        one.do()
    saved = run.state.snapshot({})
    run.overflow(factor)
    assert run.left_out == [1]
    if goes_on == "rollback":
        run.state.restore(saved)
        run.step = other.step
    else:
        other.leave_out()
    assert_equal(run, other)
    for one in (run, other):
        one.do(2)
    assert_equal(run, other)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSProp"])
def test_an_overflow_leaves_no_trace_in_an_optimizer(optimizer: str) -> None:
    run, other = (small_run(optimizer=optimizer, images=2) for _ in range(2))
    for one in (run, other):
        one.do()
    run.overflow(math.inf)
    other.leave_out()
    for one in (run, other):
        one.do(2)
    assert_equal(run, other)


@pytest.mark.parametrize("part", ["model/", "ema/", "optimizer/", "running_var"])
def test_a_state_with_a_value_that_is_not_finite_is_named(part: str) -> None:
    run = small_run(images=2)
    run.do()
    run.state.check_finite()
    name, tensor = next((name, t) for name, t in run.state._live().items() if part in name)
    with torch.no_grad():
        tensor[(-1,) * tensor.dim()] = math.nan
    with pytest.raises(NumericsError) as raised:
        run.state.check_finite()
    assert raised.value.what == f"the training state after step 1 has NaN or infinity in {name}"
