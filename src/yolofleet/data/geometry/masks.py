"""Predictions of instance masks in the form that all families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from yolofleet.data.geometry.boxes import Decoded


class DecodedMasks(NamedTuple):
    """Decoded predictions of N images, K of each, with C classes and D prototypes, float32.

    The logit of a prediction's mask at a cell of the map is the product of its coefficients and the prototypes there. The map
    covers the whole input. A mask is where its logits, enlarged to the image, are above 0 within the box.
    """

    decoded: Tensor  # [N, K, 5 + C] as of ``Decoded``
    coefficients: Tensor  # [N, K, D]
    prototypes: Tensor  # [N, D, h, w], a quarter of the input's height and width

    @property
    def boxes(self) -> Decoded:
        """The predictions without masks."""
        return Decoded(self.decoded)

    def of_classes(self, numbers: Sequence[int]) -> DecodedMasks:
        """Return the predictions with these classes in this order."""
        return self._replace(decoded=self.boxes.of_classes(numbers).rows)
