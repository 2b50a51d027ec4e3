"""The table of model families, by name. ``recipe_class.py`` adds those of users. No torch here."""

from __future__ import annotations

from yolofleet.families import darknet, deim, dfine, ppyoloe, rfdetr, rtdetr, yolov5
from yolofleet.families.family import Family, WeightsFile
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters

CUSTOM = Family(
    "custom",
    "custom:CustomDescription.from_dict",
    "custom:custom_network",
    "yolov5.loss:anchor_loss",
    hyperparameters=Yolov5Hyperparameters,
    user_code=True,
)
BUILT_IN = {
    family.name: family
    for family in (
        *(yolov5.FAMILY, darknet.FAMILY, ppyoloe.FAMILY, rtdetr.FAMILY, dfine.FAMILY, deim.FAMILY),
        rfdetr.FAMILY,
        CUSTOM,
    )
}
FAMILIES = dict(BUILT_IN)


def owners(hyperparameter: str) -> list[Family]:
    """Return the families whose loss reads a hyperparameter that not every network has."""
    return [family for family in FAMILIES.values() if hyperparameter in family.own_fields]


def weights_files(kind: str = "") -> list[WeightsFile]:
    """Return the formats of other projects that the families read: those of ``kind``, or all."""
    files = [file for family in FAMILIES.values() for file in family.weights_files]
    return [file for file in files if kind in ("", file.kind)]
