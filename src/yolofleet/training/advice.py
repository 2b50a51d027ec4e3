"""Notes about settings without effect, rates that probably do not fit the batch or the optimizer, short runs, and rising losses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from yolofleet.config.recipe import is_chosen
from yolofleet.config.resolve import DEFAULT, Resolved
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.networks.detector import Detector
from yolofleet.runs.report.console import NullConsole
from yolofleet.training.schedule import Schedule

FAR = 2.0  # ratio of the images of a step to those of the recipe, or its inverse
MOST_SCALED = 32.0  # ratio up to which arXiv:1706.02677 scaled a rate
FEW_STEPS = 100  # a detector from scratch needs some hundred steps
RISEN = 3.0  # times the lowest loss: more than an epoch of a healthy run, less than one that loses what it learned
STEADIER = "a lower lr0, a longer warm-up or --set clip_norm=1 can help"
LONG_WARMUP = 5.0  # epochs, as arXiv:1706.02677 has for steps of 8192 images
# the rule of --lr-scale: linear for SGD (arXiv:1706.02677), square root for adaptive rates (arXiv:2205.10287)
USUAL_LR = {
    "SGD": 0.01,  # YOLOv5's; the others are torch's defaults
    "Adam": 0.001,
    "AdamW": 0.001,
    "Adamax": 0.002,
    "NAdam": 0.001,
    "RAdam": 0.001,
    "RMSProp": 0.001,
}


# hyperparameters, whether these settings and this recipe leave them without effect, and why
IDLE: tuple[tuple[tuple[str, ...], Callable[[TrainConfig, Recipe], object], str], ...] = (
    (
        ("lrf",),
        lambda c, r: c.lr_decay == "constant" or (r.rates == "step" and c.lr_decay != "cooldown"),
        "the learning rate of this run does not fall to it",
    ),
    (("warmup_bias_lr", "warmup_momentum"), lambda c, r: r.rates == "step", "rates=step has one warm-up"),
    (("warmup_bias_lr", "warmup_momentum"), lambda c, r: not r.warmup_epochs, "there is no warm-up"),
    (
        ("horizon", "reference_epochs", "flat_fraction", "warmup_steps"),
        lambda c, r: r.rates == "epoch",
        "rates=epoch does not use it",
    ),
    (
        ("warmup_epochs", "reference_epochs"),
        lambda c, r: r.rates == "step" and r.warmup_steps,
        "warmup_steps is the length",
    ),
    (("horizon",), lambda c, r: r.flat_fraction == 1, "the learning rate follows no cosine"),
    (
        ("horizon", "flat_fraction"),
        lambda c, r: c.lr_decay in ("constant", "cooldown"),
        "the learning rate follows no cosine",
    ),
    (("nesterov",), lambda c, r: c.optimizer != "SGD", "only SGD has it"),
    (("ema_rule", "ema_tau"), lambda c, r: not r.ema_decay, "ema_decay=0 keeps no average"),
    (("ema_tau",), lambda c, r: r.ema_rule != "ramp", "only ema_rule=ramp uses it"),
    (("repeat_threshold",), lambda c, r: c.sampler != "repeat-factor", "it needs --sampler repeat-factor"),
    (("mosaic9", "mixup", "close_mosaic"), lambda c, r: c.rect or not r.mosaic, "this run shows no mosaics"),
    (("mosaic",), lambda c, r: c.rect, "--rect shows no mosaics"),
)


def show_advice(
    console: NullConsole,
    config: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    schedule: Schedule,
    model: Detector,
    index: DataIndex,
    *,
    is_new: bool,
) -> None:
    """Print what may be wrong with a run that begins; most of it only if the run is new."""
    if text := crowded(model, index):
        console.warn(text)
    if not is_new:
        return
    for note in [*idle_notes(config, recipe), *rate_notes(config.value, recipe, schedule)]:
        console.note(note)


def crowded(model: Detector, index: DataIndex) -> str:
    """Return a warning if images have more labels than a network with a fixed number of predictions has; else ""."""
    queries = getattr(model, "queries", sys.maxsize)
    labels = np.diff(index.offsets)
    above = labels > queries
    if not above.any():
        return ""
    return (
        f"{above.sum()} of {len(labels)} train images have more labels (up to {labels.max()}) than the {queries} predictions "
        f"that {model.description.name} makes: in each step the labels that fit worst are left out; divide such images, or "
        "use a family without a limit, such as yolov5"
    )


def idle_notes(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> list[str]:
    """Return a note for each hyperparameter, and for the schedule, that the user set without effect."""
    notes = dict[str, str]()
    fields, r = Recipe.model_fields, recipe.value
    given = {name for name in fields if is_chosen(getattr(r, name), recipe.sources[name], fields[name])}
    for names, is_idle, why in IDLE:
        for name in given & {*names} if is_idle(config.value, r) else ():
            notes.setdefault(name, f"{name} {getattr(r, name)} has no effect: {why}")
    by_step = recipe.value.rates == "step" and config.value.lr_schedule in ("linear", "cosine")
    if by_step and config.is_given("lr_schedule"):
        notes["lr_schedule"] = (
            f"{config.spelled('lr_schedule')} has no effect: rates=step has a cosine of its own"
        )
    return [notes[name] for name in sorted(notes)]


def rate_notes(config: TrainConfig, recipe: Resolved[Recipe], schedule: Schedule) -> list[str]:
    """Return the notes to print at the start of a run."""
    notes = [
        _of_batch(config, recipe.value, schedule),
        _of_optimizer(config, recipe),
        _of_length(config, schedule),
    ]
    if config.minutes and (recipe.value.close_mosaic or recipe.value.rates == "step"):
        notes.append(
            f"--minutes does not move close_mosaic and assigner_switch, which count from --epochs {config.epochs}: "
            "choose --epochs near what the time allows"
        )
    return [note for note in notes if note]


def _of_batch(config: TrainConfig, recipe: Recipe, schedule: Schedule) -> str:
    images, ratio = schedule.step_images, schedule.step_images / recipe.reference_batch
    if config.lr_scale != "none" or 1 / FAR <= ratio <= FAR:
        return ""
    if ratio < 1 and recipe.rates == "epoch":
        return ""  # YOLOv5's rate is right for small steps, too: benchmarks/README.md, fine-tuning
    if ratio > MOST_SCALED:
        return f"a step has {images} images, {ratio:.0f} times as many as lr0 was chosen for: try a smaller --batch"
    is_sgd = config.optimizer == "SGD"
    rule, factor = ("linear", ratio) if is_sgd else ("sqrt", math.sqrt(ratio))
    longer = (
        f" --set warmup_epochs={LONG_WARMUP:g}" if ratio > FAR and recipe.warmup_epochs < LONG_WARMUP else ""
    )
    return (
        f"a step has {images} images, but lr0 was chosen for {recipe.reference_batch}: try --lr-scale {rule}{longer} "
        f"(lr0 x {factor:.3g})"
    )


def _of_optimizer(config: TrainConfig, recipe: Resolved[Recipe]) -> str:
    name, reference = config.optimizer, recipe.value.reference_optimizer
    if name == reference or not recipe.sources["lr0"].startswith((DEFAULT, "recipe ")):
        return ""
    lr0, usual = recipe.value.lr0, USUAL_LR.get(name)
    if usual and reference != "SGD":  # transformers need lower rates than torch's defaults
        usual *= lr0 / USUAL_LR[reference]
    if usual == lr0:
        return ""
    start = f"start from --set lr0={usual:g}" if usual else "choose --set lr0"
    biases = "" if name == "SGD" or recipe.value.rates == "step" else " --set warmup_bias_lr=0"
    return f"lr0 {lr0:g} was chosen for {reference}; with {name} {start}{biases}"


def _of_length(config: TrainConfig, schedule: Schedule) -> str:
    """Return a note if the run has few steps, or spends most of them in the warm-up."""
    by_step = schedule.recipe.rates == "step"  # such a warm-up is a share of the run
    warm, whole = 0 if by_step else schedule.warmup_images, schedule.epochs * schedule.dataset_images
    steps = schedule.steps_of_run
    epochs = f"{schedule.epochs} epoch" + ("s" if schedule.epochs != 1 else "")
    length = f"{epochs} of {schedule.dataset_images} images: {steps} step{'s' if steps != 1 else ''}"
    if warm > whole / 2:
        part = "all" if warm >= whole else "most of them"
        return (
            f"{length}, {part} in the warm-up of {warm} images (at least 100 batches, as in YOLOv5); use more --epochs or a "
            "smaller --batch"
        )
    if steps >= FEW_STEPS or config.max_steps or config.minutes:
        return ""
    smaller = "--nominal-batch" if schedule.step_images > schedule.batch else "--batch"
    idle = ", with the rate 0, so no weight changes" if by_step and steps == 1 else ""
    return f"{length}{idle}; use more --epochs or a smaller {smaller}"


def first_rise(losses: Sequence[float]) -> tuple[int, int] | None:
    """Return the indices of the first epoch whose loss is more than RISEN times the lowest before it: (lowest, epoch)."""
    lowest = -1
    for index, loss in enumerate(losses):
        if lowest >= 0 and loss > RISEN * losses[lowest]:
            return lowest, index
        if loss > 0 and (lowest < 0 or loss < losses[lowest]):
            lowest = index
    return None


def rise_in(rows: Sequence[Mapping[str, float]]) -> tuple[int, str]:
    """Return the first epoch of rows of results.csv that :func:`first_rise` finds, and a text about it; (0, "") for none."""
    losses = [sum(row[name] for name in row if name.startswith("train/")) for row in rows]
    if (indices := first_rise(losses)) is None:
        return 0, ""
    low, high = (f"{losses[index]:.3g} in epoch {rows[index]['epoch']:.0f}" for index in indices)
    return int(rows[indices[1]]["epoch"]), f"the loss rose from {low} to {high}"
