"""The formats of labelling tools that yolofleet does not read, for a message that names the format and the way out."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from yolofleet.data.datasets.yolotxt import walk
from yolofleet.support.errors import ConfigError
from yolofleet.support.files.foreign import open_foreign

_HEAD_BYTES = 1 << 16
_MOST_FILES = 5  # of a folder, for each suffix
_COCO = "export COCO there"
_FORMATS = (  # what only files of this format have in their first 64 KiB, the format, what to do
    (rb'"_via_\w+"|"shape_attributes"|region_shape_attributes', "VIA's project or CSV", _COCO),
    (rb'"schema_ref"|"slots"\s*:\s*\[', "V7's Darwin JSON", _COCO),
    (rb'"classTitle"|"projectType"', "Supervisely's JSON", "export COCO, YOLO or Pascal VOC there"),
    (rb'"data_row"', "Labelbox's NDJSON", "convert it to COCO"),
    (rb'"dm_format_version"|"categories"\s*:\s*\{', "Datumaro's JSON", "datum convert -f coco"),
    (rb'\A\W*\{(?=[^{}]*"image_id")(?=[^{}]*"score")', "COCO's list of detections", "name the annotations"),
    (rb'"coordinates"\s*:\s*\{', "CreateML's JSON", "export COCO, YOLO or Pascal VOC instead"),
    (rb'"original_width"', "Label Studio's JSON", "export YOLO or COCO there"),
    (
        rb"<annotations>\s*<version>",
        "XML of CVAT for images or video",
        "export COCO or Ultralytics YOLO there",
    ),
    (rb"(?i)\A\W*(filename|image|path)\w*,.*(xmin|x1)", "a CSV table", "export COCO or YOLO instead"),
    (rb'"shapes"\s*:\s*\[', "labelme's JSON of one image", "name the folder of the files"),
)


def refuse_other_format(path: Path) -> None:
    """Raise ConfigError if a file, or one of the first label files in a folder, has a format that is known but not read."""
    suffixes = (".json", ".ndjson", ".csv", ".xml")
    files = [file for suffix in suffixes for file, _ in islice(walk(str(path), (suffix,)), _MOST_FILES)] if path.is_dir() else [str(path)]  # fmt: skip
    for file in files:
        try:
            with open_foreign(file) as opened:
                head = opened.read(_HEAD_BYTES)
        except OSError:
            continue
        for signs, form, way_out in _FORMATS:
            if re.search(signs, head):
                hint = f"{way_out}; docs/label-tools.md has more"
                raise ConfigError(f"{path} cannot be read: {Path(file).name} is {form}", hint=hint)
