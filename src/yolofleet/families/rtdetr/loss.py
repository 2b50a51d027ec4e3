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
    """Several outputs, the last layer's last. The first D queries are denoising queries, T are all."""

    boxes: Tensor  # [N, P, T, 4]
    logits: Tensor  # [N, P, T, C]
    noisy: int  # D


class Truth(NamedTuple):
    """Labels on the device, and the weights of the queries in the class loss."""

    boxes: Tensor  # [N, G, 4]
    classes: Tensor  # [N, G]
    weights: Tensor  # [N, T]


def outputs_of(raws: DetrRaws | TrainingRaws) -> Outputs:
    """Return the outputs of float32. A validation has only the last layer's, without denoising queries."""
    if isinstance(raws, DetrRaws):
        return Outputs(raws.boxes[:, None].float(), raws.logits[:, None].float(), 0)
    noisy, parts = raws.noisy_boxes.shape[2], []
    for name in ("boxes", "logits"):
        cells, layers = getattr(raws, f"cell_{name}"), getattr(raws, f"all_{name}")
        if noisy:  # the encoder has no denoising queries: zeros stand for them, which count nowhere
            cells = F.pad(cells, (0, 0, noisy, 0))
            layers = torch.cat([getattr(raws, f"noisy_{name}"), layers], 2)
        parts.append(torch.cat([cells[:, None], layers], 1).float())
    return Outputs(parts[0], parts[1], noisy)


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
        self.gains = torch.cat([self.weights, torch.ones(len(self.terms) - 3)])

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
        """Return the sums, and the matches of each output among all T queries."""
        outputs, truth, pairs, copies, factor = self.assigned(raws, targets)
        both = copies.beside(pairs, outputs.boxes.shape[1])
        denoised, by_output, _ = self.by_output(outputs, both, both, truth)  # [P, 3]
        gains = to_device(self.weights, by_output.device)
        aux, denoise = ((part * gains).sum() for part in (by_output[:-1], denoised[1:]))
        return torch.cat([by_output[-1], aux[None], denoise[None]]) * factor, pairs

    def assigned(
        self, raws: DetrRaws | TrainingRaws, targets: Targets
    ) -> tuple[Outputs, Truth, Pairs, Pairs, Tensor]:
        """Return outputs, labels, at each output the matches and the near copies, and the factor of :class:`Matching`."""
        outputs = boxes, logits, noisy = outputs_of(raws)
        truth = truth_of(outputs, targets)
        matching = Matching(boxes[:, :, noisy:], logits[:, :, noisy:], truth.boxes, targets.classes)
        copies, pairs = near_copies(boxes.shape[1], noisy, targets), matching.pairs()
        return outputs, truth, pairs._replace(query=pairs.query + noisy), copies, matching.factor

    def by_output(
        self, outputs: Outputs, classified: Pairs, boxed: Pairs, truth: Truth
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of the class, L1 and GIoU losses of each output, and the IoU of ``boxed``, [M] without gradient.

        The sums are those of denoising queries, [P, 3], the encoder's without a meaning, and those of the others, [P, 3].

        Args:
            classified, boxed: the matches of the class loss, and of the losses of boxes.
        """
        count, is_same = len(boxed.output), classified is boxed
        both = boxed if is_same else Pairs(*map(np.concatenate, zip(boxed, classified, strict=True)))
        output, image, query, label = both.on(outputs.boxes.device)
        ours, theirs = outputs.boxes[image, output, query], truth.boxes[image, label]  # [M, 4]
        iou, generalised = giou(ours, theirs)
        of_match = image, output, query, truth.classes[image, label], iou.detach()
        *at, wanted = (part if is_same else part[count:] for part in of_match)
        classes = self.class_losses(outputs.logits, tuple(at), wanted)
        sizes = [outputs.noisy, classes.shape[2] - outputs.noisy]
        of_classes = (classes * truth.weights[:, None, :, None]).split(sizes, 2)
        losses = torch.stack([(ours - theirs).abs().sum(1), 1 - generalised], 1)[:count]
        of_boxes = boxed.sums_by_kind(losses, classes.shape[1], outputs.noisy)
        kinds = zip(of_classes, of_boxes, strict=True)
        denoised, normal = (torch.cat([part.sum((0, 2, 3))[:, None], sums], 1) for part, sums in kinds)
        return denoised, normal, iou.detach()[:count]

    def class_losses(self, logits: Tensor, at: tuple[Tensor, ...], iou: Tensor) -> Tensor:
        """Return the class loss of every logit, [N, P, T, C].

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


def truth_of(outputs: Outputs, targets: Targets) -> Truth:
    """Return the labels, and the weights: padding has 0, and denoising queries have labels / near copies."""
    noise = (targets.noise_group[:, : outputs.noisy] >= 0) * targets.noise_weight[:, None]
    weights = np.pad(noise, ((0, 0), (0, outputs.boxes.shape[2] - outputs.noisy)), constant_values=1)
    parts = (torch.from_numpy(part) for part in (targets.boxes, targets.classes, weights))
    return Truth(*(to_device(part, outputs.boxes.device) for part in parts))


def near_copies(outputs: int, queries: int, targets: Targets) -> Pairs:
    """Return the pairs of the first denoising queries and the labels that they restore, the same at each output."""
    label = targets.noise_label[:, :queries]
    image, query = np.nonzero(label >= 0)
    return at_each(outputs, image, query, label[image, query], targets.noise_weight[image])
