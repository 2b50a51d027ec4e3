"""Which rank computes which micro-batches of a step: the only place where the fleet's size matters."""

from __future__ import annotations

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
