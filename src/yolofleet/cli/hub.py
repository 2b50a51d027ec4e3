"""YOLOv5's hub interface, which ``hubconf.py`` of a checkout offers to torch.hub.

model = torch.hub.load(FOLDER, "custom", "best.safetensors", source="local")
model.conf = 0.4
results = model(["street.jpg"], size=640)
results.print()
results.xyxy[0]  # [n, 6]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from yolofleet.cli.api import Model
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.inference.export.formats import format_of
from yolofleet.inference.predict.predictor import one_device
from yolofleet.inference.predict.results import Predictions
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import echo


class Detections(Predictions):
    """The boxes of several images, with YOLOv5's names for them. Boxes are in pixels of each image."""

    @property
    def xyxy(self) -> list[Tensor]:
        """For each image float32 [n, 6]: left, top, right, bottom, score, class; highest score first."""
        return [
            torch.from_numpy(np.column_stack([one.boxes_xyxy_px, one.scores, one.classes]).astype(np.float32))
            for one in self
        ]

    @property
    def xywh(self) -> list[Tensor]:
        """As :attr:`xyxy` with the centre, the width and the height."""
        found = self.xyxy
        for boxes in found:
            low, high = boxes[:, :2].clone(), boxes[:, 2:4].clone()
            boxes[:, :2], boxes[:, 2:4] = (low + high) / 2, high - low
        return found

    @property
    def xyxyn(self) -> list[Tensor]:
        """As :attr:`xyxy`, as fractions of the width and the height of the image."""
        return [boxes / self._scale(number) for number, boxes in enumerate(self.xyxy)]

    @property
    def xywhn(self) -> list[Tensor]:
        """As :attr:`xywh`, as fractions of the width and the height of the image."""
        return [boxes / self._scale(number) for number, boxes in enumerate(self.xywh)]

    def _scale(self, number: int) -> Tensor:
        height, width = self[number].image_bgr.shape[:2]
        return torch.tensor([width, height, width, height, 1.0, 1.0])

    def print(self) -> None:
        """Print a line for each image."""
        echo(str(self))

    def __str__(self) -> str:
        return "\n".join(
            f"image {number}/{len(self)}: {one.image_bgr.shape[1]}x{one.image_bgr.shape[0]} {one.counts()}"
            for number, one in enumerate(self, 1)
        )

    def save(self, folder: str | Path = "") -> list[Path]:
        """Write each image with its boxes to ``folder``, by default a new one in runs/detect; return the files."""
        return super().save(folder or RunFolder.create("predict", project=Path("runs", "detect")).path)


class HubModel(Model):
    """A model that is called with pictures.

    Raises:
        ConfigError: the device does not exist. CheckpointError: the weights do not exist.

    Attributes:
        conf, iou, max_det, agnostic, classes: settings of the next call, as ``yolofleet predict`` has them; ``classes``
            has numbers or names, None = all.
        trust: the author of the exported file is trusted, as for ``--trust``.
    """

    def __init__(
        self, weights: str | Path, device: str | int | torch.device | None = None, trust: bool = False
    ) -> None:
        super().__init__(weights)
        self.trust = trust
        defaults = PredictConfig()
        self.conf, self.iou = defaults.conf, defaults.iou
        self.max_det, self.agnostic = defaults.max_det, defaults.agnostic_nms
        self.classes: Sequence[int | str] | None = None
        self.device = "auto" if device in (None, "") else str(device).lower().replace("cuda:", "")
        one_device(self.device)
        if self.weights and format_of(Path(self.weights)) is None:
            resolve_weights(self.weights, download=False)

    def __call__(  # type: ignore[override]
        self, pictures: Any, size: int | None = None, augment: bool = False
    ) -> Detections:
        """Return the boxes of one picture or of a list.

        Args:
            pictures: as :meth:`Model.predict`, but arrays are RGB, as in YOLOv5's hub.
            size: of the longer side, pixels; None: as trained.

        Raises:
            DataError: a picture cannot be read. ConfigError: a setting is wrong, or the model has no weights.
        """
        several = pictures if isinstance(pictures, (list, tuple)) else [pictures]
        settings: dict[str, Any] = {"conf": self.conf, "iou": self.iou, "max_det": self.max_det}
        settings |= {"agnostic_nms": self.agnostic, "augment": augment, "device": self.device}
        settings |= {"trust": self.trust}
        settings |= {"classes": tuple(map(str, self.classes or ())), **({"img": size} if size else {})}
        return Detections(self.predict([_bgr(one) for one in several], **settings))


def _bgr(picture: Any) -> Any:
    # RGB or RGBA, also as a batch of one
    if isinstance(picture, np.ndarray) and picture.ndim in (3, 4) and picture.shape[-1] >= 3:
        return np.ascontiguousarray(picture[..., 2::-1])
    return picture


def published(name: str, pretrained: bool, device: str | None) -> HubModel:
    """Return a model with the published weights of its name. Raise ConfigError if ``pretrained`` is False."""
    if not pretrained:
        raise ConfigError(
            f"torch.hub.load(..., {name!r}, pretrained=False): a network without weights finds nothing",
            hint=f'yolofleet.Model("{name}").train(data=...)',
        )
    return HubModel(f"{name}.pt", device)
