"""The raw predictions of transformers.

N images, L outputs (the decoder's layers; D-FINE has another one before them), Q queries (fewer on images with fewer cells),
D denoising queries (0 without targets or labels), C classes, R + 1 bins of a distance, M channels of the head of masks, whose
maps of h x w are a quarter of the images. Boxes are cx, cy, w, h in 0..1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DetrRaws(NamedTuple):
    """Those of the last layer."""

    boxes: Tensor  # [N, Q, 4]
    logits: Tensor  # [N, Q, C] of classes
    sides: Tensor  # [N, 4] w, h, w, h of the images, pixels


class RtdetrTrainingRaws(NamedTuple):
    """Those of the last layer, then what the loss reads: the network returns them in training, or with targets."""

    boxes: Tensor
    logits: Tensor
    sides: Tensor
    all_boxes: Tensor  # [N, L, Q, 4]
    all_logits: Tensor  # [N, L, Q, C]
    cell_boxes: Tensor  # [N, Q, 4] of the cells that became queries
    cell_logits: Tensor  # [N, Q, C]
    noisy_boxes: Tensor  # [N, L, D, 4] of denoising queries
    noisy_logits: Tensor  # [N, L, D, C]


class DfineTrainingRaws(NamedTuple):
    """Those of RT-DETR, and the distributions of L - 1 layers."""

    boxes: Tensor
    logits: Tensor
    sides: Tensor
    all_boxes: Tensor
    all_logits: Tensor
    cell_boxes: Tensor
    cell_logits: Tensor
    noisy_boxes: Tensor
    noisy_logits: Tensor
    corners: Tensor  # [N, L - 1, Q, 4 (R + 1)] logits of the distances of a box's sides
    references: Tensor  # [N, L - 1, Q, 4] the boxes that the distances start from
    noisy_corners: Tensor  # [N, L - 1, D, 4 (R + 1)]
    noisy_references: Tensor  # [N, L - 1, D, 4]


TrainingRaws = RtdetrTrainingRaws | DfineTrainingRaws


class MaskRaws(NamedTuple):
    """Those of the last layer of a network that finds masks. The last coefficient belongs to a prototype of ones."""

    boxes: Tensor
    logits: Tensor
    sides: Tensor
    coefficients: Tensor  # [N, Q, M + 1]
    prototypes: Tensor  # [N, M, h, w]


class MaskTrainingRaws(NamedTuple):
    """What the loss of a network that finds masks reads. A decoder layer has prototypes of its own."""

    found: TrainingRaws
    coefficients: Tensor  # [N, layers, D + Q, M + 1]: denoising queries, then the others
    prototypes: tuple[Tensor, ...]  # of each layer [N, M, h, w]
