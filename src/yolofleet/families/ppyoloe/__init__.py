"""PP-YOLOE."""

from yolofleet.families.family import Family, WeightsFile
from yolofleet.families.ppyoloe.hyperparameters import PpyoloeHyperparameters

FAMILY = Family(
    name="ppyoloe",
    from_dict="ppyoloe.description:PpyoloeDescription.from_dict",
    network="ppyoloe.network:PpyoloeNetwork",
    loss="ppyoloe.loss:ppyoloe_loss",
    recipe="ppyoloe-300e",
    small_recipe="ppyoloe-finetune",
    small_scratch_recipe="ppyoloe-few",
    hyperparameters=PpyoloeHyperparameters,
    preset_names="ppyoloe.description:preset_names",
    preset="ppyoloe.description:preset",
    canonical="ppyoloe.description:canonical",
    weights_files=(
        WeightsFile(
            "Paddle weights",
            "ppyoloe.pdparams_file:read",
            (".pdparams", ".pdema", ".pdopt"),
            write="ppyoloe.pdparams_file:write",
            shapes="ppyoloe.pdparams_file:shapes",
        ),
    ),
    published="ppyoloe.published:items",
)
