"""Schedules and averages against traces recorded inside the original trainer (numbers only)."""

import json

import pytest
import torch
from conditioning import compare, perturbed
from reference import parity
from torch import nn

from yolofleet.config.schema import Recipe
from yolofleet.training.ema import MovingAverage
from yolofleet.training.schedule import Schedule

TRACES = json.loads(parity("schedule/lr_warmup.json").read_text())
CASES = [name for name in TRACES if not name.startswith("_")]


def schedule_of(trace: dict) -> Schedule:
    args = trace["args"]
    return Schedule(
        Recipe(),
        dataset_images=trace["nb"] * args["batch_size"],
        batch=args["batch_size"],
        nominal_batch=64,
        epochs=args["epochs"],
        decay="cosine" if args.get("cos_lr") else "linear",
    )


@pytest.mark.parametrize("case", CASES)
def test_rates_of_every_batch_equal_the_originals(case: str) -> None:
    trace, schedule = TRACES[case], schedule_of(TRACES[case])
    for batch, ((bias, weight, _norm), (momentum, *_)) in enumerate(
        zip(trace["lr"], trace["momentum"], strict=True)
    ):
        got = schedule.rates(batch)
        compare(got, (weight, bias, momentum), rtol=1e-12, atol=1e-15)
    compare(schedule.weight_decay, trace["weight_decay"], rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_steps_end_at_the_same_batches(case: str) -> None:
    trace, schedule = TRACES[case], schedule_of(TRACES[case])
    assert [schedule.accumulate(k) for k in range(len(trace["accumulate"]))] == trace["accumulate"]
    recorded = sorted(set(trace["last_opt_step"]))  # batch index of each optimizer step
    assert trace["ema_updates"][-1] == len(recorded)
    batch, mine = trace["args"]["batch_size"], []
    for plan in schedule.steps():
        if plan.end_image > len(trace["lr"]) * batch:
            break
        mine.append(plan.end_image // batch - 1)
    assert mine == recorded


def test_moving_average_of_weights_and_statistics() -> None:
    expected = json.loads(parity("schedule/ema.json").read_text())
    toy = {
        "w": perturbed(torch.tensor(expected["init"]["w"], dtype=torch.float32)),
        "bn.running_mean": torch.zeros(2),
        "bn.running_var": torch.ones(2),
    }
    average = MovingAverage(toy, decay=0.9999, tau=2000)
    for updates, value in expected["decay_at"].items():
        compare(average.decay_at(int(updates)), value, rtol=1e-12)
    for k, after in enumerate(expected["after_each_update"]):
        toy["w"] += 0.5 * (k + 1)
        toy["bn.running_mean"] += 1
        toy["bn.running_var"] *= 2
        average.update(torch.tensor(True))
        for name in toy:
            compare(average.average[name], after[name], rtol=1e-5, atol=1e-5)


def test_parameter_groups_count_as_in_the_original() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    from yolofleet.training.optimiser import parameter_groups

    biases, weights, norms = parameter_groups(model)
    assert (len(biases), len(weights), len(norms)) == (2, 2, 1)
