"""The hyperparameters of the losses of DETR's families."""

from __future__ import annotations

from typing import Literal

from yolofleet.config.schema.fields import Unit, setting
from yolofleet.config.schema.recipe import Recipe


class DetrGains(Recipe):
    """Weights of the loss's terms; RF-DETR has no others."""

    cls_gain: float = setting(1.0, "class gain", ge=0)
    l1_gain: float = setting(5.0, "gain of the L1 distance of boxes", ge=0)
    giou_gain: float = setting(2.0, "gain of the generalised IoU of boxes", ge=0)
    mask_gain: float = setting(5.0, "gain of the cross entropy of masks (networks -seg)", ge=0)
    dice_gain: float = setting(5.0, "gain of the dice loss of masks (networks -seg)", ge=0)


class RtdetrHyperparameters(DetrGains):
    """Those, the class loss, and the denoising queries."""

    class_loss: Literal["vfl", "mal"] = setting(
        "vfl", "vfl: varifocal loss; mal: DEIM's matchability-aware loss"
    )
    class_gamma: float = setting(0.0, "exponent of the class loss; 0: 2 for vfl, 1.5 for mal", ge=0)
    denoising: int = setting(
        100, "noisy copies of labels in each image, near and far; 0 = off", ge=0, le=1000
    )
    label_noise: Unit = setting(0.5, "half of this share of the noisy copies gets a random class")
    box_noise: float = setting(
        1.0, "largest shift of a near copy's corners, in halves of the box", ge=0, le=4
    )
