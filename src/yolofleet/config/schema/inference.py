"""Settings of ``yolofleet val``, and those that ``predict`` and ``serve`` share with it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from yolofleet.config.schema.fields import (
    MAX_SIDE_PX,
    PRECISION_HELP,
    TRUST_HELP,
    CodeSettings,
    ExecutionSettings,
    FleetSettings,
    Natural,
    Precision,
    Texts,
    Unit,
    display_setting,
    execution_setting,
    failure_setting,
    file_of_weights,
    input_setting,
    json_setting,
    method_setting,
    saved_setting,
)


class NetworkSettings(CodeSettings):
    """The networks of an inference, and which of their predictions are kept."""

    weights: Annotated[Texts, BeforeValidator(file_of_weights)] = input_setting(
        (),
        "weights: a file .safetensors, .pt, .weights or .pdparams (read as data, never executed), an exported file, the "
        "folder of a run, a published name, or hf:USER/NAME; repeat it for an ensemble",
    )
    cfg: str = input_setting("", "model description of weights files that contain none (.weights)")
    trust: bool = input_setting(False, TRUST_HELP, in_files=False)
    img: int = input_setting(
        0,
        "longest image side, pixels; 0 = that of the training, or the fixed one of an exported file; 640 if neither is known",
        ge=0,
        le=MAX_SIDE_PX,
    )
    agnostic_nms: bool = method_setting(False, "run NMS over all classes together")
    augment: bool = method_setting(
        False, "test-time augmentation: detect on three views of each image (full size, 0.83 mirrored, 0.67)"
    )
    merge: Literal["nms", "wbf", "mean"] = method_setting(
        "nms",
        "how the predictions of several weights, views and tiles become one list; nms: one suppression over all, as YOLOv5; "
        "wbf: weighted box fusion; mean: average the predictions of networks of one architecture",
    )
    conf: Unit = method_setting(0.25, "discard boxes with a lower score")
    iou: Unit = method_setting(0.45, "IoU threshold of non-maximum suppression (NMS)")
    max_det: Natural = method_setting(1000, "maximum number of boxes per image")
    classes: Texts = method_setting((), "keep only these classes, by number or name; may be repeated")
    precision: Precision = execution_setting("auto", PRECISION_HELP)


class InferenceSettings(NetworkSettings, ExecutionSettings):
    """Settings that ``yolofleet val`` and ``yolofleet predict`` share."""

    save_txt: bool = saved_setting(False, "write detections as YOLO txt files")
    save_conf: bool = saved_setting(False, "add scores to the txt files")


class ValConfig(FleetSettings, InferenceSettings):
    """Settings of ``yolofleet val``."""

    verb: ClassVar[str] = "val"
    # settings of training that have one value in a validation
    parallel: ClassVar[str] = "ddp"
    reduce: ClassVar[str] = "fast"
    shares: ClassVar[str] = ""
    resume: ClassVar[str] = ""
    linked_folders: ClassVar[bool] = False

    data: str = input_setting("", "data set: YAML file, folder, COCO JSON, or a built-in name")
    split: Literal["train", "val", "test"] = input_setting("val", "split of the data set")
    single_cls: bool = input_setting(False, "treat all classes as one")
    fit: Literal["auto", "rect", "batch", "square"] = method_setting(
        "auto",
        "pad images to a multiple of the stride (rect), to the largest of their batch as YOLOv5 does (batch), or to a "
        "square; auto: rect, or square if the evaluation of the model family does so",
    )
    conf: Unit = method_setting(0.001, "discard boxes with a lower score")
    iou: Unit = method_setting(0.6, "IoU threshold of non-maximum suppression (NMS)")
    max_det: Natural = method_setting(300, "maximum number of boxes per image")
    classes: Texts = method_setting((), "measure only these classes, by number or name; may be repeated")
    batch: Natural = method_setting(32, "images per batch; the batches are the same on every fleet")
    timeout_s: Natural = failure_setting(600, "timeout of a collective operation, seconds")
    stall_s: float = failure_setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs and ends; 0 = never",
        ge=0,
    )
    metric: Literal["coco", "voc07", "voc12"] = method_setting(
        "coco", "also show the AP of PASCAL VOC at IoU 0.5; voc07: at 11 recalls; voc12: area under the curve"
    )
    verbose: bool = display_setting(
        False, "show metrics of each class and of small, medium and large objects"
    )
    error_analysis: bool = display_setting(
        False,
        "show the kinds of errors and what each costs, as TIDE does: classification, localisation, both, duplicate, "
        "background, missed",
    )
    worst: int = display_setting(
        0,
        "draw the N images with the most errors, labels at the left and detections at the right",
        ge=0,
        le=10_000,
    )
    plots: bool = display_setting(True, "write report.html, curves and example images")
    save_json: bool = saved_setting(False, "write detections in the COCO results format")
    json_out: str = json_setting("the results")
