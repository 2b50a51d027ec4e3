"""Measure the parts of a training alone, each beside its own limit: one rank's part of ``yolofleet bench train``.

The parts are those of the run that ``yolofleet train`` would build from the same settings. All ranks measure at the same
time, so they share cores, memory and links as they would in the run. Rates are those of all ranks together.

| part | measured | limit |
|---|---|---|
| step | ``train_step`` on ready images | forward, backward and update of the bare network, with as many passes |
| all-reduce | the sums of a step, bucket by bucket | one sum of as many bytes |
| loader | micro-batches as the run reads them | reading and decoding alone; from a cache: one copy of the pixels |
| store | reading images from the store of the data set, if it is in one | what the first epoch reads |
| checkpoint | write, read back, compare, rename | one write of as many bytes, with fsync |
| validation | the whole validation split | its forward passes |
| whole run | the training loop | the slowest part; loader and step in turn without loader processes |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe
from yolofleet.config.schema.measure import BenchRun
from yolofleet.measure.bench_verdict import PartSpeed, Setup, StepTime, checkpoint_line, in_turn, judge
from yolofleet.measure.loading import Loaded, StoreSpeed, loader_speed, store_speed
from yolofleet.measure.steps import Saved, StepSpeed, WholeRun, checkpoint_cost, step_speed, whole_run
from yolofleet.measure.timing import WARM_UP, in_turns, part
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.storage.atomic import write_json
from yolofleet.support import devices
from yolofleet.training.loop import TrainingRun
from yolofleet.training.parallel.process import loader_processes, place_text, usable_cores, versions
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import file_writers
from yolofleet.training.rank.train import BuiltRun, built_run

SETTINGS: dict[str, Any] = {  # of a run that only measures
    "epochs": 1000,
    "patience": 0,
    "val_period": 0,
    "val_overlap": False,
    "save_every": ("0",),
    "plots": False,
}


def measure(
    resolved: Resolved[BenchRun],
    recipe: Resolved[Recipe],
    world: World,
    clock: Clock,
    folder: RunFolder,
    figures_of: Callable[[BuiltRun, int, World], Mapping[str, Any]] | None = None,
) -> None:
    """Measure all parts; rank 0 writes the figures to ``results.json``. Collective: every rank.

    Args:
        figures_of: measures the built run, with so many steps of each part; default: the parts of ``bench train``.
    """
    steps = resolved.value.steps
    settings = {**SETTINGS, "max_steps": WARM_UP + steps + 1}
    config = replace(resolved, value=resolved.value.model_copy(update=settings))
    clock.warmup_steps = WARM_UP
    with (
        ExitStack() as lock,
        NullConsole(folder.log(world.rank)) as world.console,
        EventLog(folder.events(world.rank), rank=world.rank, warn=world.console.warn) as events,
    ):
        is_writer = world.rank in file_writers(world, folder, 1, lock)
        with built_run(config, recipe, world, clock, folder, events, is_writer=is_writer) as run:
            figures = (figures_of or _figures)(run, steps, world)
    if world.is_main:
        write_json(folder.results_json, figures)


def _figures(run: BuiltRun, steps: int, world: World) -> dict[str, Any]:
    """Return all figures, equal on every rank except for the checkpoint's. Collective: every rank."""
    training, config = run.training, run.training.config
    workers, on_cpu = loader_processes(config.workers, world), devices.is_host(world.device)
    images = training.steps.schedule.step_images
    before = training.state.snapshot({})
    with part("step", world):
        step = step_speed(run, steps)
    reduced = None
    if world.size > 1:
        with part("all-reduce", world):
            reduced = _all_reduce(training, steps)
    training.state.restore(before)
    with part("loader", world):
        loaded = loader_speed(run, workers, steps)
    stored = None
    if run.cache.index.is_mirrored:
        with part("store", world):
            stored = store_speed(run, workers)
    with part("checkpoint", world):
        saved = checkpoint_cost(training)
    with part("whole run", world):
        ran = whole_run(run, step.network, workers)

    # on a shared machine CPU seconds compare better, where this process does all the work
    by_cpu = on_cpu and workers == 0
    together_s = step.together.wall
    alone_s = together_s * step.turns.ratio("alone", "together", by_cpu=False)
    network_s = alone_s * step.turns.ratio("bare", "alone", by_cpu=by_cpu)
    times = StepTime(
        network=network_s,
        around=alone_s - network_s,
        all_reduce=together_s - alone_s,
        load=images / loaded.rate,
    )
    parts = _parts(images, workers, step, reduced, loaded, stored, saved, ran, by_cpu=by_cpu)
    loop = ran.rate * step.bare.wall / images
    if ran.turns is not None:
        loop = ran.turns.ratio("bare", "step", by_cpu=by_cpu)
    setup = Setup(
        processes=world.size,
        workers=workers,
        cores=usable_cores() // world.local_size,
        cache=run.cache.mode,
        cached=run.cache.covered,
        images=len(run.data.train),
        on_cpu=on_cpu,
        precision=training.precision,
        reduce=config.reduce,
        micro_batch=training.splitter.micro_batch,
        batch=config.batch,
        step_images=images,
    )
    verdict = judge(times, setup)
    return {
        "where": place_text(world),
        "versions": versions(),
        "model": run.network.model.description.name,
        "img": run.network.img,
        "steps": steps,
        "cache_note": run.cache.note,
        "setup": asdict(setup),
        "step_seconds": asdict(times),
        "parts": [asdict(part) | {"share": part.of_limit} for part in parts],
        "loop_of_bare_network": loop,
        "shares_by_cpu": (["step"] + ["whole run"] * (ran.turns is not None)) * by_cpu,
        "device_memory_mib": step.memory_mib,
        "all_reduce": reduced and {"bytes": reduced.bytes, "exposed_s": times.all_reduce},
        "store": stored and asdict(stored),
        "store_line": stored.line() if stored else "",
        "checkpoint": asdict(saved),
        "checkpoint_line": checkpoint_line(saved.bytes, saved.write_s, saved.standstill_s),
        "binds": verdict.binds,
        "verdict": verdict.text,
        "advice": dict(verdict.advice),
    }


