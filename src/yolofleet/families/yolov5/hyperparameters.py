"""The hyperparameters of YOLOv5's loss, with which all networks with anchors train."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from yolofleet.config.schema.fields import Unit, setting
from yolofleet.config.schema.recipe import Recipe


def _no_autobalance(value: bool) -> bool:
    """Return the value. Raise ValueError if it is true: a fixed balance of the levels is used."""
    if value:
        raise ValueError("is not available: its balance would depend on the fleet")
    return value


class Yolov5Hyperparameters(Recipe):
    """Gains and weights of the loss's terms, and the assignment of labels to anchors."""

    box: float = setting(0.05, "box gain", ge=0)
    cls: float = setting(0.5, "class gain", ge=0)
    cls_pw: float = setting(1.0, "class positive weight", gt=0)
    obj: float = setting(1.0, "objectness gain", ge=0)
    obj_pw: float = setting(1.0, "objectness positive weight", gt=0)
    anchor_t: float = setting(4.0, "largest ratio between the sides of a label and of its anchor", gt=1)
    fl_gamma: float = setting(0.0, "focal-loss gamma; 0 = off", ge=0)
    label_smoothing: Unit = setting(0.0, "smoothing of the class targets")
    autobalance: Annotated[bool, AfterValidator(_no_autobalance)] = setting(
        False, "adapt the balance of objectness during training; not supported"
    )
