"""The hyperparameters of PP-YOLOE's loss."""

from __future__ import annotations

from yolofleet.config.schema.fields import Unit, setting
from yolofleet.config.schema.recipe import Recipe


class PpyoloeHyperparameters(Recipe):
    """Weights of the loss's terms, and its assigner."""

    cls_gain: float = setting(1.0, "class gain", ge=0)
    iou_gain: float = setting(2.5, "box overlap gain", ge=0)
    dfl_gain: float = setting(0.5, "gain of the distribution focal loss", ge=0)
    assigner_switch: Unit = setting(
        1 / 3, "fraction of the run with the ATSS assigner; the rest uses the task-aligned assigner"
    )
