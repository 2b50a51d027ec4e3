"""Measure the parts of a training alone, each beside its own limit: one rank's part of ``yolofleet bench train``.

The parts are those of the run that ``yolofleet train`` would build from the same settings. All ranks measure at the same
time, so they share cores, memory and links as they would in the run. Rates are those of all ranks together.

| part | measured | limit |
|---|---|---|
| step | ``train_step`` on ready images | forward, backward and update of the bare network, with as many passes |
| all-reduce | the sums of a step, bucket by bucket | one sum of as many bytes |
| loader | micro-batches as the run reads them | reading and decoding alone; from a cache: one copy of the pixels |
| checkpoint | write, read back, compare, rename | one write of as many bytes, with fsync |
| validation | the whole validation split | its forward passes |
| whole run | the training loop | the slowest part; loader and step in turn without loader processes |
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from yolofleet import devices
from yolofleet.config.load import Resolved
from yolofleet.config.schema import BenchTrainConfig, Recipe, TrainConfig
from yolofleet.errors import DataError
from yolofleet.families import build_model
from yolofleet.files.atomic import write_json
from yolofleet.input.cache import ImageCache
from yolofleet.input.loader import Loader, MicroBatch, MicroBatchKey
from yolofleet.measure.bench_verdict import Part, Setup, StepTime, checkpoint_line, in_turn, judge
from yolofleet.models.description import ModelDescription
from yolofleet.models.precision import autocast
from yolofleet.parallel.process import loader_processes, place_text, usable_cores, versions
from yolofleet.parallel.world import World
from yolofleet.rank.folder import file_writers
from yolofleet.rank.train import BuiltRun, built_run
from yolofleet.rank.training_data import training_samples
from yolofleet.report.clock import Clock
from yolofleet.report.console import NullConsole
from yolofleet.report.events import EventLog
from yolofleet.report.folder import RunFolder
from yolofleet.text import inform
from yolofleet.train.loop import TrainingRun
from yolofleet.train.step import NanRule, train_step

WARM_UP = 3  # steps: memory is allocated, kernels are chosen, the image cache is filled
ROUNDS = 5  # turns of works that are compared on an accelerator, which works best on several steps at once
LABELS = 8  # of each image of ready micro-batches
LISTED = 8  # micro-batches whose reads are listed for the loader's limit
COPIED_BYTES = 64 << 20  # more than a processor's caches hold
SAVES = 3  # checkpoints
SETTINGS: dict[str, Any] = {  # of a run that only measures
    "epochs": 1000,
    "max_steps": 0,
    "minutes": 0.0,
    "patience": 0,
    "parallel": "ddp",
    "multi_scale": False,
    "val_period": 0,
    "val_overlap": False,
    "save_period": "0",
    "save_minutes": "0",
    "save_steps": 0,
    "plots": False,
    "tensorboard": False,
    "log": "",
    "restarts": 0,
    "preempt_notice": "",
    "resume": "",
}


@dataclass(frozen=True)
class Seconds:
    """Wall seconds, and CPU seconds of this process: other jobs on the machine change those less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Seconds) -> Seconds:
        return Seconds(self.wall - before.wall, self.cpu - before.cpu)

    def over(self, times: int) -> Seconds:
        return Seconds(self.wall / times, self.cpu / times)

    @classmethod
    def median(cls, rows: Iterable[Seconds]) -> Seconds:
        every = list(rows)
        return cls(statistics.median(s.wall for s in every), statistics.median(s.cpu for s in every))


