"""Prepare a network for export, as one module from images to decoded predictions.

N images, K predictions of an image, C classes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.storage.atomic import whole_file


class ExportGraph(nn.Module):
    """``decode(forward(images))`` of the fused network, in evaluation mode, without gradients.

    Args:
        half: compute the network in 16 bits, and decode the boxes in 32 bits. Between 512 and 1024, 16-bit numbers are
            0.5 pixels apart, which is too coarse for boxes.
    """

    def __init__(self, model: Detector, *, half: bool = False) -> None:
        super().__init__()
        self.network = fuse(model)
        self.half_inside = half
        _use_plain_modules(self.network, lowest=-6e4 if half else -1e30)
        if half:
            self.network.half()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the fields of the decoded predictions, or the only one, for images float32 [N, 3, H, W] RGB in 0..1."""
        decoded = tuple(self.network.decode(self.network(images.half() if self.half_inside else images)))
        return decoded if len(decoded) > 1 else decoded[0]


class ZeroBorder(nn.Module):
    """``nn.ZeroPad2d`` by concatenation of zeros.

    ONNX Runtime (1.17 to 1.31 at least) merges a zero padding into the max pooling after it. The padding of a max pooling
    is minus infinity instead of zero, so the result would be wrong.
    """

    def __init__(self, padding: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.left, self.right, self.top, self.bottom = padding

    def forward(self, x: Tensor) -> Tensor:
        for axis, before, after in ((3, self.left, self.right), (2, self.top, self.bottom)):
            x = torch.cat([*self._zeros(x, axis, before), x, *self._zeros(x, axis, after)], axis)
        return x

    @staticmethod
    def _zeros(x: Tensor, axis: int, width: int) -> list[Tensor]:
        shape = [*x.shape[:axis], width, *x.shape[axis + 1 :]]
        return [x.new_zeros(shape)] if width else []


def _use_plain_modules(module: nn.Module, lowest: float) -> None:
    """Replace some of our modules by standard ones with equal results, which every runtime supports.

    They are the modules with a method ``for_export(lowest)``, which returns the other one.

    Args:
        lowest: a number below every activation, because ncnn's files cannot hold infinity.
    """
    for name, child in module.named_children():
        for_export = getattr(child, "for_export", None)
        if for_export is not None:
            setattr(module, name, for_export(lowest))
        elif isinstance(child, nn.ZeroPad2d):
            setattr(module, name, ZeroBorder(child.padding))
        else:
            _use_plain_modules(child, lowest)


@dataclass(frozen=True)
class ExportJob:
    """The input of a format's ``write``.

    Attributes:
        size_hw: size of the traced example, pixels; needed even if the file accepts any size.
        simplify: simplify the graph (ONNX only).
        calibration: returns batches of real images, float32 [N, 3, H, W] in 0..1, that find the ranges of an 8-bit file.
    """

    graph: ExportGraph
    metadata: ExportMetadata
    size_hw: tuple[int, int]
    simplify: bool = False
    calibration: Callable[[], Iterator[np.ndarray]] | None = None

    def without_nms(self) -> ExportJob:
        return replace(self, metadata=replace(self.metadata, nms=None))

    def example(self) -> Tensor:
        """Return zero images of a shape that the file accepts, [N, 3, H, W]."""
        return torch.zeros(self.metadata.batch or 1, 3, *self.size_hw)

    def traced(self) -> torch.jit.ScriptModule:
        """Return the graph as TorchScript; its sizes are expressions of the input's sizes."""
        with quiet():
            traced = torch.jit.trace(self.graph, self.example(), check_trace=False)
        assert isinstance(traced, torch.jit.ScriptModule)
        return traced

    def exported(self) -> torch.export.ExportedProgram:
        """Return the graph of ``torch.export``, for the fixed shape of :meth:`example`."""
        with quiet():
            return torch.export.export(self.graph, (self.example(),))


@contextmanager
def quiet() -> Iterator[None]:
    """Disable gradients and warnings. Tracers warn about loops over levels, and the verification finds real differences."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_module(
    module: torch.jit.ScriptModule, path: Path, extra_files: Mapping[str, bytes] | None = None
) -> None:
    """Write a module through memory, because torch's writer ends the process when the disk is full. Raises OSError."""
    stream = io.BytesIO()
    torch.jit.save(module, stream, _extra_files=dict(extra_files or {}))
    with whole_file(path) as file:
        file.write(stream.getbuffer())
