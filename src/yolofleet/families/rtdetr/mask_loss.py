"""The losses of masks as sums: cross entropy within the box and dice (arXiv:1606.04797) over the whole map.

N images, G labels of the image that has most, L decoder layers, D denoising queries, R rasters, P pairs, h x w cells of the
map, a quarter of the image's sides.

Every decoder layer has both terms for its own matches and for near copies of the denoising queries. Labels without a mask
have none of them, and nor has the encoder. A step divides them by all labels, as the terms of boxes.

RF-DETR and Mask2Former take both terms at random points, most of them where the mask is least certain, and divide by
the mean number of labels of a rank. Here they take all cells, so that no random number and no fleet changes a gradient; the
cross entropy of cells far from the object would then hide that of its edge, so it is the mean over the cells that the box touches
(arXiv:1904.02689). The matching has no costs of masks: those of all queries would need all masks.
Parity: tests/parity/test_detr_masks_parity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from yolofleet.data.geometry.boxes import xyxy_from_cxcywh
from yolofleet.families.losses.loss import Key
from yolofleet.families.rtdetr.denoising import Targets
from yolofleet.families.rtdetr.loss import RtdetrLoss, near_copies
from yolofleet.families.rtdetr.matching import Pairs
from yolofleet.families.rtdetr.raws import DetrRaws, MaskRaws, MaskTrainingRaws
from yolofleet.support.devices import to_device

if TYPE_CHECKING:
    from yolofleet.data.geometry.mask_shapes import MaskShapes
    from yolofleet.families.networks.detector import Detector
    from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters

STRIDE = 4  # of the map
CELLS = 2**24  # of masks that exist at once: 64 MiB


@dataclass(frozen=True)
class MaskTargets(Targets):
    """Targets with masks."""

    raster: np.ndarray  # int64 [N, G]; number of the label's raster; -1: it has none
    rasters: np.ndarray  # uint8 [R, h, w]; share of each cell in the mask, 1/255
    # int64 [R, 4]; first column and row, and end, of the cells that the box touches; at least one
    windows: np.ndarray


class MaskLoss:
    """The loss of boxes with two terms more, those of the last layer; other layers and copies count in ``aux`` and ``denoise``."""

    times_images = False
    predicted_divisor = False

    def __init__(self, boxes: RtdetrLoss, recipe: RtdetrHyperparameters) -> None:
        self.boxes = boxes
        self.terms = (*boxes.terms, "mask", "dice")
        self.weights = torch.tensor([recipe.mask_gain, recipe.dice_gain])
        self.gains = torch.cat([boxes.gains, self.weights])

    def at(self, progress: float) -> MaskLoss:
        """Return this loss, which is the same in the whole run."""
        return self

    def match(
        self, labels: MaskShapes, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()
    ) -> MaskTargets:
        """Return padded labels with denoising queries and rasters; arguments as in ``DetectionLoss.match``."""
        targets = self.boxes.match(labels, images, size_hw, keys)
        size = size_hw[0] // STRIDE, size_hw[1] // STRIDE
        masked = labels.rows(labels.has_mask)
        numbers, raster = np.cumsum(labels.has_mask) - 1, np.full(targets.classes.shape, -1)
        for i, of_image in enumerate(raster):
            mine = labels.image == i
            of_image[: mine.sum()] = np.where(labels.has_mask[mine], numbers[mine], -1)
        counts = np.append(targets.counts, [len(labels)] * 2)
        return MaskTargets(
            **{**vars(targets), "counts": counts},
            raster=raster,
            rasters=masked.rasters(size),
            windows=windows_of(masked.boxes, size),
        )

    def labels_with_most_queries(self, most: int) -> int:
        """See :meth:`RtdetrLoss.labels_with_most_queries`."""
        return self.boxes.labels_with_most_queries(most)

    def sums(self, raws: MaskRaws | MaskTrainingRaws, targets: MaskTargets) -> Tensor:
        """Return float32 [T], differentiable. NaN and host synchronisation as for the loss of boxes."""
        if isinstance(raws, MaskRaws):  # a validation
            sums, pairs = self.boxes.matched(DetrRaws(*raws[:3]), targets)
            return torch.cat(
                [sums, self._by_layer(raws.coefficients[:, None], (raws.prototypes,), [pairs], targets)[0]]
            )
        sums, pairs = self.boxes.matched(raws.found, targets)
        layers, noisy = len(raws.prototypes), raws.found.noisy_boxes.shape[2]
        first = raws.found.all_boxes.shape[1] + 1 - layers  # outputs before those of the layers have no masks
        normal = pairs._replace(output=pairs.output - first).rows(pairs.output >= first)
        both = normal, near_copies(layers, noisy, targets)
        by_layer = self._by_layer(raws.coefficients, raws.prototypes, both, targets)  # [2 L, 2]
        gains = to_device(self.weights, sums.device)
        weighed = by_layer * gains
        more = {"aux": weighed[: layers - 1].sum(), "denoise": weighed[layers:].sum()}
        with_more = [sums[i] + more[t] if t in more else sums[i] for i, t in enumerate(self.boxes.terms)]
        return torch.stack([*with_more, *by_layer[layers - 1]])

    def _by_layer(
        self, coefficients: Tensor, prototypes: Sequence[Tensor], kinds: Sequence[Pairs], targets: MaskTargets
    ) -> Tensor:
        """Return the sums of both losses of each layer, for one kind of pairs after the other: [kinds x L, 2].

        Masks of an image and a layer exist together, or fewer, and again in the backward pass.

        Args:
            coefficients: [N, L, queries, D + 1].
            prototypes: of each layer [N, D, h, w].
            kinds: pairs at each layer.
        """
        layers, device = len(prototypes), coefficients.device
        row = [np.full(len(kind.output), i) for i, kind in enumerate(kinds)]
        every = Pairs(*(np.concatenate(parts) for parts in zip(*kinds, strict=True)))
        group = np.concatenate(row) * layers + every.output  # row of the result
        raster = targets.raster[every.image, every.label]
        order = np.lexsort((group, every.image, every.output))
        order = order[raster[order] >= 0]
        every, group, raster = every.rows(order), group[order], raster[order]
        if not len(raster):
            return coefficients.new_zeros(len(kinds) * layers, 2, dtype=torch.float32)
        layer, image, query, _ = every.on(device)
        vectors = coefficients[image, layer, query].float()  # [P, D + 1]
        rasters, windows, number = (
            to_device(torch.from_numpy(part), device) for part in (targets.rasters, targets.windows, raster)
        )
        maps = [of_layer.unbind() for of_layer in prototypes]
        most = max(CELLS // rasters[0].numel(), 1)
        start, losses = 0, []
        while start < len(raster):  # a part has pairs of one image and layer
            at = every.output[start], every.image[start]
            same = (every.output[start : start + most] == at[0]) & (
                every.image[start : start + most] == at[1]
            )
            part = slice(start, start + int(same.sum()))
            given = vectors[part], maps[at[0]][at[1]], rasters, windows, number[part]
            losses.append(checkpoint(mask_losses, *given, use_reentrant=False, preserve_rng_state=False))
            start = part.stop
        by_group = np.argsort(group, kind="stable")
        sorted_pairs = every._replace(output=group).rows(by_group)
        return sorted_pairs.sums(
            torch.cat(losses)[to_device(torch.from_numpy(by_group), device)], len(kinds) * layers
        )


def mask_losses(
    coefficients: Tensor, prototypes: Tensor, rasters: Tensor, windows: Tensor, number: Tensor
) -> Tensor:
    """Return the cross entropy and the dice loss of each mask, float32 [P, 2].

    Args:
        coefficients: float32 [P, D + 1]; the last one is that of a prototype of ones.
        prototypes: [D, h, w].
        rasters, windows: as in ``MaskTargets``.
        number: int64 [P] of the raster and the window.
    """
    # [P, h w]
    logits = torch.addmm(coefficients[:, -1:], coefficients[:, :-1], prototypes.float().flatten(1))
    wanted = rasters[number].flatten(1) / 255
    left, top, right, bottom = windows[number][..., None].unbind(1)  # [P, 1]
    rows, columns = (torch.arange(n, device=logits.device) for n in prototypes.shape[1:])
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * inside.flatten(1)
    area = (right - left) * (bottom - top)
    found = logits.sigmoid()
    dice = 1 - (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)
    return torch.stack([entropy.sum(1) / area[:, 0], dice], 1)


def windows_of(boxes: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """Return the cells that boxes [R, 4] touch, int64 [R, 4]: first column and row, and end of columns and rows."""
    sides = np.array(size_hw[::-1] * 2)
    corners = xyxy_from_cxcywh(boxes.astype(np.float64)) * sides
    low = np.floor(corners[:, :2]).clip(0, sides[:2] - 1)
    high = np.ceil(corners[:, 2:]).clip(low + 1, sides[:2])
    return np.concatenate([low, high], 1).astype(np.int64)


def rtdetr_loss(model: Detector, recipe: RtdetrHyperparameters, img: int) -> RtdetrLoss | MaskLoss:
    """Return the loss of a network of RT-DETR."""
    return with_masks(RtdetrLoss(recipe, model.nc), model, recipe)


def with_masks(loss: RtdetrLoss, model: Detector, recipe: RtdetrHyperparameters) -> RtdetrLoss | MaskLoss:
    """Return the loss of a network of boxes, or with the terms of masks if the network finds them."""
    return MaskLoss(loss, recipe) if model.task == "masks" else loss
