"""Detect objects in images; boxes are in the pixels of each image.

N images of a pass, K candidates, C classes, n boxes of an image.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from yolofleet.config.checks import check_suppression
from yolofleet.config.load import predict_config
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.config.words.unknown import instead_of
from yolofleet.data.geometry.letterbox import Letterbox, letterbox
from yolofleet.data.geometry.tiles import check_tiles, merged_tiles, tiles
from yolofleet.families.networks.combined import CombinedNetwork, inference_network
from yolofleet.families.networks.detector import Detector, square_of
from yolofleet.families.networks.precision import autocast, inference_precision
from yolofleet.inference.export.runtime import Runtime, image_size
from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.pictures import pixels_of
from yolofleet.inference.predict.results import Prediction, Predictions
from yolofleet.inference.predict.sources import Source, check_ends, common_folder, hint_for
from yolofleet.support import devices
from yolofleet.support.device_names import ALL
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.support.text import did_you_mean, inform, shown
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.table import task_of
from yolofleet.tasks.task import Limits

SourceLike = Any  # str, Path, array, tensor, PIL image, bytes, or a list of these
DEFAULTS = PredictConfig()
PER_CALL = ("conf", "iou", "max_det", "classes", "agnostic", "agnostic_nms", "batch", "tile", "overlap")


def class_numbers(wanted: Iterable[str | int], names: Sequence[str]) -> list[int]:
    """Return the numbers of classes given by number or name. Raise ConfigError, with the nearest name, for an unknown one."""
    found = []
    entries = [str(entry).strip() for entry in wanted]
    texts = [text for entry in entries for text in ([entry] if entry in names else entry.split(","))]
    for text in map(str.strip, texts):
        if text.isdecimal():
            if int(text) >= len(names):
                raise ConfigError(
                    f"class {shown(text)} does not exist", hint=f"0 to {len(names) - 1}, or a name"
                )
            found.append(int(text))
        elif text in names:
            found.append(list(names).index(text))
        else:
            listed = f"one of {', '.join(list(names)[:10])}" + (", ..." if len(names) > 10 else "")
            raise ConfigError(f"class {shown(text)} does not exist", hint=did_you_mean(text, names) or listed)
    return sorted(set(found))


def sources_in(source: SourceLike, *, must_end: bool = False) -> list[Any]:
    """Return the sources of a list, or the only one.

    Args:
        must_end: raise ConfigError for one that may have no end, such as a camera.
    """
    found = list(source) if isinstance(source, (list, tuple)) else [source]
    for one in found if must_end else ():
        if isinstance(one, (str, Path)):
            check_ends(str(one))
    return found


class Predictor:
    """A network ready to detect.

    Args:
        model: a network, which is copied, or several for an ensemble, or an exported file, in which some of the settings
            below are fixed.
        names: class names; None: the model's.
        config: settings of ``yolofleet predict``, of which those of files, the source and the output have no effect here.
            The device of an exported file is the one that it was opened for. ``img`` is that of ``image_size``, rounded
            up to the stride. Only
            consecutive images of one shape share a pass of ``batch`` images. On a CPU, fp16 means fp32.

    Raises:
        ConfigError: the device, class or precision does not exist, or an exported file does not allow a setting.
    """

    @devices.torch_defaults()
    def __init__(
        self,
        model: Detector | Runtime | Sequence[Detector],
        config: PredictConfig = DEFAULTS,
        names: Sequence[str] | None = None,
    ) -> None:
        self.size = image_size(model, config.img)
        self.config = config = config.model_copy(update={"img": self.size.px})
        self.size_hw: tuple[int, int] | None = None  # of every image, if the model needs one
        self.suppressed = False  # whether an exported file suppresses inside
        self.model: Detector | CombinedNetwork | Runtime
        if isinstance(model, Runtime):
            model.check_precision(config.precision)
            _check_suppression(config, model)
            self.device, self.precision, self.model = torch.device("cpu"), "fp32", model
            self.size_hw, self.suppressed = model.metadata.size_hw, model.metadata.nms is not None
        else:
            self.device = one_device(config.device)
            self.precision = inference_precision(config.precision, self.device)
            models = [model] if isinstance(model, torch.nn.Module) else model
            combined = inference_network(models, self.device, augment=config.augment, merge=config.merge)
            self.model, self.size_hw = combined, square_of(combined, config.img, config.fit)
        check_suppression(config, needs_nms=self.model.needs_nms)
        self.task = task_of(self.model)
        self.task.check({"--tile": config.tile > 0})
        self.names = tuple(self.model.names if names is None else names)
        self.stride = max(self.model.strides)
        self.img = -(-config.img // self.stride) * self.stride
        self.classes = class_numbers(config.classes, self.names) or None

    def changed(self, **settings: Any) -> Predictor:
        """Return a predictor of the same network with other settings: conf, iou, max_det, classes, agnostic, batch,
        tile, overlap.

        Raises:
            ConfigError: a setting is unknown or has no such value.
        """
        for name in settings:
            if name not in PER_CALL:
                raise ConfigError(
                    f"predict has no setting {shown(name)}",
                    hint=instead_of("setting", name)
                    or did_you_mean(name, PER_CALL)
                    or f"{', '.join(PER_CALL)}; others are set by load_model",
                )
        other = copy.copy(self)
        other.config = predict_config(self.config, **settings)
        other.classes = class_numbers(other.config.classes, self.names) or None
        if isinstance(other.model, Runtime):
            _check_suppression(other.config, other.model)
        other.task.check({"--tile": other.config.tile > 0})
        if not settings.keys().isdisjoint(("iou", "agnostic", "agnostic_nms")):
            check_suppression(other.config, needs_nms=other.model.needs_nms)
        return other

    def predict(self, source: SourceLike, **settings: Any) -> Predictions:
        """Return all predictions of ``source``; for videos prefer :meth:`stream`, which keeps none in memory.

        Args:
            source: a source as for ``inference.predict.sources.Source``; a picture in memory as for ``inference.predict.pictures.pixels_of``;
                or a list of these.
            settings: of this call only, see :meth:`changed`.

        Raises:
            DataError: an image cannot be read. ConfigError: see :meth:`changed`, or the source may have no end.
        """
        predictor = self.changed(**settings) if settings else self
        return Predictions(predictor.each(sources_in(source, must_end=True)))

    __call__ = predict

    def each(self, sources: Iterable[Any], vid_stride: int = 1) -> Iterator[Prediction]:
        """Yield the predictions of several sources, or pictures in memory; see :meth:`predict`."""
        opened = [
            Source(str(source), vid_stride=vid_stride, is_argument=True)
            if isinstance(source, (str, Path))
            else source
            for source in sources
        ]
        base = common_folder([source.base for source in opened if isinstance(source, Source) and source.base])
        first = 0
        for number, source in enumerate(opened):
            if isinstance(source, Source):
                source.first, source.base = first, base or source.base
                yield from self.stream(source)
                for loss in source.losses:
                    inform(f"warning: {loss}")
                if source.problems:
                    raise DataError("; ".join(source.problems), hint=hint_for(source.items))
                first += len(source)
            else:
                name = f"image {number}"
                yield from self.stream([Frame(name, pixels_of(source, name), first, is_file=False)])
                first += 1

    def stream(self, frames: Iterable[Frame]) -> Iterator[Prediction]:
        """Yield predictions in the order of ``frames``, as soon as they are ready."""
        if self.config.tile:
            whole = self.changed(tile=0)
            for frame in frames:
                yield self._tiled(frame, whole)
            return
        waiting: list[tuple[Frame, np.ndarray, Letterbox, float]] = []
        began = time.perf_counter()
        for frame in frames:
            read_s = time.perf_counter() - began
            image, back = self.letterboxed(frame.image)
            if waiting and waiting[0][1].shape != image.shape:
                yield from self._pass(waiting)
                waiting = []
            waiting.append((frame, image, back, read_s))
            if len(waiting) == self.config.batch:
                yield from self._pass(waiting)
                waiting = []
            began = time.perf_counter()
        if waiting:
            yield from self._pass(waiting)

    def _tiled(self, frame: Frame, whole: Predictor) -> Prediction:
        """Detect on the image and on its tiles, and merge the boxes. Raise ConfigError if there would be too many."""
        height, width = frame.image.shape[:2]
        check_tiles(height, width, self.config.tile, self.config.overlap, source=frame.path)
        places = [(0, 0, width, height), *tiles(height, width, self.config.tile, self.config.overlap)]
        parts = (replace(frame, image=frame.image[y1:y2, x1:x2]) for x1, y1, x2, y2 in places)
        found = list(whole.stream(parts))
        boxes, scores, classes = merged_tiles(
            [
                (part.boxes_xyxy_px, part.scores, part.classes, place)
                for part, place in zip(found, places, strict=True)
            ],
            iou=self.config.iou,
            max_det=self.config.max_det,
            agnostic=self.config.agnostic_nms,
            fuse=self.config.merge == "wbf",
        )
        seconds = {name: sum(part.seconds[name] for part in found) for name in found[0].seconds}
        return Prediction(
            frame, FoundBoxes(np.zeros_like(classes), classes, scores, boxes), self.names, seconds, self.task
        )

    def letterboxed(self, image: np.ndarray) -> tuple[np.ndarray, Letterbox]:
        """Return the image as the network's input uint8 [h, w, 3], and the transform back."""
        with self._memory():
            if self.size_hw is not None:
                return letterbox(image, self.size_hw)
            return letterbox(image, self.img, stride=self.stride)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Raise ConfigError if the block gets too little memory."""
        try:
            yield
        except Exception as problem:
            if not devices.is_out_of_memory(problem):
                raise
            raise ConfigError(
                f"images of {self.img} px, {self.config.batch} in a pass, need more memory than {self.device} has free",
                hint="choose a smaller size (img) or batch",
            ) from None

    @devices.torch_defaults()
    @torch.inference_mode()
    def forward(self, images_bgr: Sequence[np.ndarray]) -> Any:
        """Return decoded predictions, see ``Detector.decode``, of images uint8 [h, w, 3] of one shape.

        An exported file that suppresses inside gives [N, D, 6], weighted box fusion a list (see ``CombinedNetwork``).
        """
        pixels = np.empty((len(images_bgr), *images_bgr[0].shape), np.uint8)  # [N, h, w, 3]
        for image, row in zip(images_bgr, pixels, strict=True):
            cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=row)
        images = (
            devices.to_device(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float().div_(255)
        )
        with autocast(self.precision, self.device):
            raws: Any = self.model(images)
        decoded = self.model.decode(raws)
        devices.wait_for(self.device)  # so that the times of "forward" and "nms" are separate
        return decoded

    def _pass(self, waiting: Sequence[tuple[Frame, np.ndarray, Letterbox, float]]) -> Iterator[Prediction]:
        began = time.perf_counter()
        with self._memory():
            decoded = self.forward([image for _, image, _, _ in waiting])
        forward_s = time.perf_counter() - began
        per_image = self.suppress(decoded)
        nms_s = time.perf_counter() - began - forward_s
        for (frame, _, back, read_s), found in zip(waiting, per_image, strict=True):
            shares = {"read": read_s, "forward": forward_s / len(waiting), "nms": nms_s / len(waiting)}
            yield Prediction(frame, found.native(back), self.names, shares, self.task)

    @devices.torch_defaults()
    def suppress(self, decoded: Any) -> list[Any]:
        """Return what was ``Found`` in each image, in pixels of the network's, from the result of :meth:`forward`."""
        config = self.config
        if self.suppressed:
            kept = [found.rows(found.scores > config.conf) for found in FoundBoxes.of_padded(decoded)]
            wanted = self.classes
            return kept if wanted is None else [found.rows(np.isin(found.classes, wanted)) for found in kept]
        limits = Limits(
            conf=config.conf,
            iou=config.iou if self.model.needs_nms else None,
            max_det=config.max_det,
            agnostic=config.agnostic_nms,
            classes=self.classes,
        )
        return self.task.found(decoded, limits)[0]


