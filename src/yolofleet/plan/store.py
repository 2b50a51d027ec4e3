"""The store of a data set, as the formula sees it: limits of reading its files over the network, and their price."""

from __future__ import annotations

import math
from dataclasses import dataclass

from yolofleet.files.object_store import AT_ONCE

SHOWN_TOGETHER = 4  # images of a mosaic


@dataclass(frozen=True)
class Store:
    """Limits of one host. A host reads each file once, and its disk cache holds them all.

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
        unit = 1e9 if link.endswith("gbit") else 1e6
        return cls(int(link[:-4]) * unit / 8, float(latency[:-2]) / 1000, *map(float, price))

    def image_s(self, image_bytes: float, processes: int) -> tuple[float, str]:
        """Return the seconds of a host to read an image with so many processes, and which limit binds."""
        by_bytes, by_latency = image_bytes / self.bytes_s, self.latency_s / (AT_ONCE * processes)
        return max((by_bytes, "bandwidth"), (by_latency, "latency"))


def reads(hosts: int) -> float:
    """Return how many images each host reads in the first epoch for each image of its part, if all are shown in mosaics.

    The other images of a mosaic are random ones of the whole set.
    """
    return 1 + (hosts - 1) * (1 - math.exp(-(SHOWN_TOGETHER - 1) / hosts))
