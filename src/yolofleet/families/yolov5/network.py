"""Build networks from YOLOv5's rows (also YOLOv3).

N images, L levels of stride s, A anchors per cell, C classes, K rows = sum over levels of A (H/s) (W/s).
tests/parity/test_yolov5_model.py and test_yolov3_rows.py compare outputs, parameter counts and names with the originals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from yolofleet.data.geometry.boxes import DecodedMasks, SquaredSigmoid
from yolofleet.families.networks.blocks import (
    C3,
    SPP,
    SPPF,
    Bottleneck,
    Concat,
    Conv,
    Detect,
    Focus,
    Segment,
    Upsample,
)
from yolofleet.families.networks.detector import AnchorDetector
from yolofleet.families.yolov5.rows import Layer, RowDescription, layers

BLOCKS = {"Conv": Conv, "Focus": Focus, "Bottleneck": Bottleneck, "C3": C3, "SPP": SPP, "SPPF": SPPF}
WITHOUT_WEIGHTS: dict[str, Callable[..., nn.Module]] = {
    "Concat": lambda *_: Concat(),
    "nn.Upsample": lambda *_: Upsample(),
    "nn.MaxPool2d": nn.MaxPool2d,
    "nn.ZeroPad2d": nn.ZeroPad2d,
}


class RowNetwork(AnchorDetector):
    """A network of one block per row; the last block is Detect."""

    description: RowDescription

    def __init__(self, description: RowDescription, nc: int) -> None:
        super().__init__(description, nc)
        plan = layers(description)
        self.strides = tuple(int(plan[i].stride) for i in plan[-1].inputs)
        self._inputs = tuple(layer.inputs for layer in plan)
        self._kept = {j for i, layer in enumerate(plan) for j in layer.inputs if j != i - 1}
        blocks = [self._block(layer) for layer in plan[:-1]]
        anchors_grid = [
            [(w / s, h / s) for w, h in level]
            for level, s in zip(description.anchors_px, self.strides, strict=True)
        ]
        self.codings = (SquaredSigmoid(),) * len(self.strides)
        self.backbone_groups = len(description.backbone)
        self.model = nn.ModuleList([*blocks, self._head(plan[-1], nc, anchors_grid)])

    @staticmethod
    def _head(layer: Layer, nc: int, anchors_grid: list[list[tuple[float, float]]]) -> Detect:
        return Detect(layer.in_channels, nc, anchors_grid)

    @staticmethod
    def _block(layer: Layer) -> nn.Module:
        if layer.module in WITHOUT_WEIGHTS:
            return WITHOUT_WEIGHTS[layer.module](*layer.args)
        c, args = layer.in_channels[0], layer.args
        if layer.module == "C3":
            return C3(c, *args, repeats=layer.repeats)
        block: Callable[..., nn.Module] = BLOCKS[layer.module]
        if layer.repeats == 1:
            return block(c, *args)
        return nn.Sequential(
            *(block(c if i == 0 else layer.out_channels, *args) for i in range(layer.repeats))
        )

    @property
    def detect(self) -> Detect:
        last = self.model[-1]
        assert isinstance(last, Detect)
        return last

    @property
    def anchors_px(self) -> Tensor:
        """[L, A, 2] width, height, pixels, float32."""
        levels = zip(self.detect.anchors.float(), self.strides, strict=True)
        return torch.stack([anchors * stride for anchors, stride in levels])  # needs no copy to a device

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return raw predictions of each level, [N, A, H/s, W/s, 5 + C]; see :class:`AnchorDetector`."""
        kept: dict[int, Tensor] = {}
        x: Tensor = images
        last = len(self.model) - 1
        for i, (block, inputs) in enumerate(zip(self.model, self._inputs, strict=True)):
            maps = [x if j == i - 1 else kept[j] for j in inputs]
            x = block(maps if i == last or isinstance(block, Concat) else maps[0])
            if i in self._kept:
                kept[i] = x
        return cast(list[Tensor], x)  # the last block is Detect

    def freeze_groups(self) -> list[str]:
        return [f"model.{i}." for i in range(len(self.model))]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw torch's default initial weights, and set YOLOv5's priors in Detect."""
        self.draw_weights(generator)
        detect = self.detect
        detect.anchors.copy_(
            torch.tensor(self.description.anchors_px) / torch.tensor(self.strides).view(-1, 1, 1)
        )
        self.set_priors([cast(nn.Conv2d, conv) for conv in detect.m])


class MaskNetwork(RowNetwork):
    """A network whose last block is Segment. D prototypes.

    Raw predictions are those of each level, [N, A, H/s, W/s, 5 + C + D], and the prototypes [N, D, H/4, W/4].
    """

    task = "masks"

    def __init__(self, description: RowDescription, nc: int) -> None:
        super().__init__(description, nc)
        self.rows_behind_classes = description.prototypes

    @staticmethod
    def _head(layer: Layer, nc: int, anchors_grid: list[list[tuple[float, float]]]) -> Detect:
        return Segment(layer.in_channels, nc, anchors_grid, *layer.args[2:])

    def decode(self, raws: Sequence[Tensor]) -> DecodedMasks:  # type: ignore[override]
        """Convert raw predictions to boxes, probabilities and coefficients, in float32; rows by level, anchor, y, x."""
        *levels, prototypes = raws
        values = 5 + self.nc
        decoded = super().decode([raw[..., :values] for raw in levels])
        coefficients = torch.cat([raw[..., values:].flatten(1, 3) for raw in levels], 1)
        return DecodedMasks(decoded.rows, coefficients.float(), prototypes.float())


def row_network(description: RowDescription, nc: int) -> RowNetwork:
    """Return the network of rows: with masks if the last row is Segment."""
    return (MaskNetwork if description.prototypes else RowNetwork)(description, nc)
