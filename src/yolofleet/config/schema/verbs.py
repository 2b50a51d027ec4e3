"""Settings of ``predict``, ``export``, ``bench inference``, ``doctor`` and ``selftest``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from yolofleet.config.schema.fields import (
    DEVICE,
    MAX_SIDE_PX,
    MAX_THREADS,
    PRECISION_CLASHES,
    PRECISION_HELP,
    TRUST_HELP,
    Clash,
    CodeSettings,
    Device,
    DeviceSettings,
    Frozen,
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
from yolofleet.config.schema.inference import InferenceSettings


class SelftestConfig(Frozen):
    """Settings of ``yolofleet selftest``."""

    verb: ClassVar[str] = "selftest"
    model: str = input_setting("yolov5n", "model name (yolov5n ... yolov5x)")
    img: int = input_setting(128, "image size, pixels", ge=32, le=MAX_SIDE_PX)
    steps: int = length_setting(3, "steps (optimizer updates) of each run", ge=2, le=10)
    device: Device = execution_setting(
        "auto",
        "auto, cpu:N (N processes), or CUDA device numbers such as 0,1 or 0:2; auto: all CUDA devices, else cpu:2",
        pattern=DEVICE,
    )
    precision: Precision = execution_setting("auto", PRECISION_HELP)
    json_out: str = json_setting("all results")


class DoctorConfig(DeviceSettings):
    """Settings of ``yolofleet doctor``. Those that it shares with ``train`` describe the run to prepare for."""

    verb: ClassVar[str] = "doctor"
    hosts: str = input_setting(
        "", "hosts to check, and the network between them: a:8,b:4,c:0+2,d:cpu:2", in_files=False
    )
    fleet: str = input_setting(
        "",
        "hosts to check, from a fleet file (YAML)",
        in_files=False,
        clashes=(Clash("hosts", "both choose the hosts"),),
    )
    log: str = input_setting(
        "",
        "explain the errors in a log of NCCL, gloo or torchrun: a file, a run folder, or - for standard input",
    )
    support: bool = saved_setting(
        False,
        "write yolofleet-support.zip for an issue report: findings, facts and versions, with --log RUN also the "
        "configuration and logs of that run; removes the secrets that it recognises; sends nothing",
        in_files=False,
    )
    data: str = input_setting("", "data set of the run; the doctor checks that it is the same on all hosts")
    img: int = length_setting(640, "image size of the run, pixels", ge=32, le=MAX_SIDE_PX)
    batch: Natural = length_setting(16, "total batch of the run, images")
    micro_batch: int = length_setting(
        0, "images that batch normalisation treats together; 0 = choose a divisor of --batch near 1/8 of a step", ge=0
    )  # fmt: skip
    port: int = execution_setting(29500, "port of the rendezvous to check", ge=1, le=65535)
    quick: bool = length_setting(
        False, "only quick checks (1 to 2 seconds): no import of torch, no measurements"
    )
    project: Path | None = execution_setting(None, "parent folder of the run folder (default runs/train)")
    json_out: str = json_setting("the findings")


class ExportConfig(CodeSettings):
    """Settings of ``yolofleet export``."""

    verb: ClassVar[str] = "export"
    weights: Weights = input_setting("", "weights to export: .safetensors, .pt, .weights or .pdparams")
    cfg: str = input_setting("", "model description of weights files that contain none (.weights)")
    format: str = input_setting(
        "onnx", "onnx, torchscript, openvino, ncnn or tflite; several with commas: onnx,openvino"
    )
    img: str = input_setting(
        "",
        "image size, pixels: one side, or height,width; rounded up to the stride; default: the training size",
        pattern=r"^([1-9][0-9]{1,4}(,[1-9][0-9]{1,4})?)?$",
    )
    batch: int = input_setting(1, "images per forward pass", ge=1, le=4096)
    dynamic: Literal["none", "batch", "size", "both"] = input_setting(
        "none",
        "dimensions that stay variable in the file: none, batch, image size, or both",
        clashes=(
            Clash(
                "batch",
                "a variable batch has no size",
                "leave out --batch",
                mine=lambda sizes: sizes in ("batch", "both"),
                theirs=bool,
                if_given="batch",
            ),
        ),
    )
    half: bool = method_setting(False, "compute in 16 bits; inputs and outputs stay 32-bit")
    int8: bool = method_setting(
        False,
        "compute in 8 bits, with ranges from images of --data; inputs and outputs stay 32-bit",
        clashes=tuple(
            Clash(other, "both change how the file stores its weights") for other in ("half", "simplify")
        ),
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
    triton: Path | None = saved_setting(None, "model repository of Triton to write to", in_files=False)
    deepstream: Path | None = saved_setting(None, "folder to write for DeepStream-Yolo", in_files=False)
    json_out: str = json_setting("the result of the check")


class BenchConfig(CodeSettings):
    """Settings of ``yolofleet bench``."""

    verb: ClassVar[str] = "bench"
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
    precision: Precision = execution_setting("auto", PRECISION_HELP, clashes=PRECISION_CLASHES)
    json_out: str = json_setting("the results")


class PredictConfig(InferenceSettings):
    """Settings of ``yolofleet predict``."""

    verb: ClassVar[str] = "predict"
    source: str = input_setting(
        "",
        "image, folder, glob pattern, list of images (.txt), video, camera number; http, https or rtsp url; s3://, gs:// or az:// file or folder; screen; - for "
        "standard input",
    )
    fit: Literal["auto", "rect", "square"] = method_setting(
        "auto",
        "pad images to a multiple of the stride (rect) or to a square; auto: as the evaluation of the model family does",
    )
    tile: int = method_setting(
        0, "detect also on tiles of N x N pixels, for small objects in large images; 0 = off", ge=0
    )
    overlap: float = method_setting(
        0.2, "with --tile: overlap of neighbouring tiles, as a fraction of their side", ge=0, lt=1
    )
    vid_stride: Natural = method_setting(1, "use every Nth frame of a video")
    batch: Natural = method_setting(1, "images per forward pass")
    save: Literal["images", "none"] = saved_setting("images", "write the images with boxes drawn on them")
    txt_format: Literal["yolo", "voc"] = saved_setting(
        "yolo", "format of --save-txt; yolo: class cx cy w h in 0..1; voc: class x1 y1 x2 y2 in pixels"
    )
    save_as: Literal["none", "label-studio", "cvat", "coco", "yolo", "labelme"] = saved_setting(
        "none", "write images and detections into the folder tasks, for people to correct in a labelling tool"
    )
    save_json: bool = saved_setting(False, "write all detections to one JSON file")
    save_csv: bool = saved_setting(False, "write all detections to one CSV file")
    save_crop: bool = saved_setting(False, "write each detected object as an image")
    show: bool = display_setting(False, "show the images in a window")
    line_width: int = display_setting(0, "line width of the boxes, pixels; 0 = by image size", ge=0)
    json_out: str = json_setting("all detections")
    hide_labels: bool = display_setting(False, "draw boxes without class names")
    hide_conf: bool = display_setting(False, "draw boxes without scores")
