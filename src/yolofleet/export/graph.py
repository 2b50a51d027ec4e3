"""The network as one function for tracing: images in, decoded boxes out.

N images, K predictions of an image, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from yolofleet.export.facts import ExportFacts
from yolofleet.models.blocks import Upsample
from yolofleet.models.detector import Detector
from yolofleet.models.fuse import fuse


class ExportGraph(nn.Module):
    """``decode(forward(images))`` of the fused network, in evaluation mode, without gradients.

    Args:
        half: the network computes in 16 bits; the boxes are decoded in 32, since 16 bits count pixels above 512
            in halves.
    """

    def __init__(self, model: Detector, *, half: bool = False) -> None:
        super().__init__()
        self.network = fuse(model)
        self.half_inside = half
        _use_plain_upsampling(self.network)
        if half:
            self.network.half()

    def forward(self, images: Tensor) -> Tensor:
        """float32 [N, 3, H, W] RGB in 0..1 -> float32 [N, K, 5 + C]."""
        return self.network.decode(self.network(images.half() if self.half_inside else images))


def _use_plain_upsampling(module: nn.Module) -> None:
    """Ours is made for training; every runtime has a kernel for this one, with equal values."""
    for name, child in module.named_children():
        if isinstance(child, Upsample):
            setattr(module, name, nn.Upsample(scale_factor=2.0, mode="nearest"))
        else:
            _use_plain_upsampling(child)


@dataclass(frozen=True)
class ExportJob:
    """What a format's ``write`` gets.

    Attributes:
        graph: to be written.
        facts: to be written beside it.
        size_hw: of the example that is traced, pixels; also where the file takes any size.
        simplify: shorten the graph.
    """

    graph: ExportGraph
    facts: ExportFacts
    size_hw: tuple[int, int]
    simplify: bool = False

    def example(self) -> Tensor:
        """Images of the form that the file takes, [N, 3, H, W]."""
        return torch.zeros(self.facts.batch or 1, 3, *self.size_hw)

    def traced(self) -> torch.jit.ScriptModule:
        """The graph as TorchScript; sizes stay expressions of the input's sizes."""
        with quiet():
            traced = torch.jit.trace(self.graph, self.example(), check_trace=False)
        assert isinstance(traced, torch.jit.ScriptModule)
        return traced

    def exported(self) -> torch.export.ExportedProgram:
        """The graph by ``torch.export``, for the fixed form of :meth:`example`."""
        with quiet():
            return torch.export.export(self.graph, (self.example(),))


@contextmanager
def quiet() -> Iterator[None]:
    """No gradients, and none of the warnings about loops over levels that tracers give: what comes out is compared
    with the network afterwards."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
