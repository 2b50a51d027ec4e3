"""What the formula predicts from: the workload of a training, and the machines of a fleet with their seconds and rates for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from yolofleet.storage.object_store import AT_ONCE

BUCKET_BYTES = 4 << 20  # as in training/parallel/buckets.py, which needs torch; a test compares them
FILLED = 0.75  # share of the square that images of 640 x 480 fill
STATE_BYTES = 20  # of each parameter, in fp32: weight, gradient, momentum, moving average, and its next value
FORMAT_BYTES = {"fast": 4, "fast16": 2, "exact": 4}  # size of an element in a message


@dataclass(frozen=True)
class Network:
    """The properties of a network that decide the time of a step."""

    name: str
    parameters: int  # number of trained parameters
    # 10^9 operations of a forward pass of one image at 640 px, as ``families/networks/cost.py`` counts them
    gflops: float
    # shares of the backward pass, 0..1, after which 1/8, 2/8 ... 8/8 of the gradients are final. The last
    # layers' gradients come first; a share is one of operations
    ready: tuple[float, ...]
    # that the backward pass needs of the forward pass of one image at 640 px, in fp32
    saved_bytes: float = 0.0

    def ready_at(self, share: float) -> float:
        """Return the share of the backward pass after which ``share`` of the gradients is final; both 0..1."""
        curve = (0.0, *self.ready)
        return float(np.interp(share, np.linspace(0, 1, len(curve)), curve))


@dataclass(frozen=True)
class Workload:
    """A training, as the formula needs it."""

    network: Network
    img: int  # pixels
    # images, val_images: of an epoch and of a validation
    images: int
    val_images: int
    image_bytes: float  # mean size of an image file
    epochs: int
    step_images: int  # images of a step, over all ranks, after the warm-up
    micro_batch: int  # images
    per_pass: int = 1  # micro-batches that pass the network together
    # loader processes of each rank; 0: the process that trains loads; -1: chosen from the cores
    workers: int = -1
    # where decoded images are kept; auto: in memory, if all fit into half of it
    cache: Literal["none", "ram", "disk", "auto"] = "none"
    reduce: Literal["fast", "fast16", "exact"] = "fast"
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    # shares of the ranks; () = equal, except with ``auto_shares``: in proportion to their speed
    shares: tuple[float, ...] = ()
    auto_shares: bool = False
    val_period: int = 1  # epochs between validations; 0: only after the last one

    @property
    def steps(self) -> float:
        """Steps of an epoch: a step may hold images of two epochs."""
        return self.images / self.step_images

    @property
    def validations(self) -> int:
        """Validations of the whole run; the last epoch has one."""
        return math.ceil(self.epochs / self.val_period) if self.val_period else 1

    @property
    def device_bytes(self) -> float:
        """Bytes of a device that a pass of one micro-batch needs at least.

        This counts the state and what the backward pass needs of the forward pass. It leaves out what the kernels, the loss
        and the allocator add.
        """
        saved = self.network.saved_bytes * (self.img / 640) ** 2 * self.micro_batch
        in_16_bits = self.precision in ("fp16", "bf16")
        return STATE_BYTES * self.network.parameters + saved / (2 if in_16_bits else 1)

    @property
    def cached_bytes(self) -> int:
        """Bytes of all decoded images, if they fill as much of the square as those of COCO."""
        return round(self.images * 3 * self.img**2 * FILLED)

    @cached_property
    def buckets(self) -> tuple[tuple[int, float], ...]:
        """(bytes of the message, share of the backward pass after which it is complete) of each bucket, in order.

        The sizes follow the rule of ``training.parallel.buckets.grouped`` for parameters that fill each bucket.
        """
        gradient, sizes, limit = 4 * self.network.parameters, list[int](), BUCKET_BYTES // 8
        while (remaining := gradient - sum(sizes)) > 0:
            sizes.append(min(limit, remaining))
            limit = min(2 * limit, BUCKET_BYTES)
        ends = [0, *accumulate(reversed(sizes))]
        factor = FORMAT_BYTES[self.reduce] / 4
        return tuple(
            (round((end - start) * factor), self.network.ready_at(end / gradient))
            for start, end in pairwise(ends)
        )


AUTO_SHARE = 0.5  # largest share of the memory that --cache auto fills, as in data/input/cache.py
# largest share of the memory that the image cache or the kernel's page cache fills, as in data/input/cache.py
RAM_SHARE = 0.8
SHOWN_TOGETHER = 4  # images of a mosaic


@dataclass(frozen=True)
class Link:
    """The link between two ranks."""

    latency_s: float  # latency of one message
    bytes_s: float  # in one direction
    # latency grows with the logarithm of the ranks (NCCL), else with their number (gloo's ring)
    tree: bool = False

    def all_reduce_s(self, count_bytes: float, ranks: int) -> float:
        """Return the seconds of a sum over ``ranks`` ranks that each have such a link."""
        if ranks <= 1:
            return 0.0
        hops = 2 * math.ceil(math.log2(ranks)) if self.tree else 2 * (ranks - 1)
        return hops * self.latency_s + 2 * (ranks - 1) / ranks * count_bytes / self.bytes_s


NO_LINK = Link(0.0, math.inf)


def bytes_s_of(text: str, share: float = 1.0) -> float:
    """Return the bytes per second of a share of a rate such as ``10gbit`` or ``100mbit``."""
    return share * int(text[:-4]) * (1e9 if text.endswith("gbit") else 1e6) / 8


@dataclass(frozen=True)
class Store:
    """The store of a data set: limits of one host, and the price. A host reads each file once, and its disk cache holds them all."""

    bytes_s: float  # bandwidth of the host's link, bytes per second
    latency_s: float  # latency of one request
    price: float = 0.0  # US dollars for 1,000 requests

    @classmethod
    def parse(cls, text: str) -> Store:
        """Return what ``--store`` says: ``1gbit,20ms`` or ``1gbit,20ms,0.0004``."""
        link, latency, *price = text.split(",")
        return cls(bytes_s_of(link), float(latency[:-2]) / 1000, *map(float, price))

    def image_s(self, image_bytes: float, processes: int) -> tuple[float, str]:
        """Return the seconds of a host to read an image with so many processes, and which limit binds."""
        by_bytes, by_latency = image_bytes / self.bytes_s, self.latency_s / (AT_ONCE * processes)
        return max((by_bytes, "bandwidth"), (by_latency, "latency"))


def reads(hosts: int) -> float:
    """Return how many images each host reads in the first epoch for each image of its part, if all are shown in mosaics.

    The other images of a mosaic are random ones of the whole set.
    """
    return 1 + (hosts - 1) * (1 - math.exp(-(SHOWN_TOGETHER - 1) / hosts))


class Doubt(NamedTuple):
    """Relative errors that are plausible: 0.1 = the value may be 10 % smaller or larger."""

    compute: float
    load: float
    link: float


@dataclass(frozen=True)
class Machine:
    """A host. Seconds are those of the workload, on one of its devices alone."""

    name: str
    devices: int  # ranks
    cores: float  # CPU cores that all ranks share
    pass_s: float  # fixed time of a forward and backward pass, besides ``image_s`` for each of its images
    image_s: float
    update_s: float  # time of a step besides its passes: loss counts, clipping, optimizer, average
    load_s: float  # seconds of one core to read, decode and augment an image
    cached_s: float  # the same from the image cache
    read_bytes_s: float  # bandwidth of the storage for the whole host, bytes per second
    # inside: links between the ranks of the host; between: links to other hosts
    inside: Link
    between: Link
    val_image_s: float  # time of a validation for each image of a rank
    val_end_s: float  # time of the end of a validation: gather, match and average, on any fleet
    save_s: float  # pause of the training for a checkpoint
    start_s: float  # from the command to the first step
    spread: float  # relative standard deviation of the time of a step of one rank
    memory_bytes: float  # memory of the host
    device_bytes: float  # memory of a device, 0 for a CPU
    on_cpu: bool  # loader processes take cores from the network
    doubt: Doubt
    needed_bytes: float = 0.0  # memory that a device needs for a pass of one micro-batch; 0 = unknown
    price_hour: float = math.nan  # US dollars for the host; NaN = unknown
    store: Store | None = None  # store of the data set, if it is not on the host's disk
    # images that the host reads from there in the first epoch, for each image of its part
    store_reads: float = 1.0
    source: str = ""  # where the figures come from

    @property
    def rank_cores(self) -> float:
        """Return the cores of each rank."""
        return self.cores / self.devices

    @property
    def fits(self) -> bool:
        """Return whether a device may hold a pass of one micro-batch."""
        return self.on_cpu or not self.device_bytes or self.needed_bytes <= self.device_bytes

    def changed(self, direction: Literal[-1, 1]) -> Machine:
        """Return the machine where all doubts come true: -1 the fast way, 1 the slow way."""
        compute, load, link, spread = ((1 + doubt) ** direction for doubt in (*self.doubt, 0.5))
        factors = dict.fromkeys(("pass_s", "image_s", "update_s", "val_image_s", "val_end_s"), compute)
        factors |= {"load_s": load, "cached_s": load, "read_bytes_s": 1 / load, "spread": spread}
        changed: dict[str, Any] = {name: getattr(self, name) * by for name, by in factors.items()}
        for name in ("inside", "between"):
            way: Link = getattr(self, name)
            changed[name] = replace(way, latency_s=way.latency_s * link, bytes_s=way.bytes_s / link)
        if (store := self.store) is not None:
            changed["store"] = replace(store, latency_s=store.latency_s * link, bytes_s=store.bytes_s / link)
        return replace(self, **changed)
