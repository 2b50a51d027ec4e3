"""Results of a prediction: the boxes of an image, and those of several images as a list with ways to use them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from yolofleet.inference.predict.frames import Frame
from yolofleet.runs.report.draw import class_name
from yolofleet.storage.atomic import write_bytes
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.task import Task

if TYPE_CHECKING:
    import fiftyone
    import pandas
    import supervision

# without the working folder on the import path
WINDOW_TRIAL = "import sys; sys.path[:] = filter(None, sys.path); import cv2; cv2.namedWindow('yolofleet')"
OUTPUT_FOLDERS = ("labels", "crops", "tasks")  # that predict makes beside its pictures
MOST_STEM_BYTES = 200  # most systems allow 255 in a name, and _2, _000001 and .jpg follow the stem
TABLE_COLUMNS = ("image", "path", "xmin", "ymin", "xmax", "ymax", "confidence", "class", "name")


@dataclass(frozen=True)
class Prediction:
    """What was found in one image, highest score first.

    Attributes:
        found: in the image's own pixels, for boxes ``FoundBoxes``.
        seconds: of this image: "read", "forward" (letterbox, copy, network, decoding), "nms". The images of a pass
            share its time equally.
    """

    frame: Frame
    found: Any
    names: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    task: Task = BOXES

    @property
    def boxes_xyxy_px(self) -> np.ndarray:
        """float32 [n, 4] left, top, right, bottom. Raise ConfigError if the network finds no boxes."""
        self.task.check({"boxes_xyxy_px": True})
        boxes: np.ndarray = self.found.boxes_xyxy_px
        return boxes

    @property
    def scores(self) -> np.ndarray:
        """float32 [n], 0..1."""
        scores: np.ndarray = self.found.scores
        return scores

    @property
    def classes(self) -> np.ndarray:
        """int64 [n]."""
        classes: np.ndarray = self.found.classes
        return classes

    @property
    def masks(self) -> np.ndarray:
        """bool [n, H, W] the pixels of each object. Raise ConfigError if the network finds no masks."""
        masks = self.task.bitmaps(self.found, self.image_bgr.shape[:2])
        if masks is None:
            raise ConfigError(f"masks: the network finds {self.task.name}", hint="weights of a -seg network")
        return masks

    def __repr__(self) -> str:
        """Return path, size and counts of classes; the pixels would fill the screen."""
        height, width = self.image_bgr.shape[:2]
        return f"<Prediction of {self.path}, {width} x {height} px: {self.counts()}>"

    @property
    def path(self) -> str:
        """The file of the image, ``camera N``, or ``image N`` for an array."""
        return self.frame.path

    @property
    def image_bgr(self) -> np.ndarray:
        return self.frame.image

    def __len__(self) -> int:
        return len(self.found)

    def draw(self, *, line_width: int = 0, hide_labels: bool = False, hide_conf: bool = False) -> np.ndarray:
        """Return a copy of the image with what was found; see ``runs.report.draw.draw_boxes``."""
        style = {"line_width": line_width, "hide_labels": hide_labels, "hide_scores": hide_conf}
        return self.task.draw(self.image_bgr, self.found, self.names, **style)

    plot = draw  # Ultralytics' name

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON."""
        height, width = self.image_bgr.shape[:2]
        return {
            "path": self.path,
            "frame": self.frame.number if self.frame.video else None,
            "width": width,
            "height": height,
            "detections": self.task.to_json(self.found, self.names),
        }

    def pandas(self) -> pandas.DataFrame:
        """Return :meth:`Predictions.pandas` of this image."""
        return Predictions([self]).pandas()

    def to_coco(self) -> dict[str, Any]:
        """Return :meth:`Predictions.to_coco` of this image."""
        return Predictions([self]).to_coco()

    def to_supervision(self) -> supervision.Detections:
        """Return the boxes, and masks, as ``Detections`` of the package supervision, with ``class_name`` in its data.

        Raises:
            ConfigError: supervision is not installed.
        """
        names = np.array([class_name(self.names, c) for c in self.classes.tolist()], dtype=str)
        return imported("supervision").Detections(
            xyxy=self.boxes_xyxy_px,
            mask=self.task.bitmaps(self.found, self.image_bgr.shape[:2]),
            confidence=self.scores,
            class_id=self.classes,
            data={"class_name": names},
        )

    def to_fiftyone(self) -> fiftyone.Detections:
        """Return the objects, with their masks, as ``Detections`` of the package fiftyone, for a field of a sample.

        Raises:
            ConfigError: fiftyone is not installed.
        """
        package, (height, width) = imported("fiftyone"), self.image_bgr.shape[:2]
        masks = self.task.bitmaps(self.found, (height, width))
        rows = []
        for number, box in enumerate(self.boxes_xyxy_px.astype(np.float64)):
            (left, top), (right, bottom) = box[:2], box[2:]
            more = {}
            if masks is not None:  # fiftyone has the pixels of the box
                first, last = np.floor(box[:2]).astype(int), np.ceil(box[2:]).astype(int)
                more["mask"] = masks[number, first[1] : last[1], first[0] : last[0]]
            place = [left / width, top / height, (right - left) / width, (bottom - top) / height]
            label = class_name(self.names, int(self.classes[number]))
            rows.append(
                package.Detection(
                    label=label, bounding_box=place, confidence=float(self.scores[number]), **more
                )
            )
        return package.Detections(detections=rows)

    def counts(self) -> str:
        """Return a text such as ``4 persons, 1 dog``, by class number; ``nothing`` if nothing was found."""
        found, counts = np.unique(self.classes, return_counts=True)
        words = [
            f"{count} {plural(class_name(self.names, c)) if count > 1 else class_name(self.names, c)}"
            for c, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        return ", ".join(words) or "nothing"


def plural(name: str) -> str:
    """Return an approximate English plural; a name that does not end in an ASCII letter stays unchanged."""
    if not (name and name[-1].isascii() and name[-1].isalpha()):
        return name
    return name + ("es" if name.lower().endswith(("s", "x", "ch", "sh")) else "s")


@dataclass(frozen=True)
class Crop:
    """A detected object, cut out of its image: uint8 [h, w, 3] BGR."""

    image: np.ndarray
    class_idx: int
    name: str
    score: float


def crops_of(prediction: Prediction) -> list[Crop]:
    """Return the objects of an image; a box without a whole pixel gives none."""
    height, width = prediction.image_bgr.shape[:2]
    low = np.floor(prediction.boxes_xyxy_px[:, :2]).astype(int)
    high = np.minimum(np.ceil(prediction.boxes_xyxy_px[:, 2:]).astype(int), (width, height))
    return [
        Crop(prediction.image_bgr[top:bottom, left:right], c, class_name(prediction.names, c), score)
        for (left, top), (right, bottom), c, score in zip(
            low.tolist(), high.tolist(), prediction.classes.tolist(), prediction.scores.tolist(), strict=True
        )
        if right > left and bottom > top
    ]


class Predictions(list[Prediction]):
    """The predictions of several images, in order."""

    def render(self) -> list[np.ndarray]:
        """Return each image with its boxes, uint8 [H, W, 3] BGR."""
        return [prediction.draw() for prediction in self]

    def show(self) -> None:
        """Show each image in a window, until a key is pressed. Raise ConfigError if this OpenCV cannot open windows."""
        for image in self.render():
            show_image(image, wait_ms=0)

    def save(self, folder: str | Path) -> list[Path]:
        """Write each image with its boxes to ``folder``; return the files. Files of equal names get a number.

        Raises:
            StorageError: a file cannot be written.
        """
        stems = Stems()
        return [
            write_picture(Path(folder, stems.of(prediction) + suffix_of(prediction)), image)
            for prediction, image in zip(self, self.render(), strict=True)
        ]

    def crop(self) -> list[list[Crop]]:
        """Return the objects of each image, cut out."""
        return [crops_of(prediction) for prediction in self]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per box with the columns ``TABLE_COLUMNS``; ``image`` is the place in this list."""
        for prediction in self:
            prediction.task.check({"rows()": True})
        rows = [
            (number, p.path, *box["box_xyxy_px"], box["score"], box["class"], box["name"])
            for number, p in enumerate(self)
            for box in p.to_json()["detections"]
        ]
        return [dict(zip(TABLE_COLUMNS, row, strict=True)) for row in rows]

    def table(self) -> str:
        """Return the boxes as text, in columns."""
        cells = [list(TABLE_COLUMNS), *([f"{value}" for value in row.values()] for row in self.rows())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in lines)

    def json(self) -> str:
        """Return the boxes of all images as JSON, as ``--save-json`` writes them."""
        return json.dumps([prediction.to_json() for prediction in self])

    def pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row per box, and the columns ``TABLE_COLUMNS``. Raise ConfigError without pandas."""
        return imported("pandas", "rows()").DataFrame(self.rows(), columns=list(TABLE_COLUMNS))

    def to_supervision(self) -> list[supervision.Detections]:
        """Return :meth:`Prediction.to_supervision` of each image."""
        return [prediction.to_supervision() for prediction in self]

    def to_fiftyone(self) -> list[fiftyone.Detections]:
        """Return :meth:`Prediction.to_fiftyone` of each image."""
        return [prediction.to_fiftyone() for prediction in self]

    def to_coco(self) -> dict[str, Any]:
        """Return the boxes as a data set in COCO's format, for ``json.dump``.

        Each annotation has a ``score``, so ``annotations`` alone is a list of results as pycocotools reads them. The id of
        an image is its place in this list from 1, and that of a category its class number.
        """
        for prediction in self:
            prediction.task.check({"to_coco()": True})
        images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
        for image_id, found in enumerate((prediction.to_json() for prediction in self), 1):
            frame = {} if found["frame"] is None else {"frame": found["frame"]}
            size = {"width": found["width"], "height": found["height"]}
            images.append({"id": image_id, "file_name": found["path"], **size, **frame})
            for box in found["detections"]:
                left, top, right, bottom = box["box_xyxy_px"]
                xywh = [left, top, round(right - left, 2), round(bottom - top, 2)]
                owner = {"id": len(annotations) + 1, "image_id": image_id, "category_id": box["class"]}
                area = {"bbox": xywh, "area": round(xywh[2] * xywh[3], 2), "iscrowd": 0}
                if "segmentation" in box:
                    area |= {"area": box["area_px"], "segmentation": box["segmentation"]}
                annotations.append({**owner, **area, "score": box["score"]})
        names = self[0].names if self else ()
        classes = range(max([len(names), *(one["category_id"] + 1 for one in annotations)]))
        categories = [{"id": c, "name": class_name(names, c)} for c in classes]
        return {"images": images, "annotations": annotations, "categories": categories}


def imported(package: str, instead: str = "") -> Any:
    """Return the module of a package that a user may have. Raise ConfigError if it is not installed, or does not work."""
    try:
        return import_module(package)
    except ImportError as problem:
        missing = isinstance(problem, ModuleNotFoundError) and problem.name == package
        what = f"{package} {'is not installed' if missing else f'cannot be imported: {problem}'}"
        hint = f"pip install {package}" + (f", or use {instead}" if instead else "")
        raise ConfigError(what, hint=hint) from None


class Stems:
    """Gives each picture or video a name for its files, without suffix and different from all others.

    It has the folders of the picture below the folder of the source. Of pictures that differ only in their suffix, the
    second one has it in the name: ``a/b`` and ``a/b_png``; further ones have a number, as ``a/b_2``, or ``a/b-2`` if a frame of
    a video may have that name.
    """

    def __init__(self) -> None:
        self._taken = set[str]()
        self._frames = {True: set[str](), False: set[str]()}  # of videos and of pictures, see _free

    def of(self, prediction: Prediction) -> str:
        frame = prediction.frame
        if frame.is_file:
            return self.of_file(frame.path, frame.base, is_video=frame.video is not None)
        return self._free(file_name(frame.path, "image"), is_video=frame.video is not None)

    def of_file(self, path: str, base: str, *, is_video: bool = False) -> str:
        """Return the name for a file.

        Args:
            base: folder of the source, absolute; "" if only the name of the file counts.
        """
        folder = os.path.relpath(Path(path).absolute().parent, base) if base else "."
        parts = Path("" if folder.startswith("..") else folder).parts
        if parts and parts[0].lower() in OUTPUT_FOLDERS:
            parts = (f"{parts[0]}_", *parts[1:])
        return self._free(Path(path).stem, "/".join([*parts, ""]), Path(path).suffix[1:], is_video=is_video)

    def _free(self, name: str, folder: str = "", suffix: str = "", *, is_video: bool) -> str:
        """Return the first free name. Frame 12 of ``clip.mp4`` has the name of a picture ``clip_12``: both are ``clip_#``."""
        name = folder + (os.fsencode(name)[:MOST_STEM_BYTES].decode("utf-8", "ignore") or "image")
        is_of_frames = not is_video and f"{name.lower()}_#" in self._frames[True]
        numbered = (f"{name}{'-' if is_of_frames else '_'}{number}" for number in itertools.count(2))
        for stem in itertools.chain([name], [f"{name}_{suffix}"] if suffix else [], numbered):
            key = stem.lower()  # on some disks A.jpg and a.jpg are one file
            frames = f"{key}_#" if is_video else re.sub("_[0-9]+$", "_#", key)
            if key not in self._taken and frames not in self._frames[not is_video]:
                break
        self._taken.add(key)
        self._frames[is_video].add(frames)
        return stem


def suffix_of(prediction: Prediction) -> str:
    """Return the suffix of a drawn picture: that of its file, and .jpg for anything else."""
    is_picture = prediction.frame.is_file and prediction.frame.video is None
    return (Path(prediction.path).suffix if is_picture else "") or ".jpg"


def show_image(image: np.ndarray, *, wait_ms: int) -> int:
    """Show an image in a window, or raise ConfigError; return the key that came within ``wait_ms`` (0: for ever), or 255."""
    _check_windows()
    cv2.imshow("yolofleet", image)
    return int(cv2.waitKey(wait_ms)) & 0xFF


@cache
def _check_windows() -> None:
    """Raise ConfigError if OpenCV cannot open a window. A child process tries it: without a display, Qt aborts its process."""
    try:
        done = subprocess.run([sys.executable, "-c", WINDOW_TRIAL], capture_output=True, timeout=60)
        failed, said = done.returncode != 0, done.stderr
    except subprocess.TimeoutExpired:
        failed, said = True, b""
    if failed and b"not implemented" in said:  # cv2.error
        raise ConfigError(
            "this OpenCV cannot open windows",
            source="--show",
            hint="pip install opencv-python instead of opencv-python-headless, or save the images",
        )
    if failed:
        raise ConfigError(
            "OpenCV cannot open a window here: there is no display, or it does not answer",
            source="--show",
            hint="save the images, or run the command in a desktop session or with ssh -X",
        )


def file_name(name: str, fallback: str) -> str:
    """Return a class name as a safe folder name, with ``_`` for characters that some systems forbid."""
    plain = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name).strip(" .")
    return plain or fallback


def write_picture(path: Path, image: np.ndarray) -> Path:
    """Encode by suffix (JPEG if OpenCV cannot write that format), write atomically, return the path. Raises StorageError."""
    try:
        done, encoded = cv2.imencode(path.suffix, image)
    except cv2.error:
        done = False
    if not done:
        path = path.with_suffix(".jpg")
        _, encoded = cv2.imencode(".jpg", image)
    write_bytes(path, encoded.tobytes())
    return path
