"""The interface of a network of any family: images in, raw predictions out, and their decoding.

N images, C classes, K predictions of an image.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from yolofleet.data.geometry.boxes import BoxCoding, Decoded
from yolofleet.families.networks.checked import MAX_CLASSES
from yolofleet.families.networks.description import ModelDescription
from yolofleet.support.devices import to_device
from yolofleet.support.errors import ConfigError

if TYPE_CHECKING:
    from torch.types import Device
    from typing_extensions import Self

UNSTATED_PX = 640  # image size of YOLOv5 and PP-YOLOE, for weights that do not state that of their training


class Detector(nn.Module):
    """A network with its description.

    Subclasses can be built on the meta device, because :meth:`initialise` sets every value.

    Attributes:
        task: the name of what it finds, see ``tasks.task.Task``.
        names: class names, [C]; numbers until the caller sets them.
        strides: of each level of the raw predictions, pixels per cell.
        trained_px: image size in training, pixels; None: unknown.
        assumed: what the reader of its weights assumed, see ``WeightsHeader.assumed``.
        backbone_groups: number of ``freeze_groups`` in the backbone.
        pads_to_square: pad images to a square, as the family's own evaluation does; else each image gets the least padding.
        needs_nms: several predictions may show one object, so their boxes need suppression. False: each prediction is a
            box of its own, and only scores choose among them.
        reads_targets: in a training step ``forward`` gets the targets of the loss as its second argument, for example for
            denoising queries. Everywhere else it gets images alone.
        image_part: the module that reads images alone, which a network with ``reads_targets`` may have. ``forward`` takes
            its result as the third argument. ``--passes compiled`` and CUDA graphs hold this part only, because targets have
            another shape in each pass.
        classes_first: names of tensors whose first rows are those of the classes; in others with such rows, they are the last.
        rows_behind_classes: of each anchor, in tensors whose last rows would be those of the classes without them.
    """

    task: str = "boxes"
    strides: tuple[int, ...]
    backbone_groups: int
    pads_to_square = False
    needs_nms = True
    reads_targets = False
    image_part: nn.Module
    classes_first: tuple[str, ...] = ()
    rows_behind_classes = 0
    trained_px: int | None = None
    assumed: Mapping[str, str] = MappingProxyType({})

    def __init__(self, description: ModelDescription, nc: int) -> None:
        super().__init__()
        if not 1 <= nc <= MAX_CLASSES:
            raise ConfigError(f"a detector cannot have {nc} classes; expected 1 to {MAX_CLASSES}")
        self.description = description
        self.nc = nc
        self.names: tuple[str, ...] = tuple(str(i) for i in range(nc))

    def to_empty(self, *, device: Device, recurse: bool = True) -> Self:
        """Give the network memory on ``device``, with undefined values.

        torch's own method makes each tensor like the one on the meta device, in Python: a second for yolov5n.
        """
        self._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def anchors_px(self) -> Tensor | None:
        """[L, A, 2] width, height, pixels, float32; None if the family has no anchors."""
        return None

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return raw predictions in the family's own format, which only its ``decode`` and its loss read.

        Args:
            images: [N, 3, H, W] RGB in 0..1, H and W multiples of the largest stride.
        Returns:
            Tensors whose first dimension is N. In training there may be more of them, such as outputs of earlier layers.
        """
        raise NotImplementedError

    def decode(self, raws: Sequence[Tensor]) -> Any:
        """Convert raw predictions to those of the task, in float32: a named tuple of tensors, for boxes ``Decoded``."""
        raise NotImplementedError

    def choices(self, image: Tensor) -> Iterator[Any]:
        """Yield all decoded predictions of one image [1, 3, H, W] that rounding may cause.

        A network that chooses among its cells may choose either of two whose scores are nearly equal. Others have none.
        """
        return iter(())

    def initialise(self, generator: torch.Generator) -> None:
        """Set every parameter and buffer to its initial value, which depends only on ``generator``."""
        raise NotImplementedError

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw torch's default initial values of layers, in module order. Other blocks may have a method ``draw_initial``."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                bound = 1 / math.sqrt(module.weight[0].numel())  # kaiming_uniform with a = sqrt(5)
                module.weight.uniform_(-bound, bound, generator=generator)
                if module.bias is not None:
                    module.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.reset_parameters()
            elif draw := getattr(module, "draw_initial", None):
                draw(generator)

    def freeze_groups(self) -> list[str]:
        """Return prefixes of parameter names, such as ``model.0.``, in the order of ``--freeze N``."""
        raise NotImplementedError


