"""An exported file, run by its own runtime, in the place of a network.

N images, K predictions of an image, C classes.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yolofleet.checkpoint.reader import load_weights
from yolofleet.checkpoint.weights import model_from_weights
from yolofleet.config.schema import PredictConfig
from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.export.export_metadata import MAX_PIXELS
from yolofleet.export.formats import format_of, need
from yolofleet.export.trial import Opened, ensure_tried, open_format, run_once
from yolofleet.models.detector import Detector


class Runtime:
    """Images in, boxes out; safe to call from several threads.

    It stands where a ``Detector`` stands: ``decode(runtime(images))`` are the boxes, because what comes out is
    decoded already.

    Attributes:
        facts: what the file says about itself.
        place: the runtime, its version and where it runs, for people.
    """

    training = False

    def __init__(self, path: Path, opened: Opened) -> None:
        facts = opened.facts
        self.path, self.facts, self.place, self._opened = path, facts, opened.place, opened
        self.nc, self.names, self.strides = len(facts.names), facts.names, facts.strides
        self._lock = threading.Lock()

    def __call__(self, images: Tensor) -> Tensor:
        """
        Args:
            images: float32 [N, 3, H, W] RGB in 0..1, any N; H and W as ``facts`` say.
        Returns:
            On the CPU, float32: decoded [N, K, 5 + C] (see ``Detector.decode``), or with suppression inside
            [N, max_det, 6] x1, y1, x2, y2 px, score, class.

        Raises:
            CheckpointError: the runtime refuses.
        """
        size_hw = (images.shape[2], images.shape[3])
        assert size_hw == self.facts.size_hw or (
            self.facts.size_hw is None and all(side % self.facts.stride == 0 for side in size_hw)
        ), f"{self.path} takes {self.facts.size_hw}, not {size_hw}"
        pixels = np.ascontiguousarray(images.cpu().numpy(), np.float32)
        at_once = self.facts.batch or len(pixels)
        if at_once * size_hw[0] * size_hw[1] > max(MAX_PIXELS, pixels[:, 0].size):
            raise CheckpointError(
                f"{self.path} takes {at_once} images at once, which at {size_hw[0]} x {size_hw[1]} px is more than "
                f"{MAX_PIXELS:,} pixels",
                hint="export it for a smaller batch",
            )
        parts = []
        for start in range(0, len(pixels), at_once):
            part = pixels[start : start + at_once]
            lacking = at_once - len(part)
            if lacking:  # a file of fixed batch is filled up with black images
                part = np.concatenate([part, np.zeros((lacking, *part.shape[1:]), np.float32)])
            parts.append(self._checked(part)[: at_once - lacking])
        return torch.from_numpy(np.concatenate(parts))

    def check_settings(self, *, img: int, precision: str) -> None:
        """A setting that is at its default gives way to the file's; another must agree with it.

        Raises:
            ConfigError: the file was made for another image size, or was asked for a number format.
        """
        size_hw = self.facts.size_hw
        if size_hw is not None and img not in (max(size_hw), PredictConfig.model_fields["img"].default):
            raise ConfigError(
                f"--img {img}: {self.path} takes images of {size_hw[0]} x {size_hw[1]} px (height x width)",
                hint=f"leave it out, or export with --img {img} or --dynamic size",
            )
        if precision != "auto":
            raise ConfigError(
                f"--precision {precision}: the number format of {self.path} was chosen when it was exported",
                hint="leave it out",
            )

    def check_unsuppressed(self) -> None:
        """
        Raises:
            ConfigError: the file gives boxes, not predictions.
        """
        if self.facts.nms is not None:
            raise ConfigError(
                f"{self.path} suppresses boxes by settings of its own, so its accuracy would not be the network's",
                hint="export without --nms to validate",
            )

    def decode(self, decoded: Tensor) -> Tensor:
        """What ``__call__`` gave."""
        return decoded

    def _checked(self, images: np.ndarray) -> np.ndarray:
        values = 6 if self.facts.nms else 5 + self.nc
        with self._lock:
            output = run_once(self.path, self._opened, images)
        if output.ndim != 3 or len(output) != len(images) or output.shape[2] != values:
            raise CheckpointError(
                f"{self.path} gave {list(output.shape)}, not [{len(images)}, K, {values}] as its description says",
                hint="export it again",
            )
        return output


def open_exported(
    path: Path, device: torch.device | None = None, *, threads: int = 0, is_ours: bool = False
) -> Runtime:
    """Open an exported file; a stranger's is tried in a child process first.

    Args:
        device: where to run it; None = the best that the runtime can use here.
        threads: of the runtime on a CPU; 0 = as many as torch uses.
        is_ours: this process has just written the file.

    Raises:
        ConfigError: its runtime is not installed, or does not run on ``device``.
        CheckpointError: it is broken, or not understood.
    """
    format = format_of(path)
    assert format is not None, path
    need(format, format.runs, f"running {path}")
    threads = threads or torch.get_num_threads()
    ensure_tried(format, path, threads, is_ours=is_ours)
    return Runtime(path, open_format(format, path, str(device) if device else None, threads))


def open_weights(name: str, cfg: str = "", *, device: torch.device | None = None) -> Detector | Runtime:
    """What ``--weights`` names: a network for weights, a runtime for an exported file.

    Args:
        cfg: the network's description where the weights have none.
        device: of a runtime; None = the best that it can use here.

    Raises:
        CheckpointError: missing, broken or not understood. ConfigError: see :func:`open_exported`.
    """
    path = Path(name)
    if format_of(path) is None:
        return model_from_weights(load_weights(name, cfg))
    if cfg:
        raise ConfigError(f"--cfg {cfg}: the exported file {name} describes itself", hint="leave out --cfg")
    return open_exported(path, device)
