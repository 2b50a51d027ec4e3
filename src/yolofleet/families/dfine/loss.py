"""D-FINE's loss (arXiv:2410.13842) as sums: RT-DETR's, fine-grained localisation (FGL) and distillation (DDF).

N images, L decoder layers, P = L + 2 outputs (encoder, the head before the decoder, layers), Q queries, R + 1 bins of a
side's distance, M matches. The losses of boxes use the union of all outputs' matches, so that a layer does not lose the
queries that another layer matched (GO-LSD, section 4.2); the class loss uses each output's own matches.

The original divides the union's terms by the number of its matches on all ranks, and takes DDF's means and square roots
of counts over the images of a rank. Both depend on how images are divided among ranks. Here each image has the weight of
its labels / its union, and means and counts of its own; the step then divides by labels, or DDF by images. For one image
this equals the original, and no fleet changes it. Parity: tests/parity/test_detr_loss_parity.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from yolofleet.data.geometry.boxes import xyxy_from_cxcywh
from yolofleet.families.dfine.decoder import DfineDecoder, bin_values
from yolofleet.families.rtdetr.denoising import Targets
from yolofleet.families.rtdetr.loss import Outputs, RtdetrLoss, Truth
from yolofleet.families.rtdetr.mask_loss import MaskLoss, with_masks
from yolofleet.families.rtdetr.matching import Pairs, at_each
from yolofleet.families.rtdetr.raws import DetrRaws, DfineTrainingRaws, TrainingRaws
from yolofleet.support.devices import to_device

if TYPE_CHECKING:
    from yolofleet.families.dfine.hyperparameters import DfineHyperparameters
    from yolofleet.families.networks.detector import Detector

TEMPERATURE = 5.0  # of the distributions that DDF compares


class DfineLoss(RtdetrLoss):
    """RT-DETR's loss with two terms more.

    Args:
        bins: float32 [R + 1], the distances W(n) of the bins.
        reg_scale: distances are in sides of the reference box / reg_scale.
    """

    terms = ("cls", "box", "giou", "fgl", "ddf", "aux", "denoise")
    by_images = ("ddf",)

    def __init__(self, recipe: DfineHyperparameters, classes: int, bins: Tensor, reg_scale: float) -> None:
        super().__init__(recipe, classes)
        self.bins, self.reg_scale = bins, reg_scale
        self.weights = torch.cat([self.weights, torch.tensor([recipe.fgl_gain])])
        self.gains = torch.cat([self.weights, torch.tensor([recipe.ddf_gain, 1.0, 1.0])])

    def matched(self, raws: DetrRaws | TrainingRaws, targets: Targets) -> tuple[Tensor, Pairs]:
        """See :meth:`RtdetrLoss.matched`; the sums are float32 [7]."""
        outputs, truth, pairs, copies, factor = self.assigned(raws, targets)
        count, joined = outputs.boxes.shape[1], union(pairs, targets)
        own, boxed = (copies.beside(part, count) for part in (pairs, at_each(count, *joined)))
        denoised, by_output, iou = self.by_output(outputs, own, boxed, truth)  # [P, 3]
        if not isinstance(raws, DfineTrainingRaws):  # a validation
            none = by_output.new_zeros(len(DfineLoss.terms) - 3)
            return torch.cat([by_output[-1], none]) * factor, pairs

        shares = distillation_shares(joined, targets, raws.boxes.shape[1])
        (noise_fgl, fgl), ddf = self._local(raws, outputs, boxed, iou, truth, shares)
        gains = to_device(self.weights, ddf.device)
        aux = (by_output[:-1] * gains[:3]).sum() + fgl[:-1].sum() * gains[3]
        denoise = (denoised[1:] * gains[:3]).sum() + noise_fgl.sum() * gains[3]
        others = torch.stack([fgl[-1], ddf, aux, denoise])
        return torch.cat([by_output[-1], others]) * factor, pairs

    def _local(
        self,
        raws: DfineTrainingRaws,
        outputs: Outputs,
        boxed: Pairs,
        iou: Tensor,
        truth: Truth,
        shares: np.ndarray,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the sums of FGL of each layer, [L] of denoising queries and [L] of the others, and that of DDF.

        Args:
            outputs: the last L of them are those of the layers.
            boxed, iou: pairs at each output, which are the same at all, and their IoU.
        """
        corners = torch.cat([raws.noisy_corners, raws.corners], 2)
        references = torch.cat([raws.noisy_references, raws.references], 2).float()
        corners, layers = corners.float().unflatten(3, (4, -1)), corners.shape[1]  # [N, L, T, 4, R + 1]
        before = outputs.boxes.shape[1] - layers  # outputs that have no distributions
        pairs = boxed._replace(output=boxed.output - before).rows(boxed.output >= before)
        iou, logits = iou[len(iou) - len(pairs.output) :], outputs.logits[:, -1].detach()
        output, image, query, label = pairs.on(corners.device)
        wanted = self.wanted_bins(references[image, output, query], truth.boxes[image, label])
        entropy = -(wanted * corners[image, output, query].log_softmax(-1)).sum((1, 2))
        fgl = pairs.sums_by_kind(entropy * iou, layers, outputs.noisy)

        # the last layer teaches the earlier ones; a match weighs by its own IoU, another query by the teacher's score
        students, teacher = corners[:, :-1] / TEMPERATURE, corners[:, -1:].detach() / TEMPERATURE
        weight = logits.sigmoid().amax(-1)[:, None].repeat(1, layers - 1, 1)  # [N, L - 1, T]
        taught = np.count_nonzero(pairs.output < layers - 1)  # pairs are sorted by output
        weight[image[:taught], output[:taught], query[:taught]] = iou[:taught]
        log_teacher = teacher.log_softmax(-1)
        divergence = (log_teacher.exp() * (log_teacher - students.log_softmax(-1))).sum((3, 4))
        weight = weight * to_device(torch.from_numpy(shares), weight.device)[:, None]
        return fgl, (divergence * weight).sum() * TEMPERATURE**2

    @torch.no_grad()
    def wanted_bins(self, references: Tensor, true_boxes: Tensor) -> Tensor:
        """Return the weights of the bins that make a label's sides, [M, 4, R + 1]: at most two are above 0.

        The distance of a side (left, top, right, bottom) from the reference box lies between two values of W(n), which
        share the weight; distances beyond the outermost values get the outermost bin.

        Args:
            references, true_boxes: [M, 4].
        """
        bins, corners = to_device(self.bins, references.device), xyxy_from_cxcywh(true_boxes)
        sides = torch.cat([references[:, :2] - corners[:, :2], corners[:, 2:] - references[:, :2]], 1)
        unit = references[:, 2:].repeat(1, 2) / self.reg_scale + 1e-16
        distances = (sides / unit - self.reg_scale / 2)[..., None]  # [M, 4, 1]
        left = (torch.searchsorted(bins, distances, right=True) - 1).clamp(0, len(bins) - 2)
        right_part = ((distances - bins[left]) / (bins[left + 1] - bins[left])).clamp(0, 1)
        weights = distances.new_zeros(*distances.shape[:2], len(bins))
        return weights.scatter(2, left, 1 - right_part).scatter(2, left + 1, right_part)