def _parts(
    images: int,
    workers: int,
    step: StepSpeed,
    reduced: Reduced | None,
    loaded: Loaded,
    stored: StoreSpeed | None,
    saved: Saved,
    ran: WholeRun,
    *,
    by_cpu: bool,
) -> list[PartSpeed]:
    """Return the rows of the table, for steps of ``images`` images."""
    rate = images / step.together.wall
    share = step.turns.ratio("bare", "together", by_cpu=by_cpu)
    parts = [PartSpeed("step", rate, images / step.bare.wall, "images/s", "the bare network", share)]
    if reduced is not None:
        mb_s = reduced.rate / 1e6, reduced.limit / 1e6
        parts.append(PartSpeed("all-reduce", *mb_s, "MB/s", "one sum of the bytes", reduced.share))
    loading = [PartSpeed("loader", loaded.rate, loaded.limit, "images/s", loaded.limited_by)]
    if stored is not None:
        needed = stored.needed * ran.rate
        loading.append(PartSpeed("store", stored.rate, needed, "images/s", "what the first epoch reads"))
    limit, name, share = min(loaded.rate, rate), "the slower of loader and step", math.nan
    if not workers:
        limit, name = in_turn([loaded.rate, rate]), "loader and step in turn"
    if ran.turns is not None:  # the bare network had another speed there than beside the step
        limit *= step.bare.wall / ran.turns.median("bare").wall
        alone_cpu_s = step.together.cpu + images / loaded.rate_cpu
        share = ran.turns.ratio("bare", "step", by_cpu=by_cpu) * alone_cpu_s / step.bare.cpu
    return [
        *parts,
        *loading,
        PartSpeed("whole run", ran.rate, limit, "images/s", name, share),
        PartSpeed("validation", ran.validation_rate, ran.validation_limit, "images/s", "its forward passes"),
        PartSpeed("checkpoint", saved.rate / 1e6, saved.limit / 1e6, "MB/s", "one write with fsync"),
    ]


@dataclass(frozen=True)
class Reduced:
    """Bytes that the ranks sum in a step, bytes/s of these sums and of one sum of as many bytes, and their ratio."""

    bytes: int
    rate: float
    limit: float
    share: float


def _all_reduce(training: TrainingRun, steps: int) -> Reduced:
    """Collective: every rank."""
    world, formats = training.world, training.state.buckets.formats()
    messages = [torch.zeros_like(form.message()) for form in formats]
    total = sum(t.numel() * t.element_size() for t in messages)
    flat = torch.zeros(total // 4, device=world.device)

    def by_bucket() -> None:
        for work in [world.all_reduce_async(message) for message in messages]:
            world.wait(work)

    works: dict[str, Callable[[], object]] = {"buckets": by_bucket, "flat": lambda: world.all_reduce_(flat)}
    for work in works.values():
        work()
    found = in_turns(works, world, steps)
    share = found.ratio("flat", "buckets", by_cpu=False)
    return Reduced(total, total / found.median("buckets").wall, total / found.median("flat").wall, share)
