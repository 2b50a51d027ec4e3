"""Which rank computes which micro-batches of a step: the only place where the fleet's size matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from yolofleet.errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """Contiguous ranges of micro-batches, in proportion to ``shares``.

    Args:
        shares: one positive weight per rank; equal weights give ranges that differ by at most one.
    """

    shares: tuple[float, ...]

    @classmethod
    def equal(cls, ranks: int) -> Partition:
        return cls((1.0,) * ranks)

    @classmethod
    def parse(cls, text: str, ranks: int) -> Partition:
        """``"2,1,1"`` or, when empty, equal shares.

        Raises:
            ConfigError: not numbers, not positive, or not one per rank.
        """
        if not text:
            return cls.equal(ranks)
        try:
            shares = tuple(float(part) for part in text.split(","))
        except ValueError:
            shares = ()
        if len(shares) != ranks or any(not 0 <= s < float("inf") for s in shares) or sum(shares) <= 0:
            raise ConfigError(
                f"--shares {text}: needs {ranks} number{'s' if ranks > 1 else ''} >= 0, one per process, not all 0",
                hint="--shares " + ",".join(["1"] * ranks),
            )
        return cls(shares)

    def ranges(self, micro_batches: int) -> list[range]:
        """One range per rank; together 0 .. micro_batches - 1, in rank order; some may be empty."""
        total = sum(self.shares)
        borders, reached = [0], 0.0
        for share in self.shares:
            reached += share
            borders.append(round(micro_batches * reached / total))
        return [range(a, b) for a, b in pairwise(borders)]

    def idle_note(self, images: int, micro_batch: int, choices: Sequence[int]) -> str:
        """Return how many devices get no micro-batch of a step and what to type; "" when each has one.

        Args:
            images: that the ranks share.
            micro_batch: images of each part.
            choices: micro-batches that could be chosen instead, ascending.
        """
        ranks, count = len(self.shares), images // micro_batch
        dealt = zip(self.shares, self.ranges(count), strict=True)
        idle = sum(share > 0 and not mine for share, mine in dealt)
        if not idle:
            return ""
        enough = [choice for choice in choices if images // choice >= ranks]
        advice = (
            f"--micro-batch {enough[-1]} gives each its part (batch normalisation then sees {enough[-1]} images)"
            if enough
            else "a larger --batch, or fewer devices"
        )
        return f"{idle} of {ranks} devices have nothing to do: a step has {count} micro-batches of {micro_batch}; {advice}"
