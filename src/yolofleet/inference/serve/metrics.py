"""Figures of a server in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """Counts of values up to each of ``limits``; several threads may add."""

    def __init__(self, name: str, limits: Sequence[float]) -> None:
        self.name, self.limits = name, limits
        self._counts, self._sum, self._lock = [0] * (len(limits) + 1), 0.0, threading.Lock()

    def add(self, value: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self.limits, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        with self._lock:
            total, upto = self._sum, list(accumulate(self._counts))
        limits = [f"{limit:g}" for limit in self.limits] + ["+Inf"]
        rows = [f'{self.name}_bucket{{le="{limit}"}} {n}' for limit, n in zip(limits, upto, strict=True)]
        ends = [f"{self.name}_sum {total:.9g}", f"{self.name}_count {upto[-1]}"]
        return [f"# TYPE {self.name} histogram", *rows, *ends]


class Metrics:
    """What a server counts: answers by path and status, the time of a prediction, and images that were taken together."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds = Histogram("yolofleet_predict_seconds", SECONDS)
        self.images = Histogram("yolofleet_batch_images", IMAGES)

    def text(self, **now: float) -> str:
        """Return the text; ``now`` has the values of this moment by their names."""
        lines = ["# TYPE yolofleet_requests_total counter"]
        lines += [
            f'yolofleet_requests_total{{path="{path}",status="{status}"}} {n}'
            for (path, status), n in sorted(self.requests.items())
        ]
        lines += [*self.seconds.lines(), *self.images.lines()]
        for name, value in now.items():
            lines += [f"# TYPE yolofleet_{name} gauge", f"yolofleet_{name} {value:g}"]
        return "\n".join([*lines, ""])
