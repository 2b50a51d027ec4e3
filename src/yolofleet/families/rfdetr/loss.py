"""RF-DETR's loss (arXiv:2511.09554, arXiv:2406.03459) as sums: class, L1 and GIoU of every output of the network.

N images, P outputs (encoder, then decoder layers), G groups of queries, Q queries of a group, C classes, M matches.

Each group of each output is matched by itself. A label weighs as much in all groups together as in one output without groups,
so a step divides by its labels, where the original divides by the mean number of labels of a rank times the groups. The
original's matching of networks with masks has costs of masks too; see ``mask_loss.py`` for that and for the terms of masks.
Parity (value and gradient): tests/parity/test_rfdetr_parity.py (transformers) and test_rfdetr_package.py (rfdetr).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters
from yolofleet.families.rtdetr.loss import RtdetrLoss, outputs_of, truth_of
from yolofleet.families.rtdetr.mask_loss import MaskLoss, with_masks
from yolofleet.families.rtdetr.matching import Matching, Pairs
from yolofleet.support.devices import to_device

if TYPE_CHECKING:
    from yolofleet.families.networks.detector import Detector
    from yolofleet.families.rtdetr.denoising import Targets
    from yolofleet.families.rtdetr.hyperparameters import DetrGains
    from yolofleet.families.rtdetr.raws import DetrRaws, TrainingRaws

ALPHA, GAMMA = 0.25, 2  # exponent of the probability in the target of a match, and of the weight of all else
LEAST = 0.01  # target of a match


class RfdetrLoss(RtdetrLoss):
    """RT-DETR's loss with another class loss, groups of queries, and no denoising."""

    terms = ("cls", "box", "giou", "aux")

    def matched(self, raws: DetrRaws | TrainingRaws, targets: Targets) -> tuple[Tensor, Pairs]:
        """See :meth:`RtdetrLoss.matched`; the sums are float32 [4]."""
        outputs, queries = outputs_of(raws), raws.boxes.shape[1]
        groups, truth = outputs.boxes.shape[2] // queries, truth_of(outputs, targets)
        # [N, P, G Q, .] -> [N, P G, Q, .]
        boxes, logits = (part.unflatten(2, (groups, queries)).flatten(1, 2) for part in outputs[:2])
        matching = Matching(boxes, logits, truth.boxes, targets.classes)
        found = matching.pairs()
        output, group = np.divmod(found.output, groups)
        pairs = found._replace(
            output=output, query=found.query + group * queries, weight=found.weight / np.float32(groups)
        )
        truth = truth._replace(weights=truth.weights / groups)
        _, by_output, _ = self.by_output(outputs, pairs, pairs, truth)  # [P, 3]
        aux = (by_output[:-1] * to_device(self.weights, boxes.device)).sum()
        return torch.cat([by_output[-1], aux[None]]) * matching.factor, pairs

    def class_losses(self, logits: Tensor, at: tuple[Tensor, ...], iou: Tensor) -> Tensor:
        """See :meth:`RtdetrLoss.class_losses`.

        A match has the target t = p^0.25 IoU^0.75, without gradient, and its cross entropy; all else has the weight p^2.
        """
        with torch.no_grad():
            wanted = (logits[at].sigmoid() ** ALPHA * iou ** (1 - ALPHA)).clamp(min=LEAST)
            positive = torch.zeros_like(logits).index_put(at, wanted)
        negative = (logits.sigmoid() ** GAMMA).index_put(at, 1 - wanted)
        return positive * F.softplus(-logits) + negative * F.softplus(logits)


def rfdetr_loss(model: Detector, recipe: DetrGains, img: int) -> RtdetrLoss | MaskLoss:
    """Return the loss of a network."""
    shared = RtdetrHyperparameters(**recipe.model_dump(), denoising=0)
    return with_masks(RfdetrLoss(shared, model.nc), model, shared)
