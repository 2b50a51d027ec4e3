"""One table of words of other trainers that yolofleet does not have, with what to type instead."""

from __future__ import annotations

import re

_OTHERS = (
    r"(yolo-?v?([46-9]|1\d|26)|yolox|yolo-nas|yolo-world|rt-?detr|rtmdet|fastsam|sam2?)\b.*|"
    r"(yolo-?v?([46-9]|1\d|26)|yolox|rtdetr(?!v2))[a-z].*"
)
_HERE = "yolofleet has YOLOv5, YOLOv3, PP-YOLOE, RT-DETRv2, D-FINE and RF-DETR, and cannot read models of other families"
# What to type instead of words that yolofleet does not have, by the kind of word: patterns of what other trainers call it.
# Command line, configuration files and Python ask it for a word that they do not know.
WORDS = {
    "setting": {
        "lr|learning-rate": "the learning rate is lr0 of the recipe: --set lr0=0.01; in Python set=('lr0=0.01',)",
        "imgsz|imgsz-px|img-size|image-size|resolution": "img: --img 640; in Python img=640",
        "batch-size|batchsize": "batch: --batch 16; in Python batch=16",
        "grad-accum-steps|accumulate-grad-batches": "nominal_batch, the images of a step: --nominal-batch 64; in Python nominal_batch=64",
        "num-workers|n-workers": "workers: --workers 4; in Python workers=4",
        "nodes|num-nodes": "--hosts a:8,b:8 by ssh, or --slurm nodes=2,gpus=4 for a job of SLURM",
        "gpu|ngpus|n-gpus|num-gpus|nproc": "device: --device all for every GPU, or --device 0-3; in Python device='0-3'",
        "output-dir|out-dir|save-dir": "project and name: --project FOLDER --name NAME; in Python project=FOLDER, name=NAME",
        "dataset|dataset-dir|data-dir": "data: --data FOLDER/data.yaml; in Python data='FOLDER/data.yaml'",
        "pretrained": "weights: --weights yolov5n.pt",
        "(conf-|score-|box-)?thres(hold)?|confidence|min-confidence": "conf of predict and val: --conf 0.4; in Python conf=0.4",
        "iou-thres(hold)?|nms-thres(hold)?": "iou of predict and val: --iou 0.6; in Python iou=0.6",
        "half|fp16|use-amp": "precision: --precision fp16",
        "stream": "in Python, Model(weights).stream(source) gives the results one by one",
        "verbose|silent": "quiet: --quiet prints only errors and the result; --verbose of train and val has a line for each class",
        "async": "tune chooses the trials of a generation together: --generation 8",
        "single-cls": "--single-cls of train and val treats all classes as one; the files keep their classes",
    },
    "verb": {
        "track": "yolofleet has no tracking: yolofleet predict finds the boxes of each picture of a video",
        "benchmark": "did you mean bench?",
        "finetune|fine-tune|fit": "yolofleet train --weights yolov5n.pt --data data.yaml",
    },
    "model": {
        r"(roboflow/)?rf-?detr-?(seg-?)?(base|preview|(2x|xx?)l(arge)?)\b.*": "RF-DETR's networks are rfdetr-n s m l, and with masks "
        "rfdetr-n-seg s-seg m-seg l-seg (XL and 2XL for boxes have Roboflow's licence PML 1.0, which is no open-source licence)",
        r"deim\b(?!-[nsmlx]$).*": "DEIM's networks are deim-n s m l x; it is a recipe, too: --model rtdetrv2-r18 --recipe deim",
        rf"(?=.*seg)({_OTHERS})": f"{_HERE}: --weights dfine-n --model dfine-n-seg, or --model yolov5n-seg (dfine-n-seg) from scratch",
        _OTHERS: f"{_HERE}: --weights yolov5n.pt, or --model yolov5n (dfine-n) from scratch",
    },
}


def instead_of(kind: str, word: str) -> str | None:
    """Return what to type instead of a setting, verb or model that yolofleet does not have; None if no row of WORDS fits."""
    word = word.lower().replace("_", "-")
    return next((hint for pattern, hint in WORDS[kind].items() if re.fullmatch(pattern, word)), None)
