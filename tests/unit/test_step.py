"""Parts of the step that a run on CPUs does not show: what the host looks at late, and when it waits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from yolofleet.errors import NumericsError
from yolofleet.models.precision import loss_scaler
from yolofleet.parallel import lanes as lanes_module
from yolofleet.parallel.lanes import Lane, Lanes
from yolofleet.parallel.world import World
from yolofleet.train.step import FP16_PATIENCE, watch_numerics


def state_with(norms: list[float]) -> Any:
    pairs = [(step, torch.tensor(norm)) for step, norm in enumerate(norms)]
    return SimpleNamespace(unseen_norms=pairs, overflows=0)


def test_a_gradient_that_is_not_finite_is_found_before_a_state_is_saved():
    state = state_with([1.0, 2.0, math.nan, 3.0])
    watch_numerics(state, "fp32", unseen=2)  # as after a step on a GPU
    assert [step for step, _ in state.unseen_norms] == [2, 3]
    with pytest.raises(NumericsError, match="gradient of step 2 is not finite"):
        watch_numerics(state, "fp32")  # as before saving


def test_fp16_may_overflow_for_a_while():
    state = state_with([math.inf] * FP16_PATIENCE + [1.0])
    watch_numerics(state, "fp16")
    assert state.overflows == 0
    state = state_with([math.inf] * (FP16_PATIENCE + 1))
    with pytest.raises(NumericsError):
        watch_numerics(state, "fp16")


def test_the_loss_scaler_is_whole_before_threads_use_it():
    scaler = loss_scaler("fp16", torch.device("cpu"))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    assert loss_scaler("fp32", torch.device("cpu")).state_dict() == {}


def test_devices_are_waited_for_while_speed_is_measured(monkeypatch: pytest.MonkeyPatch):
    device, world, waits = torch.device("cpu"), World.single(), []
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    lanes = Lanes([Lane.build(model, device, world, exact=False, synced=False)] * 2)
    monkeypatch.setattr(lanes_module, "wait_for", waits.append)
    for lanes.timed, expected in ((False, []), (True, [device] * 3)):
        lanes.begin(1)
        assert lanes.each(lambda lane, number: number) == [0, 1]
        lanes.finish()
        assert waits == expected
