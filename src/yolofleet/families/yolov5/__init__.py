"""YOLOv5, and YOLOv3 in its form."""

from yolofleet.families.family import Family, WeightsFile
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters

FAMILY = Family(
    name="yolov5",
    from_dict="yolov5.rows:RowDescription.from_dict",
    network="yolov5.network:row_network",
    loss="yolov5.loss:anchor_loss",
    small_recipe="finetune",
    small_scratch_recipe="scratch-few",
    hyperparameters=Yolov5Hyperparameters,
    preset_names="yolov5.presets:preset_names",
    preset="yolov5.presets:preset",
    description_files=dict.fromkeys((".yaml", ".yml"), "yolov5.rows:read_description"),
    weights_files=(
        WeightsFile("torch checkpoint", "yolov5.pt_file:read", (".pt",)),
        WeightsFile("safetensors", "yolov5.pt_file:read_state_dict"),
    ),
    published="yolov5.published:items",
    safetensors_use="YOLOv5 takes it, too: model.load_state_dict(safetensors.torch.load_file({file!r}), strict=False)",
)
