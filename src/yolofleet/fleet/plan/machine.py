"""One machine of a fleet, as the formula sees it: seconds and rates for one workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from yolofleet.support.files.object_store import AT_ONCE

AUTO_SHARE = 0.5  # largest share of the memory that --cache auto fills, as in data/input/cache.py
# largest share of the memory that the image cache or the kernel's page cache fills, as in data/input/cache.py
RAM_SHARE = 0.8
SHOWN_TOGETHER = 4  # images of a mosaic


@dataclass(frozen=True)
class Link:
    """The link between two ranks.

    Attributes:
        latency_s: of one message.
        bytes_s: in one direction.
        tree: latency grows with the logarithm of the ranks (NCCL), else with their number (gloo's ring).
    """

    latency_s: float
    bytes_s: float
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
    """The store of a data set: limits of one host, and the price. A host reads each file once, and its disk cache holds them all.

    Attributes:
        bytes_s: of the host's link. latency_s: of one request. price: US dollars for 1,000 requests.
    """

    bytes_s: float
    latency_s: float
    price: float = 0.0

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
    """A host. Seconds are those of the workload, on one of its devices alone.

    Attributes:
        devices: ranks.
        cores: CPU cores that all ranks share.
        pass_s: of a forward and backward pass, besides ``image_s`` for each of its images.
        update_s: of a step, besides its passes: loss counts, clipping, optimizer, average.
        load_s: seconds of one core to read, decode and augment an image; cached_s: from the image cache.
        read_bytes_s: of the storage, for the whole host.
        inside, between: links between its ranks, and to other hosts.
        val_image_s: of a validation, for each image of a rank; val_end_s: gather, match and average, on any fleet.
        save_s: pause of the training for a checkpoint.
        start_s: from the command to the first step.
        spread: relative standard deviation of the time of a step of one rank.
        memory_bytes: of the host; device_bytes: of a device, 0 for a CPU.
        needed_bytes: of a device, at least, for a pass of one micro-batch; 0 = unknown.
        on_cpu: loader processes take cores from the network.
        price_hour: of the host, in US dollars; NaN = unknown.
        store: of the data set, if it is not on the host's disk. store_reads: images that the host reads from there in the
            first epoch, for each image of its part.
        source: where the figures come from.
    """

    name: str
    devices: int
    cores: float
    pass_s: float
    image_s: float
    update_s: float
    load_s: float
    cached_s: float
    read_bytes_s: float
    inside: Link
    between: Link
    val_image_s: float
    val_end_s: float
    save_s: float
    start_s: float
    spread: float
    memory_bytes: float
    device_bytes: float
    on_cpu: bool
    doubt: Doubt
    needed_bytes: float = 0.0
    price_hour: float = math.nan
    store: Store | None = None
    store_reads: float = 1.0
    source: str = ""

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
