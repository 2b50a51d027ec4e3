"""RT-DETRv2."""

from yolofleet.families.family import Family, WeightsFile
from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters

SIXTEEN = "in 16 bits its boxes differ by more than the verification allows"
NO_EXPORT = {
    "ncnn": "its converter knows no top-k",
    "onnx --half": f"ONNX Runtime refuses its normalisations in mixed types, and {SIXTEEN}",
    "openvino --half": SIXTEEN,
    "openvino --int8": "the runtime cannot load the 8-bit form",
}


def files_of(family: str) -> tuple[WeightsFile, ...]:
    """Return the formats of a family's weights files: the authors' checkpoints, and folders of transformers."""
    part = f"{family}.weights_files"
    return (
        WeightsFile("torch checkpoint", f"{part}:read_pth", (".pth",), recognises=f"{part}:recognises_pth"),
        WeightsFile(
            "safetensors",
            f"{part}:read_safetensors",
            ("/",),  # a folder
            recognises=f"{part}:recognises_safetensors",
            write=f"{part}:write_folder",
        ),
    )


FAMILY = Family(
    name="rtdetr",
    from_dict="rtdetr.description:RtdetrDescription.from_dict",
    network="rtdetr.network:RtdetrNetwork",
    loss="rtdetr.mask_loss:rtdetr_loss",
    recipe="rtdetr",
    small_recipe="rtdetr-few",
    other_recipes=("deim",),
    network_values="rtdetr.description:recipe_values",
    hyperparameters=RtdetrHyperparameters,
    to_train="rtdetr.description:to_train",
    preset_names="rtdetr.description:PRESETS.keys",
    preset="rtdetr.description:PRESETS.__getitem__",
    canonical="rtdetr.description:canonical",
    weights_files=files_of("rtdetr"),
    published="rtdetr.published:items",
    no_export=NO_EXPORT,
)
