"""RT-DETRv2."""

from yolofleet.families.family import Family

FAMILY = Family(
    name="rtdetr",
    from_dict="rtdetr.description:RtdetrDescription.from_dict",
    network="rtdetr.network:RtdetrNetwork",
    loss="rtdetr.loss:rtdetr_loss",
    recipe="rtdetr",
    small_recipe="rtdetr-few",
    network_values="rtdetr.description:recipe_values",
    hyperparameters="rtdetr.hyperparameters:RtdetrHyperparameters",
    preset_names="rtdetr.description:preset_names",
    preset="rtdetr.description:preset",
    canonical="rtdetr.description:canonical",
)
