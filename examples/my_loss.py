"""Your own loss: yolofleet train --model yolov5n ... --recipe-class examples/my_loss.py:SmallLogits"""

from dataclasses import replace

import numpy as np
import torch

from yolofleet import TrainingRecipe
from yolofleet.families.yolov5.loss import Yolov5Loss


class SmallLogitsLoss(Yolov5Loss):
    """YOLOv5's loss, and a term for each level: the mean square of its objectness logits.

    A loss returns sums, and ``match`` returns their divisors, so that the processes of a run can add their parts.
    """

    def __init__(self, gain, **settings):
        super().__init__(**settings)
        levels = len(self.strides)
        self.terms += tuple(f"logit/{level}" for level in range(levels))
        self.gains = torch.cat([self.gains, torch.full((levels,), gain)])

    def match(self, labels, images, size_hw, keys=()):
        targets = super().match(labels, images, size_hw, keys)
        cells = targets.counts[
            len(self.strides) : 2 * len(self.strides)
        ]  # of each level: the divisors of "obj"
        return replace(targets, counts=np.concatenate([targets.counts, cells]))

    def sums(self, raws, targets):
        squares = [raw[..., 4].float().square().sum() for raw in raws]
        return torch.cat([super().sums(raws, targets), torch.stack(squares)])


class SmallLogits(TrainingRecipe):
    def loss(self, model, recipe, img):
        parts = {"anchors_px": model.anchors_px, "strides": model.strides, "codings": model.codings}
        return SmallLogitsLoss(0.001, nc=model.nc, recipe=recipe, img=img, **parts)
