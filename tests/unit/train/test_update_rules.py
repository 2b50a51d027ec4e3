"""Every optimizer: the formulas of the papers, one result for all fleets, a resume, and a step that is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_training import SmallRun, small_run
from torch import nn

from yolofleet.config.schema import Optimizer, Recipe
from yolofleet.train import optimiser as optimiser_module
from yolofleet.train.optimiser import KINDS, build_optimizer, set_rates, update_if_finite
from yolofleet.train.schedule import StepPlan
from yolofleet.train.update_rules import LAMB, LARS, Lion, ScheduleFreeAdamW, ScheduleFreeSGD

Array = NDArray[np.float64]
NAMES = list(get_args(Optimizer))
COUNTERS = ("step", "mu_product", "largest_lr", "weight_sum")  # on the host
STEPS, DECAY, BETA1, BETA2 = 30, 0.02, 0.9, 0.99


def lr_at(step: int) -> float:
    """A warm-up of ten steps, then a decay."""
    return 0.01 * min((step + 1) / 10, 1.0) * (1.0 if step < 20 else 0.5)


# -- the formulas of the papers, one parameter at a time -------------------------------------------------------

Gradients = list[Array]


def lion(x: Array, gradients: Gradients, _scaled: bool) -> Array:
    m = np.zeros_like(x)
    for k, g in enumerate(gradients):
        x = x - lr_at(k) * (np.sign(BETA1 * m + (1 - BETA1) * g) + DECAY * x)
        m = BETA2 * m + (1 - BETA2) * g
    return x


def lars(x: Array, gradients: Gradients, scaled: bool) -> Array:
    v = np.zeros_like(x)
    for k, g in enumerate(gradients):
        size, slope = np.linalg.norm(x), np.linalg.norm(g)
        local = 0.001 * size / (slope + DECAY * size) if scaled and size else 1.0
        v = BETA1 * v + lr_at(k) * local * (g + DECAY * x)
        x = x - v
    return x


def lamb(x: Array, gradients: Gradients, scaled: bool) -> Array:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for k, g in enumerate(gradients):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        u = m / (1 - BETA1 ** (k + 1)) / (np.sqrt(v / (1 - BETA2 ** (k + 1))) + 1e-6) + DECAY * x
        ratio = np.linalg.norm(x) / np.linalg.norm(u) if scaled and x.any() else 1.0
        x = x - lr_at(k) * ratio * u
    return x


def schedule_free(y: Array, gradients: Gradients, adam: bool) -> Array:
    """x_t, the average of z_1 ... z_t with the squares of the largest rates so far as weights."""
    z, v, sequence, weights = y, np.zeros_like(y), [], []
    for k, g in enumerate(gradients):
        v = BETA2 * v + (1 - BETA2) * g * g
        u = g / (np.sqrt(v / (1 - BETA2 ** (k + 1))) + 1e-8) if adam else g
        z = z - lr_at(k) * (u + DECAY * y)
        sequence.append(z)
        weights.append(max(map(lr_at, range(k + 1))) ** 2)
        x = np.average(sequence, axis=0, weights=weights)
        y = (1 - BETA1) * z + BETA1 * x
    return x


CASES: dict[type[torch.optim.Optimizer], Callable[[Array, Gradients, bool], Array]] = {
    Lion: lion,
    LARS: lars,
    LAMB: lamb,
    ScheduleFreeSGD: lambda y, gradients, _: schedule_free(y, gradients, adam=False),
    ScheduleFreeAdamW: lambda y, gradients, _: schedule_free(y, gradients, adam=True),
}


@pytest.mark.parametrize("kind", CASES)
def test_an_update_rule_computes_the_formula_of_its_paper(kind: type[torch.optim.Optimizer]) -> None:
    rng = np.random.default_rng(1)
    starts = {"weight": [rng.normal(size=(4, 3)), np.zeros((2, 2))], "bias": [rng.normal(size=5)]}
    parameters = {role: [nn.Parameter(torch.tensor(x)) for x in xs] for role, xs in starts.items()}
    groups = [{"role": role, "params": ps, "weight_decay": DECAY} for role, ps in parameters.items()]
    momentum: dict[str, Any] = {"momentum": BETA1}
    takes_momentum = kind in (LARS, ScheduleFreeSGD)
    rule: Any = kind(groups, lr=0.1, **(momentum if takes_momentum else {"betas": (BETA1, BETA2)}))  # type: ignore[call-arg]
    drawn = {
        role: [[rng.normal(size=x.shape) for _ in range(STEPS)] for x in starts[role]] for role in starts
    }
    for k in range(STEPS):
        for group in rule.param_groups:
            group["lr"] = lr_at(k)
            for p, gradients in zip(group["params"], drawn[group["role"]], strict=True):
                p.grad = torch.tensor(gradients[k])
        rule.step()
    for role, ps in parameters.items():
        for p, start, gradients in zip(ps, starts[role], drawn[role], strict=True):
            found = rule.state[p].get("x", p).detach().numpy()
            expected = CASES[kind](start, gradients, role == "weight")
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


def test_schedule_free_rules_agree_with_the_package_of_their_authors() -> None:
    package = pytest.importorskip("schedulefree", reason="pip install schedulefree compares with the package")
    draw = torch.Generator().manual_seed(0)
    for ours, theirs, arguments in (
        (ScheduleFreeSGD, package.SGDScheduleFree, {"momentum": 0.9}),
        (ScheduleFreeAdamW, package.AdamWScheduleFree, {"betas": (0.9, 0.999)}),
    ):
        start = torch.randn(20, 5, dtype=torch.float64, generator=draw)
        mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        rule = ours([{"params": [mine], "weight_decay": DECAY}], lr=0.1, **arguments)  # type: ignore[arg-type]
        original = theirs([other], lr=0.1, weight_decay=DECAY, foreach=False, **arguments)
        original.train()
        for k in range(STEPS):
            for optimizer in (rule, original):
                optimizer.param_groups[0]["lr"] = lr_at(k)
            mine.grad = torch.randn(20, 5, dtype=torch.float64, generator=draw)
            other.grad = mine.grad.clone()
            rule.step()
            original.step()
        assert torch.allclose(mine, other, rtol=1e-12)
        original.eval()
        assert torch.allclose(rule.state[mine]["x"], other, rtol=1e-12)


# -- in the training step ------------------------------------------------------------------------------------


def quick_run(name: str, **more: Any) -> SmallRun:
    run = small_run(optimizer=name, images=4, **more)
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
@pytest.mark.parametrize("name", ["NAdam", "Lion", "LARS", "LAMB", "ScheduleFreeAdamW"])
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


def test_a_schedule_free_run_validates_the_average_of_its_optimizer() -> None:
    run = quick_run("ScheduleFreeSGD")
    run.do(3)
    for name, p in run.state.model.named_parameters():
        average = run.state.weights()[name]
        assert torch.equal(average, run.state.optimizer.state[p]["x"]), name
    assert not torch.equal(average, p)


def test_biases_and_each_factor_have_their_own_rates() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    optimizer = build_optimizer(model, "LAMB", Recipe(), 1e-4, {"0.weight": 0.5, "2.bias": 0.1})
    set_rates(optimizer, StepPlan(0, 0, 4, lr=1.0, lr_bias=2.0, momentum=0.8))
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {"0.weight": 0.5, "1.weight": 1.0, "1.bias": 2.0, "2.weight": 1.0, "2.bias": 0.2}
    assert all(group["betas"][0] == 0.8 for group in optimizer.param_groups)


def test_the_setting_names_every_optimizer() -> None:
    assert list(KINDS) == NAMES
