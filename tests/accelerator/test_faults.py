"""Faults that the package once had, put back: the accelerator shows each of them.

A CPU shows none of them by itself, so these tests are what keeps the accelerator sharp.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from miniature import Accelerator, UnexpectedWait
from small_training import SmallRun, small_run
from test_training import restored

from yolofleet.devices import HostCopy
from yolofleet.errors import NumericsError
from yolofleet.train import state as state_module
from yolofleet.train import step as step_module


def run_of(**settings: Any) -> SmallRun:
    return small_run(devices=("mini:0",), images=2, pin=True, **settings)


@pytest.mark.parametrize("is_faulty", [True, False])
def test_momentum_that_is_made_by_a_skipped_first_step_corrupts_the_weights(is_faulty: bool):
    run = run_of(precision="fp16")
    if is_faulty:
        run.state.optimizer.state.clear()  # fused SGD makes the buffers itself, with empty_like
    run.state.scaler.load_state_dict({"scale": 2.0**126, "_growth_tracker": 0})
    run.do(1)
    run.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    run.do(1)
    broken = [name for name, t in run.tensors().items() if not t.isfinite().all()]
    assert bool(broken) == is_faulty, broken


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_a_count_restored_on_the_host_stops_fused_adam(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    run = run_of(optimizer=optimizer)
    run.do(1)

    def beside_equal_shapes(_optimizer: object, parameter: torch.Tensor, slot: torch.Tensor) -> torch.device:
        return parameter.device if parameter.shape == slot.shape else torch.device("cpu")

    monkeypatch.setattr(state_module, "slot_device", beside_equal_shapes)
    resumed = restored(run, devices=("mini:0",), images=2, pin=True, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="on the same device"):
        resumed.do(1)


@pytest.mark.parametrize("fault", ["weights", "norm", ""])
def test_a_drained_device_is_seen_in_a_steady_step(
    fault: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    run = run_of()
    run.do(3)
    before = accelerator.devices[0].operations
    run.do(1)
    step = accelerator.devices[0].operations - before
    if fault == "weights":
        monkeypatch.setattr(step_module, "to_device", lambda tensor, device: tensor.to(device))
    elif fault == "norm":
        monkeypatch.setattr(step_module, "UNREAD_NORMS", 0)
    with accelerator.only_waits(behind=step):
        if fault:
            with pytest.raises(UnexpectedWait):
                run.do(1)
        else:
            run.do(1)


def test_a_copy_to_the_host_that_is_read_too_early_gives_old_bytes(monkeypatch: pytest.MonkeyPatch):
    """The norm without its event: the host sees NaN and stops a good run."""
    run = run_of()
    monkeypatch.setattr(step_module, "UNREAD_NORMS", 0)
    monkeypatch.setattr(HostCopy, "read", lambda copy: copy._host)
    with pytest.raises(NumericsError, match="not finite"):
        run.do(1)
