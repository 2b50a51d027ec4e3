"""Sections of a Darknet ``.cfg``: their keys, and the shape of their outputs.

The reader ignores keys that only Darknet's own training uses. A key that changes the network's outputs is supported or
raises an error. No torch here.

Source of meanings and defaults: arXiv:1804.02767, arXiv:2004.10934, and outputs of Darknet and OpenCV in
tests/parity/test_darknet_network.py.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from typing import Any

from yolofleet.families.networks.checked import MAX_CLASSES, short

MAX_SECTIONS = 1000
MAX_CHANNELS = 16384
MAX_OUTPUTS = 100_000_000  # channels of raw predictions
MAX_KERNEL = 31
MAX_ITEMS = 512  # of a list
ACTIVATIONS = ("leaky", "linear", "mish", "swish", "relu", "logistic")


@dataclass(frozen=True)
class Key:
    """The format of the text after ``key =``: a whole number or a number in [low, high], or one of ``words``."""

    name: str | None  # in the file; None: the name of the field
    low: float = 0
    high: float = 0
    words: tuple[str, ...] = ()
    whole: bool = True
    many: bool = False  # several numbers, separated by commas

    def read(self, text: str) -> Any:
        """Return the value of ``text``. Raise ValueError, which names the expected values."""
        if not self.many:
            return self._one(text)
        parts = text.removesuffix(",").split(",")
        if len(parts) > MAX_ITEMS:
            raise ValueError(f"expected at most {MAX_ITEMS} values, got {len(parts)}")
        return tuple(self._one(part) for part in parts)

    def _one(self, text: str) -> Any:
        if self.words:
            if text in self.words:
                return text
            raise ValueError(f"{short(text)} is not supported; known: {', '.join(self.words)}")
        pattern = r"[+-]?[0-9]{1,9}" if self.whole else r"[+-]?([0-9]{1,9}\.?[0-9]{0,20}|\.[0-9]{1,20})"
        if re.fullmatch(pattern, text):
            value = int(text) if self.whole else float(text)
            if self.low <= value <= self.high:
                return value
        kind = "a whole number" if self.whole else "a number"
        known = f"{kind} in {self.low:g}..{self.high:g}" if self.low < self.high else f"{self.low:g}"
        raise ValueError(f"{short(text)} is not supported; known: {known}")


def key(
    default: Any = MISSING, low: float = 0, high: float = 0, *, name: str | None = None, **how: Any
) -> Any:
    """Return a dataclass field that is a key of the file."""
    return field(default=default, metadata={"key": Key(name, low, high, **how)})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections. Fields are the keys of the file, with Darknet's defaults."""

    line: int = field(default=0, compare=False)  # 0: not from a file

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @classmethod
    def file_keys(cls) -> dict[str, tuple[str, Key]]:
        """Return, for each key of the file, its field and format."""
        found = [(f.name, f.metadata["key"]) for f in fields(cls) if "key" in f.metadata]
        return {how.name or name: (name, how) for name, how in found}

    def text(self) -> str:
        """Return the section as text of a ``.cfg`` file."""
        lines = [f"[{self.kind}]"]
        for name, (attribute, _) in self.file_keys().items():
            value = getattr(self, attribute)
            if value is not None:
                values = value if isinstance(value, tuple) else (value,)
                lines.append(f"{name}={','.join(_plain(v) for v in values)}")
        return "\n".join(lines) + "\n"

    def inputs(self, i: int) -> tuple[int, ...]:
        """Return the numbers of the sections that section ``i`` reads; -1 is the image."""
        return (i - 1,)

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        """Return channels and stride of the output map from those of the input maps. Raise ValueError if they do not fit."""
        return channels[0], stride


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True, kw_only=True)
class Net(Section):
    """Image size, pixels."""

    width: int = key(low=1, high=100_000)
    height: int = key(low=1, high=100_000)
    channels: int = key(3, 3, 3)

    def inputs(self, i: int) -> tuple[int, ...]:
        raise ValueError("a file can have only one [net], at its beginning")


