"""Schedules that end with a cooldown or stay constant, and notes about rates that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, takewhile

import pytest

from yolofleet.config.load import resolve_train
from yolofleet.config.schema import Recipe
from yolofleet.training.advice import idle_notes, rate_notes
from yolofleet.training.schedule import Schedule

STEP_RATES = {"rates": "step", "warmup_epochs": 1.0}  # PP-YOLOE's


def schedule(decay: str, **more: object) -> Schedule:
    """4 epochs of 800 images in batches of 8, accumulated to 16 after the warm-up."""
    recipe = Recipe.model_validate({"warmup_epochs": 1.0, "lrf": 0.1, **more})
    return Schedule(recipe, 800, 8, 16, 4, decay)


def rates(plan: Schedule) -> list[float]:
    end = plan.epochs * plan.dataset_images
    steps = takewhile(lambda p: p.first_image < end, plan.steps())
    return [p.lr for p in takewhile(lambda p: not plan.last_step or p.step < plan.last_step, steps)]


@pytest.mark.parametrize("of_recipe", [{}, STEP_RATES, {"warmup_epochs": 0.0}])
def test_a_cooldown_is_constant_and_then_linear_in_the_last_fifth(of_recipe: dict[str, object]) -> None:
    plan = schedule("cooldown", **of_recipe)
    found = rates(plan)
    assert len(found) == plan.steps_of_run
    assert plan.cooldown_start == len(found) - len(found) // 5
    warm = next(step for step, lr in enumerate(found) if lr >= 0.0099999)
    flat, falling = found[warm : plan.cooldown_start], found[plan.cooldown_start - 1 :]
    assert flat == pytest.approx([0.01] * len(flat)) and len(flat) > len(found) // 4
    steps_down = [before - after for before, after in pairwise(falling)]
    assert steps_down == pytest.approx([0.009 / (len(found) // 5)] * len(steps_down))
    assert found[-1] == pytest.approx(0.001)


@pytest.mark.parametrize("of_recipe", [{}, STEP_RATES])
def test_a_constant_rate_never_falls(of_recipe: dict[str, object]) -> None:
    found = rates(schedule("constant", **of_recipe))
    assert found == sorted(found) and found[-1] == 0.01


@pytest.mark.parametrize("begins", [1, 4, 9, 130, 151, 179])
def test_a_run_whose_cooldown_begins_at_any_step_is_the_run_with_that_last_step(begins: int) -> None:
    """With the last step known from the start, as when a run is repeated, every rate is the same."""
    plan = schedule("cooldown")
    ended = plan.cooled_from(begins)
    assert ended.cooldown_start == begins and ended.last_step == begins + begins // 4
    known = replace(plan, last_step=ended.last_step)
    assert rates(known) == [*rates(plan)[:begins], *rates(ended)[begins:]]


@pytest.mark.parametrize("nominal", [4, 16, 100])
def test_a_step_is_known_by_its_end(nominal: int) -> None:
    plan = replace(schedule("linear"), nominal_batch=nominal)
    for step in takewhile(lambda p: p.step < 300, plan.steps()):  # of which the warm-up takes at least 8
        assert plan.ended_by(step.step + 1, step.end_image) == step


def test_a_constant_run_can_end_at_once() -> None:
    assert schedule("constant").cooled_from(17).last_step == 17


def test_a_flat_rate_falls_along_a_cosine_to_a_half_as_in_deim() -> None:
    """64 steps of 100 images: 4 of warm-up, flat until 50 %, then cos from 0 to 90 degrees, because the horizon is 1.5 runs."""
    recipe = Recipe(rates="step", flat_fraction=0.5, horizon=1.5, warmup_steps=4)
    found = rates(Schedule(recipe, 1600, 100, 100, 4))
    assert found[:5] == pytest.approx([0, 0.0025, 0.005, 0.0075, 0.01])
    assert found[4:33] == pytest.approx([0.01] * 29)
    # a half of the falling part: cos(45 degrees) + 1 = 1.7071 of 2
    assert found[48] == pytest.approx(0.01 * 1.70711 / 2, rel=1e-5)
    assert found[63] == pytest.approx(0.01 * (1 + math.cos(math.pi / 2 * 31 / 32)) / 2)


def test_a_rate_without_a_cosine_is_constant_after_its_steps_of_warm_up() -> None:
    found = rates(Schedule(Recipe(rates="step", flat_fraction=1, warmup_steps=4), 1600, 100, 100, 4))
    assert found[4:] == [0.01] * 60


def test_a_warm_up_of_many_steps_is_a_tenth_of_a_short_run() -> None:
    found = rates(Schedule(Recipe(rates="step", flat_fraction=1, warmup_steps=500), 200, 10, 10, 10))
    assert found.index(0.01) == 20 and len(found) == 200


@pytest.mark.parametrize(
    ("recipe", "decay", "form"),
    [
        (Recipe(), "linear", "linear"),
        (Recipe(rates="step"), "linear", "cosine"),
        (Recipe(rates="step", flat_fraction=0.5), "linear", "cosine after 50% of the run"),
        (Recipe(rates="step", flat_fraction=1), "linear", "constant"),
        (Recipe(rates="step", flat_fraction=0.5), "cooldown", "cooldown"),
    ],
)
def test_the_header_names_the_form_that_is_used(recipe: Recipe, decay: str, form: str) -> None:
    assert Schedule(recipe, 200, 10, 10, 10, decay).form == form


def notes(*recipe: str, images: int = 6400, **settings: object) -> str:
    config, resolved = resolve_train({"data": "shapes", "model": "yolov5n", "set": recipe, **settings})
    c = config.value
    plan = Schedule(resolved.value, images, c.batch, c.nominal_batch, c.epochs)
    return "\n".join(rate_notes(c, resolved, plan))


def test_the_warm_up_of_the_other_kind_of_schedule_has_no_effect() -> None:
    by_epoch = ["rates=epoch", "warmup_epochs=2", "warmup_steps=40"]
    given = {"data": "shapes", "model": "dfine-n", "recipe": "dfine"}
    for settings, idle in ((by_epoch, "warmup_steps"), ([*by_epoch, "rates=step"], "warmup_epochs")):
        said = idle_notes(*resolve_train({**given, "set": settings}))
        assert [note.split()[0] for note in said if note.startswith("warmup")] == [idle]


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"set": ["ema_rule=threshold", "ema_tau=5"]}, "ema_tau 5.0 has no effect: only ema_rule=ramp uses it"),
        ({"set": ["horizon=2"]}, "horizon 2.0 has no effect: rates=epoch"),
        ({"set": ["repeat_threshold=0.5"]}, "repeat_threshold 0.5 has no effect: it needs --sampler"),
        ({"set": ["mosaic=0", "mixup=1"]}, "mixup 1.0 has no effect: this run shows no mosaics"),
        ({"optimizer": "AdamW", "set": ["nesterov=false"]}, "nesterov False has no effect: only SGD"),
        ({"set": ["rates=step"], "lr_schedule": "cosine"}, "--lr-schedule cosine has no effect"),
        ({"set": ["mosaic=0"]}, ""),
        ({"recipe": "scratch-med"}, ""),
    ],
)  # fmt: skip
def test_hyperparameters_without_effect_are_named(settings: dict[str, object], note: str) -> None:
    said = idle_notes(*resolve_train({"data": "shapes", "model": "yolov5n", **settings}))
    assert note in "".join(said) and len(said) == bool(note)


def test_notes_name_the_settings_that_fit_the_batch_and_the_optimizer() -> None:
    assert notes() == ""
    assert notes(batch=128) == "", "twice the batch of the recipe is near enough"
    large = notes(batch=512)
    assert "a step has 512 images, but lr0 was chosen for 64" in large
    assert "--lr-scale linear --set warmup_epochs=5 (lr0 x 8)" in large
    assert "--lr-scale sqrt" in notes("lr0=0.001", batch=512, optimizer="AdamW")
    assert notes(batch=512, lr_scale="linear") == "" == notes("reference_batch=512", batch=512)
    assert notes(batch=16, nominal_batch=16) == "", "a smaller rate costs accuracy in small steps"
    assert "(lr0 x 0.25)" in notes("rates=step", batch=16, nominal_batch=16), "as PaddleDetection does"
    assert "with Adamax start from --set lr0=0.002" in notes(optimizer="Adamax")
    assert "lr0 0.001 was chosen for AdamW; with SGD start from --set lr0=0.01" in notes(
        optimizer="SGD", recipe="finetune"
    )
    assert "with package:Lion choose --set lr0" in notes(optimizer="package:Lion")
    assert notes(optimizer="Adam", recipe="rtdetr") == "", "the rate of AdamW is right for Adam"
    for name, rate in (("SGD", "0.001"), ("Adamax", "0.0002")):
        said = notes(optimizer=name, recipe="rtdetr")
        assert said == f"lr0 0.0001 was chosen for AdamW; with {name} start from --set lr0={rate}"
    assert notes("lr0=0.0003", optimizer="package:Lion") == "", "the user chose it"
    assert "20 epochs of 100 images: 56 steps, most of them in the warm-up of 1600" in notes(
        images=100, epochs=20
    )
    assert "20 epochs of 4 images: 5 steps, all in the warm-up of 1600" in notes(images=4, epochs=20)
    assert "1 epoch of 64 images: 4 steps, all" in notes(images=64, epochs=1)
    few = "20 epochs of 100 images: 32 steps; use more --epochs or a smaller --nominal-batch"
    assert notes("warmup_epochs=0", images=100, epochs=20) == few
    assert notes("warmup_epochs=0", images=100, epochs=20, max_steps=9) == ""
    no_change = "1 epoch of 16 images: 1 step, with the rate 0, so no weight changes; use more --epochs"
    assert no_change in notes(images=16, epochs=1, recipe="rtdetr")
    assert "rate 0" not in notes(images=32, epochs=1, recipe="rtdetr")
    assert "--minutes does not move close_mosaic" in notes("close_mosaic=3", minutes=5)
