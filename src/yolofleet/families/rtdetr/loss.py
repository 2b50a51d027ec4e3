"""RT-DETR's loss (arXiv:2304.08069, arXiv:2407.17140) as sums: class, L1 and GIoU of every output of the network.

N images, G labels of the image that has most, Q queries, D denoising queries, P outputs (encoder, then decoder layers),
C classes, M matches. Everything here is float32, because
areas of small boxes and their products underflow in fp16.

Each image is treated by itself, and all terms are divided by the labels of the step. A label weighs as much in the
denoising queries as in the others: their sums are multiplied by labels / near copies, which is 1 / groups in the originals.
Parity (value and gradient): tests/parity/test_detr_loss_parity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.losses.loss import Key
from yolofleet.families.rtdetr.denoising import MOST_LABELS, Targets, denoising_groups, padded
from yolofleet.families.rtdetr.matching import Matching, Pairs, at_each, giou
from yolofleet.families.rtdetr.raws import DetrRaws, TrainingRaws
from yolofleet.support.devices import to_device

if TYPE_CHECKING:
    from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters

VFL_ALPHA = 0.75  # weight of negatives in the varifocal loss
GAMMAS = {"vfl": 2.0, "mal": 1.5}


class Outputs(NamedTuple):
    """Boxes [N, P, Q, 4] and class logits [N, P, Q, C] of several outputs, the last layer's last."""

    boxes: Tensor
    logits: Tensor


class Truth(NamedTuple):
    """Labels on the device."""

    boxes: Tensor  # [N, G, 4]
    classes: Tensor  # [N, G]


def outputs_of(raws: DetrRaws | TrainingRaws) -> tuple[Outputs, Outputs]:
    """Return the outputs of normal queries, and of denoising queries. A validation has only those of the last layer."""
    if isinstance(raws, DetrRaws):
        boxes, logits = raws.boxes[:, None].float(), raws.logits[:, None].float()
        return Outputs(boxes, logits), Outputs(boxes[:, :0, :0], logits[:, :0, :0])
    boxes = torch.cat([raws.cell_boxes[:, None], raws.all_boxes], 1).float()
    logits = torch.cat([raws.cell_logits[:, None], raws.all_logits], 1).float()
    return Outputs(boxes, logits), Outputs(raws.noisy_boxes.float(), raws.noisy_logits.float())


