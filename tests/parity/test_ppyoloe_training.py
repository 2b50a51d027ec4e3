"""PP-YOLOE's rates, moving average and updates against numbers that PaddleDetection produced."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conditioning import compare, perturbed
from reference import parity
from torch import nn

from yolofleet.config.recipe import load_recipe
from yolofleet.training.ema import MovingAverage
from yolofleet.training.optimiser import build_optimizer, set_rates
from yolofleet.training.schedule import Schedule, StepPlan


@pytest.mark.parametrize(
    ("case", "recipe", "epochs"), [("300e", "ppyoloe-300e", 300), ("plus_80e", "ppyoloe-plus-80e", 80)]
)
def test_rates_of_every_step(case, recipe, epochs):
    expected = np.load(parity("ppyoloe_training/lr.npz"))[case]
    schedule = Schedule(
        load_recipe(recipe).value, dataset_images=13 * 64, batch=16, nominal_batch=64, epochs=epochs
    )
    plans = [plan for plan, _ in zip(schedule.steps(), expected, strict=False)]
    assert {plan.images for plan in plans} == {64}  # no ramp of accumulation
    compare([plan.lr for plan in plans], expected, rtol=1e-12, atol=1e-15)
    assert all(plan.lr_bias == plan.lr and plan.momentum == 0.9 for plan in plans)


def test_warm_up_and_horizon_scale_with_the_epochs():
    """A run of 30 epochs has the rates of one of 300 epochs on a tenth of the data."""
    recipe = load_recipe("ppyoloe-300e").value
    long = Schedule(recipe, dataset_images=6400, batch=64, nominal_batch=64, epochs=300)
    short = replace(long, dataset_images=64_000, epochs=30)
    rates = [[s.rate_by_step(image) for image in range(0, 1_920_000, 6400)] for s in (long, short)]
    compare(*rates, rtol=1e-12)


def test_a_short_run_warms_up_for_a_hundred_steps():
    recipe = load_recipe("ppyoloe-300e").value
    short = Schedule(recipe, dataset_images=640, batch=16, nominal_batch=16, epochs=20)
    assert [short.rate_by_step(16 * step) for step in (0, 50)] == [0, recipe.lr0 / 2]
    assert short.rate_by_step(16 * 100) == recipe.lr0
    tiny = replace(short, dataset_images=160)  # the recipe's five epochs are 50 steps
    assert tiny.rate_by_step(16 * 50) == recipe.lr0


def test_labels_are_static_up_to_epoch_99():
    schedule = Schedule(load_recipe("ppyoloe-300e").value, 640, 64, 64, 300)
    switch = schedule.recipe.model_dump()["assigner_switch"]
    assert schedule.progress(100 * 640 - 1) < switch <= schedule.progress(100 * 640)


# its third kind, "exponential", starts at zero without a correction, and no model of ours uses it
@pytest.mark.parametrize(("kind", "rule"), [("threshold", "threshold"), ("normal", "constant")])
def test_moving_average(kind, rule):
    expected = json.loads(parity("ppyoloe_training/ema.json").read_text())[kind]
    live = {
        "w": perturbed(torch.tensor([1.0, -2.0, 3.0])),
        "bn._mean": torch.zeros(2),
        "bn._variance": torch.ones(2),
    }
    average = MovingAverage(live, decay=0.9998, tau=2000, rule=rule)
    records = {record["update"]: record for record in expected}
    for update in range(1, max(records) + 1):
        live["w"] += 0.5 * update
        live["bn._mean"] += 1
        average.update(torch.tensor(True))
        if record := records.get(update):
            compare(average.decay_at(update), record["decay_used"], rtol=1e-12)
            for name in live:
                compare(average.average[name], record["applied"][name], rtol=1e-5, atol=1e-5)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.cb = nn.ModuleDict({"conv": nn.Conv2d(2, 3, 3, padding=1, bias=False), "bn": nn.BatchNorm2d(3)})
        self.out = nn.Conv2d(3, 1, 1)

    def forward(self, x):
        return self.out(F.silu(self.cb["bn"](self.cb["conv"](x))))


def test_three_updates_with_momentum_and_decay():
    """Momentum without Nesterov, decay on weights and biases, not on norms."""
    stored = np.load(parity("ppyoloe_training/optimizer.npz"))
    toy = Toy()
    recipe = load_recipe("ppyoloe-300e").value
    parameters = dict(toy.named_parameters())
    x = perturbed(torch.from_numpy(stored["x"]))
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(torch.from_numpy(perturbed(stored[f"step0.{name}"])))
    optimizer = build_optimizer(toy, "SGD", recipe, recipe.weight_decay)
    set_rates(optimizer, StepPlan(0, 0, 64, lr=0.01, lr_bias=0.01, momentum=0.9))
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss = toy(x).square().mean()
        compare(loss, stored["losses"][step - 1], rtol=3e-5)
        loss.backward()
        optimizer.step()
        for name, p in parameters.items():
            compare(p.detach(), stored[f"step{step}.{name}"], rtol=1e-5, atol=2e-6)
