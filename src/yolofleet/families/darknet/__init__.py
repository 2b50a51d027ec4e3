"""Darknet's networks from ``.cfg`` files."""

from yolofleet.families.family import Family, WeightsFile
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters

FAMILY = Family(
    name="darknet",
    from_dict="darknet.cfg:DarknetDescription.from_dict",
    network="darknet.network:DarknetNetwork",
    loss="yolov5.loss:anchor_loss",
    hyperparameters=Yolov5Hyperparameters,
    preset_names="darknet.cfg:preset_names",
    preset="darknet.cfg:preset",
    description_files={".cfg": "darknet.cfg:read_cfg"},
    weights_files=(
        WeightsFile(
            "Darknet weights",
            "darknet.weights_file:read",
            (".weights",),
            pattern=r"\.conv\.\d+$",  # a file of the first layers, such as darknet53.conv.74
            write="darknet.weights_file:write",
            shapes="darknet.weights_file:shapes",
            companion="darknet.cfg:companion",
        ),
    ),
    published="darknet.published:items",
    no_export={
        "tflite --int8": "LiteRT 2.3 ends the process that opens such a file of a network from a Darknet cfg"
    },
)
