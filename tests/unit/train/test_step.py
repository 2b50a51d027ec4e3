"""Parts of the step that a run on CPUs does not show: overflows, what the host reads late, when it waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from label_rows import shapes_of
from small_training import described
from torch import nn

from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.build import build_model
from yolofleet.families.networks.precision import LossScaler
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.runs.report.clock import Clock
from yolofleet.support.devices import HostCopy
from yolofleet.support.errors import NumericsError
from yolofleet.training import optimiser as optimiser_module
from yolofleet.training import step as step_module
from yolofleet.training.optimiser import slot_device
from yolofleet.training.parallel import replicas as replicas_module
from yolofleet.training.parallel.replicas import Replica, Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState, UnreadNorm
from yolofleet.training.step import (
    MOST_FP16_SKIPS,
    NanRule,
    StepAbandoned,
    StepReport,
    train_step,
    watch_numerics,
)

IMAGES, IMG, NC = 2, 64, 3


def micro_batch(loss: Any) -> MicroBatch:
    rng = np.random.default_rng(5)
    labels = shapes_of(np.column_stack([[0, 0, 1], rng.integers(0, NC, 3), rng.uniform(0.2, 0.8, (3, 4))]))
    pixels = rng.integers(0, 256, (IMAGES, IMG, IMG, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return MicroBatch(0, 0, images, labels, loss.match(labels, IMAGES, (IMG, IMG)))


class Training:
    """A narrow yolov5n on one micro-batch, its loss scale as in fp16."""

    def __init__(self, optimizer: str, *, exact: bool = False) -> None:
        torch.manual_seed(0)
        self.world, recipe = World.single(), Yolov5Hyperparameters()
        # torch's stub lacks memory_format
        self.model = cast(Any, build_model(described("yolov5-narrow"), NC))
        self.model.to(memory_format=torch.channels_last).train()
        replicas = Replicas.build(
            self.model, [self.world.device], self.world, reduce="exact" if exact else "fast", synced=False
        )
        self.state = TrainState.build(
            replicas, recipe, optimizer=optimizer, weight_decay=5e-4, precision="fp16"
        )
        self.loss = Yolov5Loss(
            anchors_px=self.model.anchors_px, strides=self.model.strides, nc=NC, recipe=recipe, img=IMG
        )

    def step(self, *, precision: str = "fp16", clip_norm: float = 10.0) -> StepReport:
        plan = StepPlan(self.state.step, 0, IMAGES, 0.01, 0.1, 0.8)
        return train_step(
            self.state, plan, [[micro_batch(self.loss)]], self.loss, self.world, Clock(),
            total_micro_batches=1, precision=precision, clip_norm=clip_norm,
        )  # fmt: skip

    def set_scale(self, scale: float) -> None:
        self.state.scaler.load_state_dict({"scale": scale, "_growth_tracker": 0})

    def everything(self) -> dict[str, torch.Tensor]:
        """Copies of weights, statistics, averages and what the optimizer remembers."""
        return {name: t.detach().clone() for name, t in self.state._live().items()}


def test_only_gradients_above_the_limit_are_clipped() -> None:
    free, small, large = (Training("SGD") for _ in range(3))
    for training, limit in ((free, 0.0), (small, 1e6), (large, 0.5)):
        training.step(precision="fp32", clip_norm=limit)
    norm = float(free.state.buckets.norm())
    assert norm > 0.5
    assert float(small.state.buckets.norm()) == norm
    assert float(large.state.buckets.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.fixture(params=["SGD", "Adam", "AdamW"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_in_the_first_step_changes_nothing(
    optimizer: str, fused: bool, monkeypatch: pytest.MonkeyPatch
):
    if not fused:
        # every CPU that runs the tests has the fused kernel
        monkeypatch.setattr(optimiser_module, "has_fused", lambda *_: False)
    training = Training(optimizer)
    training.set_scale(2.0**127)
    before = training.everything()
    training.loss.gains *= 2.0**20
    training.step()
    training.loss.gains /= 2.0**20
    after = training.everything()
    assert training.state.scaler.state_dict()["scale"] == 2.0**126
    for name, t in before.items():
        assert torch.equal(after[name], t), name
    new = set(after) - set(before)  # Adam makes its slots at the first step
    assert not [name for name in new if name[-5:] != "/step" and after[name].any()]
    assert not fused or not [name for name in new if after[name].any()]

    training.set_scale(1024.0)
    training.step()
    other = Training(optimizer)
    other.set_scale(1024.0)
    other.step()
    assert all(torch.isfinite(t).all() for t in training.everything().values())
    if fused:  # the first good step is the first step
        expected = other.everything()
        for name, t in training.everything().items():
            assert name.startswith("ema/") or torch.equal(t, expected[name]), name


def test_a_bad_step_in_the_middle_changes_nothing_though_the_host_reads_its_norm_later(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_module, "is_host", lambda device: False)  # as on an accelerator
    training = Training(optimizer)
    training.set_scale(1024.0)
    training.step()
    before = training.everything()
    with torch.no_grad():
        weight = next(training.model.parameters())
        kept = weight.clone()
        weight.fill_(math.nan)  # the forward pass and its statistics are NaN, too
    training.step(precision="fp32")
    with torch.no_grad():
        weight.copy_(kept)
    for name, t in training.everything().items():
        assert torch.equal(t, before[name]), name
    training.step(precision="fp32")
    with pytest.raises(NumericsError, match="gradient of step 1 is not finite"):
        training.step(precision="fp32")


def test_all_momentum_is_zero_before_the_first_step():
    state = Training("SGD").state
    buffers = [state.optimizer.state[p]["momentum_buffer"] for p in state.model.parameters()]
    assert not torch.cat([b.flatten() for b in buffers]).any()


def test_the_loss_scale_is_that_of_torch():
    """Grows after 2000 good steps, halves at an overflow; and reads its state."""
    ours, theirs = LossScaler("fp16", torch.device("cpu")), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": 1997})
    ours.load_state_dict(theirs.state_dict())
    for gradient in (1.0, math.inf, 1.0, 1.0, math.nan, 1.0):
        weight.grad = torch.full_like(weight, gradient)
        theirs.scale(torch.zeros(1))
        theirs.step(sgd)
        theirs.update()
        ours.update(torch.tensor(math.isfinite(gradient)))
        assert ours.state_dict() == theirs.state_dict()
    for tracker in (1998, 1999):
        state = {**theirs.state_dict(), "_growth_tracker": tracker}
        theirs.load_state_dict(state)
        ours.load_state_dict(state)
        weight.grad = torch.ones_like(weight)
        theirs.step(sgd)
        theirs.update()
        ours.update(torch.tensor(True))
        assert ours.state_dict() == theirs.state_dict()


def test_a_restored_optimizer_has_its_slots_where_its_kernels_look(optimizer: str):
    """Fused Adam needs its count of steps beside the parameter; other kernels need it on the host."""
    training = Training(optimizer)
    training.set_scale(1.0)
    training.step()
    snapshot = training.state.snapshot({})
    far = torch.device("meta")  # stands for a device
    other = Training(optimizer)
    p = next(other.model.parameters())
    (name, q) = next(iter(training.model.named_parameters()))
    slots = training.state.optimizer.state[q]
    moved = nn.Parameter(p.detach().to(far))
    for fused in (True, False):
        probe = SimpleNamespace(param_groups=[{"params": [moved], "fused": fused}])
        for slot, value in slots.items():
            on_host = slot == "step" and not fused
            assert slot_device(probe, moved, value).type == ("cpu" if on_host else "meta"), slot
    other.state.restore(snapshot)
    restored = other.everything()
    for name, t in training.everything().items():
        assert torch.equal(restored[name], t), name
        assert restored[name].stride() == t.stride()


def state_with(norms: list[float]) -> Any:
    plans = [StepPlan(step, 2 * step, IMAGES, 0.01, 0.1, 0.8) for step in range(len(norms))]
    unread = [UnreadNorm(plan, HostCopy(torch.tensor(norm))) for plan, norm in zip(plans, norms, strict=True)]
    return SimpleNamespace(unread_norms=unread, overflows=0)


def test_a_gradient_that_is_not_finite_is_found_before_a_state_is_saved():
    state = state_with([1.0, 2.0, math.nan, 3.0])
    watch_numerics(state, "fp32", unread=2)  # as after a step on a GPU
    assert [plan.step for plan, *_ in state.unread_norms] == [2, 3]
    with pytest.raises(NumericsError, match="gradient of step 2 is not finite"):
        watch_numerics(state, "fp32")  # as before saving


def test_fp16_may_overflow_for_a_while():
    state = state_with([math.inf] * MOST_FP16_SKIPS + [1.0])
    watch_numerics(state, "fp16")
    assert state.overflows == 0
    state = state_with([math.inf] * (MOST_FP16_SKIPS + 1))
    with pytest.raises(NumericsError):
        watch_numerics(state, "fp16")


def test_so_many_steps_in_a_row_may_be_left_out():
    rule = NanRule.parse("skip:2")
    state = state_with([math.nan, math.inf, 1.0, math.nan, math.inf])
    assert [plan.step for plan in watch_numerics(state, "fp32", rule)] == [0, 1, 3, 4]
    state = state_with([1.0, math.nan, math.inf, math.nan, 1.0])
    with pytest.raises(NumericsError, match=r"step 3 is not finite .* as in the 2 steps before") as caught:
        watch_numerics(state, "fp32", rule)
    assert caught.value.first_image == 6


def test_a_step_that_is_left_out_adds_no_loss():
    training = Training("SGD")
    training.set_scale(2.0**127)
    training.loss.gains *= 2.0**20
    assert not training.step().terms.any()
    training.set_scale(1024.0)
    training.loss.gains /= 2.0**20
    assert training.step().terms.all()


def test_the_loss_scaler_is_whole_before_threads_use_it():
    scaler = LossScaler("fp16", torch.device("cpu"))
    assert scaler.scale(torch.tensor(2.0)) == 2 * 65536
    assert LossScaler("fp32", torch.device("cpu")).state_dict() == {}


def test_devices_are_waited_for_while_speed_is_measured(monkeypatch: pytest.MonkeyPatch):
    device, world = torch.device("cpu"), World.single()
    waits: list[torch.device] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    replicas = Replicas([Replica.build(model, device, world, synced=False)] * 2)
    # a wait for the CPU has no effect that a test could see
    monkeypatch.setattr(replicas_module, "wait_for", waits.append)
    for replicas.timed, expected in ((False, []), (True, [device] * 4)):
        replicas.begin(1)
        assert replicas.each(lambda replica, number: number, [0, 1]) == [0, 1]
        replicas.finish()
        assert waits == expected


def test_a_step_that_is_abandoned_has_changed_nothing() -> None:
    training, other = Training("SGD"), Training("SGD")
    batch = micro_batch(training.loss)
    asked = iter([False, False, True])  # before the step, and before each micro-batch

    def step(of: Training, stop: Callable[[], object]) -> None:
        train_step(
            of.state, StepPlan(of.state.step, 0, 2 * IMAGES, 0.01, 0.1, 0.8), [[batch, replace(batch, ordinal=1)]],
            of.loss, of.world, Clock(), total_micro_batches=2, precision="fp32", clip_norm=10.0, stop=stop,
        )  # fmt: skip

    before = training.everything()
    for stop in (lambda: next(asked), lambda: True):
        with pytest.raises(StepAbandoned):
            step(training, stop)
        assert all(torch.equal(t, before[name]) for name, t in training.everything().items())
    assert (training.state.step, training.state.images_seen, training.state.unread_norms) == (0, 0, [])
    for of in (training, other):
        step(of, lambda: False)
    assert all(torch.equal(t, other.everything()[name]) for name, t in training.everything().items())


def test_a_step_without_micro_batches_is_a_fault_of_the_program() -> None:
    training = Training("SGD")
    with pytest.raises(AssertionError, match="step 0 has no micro-batch"):
        train_step(
            training.state, StepPlan(0, 0, 8, 0.01, 0.1, 0.8), [[]], training.loss, training.world, Clock(),
            total_micro_batches=0, precision="fp32", clip_norm=10.0,
        )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_labels_that_teach_nothing_end_the_run(precision: str) -> None:
    state = state_with([1.0, 0.0])
    with pytest.raises(NumericsError, match="gradient of step 1 is exactly 0") as caught:
        watch_numerics(state, precision, NanRule(skips=5))
    assert caught.value.first_image is None  # a rollback would not help
    state = state_with([1.0, 0.0])
    state.unread_norms[1] = state.unread_norms[1]._replace(has_labels=False)  # images of background alone
    assert watch_numerics(state, precision) == []


def test_a_loss_without_gains_ends_the_run() -> None:
    training = Training("SGD")
    training.loss.gains *= 0
    with pytest.raises(NumericsError, match="teach the network nothing"):
        training.step(precision="fp32")
