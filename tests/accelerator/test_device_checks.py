"""The self-test's checks of one device pass on the accelerator, and fail when a fault is put back."""

from __future__ import annotations

import pytest
import torch

from yolofleet.measure.selftest import device_checks
from yolofleet.training import state as state_module

ONE = torch.device("mini", 0)  # C++ code may make scalars on index 0


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "STEPS", 3)
    monkeypatch.setattr(device_checks, "OPTIMIZERS", ("SGD", "AdamW"))


def test_all_checks_pass():
    done = list(device_checks.run_checks(ONE))
    assert [check["name"] for check in done] == [
        "ten steps as on the CPU",
        "fp16 overflow in the first step",
        "resume with SGD",
        "resume with AdamW",
    ]
    assert not [check for check in done if not check["passed"]]


def test_momentum_buffers_that_a_skipped_step_allocates_fail_a_check(monkeypatch: pytest.MonkeyPatch):
    class Faulty(device_checks.Training):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)
            self.state.optimizer.state.clear()

    monkeypatch.setattr(device_checks, "Training", Faulty)
    with pytest.raises(AssertionError, match="not finite after an overflow"):
        device_checks.survives_an_overflow(ONE)


def test_a_step_count_restored_to_host_memory_fails_a_check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_module, "slot_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(device_checks, "OPTIMIZERS", ("AdamW",))
    check = list(device_checks.run_checks(ONE))[-1]
    assert (check["name"], check["passed"]) == ("resume with AdamW", False)
    assert "on the same device" in check["detail"]
