"""Several networks, or several views of each image, as one network: ensembles and test-time augmentation.

N images, K predictions of an image, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.support.errors import ConfigError

GREY = 114 / 255  # as in letterboxes


@dataclass(frozen=True)
class View:
    """What a network sees of an image: its size as a fraction, and whether left and right are exchanged."""

    scale: float
    flip: bool = False


WHOLE = (View(1.0),)
AUGMENTED = (View(1.0), View(0.83, flip=True), View(0.67))  # YOLOv5's views


class Raws(NamedTuple):
    """Raw predictions of a :class:`CombinedNetwork`.

    Attributes:
        size_hw: shape of the images, pixels.
        of_network: for each network and view, what the network returned.
    """

    size_hw: tuple[int, int]
    of_network: list[list[Any]]


class CombinedNetwork:
    """Runs several networks on several views of the images; it has the methods of a ``Detector`` that inference uses.

    Args:
        networks: at least one, in eval mode, of the same classes; their names may be missing in some.
        augment: detect on the views ``AUGMENTED``, not only on the whole image.
        merge: nms: ``decode`` joins the predictions, for one suppression over all; mean: it averages those of the
            networks; wbf: it keeps the predictions of each network and view apart, for weighted box fusion.

    Raises:
        ConfigError: the networks find no boxes, have different classes, or differ too much for a mean.
    """

    training = False
    task = "boxes"

    def __init__(self, networks: Sequence[Detector], *, augment: bool = False, merge: str = "nms") -> None:
        first = next((network for network in networks if _has_names(network)), networks[0])
        for number, other in enumerate(networks, 1):
            if other.task != self.task:
                raise ConfigError(
                    f"only networks that find {self.task} can be combined; number {number} finds {other.task}",
                    source="--weights, --augment",
                    hint="give one file of weights, without --augment",
                )
            if other.nc != first.nc or (_has_names(other) and other.names != first.names):
                raise ConfigError(
                    f"the networks of an ensemble need the same classes: one has {first.nc}, number {number} has "
                    f"{other.nc}" + (" with other names" if other.nc == first.nc else ""),
                    source="--weights",
                    hint="give weights that were trained on the same data set",
                )
            if merge == "mean" and not _same_rows(first, other):
                what = "other strides or anchors" if other.needs_nms else "predictions that belong to no cell"
                raise ConfigError(
                    f"--merge mean needs networks of one architecture; number {number} has {what}",
                    source="--weights",
                    hint="--merge nms or wbf",
                )
        self.networks, self.merge = tuple(networks), merge
        self.views = AUGMENTED if augment else WHOLE
        self.nc, self.names, self.assumed = first.nc, first.names, first.assumed
        self.strides = tuple(sorted({stride for network in networks for stride in network.strides}))
        self.needs_nms = True  # several networks or views show an object several times
        self.pads_to_square = any(network.pads_to_square for network in networks)

    def __call__(self, images: Tensor) -> Raws:
        """Return the raw predictions for ``images`` [N, 3, H, W] of every network and view."""
        size_hw = (images.shape[2], images.shape[3])
        seen = [_seen(images, view, max(self.strides)) for view in self.views]
        return Raws(size_hw, [[network(view) for view in seen] for network in self.networks])

    def decode(self, raws: Raws) -> Decoded | list[Decoded]:
        """Return predictions in pixels of the images; for ``merge`` wbf a list, one for each network and view."""
        sources = [
            [self._decoded(network, number, raw, raws.size_hw) for number, raw in enumerate(of_view)]
            for network, of_view in zip(self.networks, raws.of_network, strict=True)
        ]
        if self.merge == "wbf":
            return [Decoded(rows) for views in sources for rows in views]
        joined = [torch.cat(views, 1) for views in sources]
        return Decoded(torch.stack(joined).mean(0) if self.merge == "mean" else torch.cat(joined, 1))

    def _decoded(self, network: Detector, number: int, raw: Any, size_hw: tuple[int, int]) -> Tensor:
        """Return the predictions of a view, in pixels of the image."""
        decoded: Tensor = network.decode(raw).rows
        if self.merge != "wbf" and len(self.views) > 1 and len(network.strides) > 1 and network.needs_nms:
            # Other views see the largest objects of the first view, and the smallest ones of the last view, at a size
            # that suits the network better. Fusion needs them: it lowers the scores of boxes that a view lacks.
            if number == 0:
                decoded = _without_level(decoded, network.strides, max(network.strides))
            elif number == len(self.views) - 1:
                decoded = _without_level(decoded, network.strides, min(network.strides))
        return _to_image(decoded, self.views[number], size_hw)


def inference_network(
    models: Sequence[Detector], device: torch.device, *, augment: bool = False, merge: str = "nms"
) -> Detector | CombinedNetwork:
    """Return copies of ``models`` on ``device``, with batch norm folded in, as one network."""
    ready = [
        # torch types no such call of `to`
        cast(Any, fuse(model)).to(device, memory_format=torch.channels_last)
        for model in models
    ]
    if len(ready) == 1 and not augment:
        return cast(Detector, ready[0])
    return CombinedNetwork(ready, augment=augment, merge=merge)


def _has_names(network: Detector) -> bool:
    """Return whether the file of the network has names of its classes; those of Darknet's files are numbers."""
    return "names" not in network.assumed and tuple(network.names) != tuple(map(str, range(network.nc)))


