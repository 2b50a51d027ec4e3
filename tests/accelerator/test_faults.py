"""Faults that the package once had, put back: the accelerator shows each of them.

A CPU shows none of them by itself, so these tests are what keeps the accelerator sharp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import miniature
import numpy as np
import pytest
import torch
from miniature import Accelerator, UnexpectedWait
from small_training import SmallRun, described, small_run
from walks import sampled

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.families.build import build_model
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.support import devices
from yolofleet.support.devices import HostCopy
from yolofleet.support.errors import NumericsError
from yolofleet.training import state as state_module
from yolofleet.training import step as step_module

ZERO, ONE = torch.device("mini", 0), torch.device("mini", 1)


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


@pytest.mark.parametrize("optimizer", sampled(["AdamW", "Adam"], 2))
def test_a_count_restored_on_the_host_stops_fused_adam(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    run = run_of(optimizer=optimizer)
    run.do(1)

    def beside_equal_shapes(_optimizer: object, parameter: torch.Tensor, slot: torch.Tensor) -> torch.device:
        return parameter.device if parameter.shape == slot.shape else torch.device("cpu")

    monkeypatch.setattr(state_module, "slot_device", beside_equal_shapes)
    resumed = run_of(optimizer=optimizer)
    resumed.state.restore(run.state.snapshot({}))
    with pytest.raises(RuntimeError, match="on the same device"):
        resumed.do(1)


@pytest.mark.parametrize("fault", sampled(["", "norm", "weights"], 2))
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


def event_of_the_current_device(device: torch.device, *, sleeps: bool = False) -> torch.Event:
    event = torch.Event(device=device)
    event.record()
    return event


@pytest.mark.parametrize("is_faulty", [True, False])
def test_an_event_of_the_current_device_does_not_wait_for_the_named_one(
    is_faulty: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_faulty:
        monkeypatch.setattr(devices, "completion", event_of_the_current_device)
    copy = HostCopy(torch.ones(1, device=ONE))
    assert (copy.read().item() == 1) != is_faulty


@pytest.mark.parametrize("fault", sampled(["", "event", "synchronize", "guard"], 2))
def test_work_for_the_second_device_leaves_the_first_alone(
    fault: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    """Else each process takes some hundred MB of the first GPU. The current device of a new thread is the first one."""

    @contextmanager
    def set_and_return(device: torch.device) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(device.index)
        yield
        torch.accelerator.set_device_index(before)

    if fault == "event":
        monkeypatch.setattr(devices, "completion", event_of_the_current_device)
    elif fault == "synchronize":
        monkeypatch.setattr(devices, "synchronize", torch.accelerator.synchronize)
        monkeypatch.setattr(devices, "selected", lambda device: nullcontext())
    elif fault == "guard":
        monkeypatch.setattr(devices, "selected", set_and_return)
    accelerator.reset()
    predictor = Predictor(
        build_model(described("yolov3-narrow"), 3).eval(), PredictConfig(img=64, device="1")
    )
    picture = np.zeros((64, 64, 3), np.uint8)

    def beside_training() -> None:
        with devices.side_stream(ONE):
            predictor.predict(picture)

    predictor.predict(picture)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(beside_training).result()
    assert accelerator.devices[1].has_context
    assert accelerator.devices[0].has_context == bool(fault)


@pytest.mark.parametrize("at_once", sampled([True, False], 2))
def test_a_validation_beside_a_training_needs_the_memory_of_both(
    at_once: bool, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    """A memory limit that each of them keeps alone."""
    monkeypatch.setattr(miniature, "SWEEP_BYTES", -(2**60))  # freed memory is seen at once
    run, predictor = (
        run_of(),
        Predictor(build_model(described("yolov3-narrow"), 3).eval(), PredictConfig(img=64, device="0")),
    )
    device, pictures = accelerator.devices[0], [np.zeros((256, 256, 3), np.uint8)]

    def validate() -> None:
        with devices.side_stream(ZERO):
            predictor.forward(pictures)

    def peak_bytes(work: Callable[[], object]) -> int:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(ZERO)
        work()
        return devices.peak_reserved_bytes(ZERO)

    run.do(1)
    alone = peak_bytes(lambda: run.do(1)), peak_bytes(validate)
    both = peak_bytes(lambda: (run.do(1), validate()))
    kept = device.used_bytes()
    assert both - kept == sum(peak - kept for peak in alone), "each stream keeps its memory"

    device.limit_bytes = max(alone)
    if at_once:  # the training holds its activations meanwhile
        run.state.replicas.lead.model.register_forward_hook(lambda *_: validate())
    with pytest.raises(torch.OutOfMemoryError) if at_once else nullcontext():
        run.do(1)
        validate()