@torch.no_grad()
def fuse(model: Detector) -> Detector:
    """Return a copy in evaluation mode with folded batch normalisation; its outputs are equal up to rounding.

    Every block that can be folded has a method ``fold``.
    """
    fused = copy.deepcopy(model).eval()
    for module in fused.modules():
        fold = getattr(module, "fold", None)
        if fold is not None:
            fold()
    return fused.requires_grad_(False)


class AnchorDetector(Detector):
    """A network with anchors. Raw predictions per level are [N, A, H/s, W/s, 5 + C], views of convolutions' outputs."""

    codings: tuple[BoxCoding, ...]

    @property
    def anchors_px(self) -> Tensor:
        """[L, A, 2] width, height, pixels, float32."""
        raise NotImplementedError

    def decode(self, raws: Sequence[Tensor]) -> Decoded:
        """Convert raw predictions to boxes and probabilities, in float32; rows by level, anchor, y, x."""
        decoded = []
        levels = zip(raws, self.strides, self.anchors_px, self.codings, strict=True)
        for raw, stride, anchors, coding in levels:
            n, a, h, w, values = raw.shape
            raw = raw.float()
            boxes = coding.boxes(raw[..., :4], to_device(anchors, raw.device).view(1, a, 1, 1, 2))
            xs = torch.arange(w, device=raw.device, dtype=raw.dtype)
            ys = torch.arange(h, device=raw.device, dtype=raw.dtype)
            cells = torch.stack([xs.expand(h, w), ys[:, None].expand(h, w)], -1)  # [H, W, 2]
            centres = (boxes[..., :2] + cells) * stride
            rows = torch.cat([centres, boxes[..., 2:], raw[..., 4:].sigmoid()], -1)  # [N, A, H, W, 5 + C]
            decoded.append(rows.reshape(n, a * h * w, values))
        return Decoded(torch.cat(decoded, 1))

    def set_priors(self, last: Sequence[nn.Conv2d]) -> None:
        """Add priors to the initial biases of each level's last convolution (arXiv:1708.02002, section 3.3).

        They assume about 8 objects in an image of 640 pixels, and equally likely classes.
        """
        for conv, stride in zip(last, self.strides, strict=True):
            assert conv.bias is not None
            bias = conv.bias.view(-1, 5 + self.nc + self.rows_behind_classes)  # [A, 5 + C, ...]
            bias[:, 4] += math.log(8 / (640 / stride) ** 2)
            bias[:, 5 : 5 + self.nc] += math.log(0.6 / (self.nc - 0.99999))


class Fitted(Protocol):
    """A network that says how its images are padded: a ``Detector``, or several as one."""

    strides: tuple[int, ...]
    pads_to_square: bool


def square_of(model: Fitted, img: int, fit: str = "auto") -> tuple[int, int] | None:
    """Return the height and width that all images are padded to, pixels; None if each image gets the least padding.

    Args:
        img: longest side of the image; rounded up to the stride.
        fit: rect | batch | square | auto (as in the family's own evaluation).
    """
    if fit in ("rect", "batch") or (fit == "auto" and not model.pads_to_square):
        return None
    side = -(-img // max(model.strides)) * max(model.strides)
    return side, side
