"""Notice a rank that has become much slower than it was when its share of the micro-batches was decided."""

from __future__ import annotations

from collections.abc import Sequence

# times as slow as at first, compared with the other ranks
SLOWER = 3.0  # is told
AGAIN = 1.5  # below it, the next time is told again


class SlowRanks:
    """Compares the seconds per image of each rank with those of the second epoch of this process."""

    def __init__(self) -> None:
        self._before: Sequence[tuple[int, float]] = ()
        self._first: list[float] = []
        self._slow: dict[int, int] = {}  # epochs in a row

    def told(self, spent: Sequence[tuple[int, float]]) -> dict[int, float]:
        """Return how many times slower ranks have become, in their second slow epoch in a row.

        Args:
            spent: images and seconds of work of each rank since it started, at the end of each epoch.
        """
        pairs = zip(self._before, spent, strict=False)
        costs = [max((now - s) / max(images - n, 1), 1e-9) for (n, s), (images, now) in pairs]
        self._before, self._first = spent, self._first or costs
        ratios = [cost / first for cost, first in zip(costs, self._first, strict=True)]
        slower = {rank: ratio / min(ratios) for rank, ratio in enumerate(ratios)}
        known = self._slow
        self._slow = {
            r: known.get(r, 0) + (by >= SLOWER)
            for r, by in slower.items()
            if by >= (AGAIN if r in known else SLOWER)
        }
        return {r: slower[r] for r, epochs in self._slow.items() if epochs == 2 and known.get(r) == 1}
