"""The loader of a training alone, beside reading and decoding, or one copy of the pixels."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import numpy as np

from yolofleet.config.schema import PREFETCH
from yolofleet.data.geometry.view import Part
from yolofleet.data.images.decode import Seen
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.sample import MicroBatchKey
from yolofleet.fleet.plan.inputs import reads
from yolofleet.measure.timing import WARM_UP, Seconds
from yolofleet.storage.mirror import read_anew
from yolofleet.storage.object_store import AT_ONCE
from yolofleet.support.errors import DataError
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.inputs import training_samples
from yolofleet.training.rank.train import BuiltRun

LISTED = 8  # micro-batches whose reads are listed for the loader's limit
STORE_S, STORE_REQUESTS = 3.0, 5  # how long a store is measured; small requests to it
COPIED_BYTES = 64 << 20  # more than a processor's caches hold


@dataclass(frozen=True)
class Loaded:
    """Images/s of the loaders of all ranks, their limit, and images per CPU second where this process loads."""

    rate: float
    limit: float
    limited_by: str
    rate_cpu: float


Read = tuple[int, Part]  # number of an image, and the part of it that a sample shows


class _Reads:
    """A cache that lists what samples read."""

    def __init__(self, cache: ImageCache) -> None:
        self.cache = cache
        self.reads: list[Read] = []

    def get(self, image: int, seen: Seen | None = None, /) -> np.ndarray:
        pixels = self.cache.get(image, seen)
        size_wh = pixels.shape[1::-1]
        self.reads.append((image, seen(*size_wh) if seen else (0, 0, *size_wh)))
        return pixels


class _ReadAlone:
    """Reads and decodes images, and makes nothing of them."""

    def __init__(self, cache: ImageCache) -> None:
        self.cache = cache

    def __call__(self, reads: Sequence[Read]) -> int:
        for image, box in reads:
            with suppress(DataError):
                self.cache.get(image, partial(_box, box))
        return len(reads)


def _box(box: Part, width: int, height: int) -> Part:
    return box


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


def loader_speed(run: BuiltRun, workers: int, steps: int) -> Loaded:
    """Collective: every rank."""
    training, world = run.training, run.training.world
    plans = list(islice(training.steps.schedule.steps(), WARM_UP + steps + 1))  # those of the whole run
    keys = [key for plan in plans for key in training.splitter.keys(plan)]
    images = sum(len(key.samples) for key in keys)
    # else the micro-batches made in advance would count too much
    repeats = -(-4 * workers // max(len(keys), 1)) or 1
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
    with Loader(
        build, [*pieces, *pieces * repeats], workers=workers, prefetch=PREFETCH, pin_memory=False
    ) as alone:
        limit = _drained(alone, len(pieces), len(pieces) * repeats, world).over(repeats)
    mine = [images / took.wall, made / limit.wall, images / took.cpu] if keys else [0.0] * 3
    rate, limit_rate, rate_cpu = (sum(column) for column in zip(*world.gather(mine), strict=True))
    return Loaded(rate, limit_rate, limited_by, rate_cpu)


@dataclass(frozen=True)
class StoreSpeed:
    """How fast the files of a data set come from its store.

    Attributes:
        rate: images/s of a host, the mean of all hosts. bytes_s: of a host. request_s: of one small request.
        needed: images that a host reads in the first epoch, for each image that all hosts train on.
    """

    rate: float
    bytes_s: float
    request_s: float
    needed: float

    def line(self) -> str:
        words = f"{max(round(8e-6 * self.bytes_s), 1)}mbit,{1000 * self.request_s:.1f}ms"
        return (
            f"the store delivers {self.bytes_s / 1e6:.3g} MB/s to a host, and answers a small request after "
            f"{1000 * self.request_s:.3g} ms: yolofleet plan --store {words}"
        )


def store_speed(run: BuiltRun, workers: int) -> StoreSpeed:
    """Read images from the store of the data set, as loader processes do, and keep none.

    Collective: every rank.

    Raises:
        StorageError: the store cannot be read.
    """
    index, world = run.data.train, run.training.world
    every = np.random.default_rng(0).permutation(len(index))  # images of a mosaic are far from each other
    paths = [index.path(image) for image in every[world.rank % len(index) :: world.size].tolist()]
    count = min(AT_ONCE, len(paths))
    groups = [paths[at : at + count] for at in range(0, len(paths) - count + 1, count)]
    smallest = min(groups[0], key=os.path.getsize)
    requests_s = []
    for _ in range(STORE_REQUESTS):
        began_s = time.perf_counter()
        read_anew([smallest])
        requests_s.append(time.perf_counter() - began_s)
    world.barrier()
    count_bytes = images = 0
    with Loader(cast(Any, read_anew), cycle(groups), workers=workers, prefetch=1, pin_memory=False) as loader:
        for _ in range(2 * max(workers, 1)):  # until then the processes start, connect and read ahead
            next(loader)
        began_s = time.perf_counter()
        while (took_s := time.perf_counter() - began_s) < STORE_S or not images:
            count_bytes += cast(int, next(loader))
            images += count
            world.activity.tick()
    found = world.gather([images / took_s, count_bytes / took_s, statistics.median(requests_s)])
    hosts = sum(1 / size for (size,) in world.gather([world.local_size]))
    rates, bytes_s, latencies = zip(*found, strict=True)
    needed = reads(round(hosts)) / hosts
    return StoreSpeed(sum(rates) / hosts, sum(bytes_s) / hosts, statistics.median(latencies), needed)


def _drained(batches: Iterator[Any], first: int, rest: int, world: World) -> Seconds:
    """Take ``first`` items, then return the seconds of the ``rest``, without a pause between them."""
    began = Seconds.now()
    for number in range(first + rest):
        if number == first:
            began = Seconds.now()
        next(batches)
        world.activity.tick()
    return Seconds.now().since(began)


def _listed_reads(run: BuiltRun, keys: Sequence[MicroBatchKey]) -> list[list[Read]]:
    """Return what each micro-batch shows of which images."""
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
        listed.append(reads.reads)
        reads.reads = []
    return listed
