"""The number of images of a step, and of the micro-batches that it is cut into."""

from __future__ import annotations

from fractions import Fraction

from yolofleet.errors import ConfigError

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


def default_micro_batch(batch: int, nominal_batch: int) -> int:
    """Return the micro-batch for settings, 0 if no divisor of ``batch`` is in ``MICRO_BATCHES``. Every fleet has the same.

    It cuts a full step into about eight micro-batches, enough for eight devices. Its target is an eighth of a full step,
    bounded by ``TARGET_MICRO_BATCH``. It is the divisor of ``batch`` in ``MICRO_BATCHES`` whose ratio to the target is
    nearest to 1; of two equally near divisors the larger.
    """
    low, high = TARGET_MICRO_BATCH
    target = min(max(Fraction(step_images_of(batch, nominal_batch), 8), Fraction(low)), Fraction(high))
    return min(_in_range(batch), key=lambda d: (max(d / target, target / d), -d), default=0)


def step_images_of(batch: int, nominal_batch: int) -> int:
    """Return the multiple of ``batch`` nearest to ``nominal_batch``."""
    return batch * max(round(nominal_batch / batch), 1)


def no_micro_batch(batch: int) -> ConfigError:
    """Return the error for a batch without a default micro-batch."""
    smaller = next((n for n in range(batch - 1, 0, -1) if _in_range(n)), None)
    larger = next(n for n in range(batch + 1, 2 * batch + MICRO_BATCHES.start) if _in_range(n))
    sizes = f"{MICRO_BATCHES.start} to {MICRO_BATCHES.stop - 1}"
    return ConfigError(
        f"--batch {batch} cannot be cut into micro-batches of {sizes} images: none of these divides it",
        hint=(f"--batch {smaller} or {larger}" if smaller else f"--batch {larger}")
        + f", or choose --micro-batch: {either(divisors(batch))}",
    )


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
