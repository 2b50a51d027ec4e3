"""Every optimizer, torch's and a user's: one result for all fleets, a resume, a step that is left out, and classes that do not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from small_training import SmallRun, small_run
from torch import nn

from yolofleet.config.schema import Optimizer, Recipe
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.training import optimiser as optimiser_module
from yolofleet.training.optimiser import KINDS, build_optimizer, set_rates, update_if_finite
from yolofleet.training.schedule import StepPlan
from yolofleet.training.users_optimizer import load_optimizer_class

OWN = ["pytorch_optimizer:Lion", "pytorch_optimizer:Lamb", "pytorch_optimizer:Adan"]  # of a package
NAMES = [*get_args(Optimizer), *OWN]
COUNTERS = ("step", "mu_product")  # on the host


# -- in the training step ------------------------------------------------------------------------------------


def quick_run(name: str, **more: Any) -> SmallRun:
    own = load_optimizer_class(name) if ":" in name else None
    run = small_run(optimizer=own or name, images=4, **more)
    run.rate = 1e-3
    return run


def assert_equal(one: SmallRun, other: SmallRun) -> None:
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sum as exact mode does, which sets one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_one_or_two_devices_and_a_resume_give_equal_bits(name: str) -> None:
    alone = quick_run(name, exact=True)
    alone.do(2)
    both = quick_run(name, exact=True, devices=("cpu", "cpu"))
    both.do(2)
    assert_equal(alone, both)
    resumed = quick_run(name, exact=True)
    resumed.state.restore(alone.state.snapshot({}))
    resumed.step = alone.step
    for run in (alone, resumed):
        run.do(1)
    assert_equal(alone, resumed)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", ["NAdam", *OWN])
def test_a_step_that_is_left_out_changes_nothing(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimiser_module, "is_host", lambda device: on_host)  # as on an accelerator if False
    run = quick_run(name)
    for first in (True, False):
        before = run.tensors()
        for p in run.state.model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        update_if_finite(run.state.optimizer, torch.tensor(False))
        after = run.tensors()
        changed = [key for key, t in before.items() if not torch.equal(t, after[key])]
        assert not [key for key in changed if on_host or key.rpartition("/")[2] not in COUNTERS]
        assert all(t.isfinite().all() for t in after.values())
        if first:
            run.do(1)


def test_biases_and_each_factor_have_their_own_rates() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    optimizer = build_optimizer(model, "AdamW", Recipe(), 1e-4, {"0.weight": 0.5, "2.bias": 0.1})
    set_rates(optimizer, StepPlan(0, 0, 4, lr=1.0, lr_bias=2.0, momentum=0.8))
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {"0.weight": 0.5, "1.weight": 1.0, "1.bias": 2.0, "2.weight": 1.0, "2.bias": 0.2}
    assert all(group["betas"][0] == 0.8 for group in optimizer.param_groups)


def test_the_setting_names_every_optimizer() -> None:
    assert list(KINDS) == list(get_args(Optimizer))


# -- classes that do not fit -------------------------------------------------------------------------------------

MISFITS = """
import torch

class Base(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(group, p)

class NoRate(torch.optim.Optimizer):
    def __init__(self, params, weight_decay=0.0): ...

class Rows(Base):
    def update(self, group, p):
        self.state[p]["rows"] = p.detach().sum(-1)

class Lists(Base):
    def update(self, group, p):
        self.state[p]["history"] = [p.detach()]

class Rates(Base):
    def update(self, group, p):
        group["lr"] = 2.0

class Texts(Base):
    def update(self, group, p):
        group["phase"] = "begin"

class Closure(Base):
    def step(self, closure):
        closure()
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NoRate", "the constructor has no argument lr"),
        ("Rows", "its state keeps rows, which is torch.float32 [16, 8, 3]"),
        ("Lists", "its state keeps history, which is list"),
        ("Rates", "a step changes the setting lr"),
        ("Texts", "its groups keep phase, which is str"),
        ("Closure", "two updates on trial failed"),
        ("Nothing", "has no subclass Nothing of torch.optim.Optimizer"),
        ("pytorch_optimizer:ScheduleFreeAdamW", "it exchanges the weights in train() and eval()"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_training(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "misfits.py"
    file.write_text(MISFITS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        with pytest.raises(ConfigError) as refused:
            load_optimizer_class(name if ":" in name else f"{file}:{name}")
    finally:
        sys.modules.pop("misfits", None)
    assert problem in refused.value.what
    assert refused.value.hint


def test_a_checkpoint_must_not_change_settings_of_the_optimizer() -> None:
    run = quick_run(OWN[1])
    run.do(2)
    snapshot = run.state.snapshot({})
    assert snapshot.values["optimizer_counts"][0] == {"step": 2}
    snapshot.values["optimizer_counts"][0]["lr"] = 7.0
    with pytest.raises(CheckpointError, match="settings as counts"):
        run.state.restore(snapshot)
