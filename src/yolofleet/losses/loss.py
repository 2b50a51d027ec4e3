"""What the training step needs of a loss. T terms; see ``train/step.py`` for how they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor


class DetectionLoss(Protocol):
    """A loss as sums, which any number of ranks can add up.

    The loss of a step is the sum over terms t of ``gains[t] * sums[t] / divisor[t]``, times the step's images
    if ``times_images``. Divisors are counted from the labels (``targets.counts``) before the forward pass, or,
    if they depend on predictions (``late_divisor``), one for all terms comes with the sums.

    Attributes:
        terms: names, ``kind`` or ``kind/level``.
        gains: float32 [T].
    """

    gains: Tensor
    times_images: bool
    late_divisor: bool

    @property
    def terms(self) -> tuple[str, ...]: ...

    def match(self, labels: np.ndarray, images: int, size_hw: tuple[int, int]) -> Any:
        """Targets of a micro-batch, in numpy, in loader processes.

        Args:
            labels: float32 [n, 6] image in the micro-batch, class, cx, cy, w, h (0..1).
            images: N of the micro-batch.
            size_hw: pixels.
        Returns:
            Something with ``counts``: int64 [T].
        """
        ...

    def sums(self, raws: Sequence[Tensor], targets: Any) -> Tensor:
        """float32 [T], differentiable; with ``late_divisor`` [T + 1]: the last is this micro-batch's part of
        the divisor, at least 0, without gradient."""
        ...

    def at(self, progress: float) -> DetectionLoss:
        """This loss at a fraction of the run, finished epochs / all epochs."""
        ...
