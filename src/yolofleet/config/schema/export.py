"""Settings of ``yolofleet export`` and ``yolofleet bench inference``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from yolofleet.config.schema.execution import CodeSettings
from yolofleet.config.schema.fields import (
    DEVICE,
    MAX_SIDE_PX,
    MAX_THREADS,
    PRECISION_HELP,
    TRUST_HELP,
    Device,
    Natural,
    Precision,
    Unit,
    Weights,
    display_setting,
    execution_setting,
    input_setting,
    json_setting,
    length_setting,
    method_setting,
    saved_setting,
)


class ExportConfig(CodeSettings):
    """Settings of ``yolofleet export``."""

    weights: Weights = input_setting("", "weights to export: .safetensors, .pt, .weights or .pdparams")
    cfg: str = input_setting("", "model description of weights files that contain none (.weights)")
    format: str = input_setting(
        "onnx",
        "onnx, torchscript, openvino, ncnn, tflite, coreml or tensorrt; several with commas: onnx,openvino",
    )
    img: str = input_setting(
        "",
        "image size, pixels: one side, or height,width; rounded up to the stride; default: the training size",
        pattern=r"^([1-9][0-9]{1,4}(,[1-9][0-9]{1,4})?)?$",
    )
    batch: int = input_setting(1, "images per forward pass", ge=1, le=4096)
    dynamic: Literal["none", "batch", "size", "both"] = input_setting(
        "none", "dimensions that stay variable in the file: none, batch, image size, or both"
    )
    half: bool = method_setting(False, "compute in 16 bits; inputs and outputs stay 32-bit")
    int8: bool = method_setting(
        False, "compute in 8 bits, with ranges from images of --data; inputs and outputs stay 32-bit"
    )
    calibration_images: Natural = method_setting(
        64, "with --int8: images of the train split that find the ranges"
    )
    simplify: bool = method_setting(False, "simplify the ONNX graph (needs onnxslim)")
    nms: bool = method_setting(False, "include non-maximum suppression (NMS) in the file")
    conf: Unit = method_setting(0.25, "with --nms: discard boxes with a lower score")
    iou: Unit = method_setting(0.45, "with --nms: IoU threshold")
    max_det: int = method_setting(300, "with --nms: maximum number of boxes per image", ge=1, le=100_000)
    agnostic_nms: bool = method_setting(False, "with --nms: run NMS over all classes together")
    data: str = display_setting(
        "", "data set whose images verify the file, and calibrate it with --int8; default: generated images"
    )
    out: Path | None = saved_setting(
        None, "file or folder to write; default: in the folder of the weights", in_files=False
    )
    json_out: str = json_setting("the result of the check")


class BenchConfig(CodeSettings):
    """Settings of ``yolofleet bench``."""

    weights: Weights = input_setting("", "weights file or exported file")
    cfg: str = input_setting("", "model description of weights files that contain none (.weights)")
    trust: bool = input_setting(False, TRUST_HELP, in_files=False)
    img: int = input_setting(
        0,
        "longest image side, pixels; 0 = that of the training, or the fixed one of an exported file; 640 if neither is known",
        ge=0,
        le=MAX_SIDE_PX,
    )
    batch: Natural = input_setting(1, "images per forward pass")
    passes: Natural = length_setting(30, "measured forward passes, after a few for warm-up")
    device: Device = execution_setting("auto", "auto, cpu, mps, or one CUDA device number", pattern=DEVICE)
    threads: int = execution_setting(0, "CPU threads; 0 = all cores", ge=0, le=MAX_THREADS)
    precision: Precision = execution_setting("auto", PRECISION_HELP)
    json_out: str = json_setting("the results")
