"""The number of images of a step, and of the micro-batches that it is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from yolofleet.errors import ConfigError

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


@dataclass(frozen=True)
class StepShape:
    """Numbers of images, which depend on the settings only: they are the same on every fleet.

    Attributes:
        batch: as ``--batch``; -1: the ranks have not measured it yet, and the other two numbers are estimates.
        micro_batch: images that batch normalisation treats together.
        step_images: of a step after warm-up: the multiple of ``batch`` nearest to the nominal batch.
    """

    batch: int
    micro_batch: int
    step_images: int

    @classmethod
    def of(cls, batch: int, nominal_batch: int, micro_batch: int = 0) -> StepShape:
        """Return the shape for settings; ``micro_batch`` below 1: choose the default.

        The default cuts a full step into about eight micro-batches, enough for eight devices. Its target is an eighth of
        a full step, bounded by ``TARGET_MICRO_BATCH``. It is the divisor of ``batch`` in ``MICRO_BATCHES`` whose ratio to
        the target is nearest to 1; of two equally near divisors the larger. With ``--micro-batch -1`` it is an estimate,
        until the ranks have probed their memory.

        Raises:
            ConfigError: no divisor of ``batch`` is in that range.
        """
        if batch < 0:
            return cls(batch, micro_batch if micro_batch > 0 else TARGET_MICRO_BATCH[0], nominal_batch)
        step_images = step_images_of(batch, nominal_batch)
        if micro_batch < 1:
            low, high = TARGET_MICRO_BATCH
            target = min(max(Fraction(step_images, 8), Fraction(low)), Fraction(high))
            choices = _default_micro_batches(batch)
            micro_batch = min(choices, key=lambda d: (max(d / target, target / d), -d))
        return cls(batch, micro_batch, step_images)

    @property
    def micro_batches(self) -> list[int]:
        """The possible values of ``--micro-batch`` for this batch, ascending."""
        return divisors(self.batch)


def step_images_of(batch: int, nominal_batch: int) -> int:
    """Return the multiple of ``batch`` nearest to ``nominal_batch``."""
    return batch * max(round(nominal_batch / batch), 1)


def _default_micro_batches(batch: int) -> list[int]:
    found = _in_range(batch)
    if not found:
        smaller = next((n for n in range(batch - 1, 0, -1) if _in_range(n)), None)
        larger = next(n for n in range(batch + 1, 2 * batch + MICRO_BATCHES.start) if _in_range(n))
        sizes = f"{MICRO_BATCHES.start} to {MICRO_BATCHES.stop - 1}"
        raise ConfigError(
            f"--batch {batch} cannot be cut into micro-batches of {sizes} images: none of these divides it",
            hint=(f"--batch {smaller} or {larger}" if smaller else f"--batch {larger}")
            + f", or choose --micro-batch: {either(divisors(batch))}",
        )
    return found


def _in_range(batch: int) -> list[int]:
    return [d for d in MICRO_BATCHES if batch % d == 0]


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n`` >= 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def either(numbers: list[int]) -> str:
    """Return the numbers as text, such as ``8, 10 or 20``."""
    *first, last = map(str, numbers)
    return " or ".join([", ".join(first), last]) if first else last
