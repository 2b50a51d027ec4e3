"""D-FINE."""

from yolofleet.families.family import Family
from yolofleet.families.rtdetr import FILES, NO_EXPORT

FAMILY = Family(
    name="dfine",
    from_dict="dfine.description:DfineDescription.from_dict",
    network="dfine.network:DfineNetwork",
    loss="dfine.loss:dfine_loss",
    recipe="dfine",
    small_recipe="dfine-few",
    network_values="rtdetr.description:recipe_values",
    hyperparameters="dfine.hyperparameters:DfineHyperparameters",
    preset_names="dfine.description:preset_names",
    preset="dfine.description:preset",
    canonical="dfine.description:canonical",
    weights_files=FILES,
    published="rtdetr.published:dfine_items",
    no_export=NO_EXPORT,
)
