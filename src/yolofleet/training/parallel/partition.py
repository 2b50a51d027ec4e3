"""Assign the micro-batches of a step to ranks: the only place where the number of ranks matters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from yolofleet.config.schema import divisors
from yolofleet.support.errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """Contiguous ranges of micro-batches, in proportion to ``shares``.

    Args:
        shares: one number >= 0 per rank, or per device with ``--parallel dp``; equal numbers give ranges that differ by
            at most one.
    """

    shares: tuple[float, ...]

    @classmethod
    def equal(cls, ranks: int) -> Partition:
        return cls((1.0,) * ranks)

    @classmethod
    def parse(cls, text: str, ranks: int) -> Partition:
        """Parse shares such as ``"2,1,1"``; an empty text means equal shares.

        Raises:
            ConfigError: expected one number >= 0 per rank, and not all 0.
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
        """Return one range per rank, together 0 .. micro_batches - 1 in rank order; some may be empty."""
        total = sum(self.shares)
        borders, reached = [0], 0.0
        for share in self.shares:
            reached += share
            borders.append(round(micro_batches * reached / total))
        return [range(a, b) for a, b in pairwise(borders)]

    def _idle(self, micro_batches: int) -> int:
        """Return how many ranks with a share get none of the micro-batches."""
        dealt = zip(self.shares, self.ranges(micro_batches), strict=True)
        return sum(share > 0 and not mine for share, mine in dealt)

    def idle(self, images: int, micro_batch: int, batch: int) -> tuple[str, str]:
        """Return how many devices get no micro-batch of a step, and what gives each one; "" twice if all have one.

        Args:
            images: images of a step, on all ranks.
            micro_batch: images of a micro-batch.
            batch: whose divisors are the other possible values of ``--micro-batch``.
        """
        ranks, count = len(self.shares), images // micro_batch
        idle = self._idle(count)
        if not idle:
            return "", ""
        enough = [choice for choice in divisors(batch) if not self._idle(images // choice)]
        larger = (
            f"--micro-batch {enough[-1]} (batch normalisation then sees {enough[-1]} image{'s' * (enough[-1] > 1)})"
            if enough
            else "a larger --batch"
        )
        return (
            f"{idle} of {ranks} devices get no work: a step of {images} images has {count} "
            f"micro-batch{'es' * (count != 1)} of {micro_batch}",
            f"{larger}, or {ranks - idle} device{'s' * (ranks - idle != 1)}",
        )
