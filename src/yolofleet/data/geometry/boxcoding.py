"""Convert the four raw values of an anchor in a grid cell to a box.

Losses (matched rows) and decoding (whole maps) use it. Centres are in cells relative to the cell's corner, sizes in the
unit of the anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# e^10 = 22,026 anchors: larger than any image, and float32 neither overflows nor reaches 0
MAX_LOG_SIZE = 10.0


@dataclass(frozen=True)
class SquaredSigmoid:
    """YOLOv5's coding: centre = 2 sigmoid(t) - 0.5, size = (2 sigmoid(t))^2 anchor.

    Centres reach half a cell beyond the cell, so the nearest neighbours of a label's cell may predict it too.
    """

    neighbours = True

    def boxes(self, raw: Tensor, anchors_wh: Tensor) -> Tensor:
        """Return [..., 4] cx, cy, w, h from [..., 4] raw x, y, w, h and their [..., 2] anchors."""
        unit = raw.sigmoid() * 2
        return torch.cat((unit[..., :2] - 0.5, unit[..., 2:].square() * anchors_wh), -1)


@dataclass(frozen=True)
class Exponential:
    """Darknet's coding: centre = s sigmoid(t) - (s - 1) / 2, size = exp(t) anchor (arXiv:1804.02767; s: arXiv:2004.10934).

    Centres stay in the label's own cell, or reach a little beyond it.

    Attributes:
        scale_xy: s, at least 1; 1 in YOLOv3.
    """

    scale_xy: float = 1.0

    neighbours = False

    def boxes(self, raw: Tensor, anchors_wh: Tensor) -> Tensor:
        """Return [..., 4] cx, cy, w, h from [..., 4] raw x, y, w, h and their [..., 2] anchors."""
        centres = raw[..., :2].sigmoid()
        if self.scale_xy != 1:
            centres = centres * self.scale_xy - (self.scale_xy - 1) / 2
        sizes = raw[..., 2:].clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp() * anchors_wh
        return torch.cat((centres, sizes), -1)


BoxCoding = SquaredSigmoid | Exponential
