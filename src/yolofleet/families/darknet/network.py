"""Build a network from a Darknet description.

N images, L levels of stride s, A anchors per cell, C classes, K rows = sum over levels of A (H/s) (W/s).
Checked against outputs of Darknet and OpenCV in tests/parity/test_darknet_network.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.data.geometry.boxes import Exponential
from yolofleet.families.darknet.cfg import DarknetDescription, Layer, layers, levels
from yolofleet.families.darknet.sections import Convolutional, Maxpool, Route, Shortcut, Yolo
from yolofleet.families.networks.blocks import BN_MOMENTUM, Foldable, Upsample
from yolofleet.families.networks.detector import AnchorDetector

BN_EPS = 1e-5  # Darknet's; OpenCV reads the same files with 1e-6, which moves raw predictions by up to 4e-4

# in place where autograd needs no copy of the input
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "linear": lambda x: x,
    "mish": lambda x: F.mish(x, inplace=not torch.is_grad_enabled()),
    "swish": lambda x: F.silu(x, inplace=not torch.is_grad_enabled()),
    "relu": lambda x: F.relu(x, inplace=True),
    "logistic": torch.sigmoid,
}


class ConvUnit(Foldable):
    """Convolution, batch normalisation or bias, activation."""

    def __init__(self, in_channels: int, section: Convolutional) -> None:
        super().__init__()
        self.activation = section.activation
        kernel, groups = (section.size, section.stride, section.padding_px), section.groups
        bias = not section.batch_normalize
        self.conv = nn.Conv2d(in_channels, section.filters, *kernel, groups=groups, bias=bias)
        self.bn = nn.Identity()
        if section.batch_normalize:
            self.bn = nn.BatchNorm2d(section.filters, eps=BN_EPS, momentum=BN_MOMENTUM)

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](self.bn(self.conv(x)))


class Sum(nn.Module):
    """Sum of maps, activation (arXiv:1512.03385)."""

    def __init__(self, section: Shortcut) -> None:
        super().__init__()
        self.activation = section.activation

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        total = x
        for other in others:
            total = total + other
        return ACTIVATIONS[self.activation](total)


class Join(nn.Module):
    """Concatenates part ``part`` of ``parts`` of each map's channels."""

    def __init__(self, section: Route) -> None:
        super().__init__()
        self.parts, self.part = section.groups, section.group_id

    def forward(self, *maps: Tensor) -> Tensor:
        picked = [x.chunk(self.parts, 1)[self.part] for x in maps] if self.parts > 1 else maps
        return picked[0] if len(picked) == 1 else torch.cat(list(picked), 1)


class Pool(nn.Module):
    """Max pooling; odd padding has its extra pixel at the right and bottom."""

    def __init__(self, section: Maxpool) -> None:
        super().__init__()
        self.size, self.stride = section.size, section.stride
        self.before, self.after = section.before_after_px

    def forward(self, x: Tensor) -> Tensor:
        if self.before == self.after:
            return F.max_pool2d(x, self.size, self.stride, self.before)
        padded = F.pad(x, (self.before, self.after) * 2, value=-math.inf)
        return F.max_pool2d(padded, self.size, self.stride)

    def for_export(self, lowest: float) -> nn.Module:
        """Return standard modules; ``lowest`` takes the place of minus infinity."""
        if self.before == self.after:
            return self
        border = nn.ConstantPad2d((self.before, self.after) * 2, lowest)
        return nn.Sequential(border, nn.MaxPool2d(self.size, self.stride))


class Level(nn.Module):
    """Raw predictions of one level: a view [N, A, H, W, 5 + C] of the convolution's output, no copy."""

    def __init__(self, section: Yolo) -> None:
        super().__init__()
        self.anchors_per_cell = len(section.anchors_px)

    def forward(self, x: Tensor) -> Tensor:
        cells: Tensor = x.unflatten(1, (self.anchors_per_cell, -1))
        return cells.permute(0, 1, 3, 4, 2)


class DarknetNetwork(AnchorDetector):
    """A network from a ``.cfg``, for any number of classes.

    Layers have Darknet's numbers; tensors have names such as ``layers.0.conv.weight`` and ``layers.0.bn.weight``. Levels
    are ordered from fine to coarse, in any order of the file.
    """

    description: DarknetDescription
    pads_to_square = True

    def __init__(self, description: DarknetDescription, nc: int) -> None:
        super().__init__(description, nc)
        plan = layers(description.with_classes(nc))
        found = levels(plan)
        self.strides = tuple(stride for _, _, stride in found)
        self.codings = tuple(Exponential(yolo.scale_x_y) for _, yolo, _ in found)
        self.backbone_groups = _backbone(plan)
        self.layers = nn.ModuleList(_module(layer) for layer in plan)
        self._anchors_px = tuple(yolo.anchors_px for _, yolo, _ in found)
        self._levels = tuple(i for i, _, _ in found)
        self._inputs = tuple(layer.inputs for layer in plan)
        last_use = {j: i for i, layer in enumerate(plan) for j in layer.inputs if j != i - 1}
        self._kept = frozenset(last_use)
        self._done = tuple(tuple(j for j in last_use if last_use[j] == i) for i in range(len(plan)))

    @property
    def anchors_px(self) -> Tensor:
        """[L, A, 2] width, height, pixels, float32."""
        return torch.tensor(self._anchors_px)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return raw predictions of each level, [N, A, H/s, W/s, 5 + C]; see :class:`AnchorDetector`."""
        kept: dict[int, Tensor] = {}
        raws: dict[int, Tensor] = {}
        x = images
        for i, (layer, inputs) in enumerate(zip(self.layers, self._inputs, strict=True)):
            x = layer(*(x if j == i - 1 else kept[j] for j in inputs))
            if i in self._kept:
                kept[i] = x
            for j in self._done[i]:
                del kept[j]
            if i in self._levels:
                raws[i] = x
        return [raws[i] for i in self._levels]

    def freeze_groups(self) -> list[str]:
        return [f"layers.{i}." for i in range(len(self.layers))]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw torch's default initial weights, and set YOLOv5's priors."""
        self.draw_weights(generator)
        self.set_priors([cast(ConvUnit, self.layers[i - 1]).conv for i in self._levels])


def _module(layer: Layer) -> nn.Module:
    section = layer.section
    if isinstance(section, Convolutional):
        return ConvUnit(layer.in_channels[0], section)
    if isinstance(section, Shortcut):
        return Sum(section)
    if isinstance(section, Route):
        return Join(section)
    if isinstance(section, Maxpool):
        return Pool(section)
    if isinstance(section, Yolo):
        return Level(section)
    return Upsample() if section.kind == "upsample" else nn.Identity()


def _backbone(plan: Sequence[Layer]) -> int:
    """Return the number of layers before the neck: 75 for YOLOv3 (Darknet-53), 13 for its tiny form.

    The backbone ends at the last shortcut before the first [yolo], or without shortcuts at the first of the widest layers.
    """
    before = plan[: next(i for i, layer in enumerate(plan) if isinstance(layer.section, Yolo)) - 1]
    shortcuts = [i for i, layer in enumerate(before) if isinstance(layer.section, Shortcut)]
    widest = max(range(len(before)), key=lambda i: before[i].out_channels, default=-1)
    return (shortcuts[-1] if shortcuts else widest) + 1
