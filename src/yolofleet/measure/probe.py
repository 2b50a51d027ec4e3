"""Measure the figures of this fleet's machines for predictions: one rank's part of ``yolofleet plan probe``.

It measures parts of the run that ``yolofleet train`` would build, as ``bench train`` does, but each rank reports its own
seconds, and sizes vary where the formula needs a line: passes by their images, sums by their bytes.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe
from yolofleet.config.schema.measure import ProbeRun
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.sample import train_loader
from yolofleet.fleet.plan.library import COCO_IMAGE_BYTES
from yolofleet.measure.bench import measure
from yolofleet.measure.steps import ReadySteps, checkpoint_cost, whole_run
from yolofleet.measure.timing import WARM_UP, in_rounds, part
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.foreign import open_foreign
from yolofleet.support import devices
from yolofleet.support.system.cgroup import available_bytes, cpu_quota
from yolofleet.tasks.table import task_of
from yolofleet.training.parallel.process import usable_cores
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.inputs import training_samples
from yolofleet.training.rank.train import BuiltRun

SUM_BYTES = (64 << 10, 1 << 20, 4 << 20)  # sizes of buckets, from the smallest to the largest
SUM_CALLS = 5
BLOCK_S = 0.5  # a quota of CPU time stops a process for tens of milliseconds, so short works are timed several at once
LOADED = 32  # timed images, at least; one more micro-batch is loaded before, because it imports and allocates
READ_BYTES, READ_S = 64 << 20, 3.0  # limits of reading image files from the disk
EACH_ONCE: Mapping[str, int] = MappingProxyType({})
SPREAD_OF_MAD = 1.4826  # standard deviation / median absolute deviation of a normal distribution


def probe(
    resolved: Resolved[ProbeRun], recipe: Resolved[Recipe], world: World, clock: Clock, folder: RunFolder
) -> None:
    """Do one rank's part of ``yolofleet plan probe``. Collective: every rank."""
    measure(resolved, recipe, world, clock, folder, probe_figures)


def probe_figures(run: BuiltRun, steps: int, world: World) -> dict[str, Any]:
    """Return the values of one probe for each host, equal on every rank. Collective: every rank."""
    ready_at = time.time()
    training = run.training
    before = training.state.snapshot({})
    with part("passes", world):
        mine = _passes(run, steps, world)
    training.state.restore(before)
    sums = []
    if world.size > 1:
        with part("sums", world):
            sums = _sums(world)
    with part("loader", world):
        mine |= _loading(run, world)
    with part("storage", world):
        mine["read_bytes_s"] = _reading(run)
    with part("checkpoint", world):
        saved = checkpoint_cost(training)
    with part("validation", world):
        ran = whole_run(run, None, training.config.workers)
    evaluation = training.report.last_evaluation
    assert evaluation is not None
    parts = {name: seconds for name, seconds in evaluation.seconds.items() if name != "wall"}
    val_image_s = sum(parts.values()) * world.size / evaluation.images
    memory = devices.memory_info(world.device)
    mine |= {
        "host": world.host,
        "cores": min(usable_cores(), cpu_quota() or usable_cores()),
        "memory_bytes": float(available_bytes() or 1 << 30),
        "device": devices.name_of(world.device),
        "device_bytes": float(memory[1]) if memory else 0.0,
    }
    hosts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rank in world.gather(mine):
        hosts[rank["host"]].append(rank)
    shared = {
        "version": 1,
        "on_cpu": devices.is_host(world.device),
        "model": run.network.model.description.name,
        "img": run.network.img,
        "precision": training.precision,
        "image_bytes": statistics.mean(
            [Path(path).stat().st_size for path in _some_files(run)] or [COCO_IMAGE_BYTES]
        ),
        "val_image_s": val_image_s,
        "val_end_s": max(evaluation.seconds["wall"] - sum(parts.values()), 0.0),
        "save_s": saved.standstill_s,
        "sums_between" if len(hosts) > 1 else "sums_inside": [
            row | {"ranks": len(hosts) if len(hosts) > 1 else world.size} for row in sums
        ],
    }
    return {
        "ready_at": ready_at,
        "images_per_s": ran.rate,
        "images": len(run.data.train),
        "val_images": len(run.data.val),
        "probes": [shared | _of_host(ranks) for ranks in hosts.values()],
    }


