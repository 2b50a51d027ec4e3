"""The interface of a loss for the training step. T terms; ``training/step.py`` combines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

Key = tuple[int, int, int]  # of an image: seed, epoch, position in the epoch


class DetectionLoss(Protocol):
    """A loss as sums, so that ranks can add their parts.

    The loss of a step is the sum over terms t of ``gains[t] * sums[t] / divisor[t]``.

    A loss may match labels to cells in the loader (:meth:`match`), or labels to predictions on the device or the host
    (:meth:`sums`). Both must treat each image by itself: the number of images in a pass depends on the memory. Random
    numbers must follow from the labels of the image or from its key, so that they are equal on every fleet.

    Attributes:
        terms: names, ``kind`` or ``kind/level``; each kind is a column of the results and a chart.
        gains: float32 [T], in the order of ``terms``, as counts and sums are.
        times_images: multiply the loss by the images of the step.
        predicted_divisor: one divisor for all terms, which depends on predictions and comes with the sums; terms that are
            divided by labels cannot stand beside it. Else the
            divisors are counts of labels (``targets.counts``), known before the forward pass.
    """

    gains: Tensor
    times_images: bool
    predicted_divisor: bool

    @property
    def terms(self) -> tuple[str, ...]: ...

    def match(self, labels: Any, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()) -> Any:
        """Return the targets of a micro-batch, as numpy arrays; loader processes call it.

        Args:
            labels: of all images, the ``Shapes`` of the network's task.
            images: number of images of the micro-batch, N.
            size_hw: pixels.
            keys: of each image, for a loss that draws random numbers; a validation or a trial gives none.
        Returns:
            An object with ``counts``: int64 [T].
        """
        ...

    def sums(self, raws: Any, targets: Any) -> Tensor:
        """Return float32 [T], differentiable. A loss that matches predictions does so here, without gradient.

        With ``predicted_divisor`` return [T + 1]. The last value is this micro-batch's part of the divisor; it is at
        least 0 and needs no gradient.
        """
        ...

    def at(self, progress: float) -> DetectionLoss:
        """Return this loss at a fraction of the run (finished epochs / all epochs)."""
        ...
