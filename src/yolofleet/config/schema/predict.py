"""Settings of ``yolofleet predict``."""

from __future__ import annotations

from typing import Literal

from yolofleet.config.schema.fields import (
    Natural,
    Texts,
    Unit,
    display_setting,
    input_setting,
    json_setting,
    method_setting,
    saved_setting,
)
from yolofleet.config.schema.inference import InferenceSettings


class PredictConfig(InferenceSettings):
    """Settings of ``yolofleet predict``."""

    source: str = input_setting(
        "",
        "image, folder, glob pattern, list of images (.txt), video, camera number; http, https or rtsp url; s3://, gs:// or az:// file or folder; screen; - for "
        "standard input",
    )
    fit: Literal["auto", "rect", "square"] = method_setting(
        "auto",
        "pad images to a multiple of the stride (rect) or to a square; auto: as the evaluation of the model family does",
    )
    conf: Unit = method_setting(0.25, "discard boxes with a lower score")
    iou: Unit = method_setting(0.45, "IoU threshold of non-maximum suppression (NMS)")
    max_det: Natural = method_setting(1000, "maximum number of boxes per image")
    classes: Texts = method_setting((), "keep only these classes, by number or name; may be repeated")
    vid_stride: Natural = method_setting(1, "use every Nth frame of a video")
    batch: Natural = method_setting(1, "images per forward pass")
    save: Literal["images", "none"] = saved_setting("images", "write the images with boxes drawn on them")
    txt_format: Literal["yolo", "voc"] = saved_setting(
        "yolo", "format of --save-txt; yolo: class cx cy w h in 0..1; voc: class x1 y1 x2 y2 in pixels"
    )
    save_json: bool = saved_setting(False, "write all detections to one JSON file")
    save_csv: bool = saved_setting(False, "write all detections to one CSV file")
    save_crop: bool = saved_setting(False, "write each detected object as an image")
    show: bool = display_setting(False, "show the images in a window")
    line_width: int = display_setting(0, "line width of the boxes, pixels; 0 = by image size", ge=0)
    json_out: str = json_setting("all detections")
    hide_labels: bool = display_setting(False, "draw boxes without class names")
    hide_conf: bool = display_setting(False, "draw boxes without scores")