def union(pairs: Pairs, targets: Targets) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return image, query, label and weight of the union of all outputs' matches, sorted by image and query.

    A query gets the label that most outputs match it with; of equally many the first. The weight is labels / matches.
    """
    votes, times = np.unique(np.stack([pairs.image, pairs.query, pairs.label]), axis=1, return_counts=True)
    votes = votes[:, np.lexsort((votes[2], -times, votes[1], votes[0]))]
    is_first = (np.diff(votes[:2], axis=1, prepend=-1) != 0).any(0)
    image, query, label = votes[:, is_first]
    labels = (targets.classes >= 0).sum(1)
    matches = np.bincount(image, minlength=len(labels))
    return image, query, label, (labels / np.maximum(matches, 1)).astype(np.float32)[image]


def distillation_shares(joined: tuple[np.ndarray, ...], targets: Targets, queries: int) -> np.ndarray:
    """Return the share of each query in DDF, float32 [N, D + Q].

    In each image the mean over matches and that over all other queries have weights like the square roots of the numbers of
    matches and of other queries (section 4.2); denoising queries have those of the normal ones. A mean has four sides.
    """
    is_near_copy, is_query = targets.noise_label >= 0, targets.noise_group >= 0
    is_match = np.zeros((len(is_query), queries), bool)
    is_match[joined[0], joined[1] - is_query.shape[1]] = True
    count = is_match.sum(1, keepdims=True)
    of_matches, of_others = np.sqrt(count), np.sqrt(queries - count)
    weights = of_matches / (of_matches + of_others), of_others / (of_matches + of_others)

    def share_of_each(matches: np.ndarray, others: np.ndarray) -> np.ndarray:
        parts = zip(weights, (matches, others), strict=True)
        means = [weight * part / np.maximum(4 * part.sum(1, keepdims=True), 1) for weight, part in parts]
        shares: np.ndarray = sum(means).astype(np.float32)
        return shares

    of_copies = share_of_each(is_near_copy, is_query & ~is_near_copy)
    return np.hstack([of_copies, share_of_each(is_match, ~is_match)])


def dfine_loss(model: Detector, recipe: DfineHyperparameters, img: int) -> RtdetrLoss | MaskLoss:
    """Return the loss of a network, with the scales that its weights state."""
    decoder = cast("DfineDecoder", model.decoder)
    up, scale = decoder.up.detach().float().abs().cpu(), decoder.reg_scale.detach().float().abs().cpu()
    loss = DfineLoss(recipe, model.nc, bin_values(up, scale), float(scale))
    return with_masks(loss, model, recipe)
