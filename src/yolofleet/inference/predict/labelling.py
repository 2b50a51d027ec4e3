"""Predictions as tasks for people who label (``--save-as``): images, and labels in a format that their tool imports.

A person edits the outline of a mask, so it is a polygon with few points that fills holes; ``coco`` has all pixels, and
``yolo`` the polygon of ``--save-txt``. Scores stand where the format has a place for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import cv2
import numpy as np

from yolofleet.data.datasets.maskrows import signed_area
from yolofleet.data.datasets.writers import LAYOUT_FOLDERS, place
from yolofleet.data.geometry import rle
from yolofleet.inference.predict.results import Prediction, suffix_of, write_picture
from yolofleet.runs.report.draw import class_name
from yolofleet.storage.atomic import make_folder, write_json, write_text
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.tasks.boxes.files import yolo_text

SIMPLER_PX = 1.0  # the outline of a mask moves by at most so much
# format -> folders of images and of labels below the folder of the tasks
_FOLDERS = {
    "yolo": ("images/train", "labels/train"),
    "coco": ("images/default", "annotations"),
    "cvat": ("images/default", "annotations"),
    "labelme": ("", ""),
    "label-studio": ("images", ""),
}


class LabellingTasks:
    """Writes the tasks of the images of a prediction, one after another.

    Args:
        folder: of the tasks. form: a value of ``--save-as``.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder, form
        self.images, self.labels = (folder / name for name in _FOLDERS[form])
        self._names: tuple[str, ...] = ()
        self._folders: dict[str, str] = {}  # folder of a stem -> folder below those of images and of labels
        self._tasks: list[dict[str, Any]] = []  # of Label Studio
        self._coco: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": []}

    def add(self, prediction: Prediction, stem: str) -> None:
        """Write the image, and what its format has a file of its own for. Raises StorageError."""
        self._names = prediction.names
        stem = self._readable(stem)
        name = self._place(prediction, stem)
        if self.form == "yolo":
            write_text(self.labels / f"{stem}.txt", as_txt(prediction, "yolo", scores=False))
        elif self.form == "labelme":
            write_json(self.labels / f"{stem}.json", _labelme(prediction, Path(name).name))
        elif self.form == "label-studio":
            found = label_studio_prediction(prediction, len(self._tasks) + 1)
            image = f"/data/local-files/?d={quote(f'images/{name}')}"
            self._tasks.append({"data": {"image": image}, "predictions": [found]})
        else:
            self._add_coco(prediction, name)

    def finish(self) -> None:
        """Write the files of all images. Raises StorageError."""
        if self.form == "yolo":
            classes = {"train": "images/train", "nc": len(self._names), "names": list(self._names)}
            write_text(self.folder / "data.yaml", write_yaml({"path": ".", **classes}))
        elif self.form == "label-studio":
            write_json(self.folder / "tasks.json", self._tasks)
            write_text(self.folder / "label-config.xml", _label_config(self._names))
        elif self.form != "labelme":
            write_json(self.labels / "instances_default.json", self._coco)

    def _readable(self, stem: str) -> str:
        """Return a stem without folders that have a meaning in the format: readers of YOLO replace the last ``images``."""
        folder, slash, base = stem.rpartition("/")
        if self.form != "yolo" or not folder:
            return stem
        if folder not in self._folders:
            parts = [part + "_" * (part.lower() in LAYOUT_FOLDERS) for part in folder.split("/")]
            name, taken = "/".join(parts), {one.casefold() for one in self._folders.values()}
            while name.casefold() in taken:
                name += "_"
            self._folders[folder] = name
        return self._folders[folder] + slash + base

    def _place(self, prediction: Prediction, stem: str) -> str:
        """Link, copy or write the image; return its name below the folder of images."""
        target = self.images / f"{stem}{suffix_of(prediction)}"
        make_folder(target.parent)
        source, frame = Path(prediction.path), prediction.frame
        if frame.is_file and frame.video is None and source.is_file():
            target.unlink(missing_ok=True)  # of an earlier command, with --exist-ok
            place([(str(source), str(target))], "link")
        else:
            target = write_picture(target, prediction.image_bgr)
        return target.relative_to(self.images).as_posix()

    def _add_coco(self, prediction: Prediction, name: str) -> None:
        found, number = prediction.to_coco(), len(self._coco["images"]) + 1
        self._coco["images"].append({**found["images"][0], "id": number, "file_name": name})
        outlines = _outlines(prediction)
        for one, rings in zip(found["annotations"], outlines, strict=True):
            one |= {"id": len(self._coco["annotations"]) + 1, "image_id": number}
            if self.form == "cvat":  # which takes run lengths for crowd regions, and has no score
                one |= {
                    "attributes": {"score": one["score"]},
                    "segmentation": [r.ravel().tolist() for r in rings],
                }
            self._coco["annotations"].append(one)
        self._coco["categories"] = max(self._coco["categories"], found["categories"], key=len)


