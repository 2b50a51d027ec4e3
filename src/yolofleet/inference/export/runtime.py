"""Run an exported file with its runtime, as a replacement for a network.

N images, K predictions of an image, C classes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from yolofleet.families.networks.detector import UNSTATED_PX, Detector
from yolofleet.families.weights.reader import load_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.inference.export.export_metadata import MAX_PIXELS
from yolofleet.inference.export.formats import format_of, need
from yolofleet.inference.export.opened import Opened, check_meant, check_trusted, open_format, run_once
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.table import task_of


class Runtime:
    """Computes predictions with an exported file; several threads may call it.

    It has the methods of a ``Detector`` that prediction and validation use. The output is already decoded, so ``decode``
    returns its argument.
    """

    training = False

    def __init__(self, path: Path, opened: Opened) -> None:
        metadata = opened.metadata
        self.path, self.metadata, self.place, self._opened = path, metadata, opened.place, opened
        self.nc, self.names, self.strides = len(metadata.names), metadata.names, metadata.strides
        self.trained_px, self.needs_nms = metadata.trained_px, metadata.needs_nms
        self.task = metadata.task
        if metadata.outputs != task_of(self).outputs or (metadata.nms and self.task != BOXES.name):
            raise CheckpointError(
                f"{path} has outputs of {self.task} that yolofleet cannot read: {', '.join(metadata.outputs)}",
                hint="export it again, without --deepstream",
            )
        self.assumed: Mapping[str, str] = metadata.assumed
        self._lock = threading.Lock()

    def __call__(self, images: Tensor) -> Any:
        """Return the predictions for ``images``.

        Args:
            images: float32 [N, 3, H, W] RGB in 0..1, any N; H and W must fit ``metadata``.
        Returns:
            float32 on the CPU: decoded predictions as of ``Detector.decode``; for a file with NMS [N, max_det, 6] x1, y1, x2,
            y2 (pixels), score, class.

        Raises:
            CheckpointError: the runtime fails, or its output has another shape.
        """
        size_hw = (images.shape[2], images.shape[3])
        assert size_hw == self.metadata.size_hw or (
            self.metadata.size_hw is None and all(side % self.metadata.stride == 0 for side in size_hw)
        ), f"{self.path} needs {self.metadata.size_hw}, got {size_hw}"
        pixels = np.ascontiguousarray(images.cpu().numpy(), np.float32)
        batch = self.metadata.batch or len(pixels)
        if batch * size_hw[0] * size_hw[1] > max(MAX_PIXELS, pixels[:, 0].size):
            raise CheckpointError(
                f"{self.path} needs batches of {batch} images, which at {size_hw[0]} x {size_hw[1]} px is more than "
                f"{MAX_PIXELS:,} pixels",
                hint="export it for a smaller batch",
            )
        parts = []
        for start in range(0, len(pixels), batch):
            part = pixels[start : start + batch]
            missing = batch - len(part)
            if missing:  # fill the fixed batch with black images
                part = np.concatenate([part, np.zeros((missing, *part.shape[1:]), np.float32)])
            parts.append([output[: batch - missing] for output in self._checked(part)])
        outputs = [torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)]
        return outputs[0] if self.metadata.nms else task_of(self).decoded(*outputs)

    def check_precision(self, precision: str) -> None:
        """Raise ConfigError if ``--precision`` is not "auto"."""
        if precision != "auto":
            raise ConfigError(
                f"--precision {precision}: the number format of {self.path} was chosen when it was exported",
                hint="leave it out",
            )

    def check_unsuppressed(self) -> None:
        """Raise ConfigError if the file includes NMS, because a validation needs all predictions."""
        if self.metadata.nms is not None:
            raise ConfigError(
                f"{self.path} includes NMS with fixed settings, so its metrics would differ from those of the network",
                hint="export without --nms to validate",
            )

    def decode(self, decoded: Any) -> Any:
        """Return the output of ``__call__`` unchanged, because it is decoded."""
        return decoded

    def _checked(self, images: np.ndarray) -> list[np.ndarray]:
        metadata, count = self.metadata, len(images)
        with self._lock:
            outputs = run_once(self.path, self._opened, images)
        shapes = [list(one.shape) for one in outputs]
        fits = len(shapes) == len(metadata.outputs) and all(shape[:1] == [count] for shape in shapes)
        expected = f"{len(metadata.outputs)} outputs of {count} images"
        if self.task == BOXES.name:
            values = 6 if metadata.nms else 5 + self.nc
            fits, expected = fits and shapes[0][2:] == [values], f"[{count}, K, {values}]"
        if not fits:
            found = ", ".join(map(str, shapes)) or "nothing"
            raise CheckpointError(
                f"{self.path} returned {found}, expected {expected} by its metadata", hint="export it again"
            )
        return outputs


def open_exported(
    path: Path, device: torch.device | None = None, *, threads: int = 0, trust: bool = False
) -> Runtime:
    """Open an exported file, after :func:`check_trusted`.

    Args:
        device: device for the runtime; None: the fastest that it supports here.
        threads: CPU threads of the runtime; 0: as many as torch uses.
        trust: the user trusts the author of the file.

    Raises:
        ConfigError: its runtime is not installed, or does not run on ``device``; or see :func:`check_trusted`.
        CheckpointError: the file is damaged, or its format is unknown.
    """
    format = format_of(path)
    assert format is not None, path
    need(format, format.runs, f"running {path}")
    path = path.parent if format.marker and path.is_file() else path  # a file of the folder may name it
    threads = threads or torch.get_num_threads()
    check_trusted(format, path, trust=trust)
    return Runtime(path, open_format(format, path, str(device) if device else None, threads))


def open_weights(
    name: str, cfg: str = "", *, device: torch.device | None = None, trust: bool = False
) -> Detector | Runtime:
    """Open the file that ``--weights`` names: a network for weights, a runtime for an exported file.

    Args:
        cfg: description of the network for weights that have none.
        device, trust: as for :func:`open_exported`.

    Raises:
        CheckpointError: the file is missing or damaged, or its format is unknown.
        ConfigError: see :func:`open_exported`.
    """
    path = Path(name)
    if format_of(path) is None:
        weights = load_weights(name, cfg)
        check_meant(name, trust)
        return model_from_weights(weights)
    if cfg:
        raise ConfigError(f"--cfg {cfg}: the exported file {name} describes itself", hint="leave out --cfg")
    return open_exported(path, device, trust=trust)


def open_networks(
    names: Sequence[str],
    cfg: str = "",
    *,
    device: torch.device | None = None,
    augment: bool = False,
    trust: bool = False,
) -> list[Detector] | Runtime:
    """Open the files of ``--weights``: one exported file, or the networks of one or several weights files.

    Args:
        cfg, device, trust: as for :func:`open_weights`.
        augment: test-time augmentation is wanted, which an exported file does not have.

    Raises:
        CheckpointError, ConfigError: see :func:`open_weights`.
        ConfigError: an exported file shall be part of an ensemble, or be augmented.
    """
    opened = [open_weights(name, cfg, device=device, trust=trust) for name in names]
    networks = [one for one in opened if isinstance(one, Detector)]
    for one in opened:
        if isinstance(one, Runtime):
            if augment or len(opened) > 1:
                what = "--augment" if augment else f"--weights with {len(opened)} files"
                raise ConfigError(
                    f"{what}: {one.path} is an exported file, which always computes one view of one network",
                    hint="give the weights files that it was exported from",
                )
            return one
    return networks


@dataclass(frozen=True)
class ImageSize:
    """The longest side of the images of a validation, a prediction, an export or a measurement.

    Attributes:
        px: pixels, before it is rounded up to the stride.
        text: with its source, for a header.
        note: what a user should know about it, and what the reader of the weights assumed; "": nothing.
    """

    px: int
    text: str
    note: str = ""


def image_size(model: Detector | Runtime | Sequence[Detector], wanted: int = 0) -> ImageSize:
    """Return the size of the images for a model: the one rule of all verbs, of the Python interface and of the hub.

    It is the only one that an exported file takes, else ``wanted``, else the size in training, else 640.

    Args:
        model: a network, several of an ensemble, or an exported file.
        wanted: size that the user chose, pixels; 0: none.

    Raises:
        ConfigError: the exported file takes another size than ``wanted``.
    """
    if isinstance(model, Runtime) and model.metadata.size_hw is not None:
        height, width = model.metadata.size_hw
        if wanted not in (0, max(height, width)):
            raise ConfigError(
                f"--img {wanted}: {model.path} takes images of {height} x {width} px (height x width)",
                hint=f"leave it out, or export with --img {wanted} or --dynamic size",
            )
        text = f"{height} x {width} px (height x width), fixed in the exported file"
        return ImageSize(max(height, width), text, "; ".join(model.assumed.values()))
    models = model if isinstance(model, Sequence) else [model]
    stride = max(stride for one in models for stride in one.strides)
    stated = sorted({px for one in models if (px := getattr(one, "trained_px", None))})
    trained = " and ".join(f"{px}" for px in stated)
    px = wanted or max(stated, default=UNSTATED_PX)
    if wanted:
        source = "as set"
    elif not stated:
        source = "the default, because the weights do not state the size of their training"
    else:
        source = "of the weights" + (f", the largest of {trained}" if len(stated) > 1 else "")
    rounded = -(-px // stride) * stride
    text = f"{rounded} px, {source}" + (f" ({px} rounded up to the stride {stride})" if rounded != px else "")
    assumptions = dict.fromkeys(text for one in models for text in getattr(one, "assumed", {}).values())
    return ImageSize(px, text, "; ".join(filter(None, (size_note(px, stated), *assumptions))))


def size_note(px: int, stated: Sequence[int]) -> str:
    """Return the note that images of ``px`` are not those that the weights were trained with; "" if they are, or unknown."""
    if not stated or list(stated) == [px]:
        return ""
    trained = " and ".join(map(str, stated))
    return f"image size {px} px, but the weights were trained at {trained} px"