def _same_rows(first: Detector, other: Detector) -> bool:
    """Return whether row k of both networks' predictions belongs to the same cell and anchor."""
    a, b = first.anchors_px, other.anchors_px
    same = (
        a is None
        if b is None
        else a is not None and a.shape == b.shape and torch.allclose(a.cpu(), b.cpu(), rtol=1e-3)
    )
    return first.strides == other.strides and same and first.needs_nms and other.needs_nms


def _viewed_hw(view: View, size_hw: tuple[int, int]) -> tuple[int, int]:
    """Return the size of the image in a view, without padding, pixels."""
    return max(1, int(size_hw[0] * view.scale)), max(1, int(size_hw[1] * view.scale))


def _seen(images: Tensor, view: View, stride: int) -> Tensor:
    """Return the images as a view shows them, padded with grey at the right and at the bottom to the stride."""
    if view.flip:
        images = images.flip(3)
    if view.scale == 1:
        return images
    height, width = _viewed_hw(view, (images.shape[2], images.shape[3]))
    images = F.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
    images = F.pad(images, (0, -width % stride, 0, -height % stride), value=GREY)
    return images.contiguous(memory_format=torch.channels_last)


def _to_image(decoded: Tensor, view: View, size_hw: tuple[int, int]) -> Tensor:
    """Return decoded predictions [N, K, 5 + C] of a view in pixels of the image."""
    if view == View(1.0):
        return decoded
    height, width = _viewed_hw(view, size_hw)
    factor = decoded.new_tensor([size_hw[1] / width, size_hw[0] / height]).repeat(2)
    boxes = decoded[..., :4] * factor
    if view.flip:
        boxes = torch.cat([size_hw[1] - boxes[..., :1], boxes[..., 1:]], -1)
    return torch.cat([boxes, decoded[..., 4:]], -1)


def _without_level(decoded: Tensor, strides: Sequence[int], left_out: int) -> Tensor:
    """Return decoded predictions [N, K, 5 + C], whose rows are ordered by level, without those of one stride.

    A level has rows in proportion to 1 / stride^2, because all levels have as many anchors.
    """
    cells = [(max(strides) // stride) ** 2 for stride in strides]
    rows = [decoded.shape[1] * count // sum(cells) for count in cells]
    levels = decoded.split(rows, 1)
    return torch.cat([level for level, stride in zip(levels, strides, strict=True) if stride != left_out], 1)
