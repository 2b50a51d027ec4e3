"""The hyperparameters that only PP-YOLOE has. ``config.schema.Recipe`` includes them."""

from __future__ import annotations

from yolofleet.config.schema.fields import Frozen, Unit, setting


class PpyoloeHyperparameters(Frozen):
    """Weights of the loss's terms, and its assigner."""

    cls_gain: float = setting(1.0, "PP-YOLOE: class gain", ge=0)
    iou_gain: float = setting(2.5, "PP-YOLOE: box overlap gain", ge=0)
    dfl_gain: float = setting(0.5, "PP-YOLOE: gain of the distribution focal loss", ge=0)
    assigner_switch: Unit = setting(
        1 / 3, "PP-YOLOE: fraction of the run with the ATSS assigner; the rest uses the task-aligned assigner"
    )
