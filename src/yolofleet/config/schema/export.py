"""Settings of ``yolofleet export`` and ``yolofleet bench inference``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from yolofleet.config.schema.execution import CodeSettings
from yolofleet.config.schema.fields import (
    DEVICE,
    MAX_THREADS,
    PRECISION_HELP,
    Natural,
    Precision,
    Unit,
    Weights,
    setting,
)


class ExportConfig(CodeSettings):
    """Settings of ``yolofleet export``."""

    weights: Weights = setting(
        "", "weights to export: .safetensors, .pt, .weights or .pdparams", group="input"
    )
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    format: str = setting(
        "onnx",
        "onnx, torchscript, openvino, ncnn, tflite, coreml or tensorrt; several with commas: onnx,openvino",
        group="input",
    )
    img: str = setting(
        "",
        "image size, pixels: one side, or height,width; rounded up to the stride; default: the training size",
        group="input",
        pattern=r"^([1-9][0-9]{1,4}(,[1-9][0-9]{1,4})?)?$",
    )
    batch: int = setting(1, "images per forward pass", ge=1, le=4096, group="input")
    dynamic: Literal["none", "batch", "size", "both"] = setting(
        "none", "dimensions that stay variable in the file: none, batch, image size, or both", group="input"
    )
    half: bool = setting(False, "compute in 16 bits; inputs and outputs stay 32-bit", group="method")
    int8: bool = setting(
        False,
        "compute in 8 bits, with ranges from images of --data; inputs and outputs stay 32-bit",
        group="method",
    )
    calibration_images: Natural = setting(
        64, "with --int8: images of the train split that find the ranges", group="method"
    )
    simplify: bool = setting(False, "simplify the ONNX graph (needs onnxslim)", group="method")
    nms: bool = setting(False, "include non-maximum suppression (NMS) in the file", group="method")
    conf: Unit = setting(0.25, "with --nms: discard boxes with a lower score", group="method")
    iou: Unit = setting(0.45, "with --nms: IoU threshold", group="method")
    max_det: int = setting(
        300, "with --nms: maximum number of boxes per image", ge=1, le=100_000, group="method"
    )
    agnostic_nms: bool = setting(False, "with --nms: run NMS over all classes together", group="method")
    data: str = setting(
        "",
        "data set whose images verify the file, and calibrate it with --int8; default: generated images",
        group="reports and display",
    )
    out: Path | None = setting(
        None,
        "file or folder to write; default: in the folder of the weights",
        group="saved files",
        in_files=False,
    )
    json_out: str = setting(
        "",
        "write the result of the check as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )


class BenchConfig(CodeSettings):
    """Settings of ``yolofleet bench``."""

    weights: Weights = setting("", "weights file or exported file", group="input")
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    img: int = setting(640, "image size, pixels; not needed for a file of fixed size", ge=32, group="input")
    batch: Natural = setting(1, "images per forward pass", group="input")
    passes: Natural = setting(
        30, "measured forward passes, after a few for warm-up", group="length and batch size"
    )
    device: str = setting(
        "auto", "auto, cpu, mps, or one CUDA device number", group="execution", pattern=DEVICE
    )
    threads: int = setting(0, "CPU threads; 0 = all cores", ge=0, le=MAX_THREADS, group="execution")
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    json_out: str = setting(
        "",
        "write the results as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )
