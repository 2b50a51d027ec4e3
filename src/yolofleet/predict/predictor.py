"""Detect objects in images; boxes are in the pixels of each image.

N images of a pass, K candidates, C classes, n boxes of an image.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet import devices
from yolofleet.config.schema import PredictConfig
from yolofleet.errors import ConfigError, DataError
from yolofleet.evaluate.run import Network
from yolofleet.export.export_metadata import Suppression
from yolofleet.export.runtime import Runtime
from yolofleet.geometry.letterbox import Letterbox, letterbox
from yolofleet.geometry.nms import detections
from yolofleet.models.combined import inference_network
from yolofleet.models.detector import Detector, square_of
from yolofleet.models.precision import autocast, inference_precision
from yolofleet.predict.sources import Frame, Source
from yolofleet.report.draw import class_name, draw_boxes
from yolofleet.text import did_you_mean, shown

SourceLike = str | Path | np.ndarray | Sequence[str | Path | np.ndarray]


@dataclass(frozen=True)
class Prediction:
    """The boxes of one image, highest score first.

    Attributes:
        frame: the source of the image.
        boxes_xyxy_px: float32 [n, 4] left, top, right, bottom in the image's own pixels, inside it.
        scores: float32 [n], 0..1. classes: int64 [n].
        names: of all classes.
        seconds: of this image: "read", "forward" (letterbox, copy, network, decoding), "nms". The images of a pass
            share its time equally.
    """

    frame: Frame
    boxes_xyxy_px: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The file of the image, ``camera N``, or ``image N`` for an array."""
        return self.frame.path

    @property
    def image_bgr(self) -> np.ndarray:
        return self.frame.image

    def __len__(self) -> int:
        return len(self.scores)

    def draw(self, *, line_width: int = 0, hide_labels: bool = False, hide_conf: bool = False) -> np.ndarray:
        """Return a copy of the image with the boxes; see ``report.draw.draw_boxes``."""
        return draw_boxes(
            self.image_bgr,
            self.boxes_xyxy_px,
            self.classes,
            self.names,
            self.scores,
            line_width=line_width,
            hide_labels=hide_labels,
            hide_scores=hide_conf,
        )

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON; boxes rounded to 0.01 px, scores to 0.00001."""
        height, width = self.image_bgr.shape[:2]
        return {
            "path": self.path,
            "frame": self.frame.number if self.frame.video else None,
            "width": width,
            "height": height,
            "detections": [
                {
                    "class": c,
                    "name": class_name(self.names, c),
                    "score": round(score, 5),
                    "box_xyxy_px": [round(side, 2) for side in box],
                }
                for c, score, box in zip(
                    self.classes.tolist(), self.scores.tolist(), self.boxes_xyxy_px.tolist(), strict=True
                )
            ],
        }

    def counts(self) -> str:
        """Return a text such as ``4 persons, 1 dog``, by class number; ``nothing`` without boxes."""
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


def class_numbers(wanted: Iterable[str | int], names: Sequence[str]) -> list[int]:
    """Return the numbers of classes given by number or name.

    Raises:
        ConfigError: a class does not exist; the hint has the nearest name.
    """
    found = []
    for entry in wanted:
        text = str(entry).strip()
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


class NamedNetwork(Network, Protocol):
    """A network that knows its classes."""

    names: tuple[str, ...]


class Predictor:
    """A network ready to detect.

    Args:
        model: a network, which is copied, or several for an ensemble, or an exported file, in which some of the settings
            below are fixed.
        names: class names; None: the model's.
        device: auto | cpu | mps | one CUDA id; for an exported file, the device that it was opened for.
        img: longest side of the scaled image, pixels; rounded up to the stride.
        conf: lowest score kept. iou: overlap of boxes of one class above which the box of lower score is removed.
        max_det: maximum number of boxes per image.
        classes: keep only these, by number or name; empty: all.
        agnostic: suppress over all classes together.
        fit: rect | square padding, or auto (as in the family's own evaluation).
        precision: auto | fp32 | fp16 | bf16 of the forward pass; on a CPU, fp16 means fp32.
        batch: images per forward pass; only consecutive images of one shape share a pass.
        augment, merge: see ``models.combined.CombinedNetwork``.

    Raises:
        ConfigError: the device, class or precision does not exist, or an exported file does not allow a setting.
    """

    def __init__(
        self,
        model: Detector | Runtime | Sequence[Detector],
        names: Sequence[str] | None = None,
        *,
        device: str | torch.device = "auto",
        img: int = 640,
        fit: str = "auto",
        conf: float = 0.25,
        iou: float = 0.45,
        max_det: int = 1000,
        classes: Iterable[str | int] = (),
        agnostic: bool = False,
        precision: str = "auto",
        batch: int = 1,
        augment: bool = False,
        merge: str = "nms",
    ) -> None:
        self.conf, self.iou, self.max_det, self.agnostic, self.batch = conf, iou, max_det, agnostic, batch
        self.size_hw: tuple[int, int] | None = None  # of every image, if the model needs one
        self.suppressed = False  # whether an exported file suppresses inside
        self.model: NamedNetwork
        if isinstance(model, Runtime):
            model.check_settings(img=img, precision=precision)
            if model.metadata.nms is not None:
                self._check_suppression(model, model.metadata.nms)
            self.device, self.precision, self.model = torch.device("cpu"), "fp32", model
            self.size_hw, self.suppressed = model.metadata.size_hw, model.metadata.nms is not None
        else:
            self.device = device if isinstance(device, torch.device) else one_device(device)
            self.precision = inference_precision(precision, self.device)
            models = [model] if isinstance(model, torch.nn.Module) else model
            combined = inference_network(models, self.device, augment=augment, merge=merge)
            self.model, self.size_hw = combined, square_of(combined, img, fit)
        self.names = tuple(self.model.names if names is None else names)
        self.stride = max(self.model.strides)
        self.img = -(-img // self.stride) * self.stride
        self.classes = class_numbers(classes, self.names) or None

    def _check_suppression(self, runtime: Runtime, nms: Suppression) -> None:
        """Raise if settings differ from the suppression inside the file; a higher ``conf`` is possible afterwards."""
        defaults = PredictConfig.model_fields
        if self.conf < nms.conf and self.conf != defaults["conf"].default:
            raise ConfigError(
                f"--conf {self.conf:g}: {runtime.path} keeps only scores above {nms.conf:g}",
                hint="export it with a lower --conf",
            )
        asked = {"iou": self.iou, "max_det": self.max_det, "agnostic_nms": self.agnostic}
        fixed = {"iou": nms.iou, "max_det": nms.max_det, "agnostic_nms": nms.agnostic}
        for name, value in asked.items():
            if value not in (fixed[name], defaults[name].default):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value}: {runtime.path} suppresses inside, with {fixed[name]}",
                    hint="remove the option, or export without --nms",
                )

    def predict(self, source: SourceLike) -> list[Prediction]:
        """Return all predictions of ``source``; for videos prefer :meth:`stream`, which keeps none in memory.

        Args:
            source: a source as for ``predict.sources.Source``, a uint8 [H, W, 3] BGR array, or a list of these.

        Raises:
            DataError: an image cannot be read.
        """
        parts = [source] if isinstance(source, (str, Path, np.ndarray)) else source
        return [
            prediction for number, part in enumerate(parts) for prediction in self._predict_one(part, number)
        ]

    __call__ = predict

    def _predict_one(self, part: str | Path | np.ndarray, number: int) -> list[Prediction]:
        if isinstance(part, np.ndarray):
            if part.dtype != np.uint8 or part.ndim != 3 or part.shape[2] != 3 or not part.size:
                raise DataError(
                    f"image {number} is {part.dtype} {part.shape}, expected uint8 (H, W, 3) in BGR order"
                )
            return list(self.stream([Frame(f"image {number}", part, number)]))
        frames = Source(str(part))
        found = list(self.stream(frames))
        if frames.problems:
            raise DataError("; ".join(frames.problems))
        return found

    def stream(self, frames: Iterable[Frame]) -> Iterator[Prediction]:
        """Yield predictions in the order of ``frames``, as soon as they are ready."""
        waiting: list[tuple[Frame, np.ndarray, Letterbox, float]] = []
        began = time.perf_counter()
        for frame in frames:
            read_s = time.perf_counter() - began
            image, back = self.letterboxed(frame.image)
            if waiting and waiting[0][1].shape != image.shape:
                yield from self._pass(waiting)
                waiting = []
            waiting.append((frame, image, back, read_s))
            if len(waiting) == self.batch:
                yield from self._pass(waiting)
                waiting = []
            began = time.perf_counter()
        if waiting:
            yield from self._pass(waiting)

    def letterboxed(self, image: np.ndarray) -> tuple[np.ndarray, Letterbox]:
        """Return the image as the network's input uint8 [h, w, 3], and the transform back."""
        if self.size_hw is not None:
            return letterbox(image, self.size_hw)
        return letterbox(image, self.img, stride=self.stride)

    @torch.inference_mode()
    def forward(self, images_bgr: Sequence[np.ndarray]) -> Tensor | list[Tensor]:
        """Return decoded predictions float32 [N, K, 5 + C] of images uint8 [h, w, 3] of one shape.

        An exported file that suppresses inside gives [N, D, 6], weighted box fusion a list (see ``CombinedNetwork``).
        """
        pixels = np.empty((len(images_bgr), *images_bgr[0].shape), np.uint8)  # [N, h, w, 3]
        for image, row in zip(images_bgr, pixels, strict=True):
            cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=row)
        images = (
            devices.to_device(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float().div_(255)
        )
        with autocast(self.precision, self.device):
            raws = self.model(images)
        decoded = self.model.decode(raws)
        devices.wait_for(self.device)  # so that the times of "forward" and "nms" are separate
        return decoded

    def _pass(self, waiting: Sequence[tuple[Frame, np.ndarray, Letterbox, float]]) -> Iterator[Prediction]:
        began = time.perf_counter()
        decoded = self.forward([image for _, image, _, _ in waiting])
        forward_s = time.perf_counter() - began
        per_image = self.suppress(decoded)
        rows = [found.cpu().numpy() for found in per_image]  # [n, 6] x1, y1, x2, y2, score, class
        nms_s = time.perf_counter() - began - forward_s
        for (frame, _, back, read_s), row in zip(waiting, rows, strict=True):
            shares = {"read": read_s, "forward": forward_s / len(waiting), "nms": nms_s / len(waiting)}
            boxes = back.to_native(row[:, :4])
            yield Prediction(frame, boxes, row[:, 4], row[:, 5].astype(np.int64), self.names, shares)

    def suppress(self, decoded: Tensor | list[Tensor]) -> list[Tensor]:
        """Return [n, 6] x1, y1, x2, y2, score, class of each image, from the result of :meth:`forward`."""
        if self.suppressed:
            kept = [boxes[(boxes[:, 4] > 0) & (boxes[:, 4] > self.conf)] for boxes in decoded]
            wanted = self.classes
            return (
                kept
                if wanted is None
                else [boxes[torch.isin(boxes[:, 5].long(), torch.tensor(wanted))] for boxes in kept]
            )
        found, _capped = detections(
            decoded,
            conf=self.conf,
            iou=self.iou,
            max_det=self.max_det,
            multi_label=False,
            agnostic=self.agnostic,
            classes=self.classes,
        )
        return found


def one_device(spec: str) -> torch.device:
    """Return the device of a command that runs in one process.

    Raises:
        ConfigError: ``spec`` names several devices, or one that does not exist.
    """
    if "," in spec or spec.startswith("cpu:"):
        raise ConfigError(
            f"--device {spec}: prediction runs on one device", hint="auto, cpu, mps or one CUDA id, as 0"
        )
    if spec not in ("auto", "cpu", "mps") and not spec.isdecimal():
        raise ConfigError(f"--device {spec} is not a device", hint="auto, cpu, mps or one CUDA id, as 0")
    return devices.device_of(spec, 0)
