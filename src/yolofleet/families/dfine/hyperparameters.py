"""The hyperparameters of D-FINE's loss."""

from __future__ import annotations

from yolofleet.config.schema.fields import setting
from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters


class DfineHyperparameters(RtdetrHyperparameters):
    """Those of RT-DETR, and weights of the terms that only D-FINE has."""

    fgl_gain: float = setting(0.15, "gain of the fine-grained localisation loss", ge=0)
    ddf_gain: float = setting(1.5, "gain of the distillation between decoder layers", ge=0)