def _check_suppression(config: PredictConfig, runtime: Runtime) -> None:
    """Raise if settings differ from the suppression inside the file; a higher ``conf`` is possible afterwards."""
    nms = runtime.metadata.nms
    if nms is None:
        return
    if config.conf < nms.conf and config.conf != DEFAULTS.conf:
        raise ConfigError(
            f"--conf {config.conf:g}: {runtime.path} keeps only scores above {nms.conf:g}",
            hint="export it with a lower --conf",
        )
    fixed = {"iou": nms.iou, "max_det": nms.max_det, "agnostic_nms": nms.agnostic}
    for name, value in fixed.items():
        wanted = getattr(config, name)
        if wanted not in (value, getattr(DEFAULTS, name)):
            raise ConfigError(
                f"--{name.replace('_', '-')} {wanted}: {runtime.path} suppresses inside, with {value}",
                hint="remove the option, or export without --nms",
            )


def one_device(spec: str) -> torch.device:
    """Return the device of a command that runs in one process. Raise ConfigError for several, or an unknown one."""
    if "," in spec or spec == ALL or spec.startswith("cpu:"):
        raise ConfigError(
            f"--device {spec}: prediction runs on one device", hint="auto, cpu, mps or one CUDA id, as 0"
        )
    if spec not in ("auto", "cpu", "mps") and not spec.isdecimal():
        raise ConfigError(f"--device {spec} is not a device", hint="auto, cpu, mps or one CUDA id, as 0")
    return devices.device_of(spec, 0)