def measure(
    resolved: Resolved[BenchTrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    clock: Clock,
    folder: RunFolder,
    figures_of: Callable[[BuiltRun, int, World], Mapping[str, Any]] | None = None,
) -> None:
    """Measure all parts; rank 0 writes the figures to ``results.json``. Collective: every rank.

    Args:
        figures_of: measures the built run, with so many steps of each part; default: the parts of ``bench train``.
    Raises:
        YolofleetError: any expected failure.
    """
    steps = resolved.value.steps
    settings = {**SETTINGS, "max_steps": WARM_UP + steps + 1}
    config = replace(cast(Resolved[TrainConfig], resolved), value=resolved.value.model_copy(update=settings))
    clock.warmup_steps = WARM_UP
    with (
        ExitStack() as lock,
        NullConsole(folder.log(world.rank)) as console,
        EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
    ):
        is_writer = world.rank in file_writers(world, folder, 1, lock)
        with built_run(config, recipe, world, clock, folder, console, events, is_writer=is_writer) as run:
            figures = (figures_of or _figures)(run, steps, world)
    if world.is_main:
        write_json(folder.results_json, figures)


def _figures(run: BuiltRun, steps: int, world: World) -> dict[str, Any]:
    """Return all figures, equal on every rank except for the checkpoint's. Collective: every rank."""
    training, config = run.training, run.training.config
    workers, on_cpu = loader_processes(config.workers, world), devices.is_host(world.device)
    images = training.schedule.step_images
    before = training.state.snapshot({})
    with part("step", world):
        step = _step(run, steps)
    reduced = None
    if world.size > 1:
        with part("all-reduce", world):
            reduced = _all_reduce(training, steps)
    training.state.restore(before)
    with part("loader", world):
        loaded = _loader(run, workers, steps)
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
    parts = _parts(images, workers, step, reduced, loaded, saved, ran, by_cpu=by_cpu)
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
    saved: Saved,
    ran: WholeRun,
    *,
    by_cpu: bool,
) -> list[Part]:
    """Return the rows of the table, for steps of ``images`` images."""
    rate = images / step.together.wall
    share = step.turns.ratio("bare", "together", by_cpu=by_cpu)
    rows = [Part("step", rate, images / step.bare.wall, "images/s", "the bare network", share)]
    if reduced is not None:
        mb_s = reduced.rate / 1e6, reduced.limit / 1e6
        rows.append(Part("all-reduce", *mb_s, "MB/s", "one sum of the bytes", reduced.share))
    limit, name, share = min(loaded.rate, rate), "the slower of loader and step", math.nan
    if not workers:
        limit, name = in_turn([loaded.rate, rate]), "loader and step in turn"
    if ran.turns is not None:  # the bare network had another speed there than beside the step
        limit *= step.bare.wall / ran.turns.median("bare").wall
        alone_cpu_s = step.together.cpu + images / loaded.rate_cpu
        share = ran.turns.ratio("bare", "step", by_cpu=by_cpu) * alone_cpu_s / step.bare.cpu
    return [
        *rows,
        Part("loader", loaded.rate, loaded.limit, "images/s", loaded.limited_by),
        Part("whole run", ran.rate, limit, "images/s", name, share),
        Part("validation", ran.validation_rate, ran.validation_limit, "images/s", "its forward passes"),
        Part("checkpoint", saved.rate / 1e6, saved.limit / 1e6, "MB/s", "one write with fsync"),
    ]


@contextmanager
def part(name: str, world: World) -> Iterator[None]:
    """Show the part that is measured now, and tell it to the watchdog."""
    if world.is_main:
        inform(f"measuring: {name}")
    with world.activity.doing(f"bench: {name}"):
        yield