class RtdetrLoss:
    """``sum_t(gains[t] * sums[t]) / labels`` is the loss of a step.

    The terms are those of the last layer, then ``aux``: encoder and earlier layers; ``denoise``: denoising queries of all
    layers. A validation leaves out the last two, whose outputs its forward pass does not compute.
    """

    terms: tuple[str, ...] = ("cls", "box", "giou", "aux", "denoise")
    by_images: tuple[
        str, ...
    ] = ()  # terms that are divided by images, the others by labels: ``match`` counts for each
    times_images = False
    predicted_divisor = False

    def __init__(self, recipe: RtdetrHyperparameters, classes: int) -> None:
        self.class_loss = recipe.class_loss
        self.gamma = recipe.class_gamma or GAMMAS[recipe.class_loss]
        self.recipe, self.classes = recipe, classes
        # gains of the first terms, also within ``aux`` and ``denoise``, whose own gains are 1
        self.weights = torch.tensor([recipe.cls_gain, recipe.l1_gain, recipe.giou_gain])
        self.gains = torch.cat([self.weights, torch.ones(2)])

    def at(self, progress: float) -> RtdetrLoss:
        """Return this loss, which is the same in the whole run."""
        return self

    def match(
        self, labels: Shapes, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()
    ) -> Targets:
        """Return padded labels with denoising queries. ``keys`` as in ``DetectionLoss.match``; () for a trial."""
        keys = keys or [(0, 0, i) for i in range(images)]
        targets = padded(labels, images, len(self.terms), keys, self.recipe, self.classes)
        return replace(targets, counts=np.where(np.isin(self.terms, self.by_images), images, targets.counts))

    def labels_with_most_queries(self, most: int) -> int:
        """Return how many labels, up to ``most``, give an image the most denoising queries: a trial of memory needs it."""
        return max(
            range(min(most, MOST_LABELS) + 1),
            key=lambda n: (n * denoising_groups(n, self.recipe.denoising), n),
        )

    def sums(self, raws: DetrRaws | TrainingRaws, targets: Targets) -> Tensor:
        """Return float32 [5], differentiable; NaN with gradients of NaN if a cost of the matching is not finite.

        Host synchronisation: see :meth:`Matching.pairs`.
        """
        return self.matched(raws, targets)[0]

    def matched(self, raws: DetrRaws | TrainingRaws, targets: Targets) -> tuple[Tensor, Pairs]:
        """Return the sums, and the matches of each output."""
        normal, _, truth, matching, (denoised, _) = self.begun(raws, targets)
        pairs = matching.pairs()
        by_output, _ = self.by_output(normal, pairs, pairs, truth)  # [P, 3]
        gains = to_device(self.weights, normal.boxes.device)
        aux, denoise = ((part * gains).sum() for part in (by_output[:-1], denoised))
        return torch.cat([by_output[-1], aux[None], denoise[None]]) * matching.factor, pairs

    def begun(
        self, raws: DetrRaws | TrainingRaws, targets: Targets
    ) -> tuple[Outputs, Outputs, Truth, Matching, tuple[Tensor, Tensor]]:
        """Return normal and denoising outputs, labels, the begun matching, and what :meth:`by_output` has of denoising queries."""
        normal, noisy = outputs_of(raws)
        device = normal.boxes.device
        truth = Truth(
            *(to_device(torch.from_numpy(part), device) for part in (targets.boxes, targets.classes))
        )
        matching = Matching(normal.boxes, normal.logits, truth.boxes, targets.classes)
        restored, weights = noise_of(noisy, targets)
        return normal, noisy, truth, matching, self.by_output(noisy, restored, restored, truth, weights)

    def by_output(
        self, outputs: Outputs, classified: Pairs, boxed: Pairs, truth: Truth, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the class, L1 and GIoU losses of each output, [P, 3], and the IoU of ``boxed``, [M] without gradient.

        Args:
            classified, boxed: the matches of the class loss, and of the losses of boxes.
            weights: [N, Q] of each query in the class loss.
        """
        output, image, query, label = boxed.on(outputs.boxes.device)
        ours, theirs = outputs.boxes[image, output, query], truth.boxes[image, label]  # [M, 4]
        iou, generalised = giou(ours, theirs)
        wanted = iou = iou.detach()
        if classified is not boxed:
            output, image, query, label = classified.on(outputs.boxes.device)
            with torch.no_grad():
                wanted = giou(outputs.boxes[image, output, query], truth.boxes[image, label])[0]
        classes = self.class_losses(
            outputs.logits, (image, output, query, truth.classes[image, label]), wanted
        )
        if weights is not None:
            classes = classes * weights[:, None, :, None]
        losses = torch.stack([(ours - theirs).abs().sum(1), 1 - generalised], 1)
        box_sums = boxed.sums(losses, outputs.boxes.shape[1])
        return torch.cat([classes.sum((0, 2, 3))[:, None], box_sums], 1), iou

    def class_losses(self, logits: Tensor, at: tuple[Tensor, ...], iou: Tensor) -> Tensor:
        """Return the class loss of every logit, [N, P, Q, C].

        Args:
            at: indices of the matches in ``logits``, each [M].
            iou: of the matches, [M].

        The varifocal loss (arXiv:2008.13367) weighs the cross entropy of a match with its target, the IoU, and that of
        all else with alpha p^gamma. The matchability-aware loss (DEIM, arXiv:2412.04234, equation 2) has the target
        IoU^gamma, the weight 1 for matches, and p^gamma for all else. No gradient flows through weights and targets.
        """
        with torch.no_grad():
            wanted, weight = torch.zeros_like(logits), logits.sigmoid() ** self.gamma
            if self.class_loss == "vfl":
                wanted[at], weight = iou, weight * VFL_ALPHA
                weight[at] = iou
            else:
                wanted[at], weight[at] = iou**self.gamma, 1.0
        losses: Tensor = weight * (F.softplus(logits) - wanted * logits)
        return losses


def noise_of(noisy: Outputs, targets: Targets) -> tuple[Pairs, Tensor]:
    """Return the pairs of denoising queries at each output, and the weights [N, D] of the queries."""
    outputs, queries = noisy.boxes.shape[1:3]
    weights = (targets.noise_group[:, :queries] >= 0) * targets.noise_weight[:, None]
    return near_copies(outputs, queries, targets), to_device(torch.from_numpy(weights), noisy.boxes.device)


def near_copies(outputs: int, queries: int, targets: Targets) -> Pairs:
    """Return the pairs of the first denoising queries and the labels that they restore, the same at each output."""
    label = targets.noise_label[:, :queries]
    image, query = np.nonzero(label >= 0)
    return at_each(outputs, image, query, label[image, query], targets.noise_weight[image])
