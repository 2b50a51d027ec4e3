"""Settings of ``yolofleet val`` and ``yolofleet predict``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from yolofleet.config.schema.execution import CodeSettings, ExecutionSettings, FleetSettings
from yolofleet.config.schema.fields import (
    PRECISION_HELP,
    Natural,
    Precision,
    Texts,
    Unit,
    _file_of,
    json_setting,
    setting,
)


class InferenceSettings(CodeSettings, ExecutionSettings):
    """Settings that ``yolofleet val`` and ``yolofleet predict`` share."""

    weights: Annotated[Texts, BeforeValidator(_file_of)] = setting(
        (),
        "weights: .safetensors, .pt, .weights or .pdparams (read as data, never executed), or an exported file; repeat it "
        "for an ensemble",
        group="input",
    )
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    img: int = setting(640, "longest image side, pixels", ge=32, group="input")
    agnostic_nms: bool = setting(False, "run NMS over all classes together", group="method")
    augment: bool = setting(
        False,
        "test-time augmentation: detect on three views of each image (full size, 0.83 mirrored, 0.67)",
        group="method",
    )
    merge: Literal["nms", "wbf", "mean"] = setting(
        "nms",
        "how the predictions of several weights, views and tiles become one list; nms: one suppression over all, as YOLOv5; "
        "wbf: weighted box fusion; mean: average the predictions of networks of one architecture",
        group="method",
    )
    tile: int = setting(
        0,
        "detect also on tiles of N x N pixels, for small objects in large images; 0 = off",
        ge=0,
        group="method",
    )
    overlap: float = setting(
        0.2,
        "with --tile: overlap of neighbouring tiles, as a fraction of their side",
        ge=0,
        lt=1,
        group="method",
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    save_txt: bool = setting(False, "write detections as YOLO txt files", group="saved files")
    save_conf: bool = setting(False, "add scores to the txt files", group="saved files")


class ValConfig(FleetSettings, InferenceSettings):
    """Settings of ``yolofleet val``."""

    verb: ClassVar[str] = "val"
    # settings of training that have one value in a validation
    parallel: ClassVar[str] = "ddp"
    reduce: ClassVar[str] = "fast"
    shares: ClassVar[str] = ""
    resume: ClassVar[str] = ""
    linked_folders: ClassVar[bool] = False

    data: str = setting("", "data set: YAML file, folder, COCO JSON, or a built-in name", group="input")
    split: Literal["train", "val", "test"] = setting("val", "split of the data set", group="input")
    single_cls: bool = setting(False, "treat all classes as one", group="input")
    fit: Literal["auto", "rect", "batch", "square"] = setting(
        "auto",
        "pad images to a multiple of the stride (rect), to the largest of their batch as YOLOv5 does (batch), or to a "
        "square; auto: rect, or square if the evaluation of the model family does so",
        group="method",
    )
    conf: Unit = setting(0.001, "discard boxes with a lower score", group="method")
    iou: Unit = setting(0.6, "IoU threshold of non-maximum suppression (NMS)", group="method")
    max_det: Natural = setting(300, "maximum number of boxes per image", group="method")
    classes: Texts = setting(
        (), "measure only these classes, by number or name; may be repeated", group="method"
    )
    batch: Natural = setting(32, "images per batch; the batches are the same on every fleet", group="method")
    timeout_s: Natural = setting(600, "timeout of a collective operation, seconds", group="execution")
    stall_s: float = setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs and ends; 0 = never",
        ge=0,
        group="execution",
    )
    metric: Literal["coco", "voc07", "voc12"] = setting(
        "coco",
        "also show the AP of PASCAL VOC at IoU 0.5; voc07: at 11 recalls; voc12: area under the curve",
        group="method",
    )
    verbose: bool = setting(
        False,
        "show metrics of each class and of small, medium and large objects",
        group="reports and display",
    )
    error_analysis: bool = setting(
        False,
        "show the kinds of errors and what each costs, as TIDE does: classification, localisation, both, duplicate, "
        "background, missed",
        group="reports and display",
    )
    worst: int = setting(
        0,
        "draw the N images with the most errors, labels at the left and detections at the right",
        ge=0,
        le=10_000,
        group="reports and display",
    )
    plots: bool = setting(True, "write report.html, curves and example images", group="reports and display")
    save_json: bool = setting(False, "write detections in the COCO results format", group="saved files")
    json_out: str = json_setting("the results")


class PredictConfig(InferenceSettings):
    """Settings of ``yolofleet predict``."""

    source: str = setting(
        "",
        "image, folder, glob pattern, list of images (.txt), video, camera number; http, https or rtsp url; s3://, gs:// or az:// file or folder; screen; - for "
        "standard input",
        group="input",
    )
    fit: Literal["auto", "rect", "square"] = setting(
        "auto",
        "pad images to a multiple of the stride (rect) or to a square; auto: as the evaluation of the model family does",
        group="method",
    )
    conf: Unit = setting(0.25, "discard boxes with a lower score", group="method")
    iou: Unit = setting(0.45, "IoU threshold of non-maximum suppression (NMS)", group="method")
    max_det: Natural = setting(1000, "maximum number of boxes per image", group="method")
    classes: Texts = setting(
        (), "keep only these classes, by number or name; may be repeated", group="method"
    )
    vid_stride: Natural = setting(1, "use every Nth frame of a video", group="method")
    batch: Natural = setting(1, "images per forward pass", group="method")
    save: Literal["images", "none"] = setting(
        "images", "write the images with boxes drawn on them", group="saved files"
    )
    txt_format: Literal["yolo", "voc"] = setting(
        "yolo",
        "format of --save-txt; yolo: class cx cy w h in 0..1; voc: class x1 y1 x2 y2 in pixels",
        group="saved files",
    )
    save_json: bool = setting(False, "write all detections to one JSON file", group="saved files")
    save_csv: bool = setting(False, "write all detections to one CSV file", group="saved files")
    save_crop: bool = setting(False, "write each detected object as an image", group="saved files")
    show: bool = setting(False, "show the images in a window", group="reports and display")
    line_width: int = setting(
        0, "line width of the boxes, pixels; 0 = by image size", ge=0, group="reports and display"
    )
    json_out: str = json_setting("all detections")
    hide_labels: bool = setting(False, "draw boxes without class names", group="reports and display")
    hide_conf: bool = setting(False, "draw boxes without scores", group="reports and display")
