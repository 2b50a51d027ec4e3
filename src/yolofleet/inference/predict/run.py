"""``yolofleet predict``: detect objects, draw and write them, and print a summary."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from yolofleet.config.schema import ValConfig
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.families.recipe_class import load_recipe_class
from yolofleet.inference.export.runtime import Runtime, open_networks
from yolofleet.inference.predict.labelling import LabellingTasks, as_txt
from yolofleet.inference.predict.predictor import Predictor, one_device
from yolofleet.inference.predict.results import (
    Prediction,
    Stems,
    crops_of,
    file_name,
    show_image,
    suffix_of,
    write_picture,
)
from yolofleet.inference.predict.sources import Source, hint_for, is_endless
from yolofleet.runs.report.console import Console
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import emit_json, make_folder, write_csv, write_json, write_text
from yolofleet.support import devices
from yolofleet.support.closing import Closing
from yolofleet.support.errors import DataError, StorageError, YolofleetError

CSV_COLUMNS = ("path", "frame", "class", "name", "score", "x1", "y1", "x2", "y2")


@devices.torch_defaults()
def predictor_of(config: PredictConfig) -> Predictor:
    """Return the predictor of these settings, after loading the recipe class that the weights may need.

    Raises:
        CheckpointError: the weights cannot be read. ConfigError: as :class:`Predictor`.
    """
    load_recipe_class(config.recipe_class)
    device = None if config.device == "auto" else one_device(config.device)
    networks = open_networks(
        config.weights, config.cfg, device=device, augment=config.augment, trust=config.trust
    )
    predictor = Predictor(networks, config)
    asked = {"--save-txt": config.save_txt, "--save-crop": config.save_crop, "--save-csv": config.save_csv}
    asked |= {"--save-as": config.save_as != "none"}
    predictor.task.check(asked)
    return predictor


def predict_command(config: PredictConfig) -> int:
    """Run the command; return the exit code. Raise YolofleetError; DataError if no image could be read."""
    source = Source(config.source, vid_stride=config.vid_stride, is_argument=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    predictor = predictor_of(config)
    folder = RunFolder.create("predict", project=config.project, name=config.name, exist_ok=config.exist_ok)
    try:
        _predict(config, source, predictor, folder)
    except YolofleetError:
        folder.discard_unless_used()
        raise
    return 0


def _predict(config: PredictConfig, source: Source, predictor: Predictor, folder: RunFolder) -> None:
    stream = sys.stderr if config.json_out == "-" else None  # standard output has only the JSON then
    with Console(stream=stream, quiet=config.quiet) as console, Output(config, folder.path) as output:
        header = {
            "weights": f"{weights_text(config)}, {len(predictor.names)} classes",
            "image size": predictor.size.text,
            "source": f"{source.name}: {len(source)} file{'s' if len(source) != 1 else ''}"
            + (f"; its {source.left_out} sub-folders are not searched" if source.left_out else ""),
            "where": place_text(predictor),
            "results": str(folder.path),
        }
        source.note = console.note
        seconds: list[dict[str, float]] = []
        boxes = 0
        try:
            for prediction in predictor.stream(source):
                if not seconds:  # without an image, the folder of the results will not exist
                    console.header("yolofleet predict", header)
                    if predictor.size.note:
                        console.note(predictor.size.note)
                output.write(prediction)
                seconds.append(prediction.seconds)
                boxes += len(prediction)
                console.fact(progress_line(prediction, len(source)))
                if config.show and not show(prediction, config):
                    break
        except KeyboardInterrupt:
            if not (seconds and is_endless(config.source)):
                raise
            console.note("stopped on request")  # a camera usually ends in this way
        for problem in source.problems:
            console.warn(f"skipped: {problem}")
        for loss in source.losses:
            console.warn(loss)
        if not seconds:
            raise DataError(
                f"cannot read any image of {source.name}: {source.problems[0]}", hint=hint_for(source.items)
            )
        output.finish()
        if not boxes:
            console.note(f"nothing reached --conf {config.conf:g}")
        images = f"{len(seconds)} image{'s' if len(seconds) != 1 else ''}"
        images += f" ({source.lost} more could not be read)" if source.lost else ""
        console.summary(f"{images}, {speed_text(seconds)}", {"results": str(folder.path)})


def weights_text(config: PredictConfig | ValConfig) -> str:
    """Return the weights, and how their predictions are merged, as text."""
    parts = [", ".join(config.weights)]
    if config.augment:
        parts.append("test-time augmentation")
    if len(config.weights) > 1:
        parts.append(f"ensemble of {len(config.weights)}")
    if config.merge != "nms":
        parts.append(f"merged by {config.merge}")
    return "; ".join(parts)


def place_text(predictor: Predictor) -> str:
    """Return the device and precision as text."""
    model = predictor.model
    return model.place if isinstance(model, Runtime) else f"{predictor.device}, {predictor.precision}"


def progress_line(prediction: Prediction, items: int) -> str:
    """Return a line such as ``img 3/16 street.jpg: 4 persons, 1 dog, 12 ms``."""
    frame = prediction.frame
    place = f"{frame.item + 1}/{items}"
    if frame.video is not None:
        place += f" frame {frame.number + 1}" + (f"/{frame.video.frames}" if frame.video.frames else "")
    ms = 1000 * (prediction.seconds["forward"] + prediction.seconds["nms"])
    return (
        f"{'video' if frame.video else 'img'} {place} {prediction.path}: {prediction.counts()}, {ms:.0f} ms"
    )


def speed_text(seconds: list[dict[str, float]]) -> str:
    """Return the mean milliseconds per image, without the first of several (allocation, kernel choice)."""
    rated = seconds[1:] or seconds
    means = {part: 1000 * sum(s[part] for s in rated) / len(rated) for part in rated[0]}
    return "ms an image: " + ", ".join(f"{part} {ms:.1f}" for part, ms in means.items())


def show(prediction: Prediction, config: PredictConfig) -> bool:
    """Show the image in a window; return False if the user pressed q or Escape. Raises as :func:`show_image`."""
    key = show_image(drawn(prediction, config), wait_ms=1 if prediction.frame.video else 300)
    return key not in (ord("q"), 27)


def drawn(prediction: Prediction, config: PredictConfig) -> np.ndarray:
    return prediction.draw(
        line_width=config.line_width, hide_labels=config.hide_labels, hide_conf=config.hide_conf
    )


class Output(Closing):
    """Writes the files that the settings ask for.

    Pictures ``<stem>.<suffix>``, videos ``<stem>.mp4``, ``labels/<stem>.txt`` (``<stem>_<frame>.txt`` for videos),
    ``crops/<class>/<stem>_<n>.jpg``, ``predictions.json``, ``predictions.csv``, ``tasks``. A stem has the folders below that of the
    source, see ``Stems``.
    """

    def __init__(self, config: PredictConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._stems: dict[int, str] = {}  # item -> stem of its files
        self._named = Stems()
        self._video: cv2.VideoWriter | None = None
        self._video_item, self._video_path = -1, folder
        self._video_size = (0, 0)
        self._all: list[dict[str, Any]] = []
        self._tasks = LabellingTasks(folder / "tasks", config.save_as) if config.save_as != "none" else None

    def close(self) -> None:
        if self._video is not None:  # after a failure the frames so far stay
            self._video.release()

    def write(self, prediction: Prediction) -> None:
        """Write the files of one image. Raises StorageError."""
        config, frame = self.config, prediction.frame
        if frame.item not in self._stems:
            self._stems[frame.item] = self._named.of(prediction)
        stem = self._stems[frame.item]
        if config.save == "images":
            if frame.video is not None:
                self._write_frame(prediction, stem)
            else:
                write_picture(self.folder / (stem + suffix_of(prediction)), drawn(prediction, config))
        each = f"{stem}_{frame.number}" if frame.video is not None else stem
        if config.save_txt and len(prediction):
            text = as_txt(prediction, config.txt_format, scores=config.save_conf)
            write_text(self.folder / "labels" / f"{each}.txt", text)
        if self._tasks is not None:
            self._tasks.add(prediction, each)
        for n, crop in enumerate(crops_of(prediction) if config.save_crop else ()):
            kind = file_name(crop.name, f"class {crop.class_idx}")
            write_picture(self.folder / "crops" / kind / f"{each}_{n}.jpg", crop.image)
        if config.save_json or config.save_csv or config.json_out:
            self._all.append(prediction.to_json())

    def finish(self) -> None:
        """Write the files of the whole source."""
        self._end_video()
        if self._tasks is not None:
            self._tasks.finish()
        if self.config.save_json:
            write_json(self.folder / "predictions.json", self._all)
        if self.config.save_csv:
            write_csv(self.folder / "predictions.csv", csv_rows(self._all))
        emit_json(self._all, self.config.json_out)

    def _write_frame(self, prediction: Prediction, stem: str) -> None:
        frame = prediction.frame
        assert frame.video is not None
        picture = drawn(prediction, self.config)
        if self._video is None or self._video_item != frame.item:
            self._end_video()
            path = self.folder / f"{stem}.mp4"
            self._video_path = path
            self._video_item, self._video_size = frame.item, (picture.shape[1], picture.shape[0])
            rate_hz = max(frame.video.rate_hz / self.config.vid_stride, 1.0)
            make_folder(path.parent)
            self._video = cv2.VideoWriter(
                str(path), cv2.VideoWriter.fourcc(*"mp4v"), rate_hz, self._video_size
            )
            if not self._video.isOpened():
                raise StorageError(
                    f"cannot write {path} as a video",
                    hint="--save none with --save-txt or --save-json, or another disk",
                )
        if (picture.shape[1], picture.shape[0]) != self._video_size:  # some cameras change their size
            picture = cv2.resize(picture, self._video_size)
        self._video.write(picture)

    def _end_video(self) -> None:
        """Close the video; raise StorageError if no file was written (OpenCV reports no error)."""
        video, self._video = self._video, None
        if video is not None:
            video.release()
            if not (self._video_path.is_file() and self._video_path.stat().st_size):
                raise StorageError(
                    f"cannot write {self._video_path}", hint="is the disk full? try another --project"
                )


def csv_rows(predictions: list[dict[str, Any]]) -> Iterator[Sequence[object]]:
    """Yield a row per box of all images, after the names of the columns."""
    yield CSV_COLUMNS
    for image in predictions:
        for box in image["detections"]:
            frame = "" if image["frame"] is None else image["frame"]
            yield [image["path"], frame, box["class"], box["name"], box["score"], *box["box_xyxy_px"]]