def _of_host(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a host: the medians of its ranks."""

    def median(name: str) -> float:
        return float(statistics.median(rank[name] for rank in ranks))

    first = ranks[0]
    passes = [{images: (seconds, peak) for images, seconds, peak in rank["passes"]} for rank in ranks]
    return {
        **{name: first[name] for name in ("host", "device", "cores", "memory_bytes", "device_bytes")},
        **{name: median(name) for name in ("update_s", "spread", "load_s", "cached_s")},
        "read_bytes_s": sum(rank["read_bytes_s"] for rank in ranks),
        "devices": len(ranks),
        "passes": [
            {
                "images": images,
                "seconds": statistics.median(rank[images][0] for rank in passes),
                "device_bytes": max(rank[images][1] for rank in passes),
            }
            for images in passes[0]
            if all(images in rank for rank in passes)
        ],
    }


def _wall_s(
    works: Mapping[str, Callable[[], object]], world: World, rounds: int, calls: Mapping[str, int] = EACH_ONCE
) -> dict[str, list[float]]:
    """Return this rank's wall seconds of a call, by round. Collective: every rank."""
    return {name: [s.wall for s in mine] for name, mine in in_rounds(works, world, rounds, calls).items()}


def _passes(run: BuiltRun, steps: int, world: World) -> dict[str, Any]:
    """Time steps of one and of two passes, for several sizes of a pass, without other ranks. Collective: every rank.

    The difference of the two is a pass; the rest of a step is the update. A pass is (images, seconds, bytes of the device).
    """
    training, ready, alone = run.training, ReadySteps(run), World.single(world.device)
    micro = training.splitter.micro_batch
    # all ranks time equal sizes, because each call begins with a barrier
    every = world.gather(ready.passes)
    sizes = sorted({max(micro // 2, 1), micro, *(round(images) for passes in every for images in passes)})
    made = {images: ready.micro_batch(run, images) for images in sizes}

    def step(images: int, passes: int) -> None:
        ready.step(alone, [replace(made[images], ordinal=number) for number in range(passes)])

    works: dict[str, Callable[[], object]] = {
        f"{images} x {passes}": lambda images=images, passes=passes: step(images, passes)  # type: ignore[misc]
        for images in sizes
        for passes in (1, 2)
    }
    works["share"] = lambda: ready.step(alone)
    once = _wall_s(works, world, min(WARM_UP, 2))
    calls = {name: math.ceil(BLOCK_S / min(seconds)) for name, seconds in once.items() if name != "share"}
    measured = _wall_s(works, world, steps, calls)
    peaks = {images: _peak_bytes(lambda images=images: step(images, 1), world.device) for images in sizes}  # type: ignore[misc]
    ready.sum_over(world)
    taken = {name: statistics.median(seconds) for name, seconds in measured.items()}
    passes = [
        (images, max(taken[f"{images} x 2"] - taken[f"{images} x 1"], 1e-6), peaks[images])
        for images in sizes
    ]
    update = statistics.median(2 * taken[f"{images} x 1"] - taken[f"{images} x 2"] for images in sizes)
    share = measured["share"]
    middle = statistics.median(share)
    spread = SPREAD_OF_MAD * statistics.median(abs(seconds - middle) for seconds in share) / middle
    return {"passes": passes, "update_s": max(update, 0.0), "spread": spread}


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the memory that torch takes on a device during ``work``; 0 on a CPU."""
    devices.release_memory(device)
    devices.reset_peak_memory(device)
    work()
    devices.synchronize(device)
    return devices.peak_reserved_bytes(device)


def _sums(world: World) -> list[dict[str, Any]]:
    """Time sums over all ranks, those of the slowest rank. Collective: every rank."""
    found = []
    for count_bytes in SUM_BYTES:
        message = torch.zeros(count_bytes // 4, device=world.device)
        works = {"sum": partial(world.all_reduce_, message)}
        _wall_s(works, world, 1)
        mine = statistics.median(_wall_s(works, world, SUM_CALLS)["sum"])
        found.append({"bytes": count_bytes, "seconds": max(world.gather([mine]))[0]})
    return found


def _loading(run: BuiltRun, world: World) -> dict[str, float]:
    """Time micro-batches in this process: of image files, and of the same images in memory. Collective: every rank."""
    training, network = run.training, run.network
    config = training.config
    micro = training.splitter.micro_batch
    plans = list(islice(training.steps.schedule.steps(), 200))  # a rank may have no work in some steps
    order = [world.rank, *range(world.size)]  # or in any: then it loads the images of another rank
    splitters = [replace(training.splitter, rank=rank) for rank in order]
    splitter = next(s for s in splitters if any(s.keys(plan) for plan in plans))
    every = (key for plan in plans for key in splitter.keys(plan))
    keys = list(islice(every, -(-LOADED // micro) + 1))
    images = sum(len(key.samples) for key in keys[1:])
    files = ImageCache(run.data.train, network.img, "none", quick=True)
    whole = cache(files.get)
    kept = SimpleNamespace(get=lambda image, seen=None: whole(image))  # an image cache that holds all images
    samples = training_samples(
        config,
        network.recipe.value,
        run.data.train,
        kept,
        img=network.img,
        stride=network.stride,
        labels=task_of(network.model).labels,
    )

    def seconds() -> float:
        world.barrier()
        began_s = 0.0
        with train_loader(samples, keys, network.loss.match, workers=0) as batches:
            for number, _ in enumerate(batches):
                if number == 0:  # the first one imports and allocates
                    began_s = time.perf_counter()
        return max(time.perf_counter() - began_s, 1e-9) / max(images, 1)

    read = seconds()
    return {"load_s": read, "cached_s": min(seconds(), read)}


def _some_files(run: BuiltRun) -> list[str]:
    index = run.data.train
    step = max(len(index) // 200, 1)
    return [
        path for path in (index.path(image) for image in range(0, len(index), step)) if Path(path).is_file()
    ]


def _reading(run: BuiltRun) -> float:
    """Return the bytes/s of image files that are not in memory; an upper estimate where the system keeps them there."""
    count, began_s = 0, time.perf_counter()
    for path in _some_files(run):
        with open_foreign(path, buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            count += len(file.read())
        if count >= READ_BYTES or time.perf_counter() - began_s > READ_S:
            break
    return count / max(time.perf_counter() - began_s, 1e-6) if count else 1e9
