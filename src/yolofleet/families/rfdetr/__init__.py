"""RF-DETR."""

from yolofleet.families.family import Family
from yolofleet.families.rtdetr import NO_EXPORT, files_of
from yolofleet.families.rtdetr.hyperparameters import DetrGains

FAMILY = Family(
    name="rfdetr",
    from_dict="rfdetr.description:RfdetrDescription.from_dict",
    network="rfdetr.network:RfdetrNetwork",
    loss="rfdetr.loss:rfdetr_loss",
    recipe="rfdetr",
    small_recipe="rfdetr-few",
    network_values="rfdetr.description:recipe_values",
    hyperparameters=DetrGains,
    preset_names="rfdetr.description:PRESETS.keys",
    preset="rfdetr.description:PRESETS.__getitem__",
    canonical="rfdetr.description:canonical",
    weights_files=files_of("rfdetr"),
    published="rfdetr.published:items",
    no_export=NO_EXPORT,
)