@dataclass(frozen=True, kw_only=True)
class Convolutional(Section):
    batch_normalize: int = key(0, 0, 1)
    filters: int = key(1, 1, MAX_OUTPUTS)
    size: int = key(1, 1, MAX_KERNEL)
    stride: int = key(1, 1, 8)
    pad: int = key(0, 0, 1)
    padding: int = key(0, 0, MAX_KERNEL)
    groups: int = key(1, 1, MAX_CHANNELS)
    activation: str = key("logistic", words=ACTIVATIONS)

    @property
    def padding_px(self) -> int:
        """Padding on each side, pixels."""
        return self.size // 2 if self.pad else self.padding

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        _check_window(self.size, self.stride, 2 * self.padding_px)
        if channels[0] % self.groups or self.filters % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {channels[0]} and {self.filters} channels")
        return self.filters, stride * self.stride


@dataclass(frozen=True, kw_only=True)
class Shortcut(Section):
    """The sum of the outputs of the previous section and of ``sources``."""

    sources: tuple[int, ...] = key(low=-MAX_SECTIONS, high=MAX_SECTIONS, name="from", many=True)
    activation: str = key("linear", words=ACTIVATIONS)

    def inputs(self, i: int) -> tuple[int, ...]:
        return (i - 1, *_absolute(self.sources, i))

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        if len(set(channels)) > 1:
            raise ValueError(f"cannot add maps of {', '.join(str(c) for c in channels)} channels")
        return channels[0], stride