def _outlines(prediction: Prediction) -> list[list[np.ndarray]]:
    """Return the outer rings of each object, [k, 2] pixels; none for a box, and for a mask without a pixel."""
    masks = getattr(prediction.found, "masks", None)
    if masks is None:
        return [[] for _ in range(len(prediction))]
    return [
        [_simpler(ring) for ring in rle.rings(mask.runs, mask.size_hw) if signed_area(ring) > 0]
        for mask in masks
    ]


def _simpler(ring: np.ndarray) -> np.ndarray:
    points: np.ndarray = cv2.approxPolyDP(ring.astype(np.int32)[:, None], SIMPLER_PX, closed=True)[:, 0]
    return points if len(points) >= 3 else ring


def _rows(prediction: Prediction) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
    return list(zip(prediction.to_json()["detections"], _outlines(prediction), strict=True))


def as_txt(prediction: Prediction, form: str, *, scores: bool) -> str:
    """Return a line per object, with the score at its end if ``scores``.

    ``form`` yolo: ``class cx cy w h``, or the points of a polygon, as fractions of the image; voc: ``class x1 y1 x2 y2`` in pixels.
    """
    height, width = prediction.image_bgr.shape[:2]
    values = list(prediction.boxes_xyxy_px.astype(np.float64))
    if form == "yolo":
        values = prediction.task.yolo_values(prediction.found, (width, height))
    return yolo_text(prediction.classes, values, prediction.scores if scores else None)


def _labelme(prediction: Prediction, name: str) -> dict[str, Any]:
    """Return the file of an image. labelme keeps the key ``score``, and X-AnyLabeling shows it."""
    height, width = prediction.image_bgr.shape[:2]
    shapes = []
    for number, (one, rings) in enumerate(_rows(prediction)):
        left, top, right, bottom = one["box_xyxy_px"]
        parts = [("polygon", ring.tolist()) for ring in rings] or [
            ("rectangle", [[left, top], [right, bottom]])
        ]
        shapes += [
            {
                "label": one["name"],
                "score": one["score"],
                "points": points,
                "group_id": number if len(parts) > 1 else None,
                "description": f"score {one['score']:.2f}",
                "shape_type": kind,
                "flags": {},
            }
            for kind, points in parts
        ]
    size = {"imageHeight": height, "imageWidth": width}
    return {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": None, **size}


def label_studio_prediction(prediction: Prediction, number: int) -> dict[str, Any]:
    """Return the prediction of a task, with coordinates in percent. ``number``: of the task, for the ids of its objects."""
    height, width = prediction.image_bgr.shape[:2]
    percent, rows = 100 / np.array([width, height]), list[dict[str, Any]]()
    for one, rings in _rows(prediction):
        left, top, right, bottom = (np.array(one["box_xyxy_px"]) * np.tile(percent, 2)).round(4).tolist()
        box = {
            "x": left,
            "y": top,
            "width": round(right - left, 4),
            "height": round(bottom - top, 4),
            "rotation": 0,
        }
        values: list[dict[str, Any]] = [
            {"points": (ring * percent).round(4).tolist(), "closed": True} for ring in rings
        ]
        for value in values or [box]:
            kind = "polygonlabels" if values else "rectanglelabels"
            about = {"from_name": kind, "to_name": "image", "type": kind, "image_rotation": 0}
            about |= {"original_width": width, "original_height": height, "score": one["score"]}
            rows.append({"id": f"{number}-{len(rows) + 1}", **about, "value": {**value, kind: [one["name"]]}})
    # Label Studio sorts images by it: the least sure ones first
    least = min((row["score"] for row in rows), default=0.0)
    return {"model_version": "yolofleet", "score": least, "result": rows}


def _label_config(names: tuple[str, ...]) -> str:
    """Return the labelling interface of Label Studio that the tasks refer to."""
    labels = "".join(f"\n    <Label value={quoteattr(class_name(names, at))}/>" for at in range(len(names)))
    tools = "".join(
        f'  <{tag} name="{tag.lower()}" toName="image">{labels}\n  </{tag}>\n'
        for tag in ("RectangleLabels", "PolygonLabels")
    )
    return f'<View>\n  <Image name="image" value="$image" zoom="true"/>\n{tools}</View>\n'
