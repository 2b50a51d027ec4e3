"""Find a learning rate: train some steps while the rate grows, and watch the loss. One rank's part of ``yolofleet lr-find``.

This is the range test of arXiv:1506.01186 with a rate that grows by the same factor in each step. The steps are those of
the run that ``yolofleet train`` would build from the same settings, on all its ranks, so the losses are equal on every
fleet. Nothing is validated or saved but the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import cast

from yolofleet.config.load import Resolved
from yolofleet.config.schema import LrFindConfig, Recipe, TrainConfig
from yolofleet.errors import NumericsError
from yolofleet.files.atomic import write_json, write_text
from yolofleet.measure.bench import SETTINGS
from yolofleet.parallel.world import World
from yolofleet.rank.folder import file_writers, run_console
from yolofleet.rank.train import BuiltRun, built_run
from yolofleet.report.clock import Clock
from yolofleet.report.events import EventLog
from yolofleet.report.folder import RunFolder
from yolofleet.report.plots import attempt
from yolofleet.report.plots_of_searches import plot_rates
from yolofleet.train.step import NanRule, train_step

SMOOTHING = 0.9  # weight of earlier steps in the moving average of the loss
DIVERGED = 4.0  # times the smallest smoothed loss
HARDLY = 0.9  # of the first loss
BELOW_BEST = 10.0  # the suggestion is the rate of the smallest smoothed loss, divided by this


def find_rate(
    resolved: Resolved[LrFindConfig], recipe: Resolved[Recipe], world: World, clock: Clock, folder: RunFolder
) -> None:
    """Measure the curve; rank 0 writes ``lr_find.csv``, a picture and results.json. Collective: every rank.

    Raises:
        NumericsError: the loss diverges within the first steps.
    """
    value = resolved.value.model_copy(update=SETTINGS)
    config = replace(cast(Resolved[TrainConfig], resolved), value=value)
    with (
        ExitStack() as lock,
        run_console(resolved.value, world, folder) as console,
        EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
    ):
        is_writer = world.rank in file_writers(world, folder, 1, lock)
        with built_run(config, recipe, world, clock, folder, console, events, is_writer=is_writer) as run:
            run.begin()
            rates, losses = _curve(run, resolved.value)
        smooth = smoothed(losses)
        suggested = suggestion(rates, smooth)
        if not world.is_main:
            return
        lines = [
            f"{lr:.6g},{loss:.6g},{mean:.6g}" for lr, loss, mean in zip(rates, losses, smooth, strict=True)
        ]
        table, picture = folder.path / "lr_find.csv", folder.path / "lr_find.png"
        write_text(table, "\n".join(["lr,loss,smoothed", *lines, ""]))
        write_json(folder.results_json, {"lr0": suggested, "steps": len(rates)})
        if min(smooth) > HARDLY * smooth[0]:
            console.warn(
                f"the smoothed loss fell by {1 - min(smooth) / smooth[0]:.0%} only, so the suggestion is a guess: more --steps, a "
                "larger --nominal-batch or start weights give a clearer curve"
            )
        drawn = attempt(console.note, picture, plot_rates, rates, losses, smooth, suggested, picture)
        console.summary(
            f"suggested: --set lr0={suggested:.2g} ({len(rates)} steps)",
            {"curve": str(table), **({"picture": str(picture)} if drawn else {})},
        )


def _curve(run: BuiltRun, settings: LrFindConfig) -> tuple[list[float], list[float]]:
    """Return the rates and the losses of the steps until the loss diverges. Collective: every rank."""
    training, world, momentum = run.training, run.training.world, run.network.recipe.value.momentum
    growth = (settings.highest / settings.lowest) ** (1 / (settings.steps - 1))
    rates = [settings.lowest * growth**k for k in range(settings.steps)]
    plans = [
        replace(plan, lr=lr, lr_bias=lr, momentum=momentum)
        for plan, lr in zip(training.schedule.steps(), rates, strict=False)
    ]
    used: list[float] = []
    losses: list[float] = []
    with closing(training.loader(k for plan in plans for k in training.splitter.keys(plan))) as micro_batches:
        for plan in plans:
            with training.report.clock("data"):
                mine = list(islice(micro_batches, len(training.splitter.keys(plan))))
            done = train_step(
                training.state,
                plan,
                training.splitter.by_replica(plan, mine),
                training.loss.at(0.0),
                world,
                training.report.clock,
                total_micro_batches=training.splitter.statistics_total(plan),
                precision=training.precision,
                clip_norm=training.clip_norm,
                nan_rule=NanRule(skips=settings.steps),
            )
            training.report.clock.step(plan.images)
            training.report.console.progress("steps", training.report.clock.steps, len(plans))
            loss = sum(world.sum_rows(done.terms.tolist()))
            if not loss and not losses:
                continue  # the gradient is not finite: in fp16 the search for a loss scale
            if not loss:
                break
            used.append(plan.lr)
            losses.append(loss)
            smooth = smoothed(losses)
            if smooth[-1] > DIVERGED * min(smooth):
                break
    if len(losses) < 2:
        raise NumericsError(
            f"the loss is not finite at a learning rate of {settings.lowest:g}",
            hint="a smaller --lowest, --precision fp32, or check the labels (yolofleet data check)",
        )
    return used, losses


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average of the losses, without the bias of its start at 0."""
    found, average = [], 0.0
    for k, loss in enumerate(losses):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING ** (k + 1)))
    return found


def suggestion(rates: Sequence[float], smooth: Sequence[float]) -> float:
    """Return a tenth of the rate at which the smoothed loss is smallest."""
    best = min(range(len(smooth)), key=lambda k: smooth[k] if math.isfinite(smooth[k]) else math.inf)
    return rates[best] / BELOW_BEST