@dataclass(frozen=True, kw_only=True)
class Route(Section):
    """Concatenation of maps; of each map, part ``group_id`` of ``groups``."""

    layers: tuple[int, ...] = key(low=-MAX_SECTIONS, high=MAX_SECTIONS, many=True)
    groups: int = key(1, 1, MAX_CHANNELS)
    group_id: int = key(0, 0, MAX_CHANNELS)

    def inputs(self, i: int) -> tuple[int, ...]:
        return _absolute(self.layers, i)

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        if self.group_id >= self.groups or any(c % self.groups for c in channels):
            shown = ", ".join(str(c) for c in channels)
            raise ValueError(f"there is no part {self.group_id} of {self.groups} groups of {shown} channels")
        return sum(c // self.groups for c in channels), stride


def _absolute(sections: tuple[int, ...], i: int) -> tuple[int, ...]:
    """Return absolute section numbers; negative ones count back from section ``i``."""
    return tuple(i + j if j < 0 else j for j in sections)


@dataclass(frozen=True, kw_only=True)
class Maxpool(Section):
    """Max pooling. ``padding``: sum of both sides; None: size - 1."""

    size: int = key(low=1, high=MAX_KERNEL)
    stride: int = key(1, 1, 8)
    padding: int | None = key(None, 0, 2 * MAX_KERNEL)

    @property
    def before_after_px(self) -> tuple[int, int]:
        """Padding at the left and top, and at the right and bottom as far as windows reach, pixels."""
        before = (self.size - 1 if self.padding is None else self.padding) // 2
        return before, max(0, self.size - self.stride - before)

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        _check_window(self.size, self.stride, self.size - 1 if self.padding is None else self.padding)
        return channels[0], stride * self.stride


def _check_window(size: int, stride: int, padding: int) -> None:
    """Raise if a map whose sides are multiples of the stride does not shrink by exactly the stride."""
    if not size - stride <= padding < size:
        raise ValueError(
            f"size {size}, stride {stride} and {padding} pixels of padding do not divide the sides of a map by {stride}"
        )


@dataclass(frozen=True, kw_only=True)
class Upsample(Section):
    stride: int = key(2, 2, 2)

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        return channels[0], stride / 2


@dataclass(frozen=True, kw_only=True)
class Dropout(Section):
    """Has no effect, not even in training."""


@dataclass(frozen=True, kw_only=True)
class Yolo(Section):
    """A detection level. ``anchors``: width, height, width, height, ..., pixels; ``mask``: numbers of this level's."""

    mask: tuple[int, ...] | None = key(None, 0, MAX_ITEMS, many=True)
    anchors: tuple[float, ...] = key(low=1e-3, high=100_000, whole=False, many=True)
    classes: int = key(low=1, high=MAX_CLASSES)
    num: int = key(low=1, high=MAX_ITEMS)
    scale_x_y: float = key(1.0, 1.0, 10.0, whole=False)

    @property
    def anchors_px(self) -> tuple[tuple[float, float], ...]:
        """(width, height) of each anchor of this level."""
        mask = range(self.num) if self.mask is None else self.mask
        return tuple((self.anchors[2 * i], self.anchors[2 * i + 1]) for i in mask)

    @property
    def outputs(self) -> int:
        """Channels of the input: 4 box values, objectness and classes of each anchor."""
        return len(self.anchors_px) * (5 + self.classes)

    def output(self, channels: tuple[int, ...], stride: Fraction) -> tuple[int, Fraction]:
        if len(self.anchors) != 2 * self.num:
            raise ValueError(
                f"num={self.num} needs {2 * self.num} numbers in anchors, got {len(self.anchors)}"
            )
        if self.mask is not None and max(self.mask) >= self.num:
            raise ValueError(f"mask names anchor {max(self.mask)}, expected 0 to {self.num - 1}")
        if channels[0] != self.outputs:
            raise ValueError(
                f"the section before it has filters={channels[0]}, expected {self.outputs}: "
                f"{len(self.anchors_px)} anchors x (5 + {self.classes} classes)"
            )
        if stride.denominator != 1:
            raise ValueError("its map is larger than the image")
        return channels[0], stride


SECTIONS: dict[str, type[Section]] = {
    kind.__name__.lower(): kind
    for kind in (Net, Convolutional, Shortcut, Route, Maxpool, Upsample, Dropout, Yolo)
}
SPELLINGS = {"network": "net", "conv": "convolutional", "max": "maxpool"}

# keys that affect only Darknet's own training, or its suppression of boxes
TRAINING_EVERYWHERE = (
    *(
        "learning_rate",
        "stopbackward",
        "onlyforward",
        "dont_update",
        "burnin_update",
        "train_only_bn",
        "clip",
    ),
    *("stream", "wait_stream", "grad_centr"),
)
TRAINING = {
    "yolo": (
        *("jitter", "resize", "random", "ignore_thresh", "truth_thresh", "iou_thresh", "iou_thresh_kind"),
        *("iou_loss", "iou_normalizer", "obj_normalizer", "cls_normalizer", "delta_normalizer", "max_delta"),
        *("label_smooth_eps", "objectness_smooth", "counters_per_class", "focal_loss", "max", "map"),
        *("beta_nms", "nms_kind", "show_details"),
    ),
    "dropout": ("probability", "dropblock", "dropblock_size_rel", "dropblock_size_abs"),
}
# keys of features that are not supported, with the value that switches them off
SWITCHED_OFF = {
    "convolutional": {
        "dilation": "1",
        **dict.fromkeys(
            ("flipped", "binary", "xnor", "bin_output", "antialiasing", "assisted_excitation"), "0"
        ),
        **dict.fromkeys(("deform", "sway", "rotate", "stretch", "stretch_sway", "reverse", "coordconv"), "0"),
        **dict.fromkeys(("dontload", "dontloadscales"), "0"),
    },
    "shortcut": {"weights_type": "none", "weights_normalization": "none"},
    "maxpool": {"maxpool_depth": "0", "antialiasing": "0"},
    "upsample": {"scale": "1"},
    "yolo": {"new_coords": "0"},
}
