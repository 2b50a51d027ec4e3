"""D-FINE."""

from dataclasses import replace

from yolofleet.families import rtdetr
from yolofleet.families.dfine.hyperparameters import DfineHyperparameters

FAMILY = replace(
    rtdetr.FAMILY,
    name="dfine",
    from_dict="dfine.description:DfineDescription.from_dict",
    network="dfine.network:DfineNetwork",
    loss="dfine.loss:dfine_loss",
    recipe="dfine",
    small_recipe="dfine-few",
    hyperparameters=DfineHyperparameters,
    preset_names="dfine.description:PRESETS.keys",
    preset="dfine.description:PRESETS.__getitem__",
    canonical="dfine.description:canonical",
    published="rtdetr.published:dfine_items",
)