def _of_all(world: World, mine: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank, in rank order. Collective: every rank."""
    return [json.loads(packed) for packed in world.all_gather_bytes(json.dumps(list(mine)).encode())]


# -- comparing works -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Seconds of one call of each work, by turn."""

    rows: Mapping[str, Sequence[Seconds]]

    def median(self, name: str) -> Seconds:
        return Seconds.median(self.rows[name])

    def ratio(self, one: str, other: str, *, by_cpu: bool) -> float:
        """Return the median over turns of the time of ``one`` / that of ``other``: the load of a turn cancels out."""
        pairs = zip(self.rows[one], self.rows[other], strict=True)
        return statistics.median(a.cpu / b.cpu if by_cpu else a.wall / b.wall for a, b in pairs)


def in_turns(works: Mapping[str, Callable[[], object]], world: World, calls: int) -> Turns:
    """Take works in turns, so that other jobs on the machine slow all of them down alike.

    Collective: every rank; the seconds are those of the slowest rank in each turn.

    Args:
        calls: of each work in total. A turn has one; on an accelerator, which works on in the background, it has more,
            and the device is waited for at the end of the turn only.
    """
    turns = calls if devices.is_host(world.device) else min(ROUNDS, calls)
    rows: dict[str, list[Seconds]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            devices.synchronize(world.device)
            world.barrier()
            began = Seconds.now()
            for _ in range(calls // turns):
                work()
            devices.synchronize(world.device)
            rows[name].append(Seconds.now().since(began).over(calls // turns))
            world.activity.tick()
    return Turns({name: _slowest(world, mine) for name, mine in rows.items()})


def _slowest(world: World, mine: Sequence[Seconds]) -> list[Seconds]:
    """Return the largest seconds of all ranks, one by one. Collective: every rank."""
    every = _of_all(world, [value for s in mine for value in (s.wall, s.cpu)])
    largest = [max(column) for column in zip(*every, strict=True)]
    return [Seconds(*largest[at : at + 2]) for at in range(0, len(largest), 2)]


# -- the step ------------------------------------------------------------------------------------------------


class ReadySteps:
    """Steps of a run on micro-batches that are ready in memory, page-locked where that helps."""

    def __init__(self, run: BuiltRun) -> None:
        self.training = run.training
        self.plan = next(self.training.schedule.steps())
        keys = self.training.splitter.keys(self.plan)
        made = {n: self.micro_batch(run, n) for n in {len(key.samples) for key in keys}}
        mine = [replace(made[len(key.samples)], ordinal=key.ordinal) for key in keys]
        self.shares = self.training.splitter.by_replica(self.plan, mine)
        self.passes = [len(key.samples) for key in keys]

    def micro_batch(self, run: BuiltRun, images: int) -> MicroBatch:
        rng, img = np.random.default_rng(images), run.network.img
        pixels = torch.from_numpy(rng.integers(0, 256, (images, img, img, 3), dtype=np.uint8))
        labels = np.zeros((LABELS * images, 6), np.float32)
        labels[:, 0] = np.repeat(np.arange(images), LABELS)
        labels[:, 1] = rng.integers(0, run.network.model.nc, len(labels))
        labels[:, 2:] = rng.uniform(0.2, 0.6, (len(labels), 4))
        targets = self.training.loss.match(labels, images, (img, img))
        batch = MicroBatch(0, 0, pixels.permute(0, 3, 1, 2), labels, targets)
        is_pinned = self.training.config.pin_memory and devices.can_pin(self.training.world.device)
        return batch.pin_memory() if is_pinned else batch

    def step(self, world: World) -> None:
        """Do one update. Collective: every rank of ``world``."""
        training = self.training
        for replica in training.state.replicas.all:
            replica.buckets.world = world
        train_step(
            training.state,
            self.plan,
            self.shares,
            training.loss.at(1.0),
            world,
            Clock(),
            total_micro_batches=training.splitter.statistics_total(self.plan),
            precision=training.precision,
            clip_norm=training.clip_norm,
            nan_rule=NanRule(skips=10**6),
        )


class BareNetwork:
    """Forward, backward and update of a network with a trivial loss: what every trainer has to compute.

    Args:
        passes: images of each forward pass of a step.
    """

    def __init__(
        self,
        description: ModelDescription,
        nc: int,
        img: int,
        passes: Sequence[int],
        device: torch.device,
        precision: str,
        *,
        channels_last: bool = True,
    ) -> None:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.precision, self.device = precision, device
        self.net = cast(Any, build_model(description, nc).to(device).train()).to(memory_format=layout)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(),
            lr=1e-6,
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-4,
            fused=devices.has_fused(torch.optim.SGD, device),
        )
        sizes = {n: torch.rand(n, 3, img, img, device=device).to(memory_format=layout) for n in {*passes}}
        self.passes = [sizes[n] for n in passes]

    def step(self) -> None:
        for images in self.passes:
            with autocast(self.precision, self.device):
                outputs = self.net(images)
            torch.stack([t.float().sum() for t in _tensors_of(outputs)]).sum().mul(1e-6).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _tensors_of(outputs: Any) -> list[Tensor]:
    """Return all tensors of a network's output that have a gradient."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad else []
    return [t for part in outputs for t in _tensors_of(part)]


@dataclass(frozen=True)
class StepSpeed:
    """Seconds of a step with all ranks, of the same step without other ranks, and of the bare network.

    Attributes:
        turns: "together", "alone", "bare".
        network: the bare network, on a CPU; else None, because it takes memory of the device.
        memory_mib: peak of the device in a step, the largest of the ranks; 0 if torch does not count it.
    """

    turns: Turns
    network: BareNetwork | None
    memory_mib: float

    @property
    def together(self) -> Seconds:
        return self.turns.median("together")

    @property
    def bare(self) -> Seconds:
        return self.turns.median("bare")


def _step(run: BuiltRun, steps: int) -> StepSpeed:
    """Collective: every rank."""
    training, world, config = run.training, run.training.world, run.training.config
    ready, alone = ReadySteps(run), World.single(world.device)
    devices.reset_peak_memory(world.device)
    for _ in range(WARM_UP):
        ready.step(world)
    devices.synchronize(world.device)
    memory_mib = devices.peak_memory_bytes(world.device) / 2**20
    model = run.network.model
    bare = BareNetwork(
        model.description,
        model.nc,
        run.network.img,
        ready.passes,
        world.device,
        training.precision,
        channels_last=config.channels_last,
    )
    for _ in range(WARM_UP):
        bare.step()
    works: dict[str, Callable[[], object]] = {"together": lambda: ready.step(world), "bare": bare.step}
    if world.size > 1:
        works["alone"] = lambda: ready.step(alone)
    turns = in_turns(works, world, steps)
    turns = Turns({"alone": turns.rows["together"], **turns.rows})
    for replica in training.state.replicas.all:
        replica.buckets.world = world
    memory_mib = max(row[0] for row in _of_all(world, [memory_mib]))
    return StepSpeed(turns, bare if devices.is_host(world.device) else None, memory_mib)


# -- all-reduce ----------------------------------------------------------------------------------------------


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


# -- the loader ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """Images/s of the loaders of all ranks, their limit, and images per CPU second where this process loads."""

    rate: float
    limit: float
    limited_by: str
    rate_cpu: float


class _Reads:
    """A cache that lists the images that samples read."""

    def __init__(self, cache: ImageCache) -> None:
        self.cache = cache
        self.numbers: list[int] = []

    def get(self, image: int, /) -> np.ndarray:
        self.numbers.append(image)
        return self.cache.get(image)


class _ReadAlone:
    """Reads and decodes images, and makes nothing of them."""

    def __init__(self, cache: ImageCache) -> None:
        self.cache = cache

    def __call__(self, images: Sequence[int]) -> int:
        for image in images:
            with suppress(DataError):
                self.cache.get(image)
        return len(images)


class _CopyAlone:
    """Copies as many pixels as a micro-batch has, from memory that no cache of the processor holds."""

    def __init__(self, img: int) -> None:
        self.img, self.at = img, 0
        self.source = self.target = np.zeros(0, np.uint8)

    def __call__(self, images: int) -> int:
        if not len(self.source):  # made here, so that it is not sent to loader processes
            shape = (self.img, self.img, 3)
            self.source = np.ones((max(COPIED_BYTES // math.prod(shape), images), *shape), np.uint8)
            self.target = np.zeros_like(self.source)
        for _ in range(images):
            self.at = (self.at + 1) % len(self.source)
            np.copyto(self.target[self.at], self.source[self.at])
        return images


def _loader(run: BuiltRun, workers: int, steps: int) -> Loaded:
    """Collective: every rank."""
    training, world = run.training, run.training.world
    plans = list(islice(training.schedule.steps(), WARM_UP + steps + 1))  # those of the whole run
    keys = [key for plan in plans for key in training.splitter.keys(plan)]
    images = sum(len(key.samples) for key in keys)
    repeats = (
        -(-4 * workers // max(len(keys), 1)) or 1
    )  # else the micro-batches made in advance would count too much
    world.barrier()
    with closing(training.loader([*keys, *keys * repeats])) as batches:  # the first turn fills the cache
        took = _drained(batches, len(keys), len(keys) * repeats, world).over(repeats)
    if run.cache.covered == len(run.data.train):
        limited_by, build = "one copy of the pixels", cast(Any, _CopyAlone(run.network.img))
        pieces: list[Any] = [len(key.samples) for key in keys]
        made = images
    else:
        limited_by, build = "reading and decoding alone", cast(Any, _ReadAlone(run.cache))
        listed = _listed_reads(run, keys[:LISTED])
        pieces = list(islice(cycle(listed), len(keys))) if listed else []
        made = sum(len(key.samples) for key, _ in zip(cycle(keys[:LISTED]), pieces, strict=False))
    world.barrier()
    prefetch = training.config.prefetch
    with Loader(
        build, [*pieces, *pieces * repeats], workers=workers, prefetch=prefetch, pin_memory=False
    ) as alone:
        limit = _drained(alone, len(pieces), len(pieces) * repeats, world).over(repeats)
    mine = [images / took.wall, made / limit.wall, images / took.cpu] if keys else [0.0] * 3
    rate, limit_rate, rate_cpu = (sum(column) for column in zip(*_of_all(world, mine), strict=True))
    return Loaded(rate, limit_rate, limited_by, rate_cpu)


def _drained(batches: Iterator[Any], first: int, rest: int, world: World) -> Seconds:
    """Take ``first`` items, then return the seconds of the ``rest``, without a pause between them."""
    began = Seconds.now()
    for number in range(first + rest):
        if number == first:
            began = Seconds.now()
        next(batches)
        world.activity.tick()
    return Seconds.now().since(began)


def _listed_reads(run: BuiltRun, keys: Sequence[MicroBatchKey]) -> list[list[int]]:
    """Return the numbers of the images that each micro-batch shows."""
    config, listed = run.training.config, []
    reads = _Reads(run.cache)
    samples = training_samples(
        config,
        run.network.recipe.value,
        run.data.train,
        reads,
        img=run.network.img,
        stride=run.network.stride,
    )
    for key in keys:
        for epoch, position in key.samples:
            samples.sample(epoch, position)
        listed.append(reads.numbers)
        reads.numbers = []
    return listed


# -- checkpoint ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint: size, seconds to write and verify it, seconds that training stands still, and bytes/s of writes."""

    bytes: int
    write_s: float
    standstill_s: float
    rate: float
    limit: float


def checkpoint_cost(training: TrainingRun) -> Saved:
    """Measure on rank 0. Collective: every rank."""
    world, rows = training.world, []
    if training.report.is_writer and world.is_main:
        for number in range(SAVES):
            began_s = time.perf_counter()
            snapshot = training.state.snapshot(
                {"fingerprint": training.fingerprint, "clock": training.report.clock.to_dict()}
            )
            copied_s = time.perf_counter()
            training.store.save(replace(snapshot, step=number))
            training.store.flush()
            written_s = time.perf_counter()
            path = training.store.entries()[0].path
            content = path.read_bytes()
            raw_s = time.perf_counter()
            raw = path.with_name("raw")
            with raw.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            done_s = time.perf_counter()
            raw.unlink()
            rows.append((len(content), written_s - copied_s, copied_s - began_s, done_s - raw_s))
        for entry in training.store.entries():
            entry.path.unlink()
    size, write_s, standstill_s, raw_s = (
        (statistics.median(column) for column in zip(*rows, strict=True)) if rows else [math.nan] * 4
    )
    size, write_s, standstill_s, raw_s = _of_all(world, [size, write_s, standstill_s, raw_s])[0]
    return Saved(int(size), write_s, standstill_s, size / write_s, size / raw_s)


# -- whole run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeRun:
    """Images/s of the training loop, and of the validation and its network.

    Attributes:
        turns: "step", and "bare" if steps of the bare network took turns with those of the loop; else None.
    """

    rate: float
    turns: Turns | None
    validation_rate: float
    validation_limit: float


class Interleaved:
    """Passes on the micro-batches of a loader, and times the steps of the loop in turns with steps of the bare network.

    A step lasts from the moment when its first micro-batch is ready to that of the next one. Only for a loop that has no
    loader processes and no other ranks: those would work on during the steps of the bare network.
    """

    def __init__(self, loader: Callable[[Iterable[MicroBatchKey]], Any], bare: Callable[[], object]) -> None:
        self.loader, self.bare = loader, bare
        self.rows: dict[str, list[Seconds]] = {"step": [], "bare": []}
        self._batches: Any = None
        self._step, self._began = -1, Seconds.now()

    def __call__(self, keys: Iterable[MicroBatchKey]) -> Interleaved:
        self._batches = self.loader(keys)
        return self

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        made: MicroBatch = next(self._batches)
        if made.step != self._step:
            ready = Seconds.now()
            self.bare()
            done = Seconds.now()
            if self._step >= 0:
                self.rows["step"].append(ready.since(self._began))
                self.rows["bare"].append(done.since(ready))
            self._step, self._began = made.step, done
        return made

    def close(self) -> None:
        self._batches.close()

    def turns(self) -> Turns:
        """Return the turns after the warm-up."""
        return Turns({name: rows[WARM_UP:] for name, rows in self.rows.items()})


def whole_run(run: BuiltRun, bare: BareNetwork | None, workers: int) -> WholeRun:
    """Train to the end of the run, with its validation. Collective: every rank."""
    training, world = run.training, run.training.world
    if bare is not None and workers == 0 and world.size == 1:
        training.loader = Interleaved(training.loader, bare.step)
    run.begin()
    training.train()
    rate, evaluation = training.report.clock.run_so_far().rate_img_s, training.report.last_evaluation
    assert evaluation is not None, "the last step of a run validates"
    turns = None
    if isinstance(training.loader, Interleaved):
        turns = training.loader.turns()
        rate = training.schedule.step_images / turns.median("step").wall
    return WholeRun(
        rate=min(row[0] for row in _of_all(world, [rate])),
        turns=turns,
        validation_rate=evaluation.images_per_s,
        validation_limit=evaluation.images / max(evaluation.seconds["forward"], 1e-9),
    )
