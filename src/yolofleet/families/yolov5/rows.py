"""YOLOv5's description of a network: rows of (inputs, repeats, module, arguments), two multiples, anchors.

It also describes YOLOv3 as Ultralytics publishes it. Descriptions come from ``row_presets``, users' YAML files and
headers of weights files. All are untrusted, none is evaluated, and every size is checked before memory is allocated.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from yolofleet.families.networks.checked import Checker, known_names, short
from yolofleet.storage.yaml_lines import read_yaml

MAX_FILE_BYTES = 100_000  # of a YAML description; yolov5x6.yaml has 2,000
MAX_ROWS = 300
MAX_REPEATS = 100
MAX_BLOCKS = 1000  # after the depth multiple, in all rows together; yolov5x6 has 51
MAX_CHANNELS = 16384
MAX_KERNEL = 31
MAX_LEVELS = 8
MAX_ANCHORS = 32
MIN_STRIDE, MAX_STRIDE = Fraction(1, 4), 1024
PROTOTYPE_STRIDE = 4  # pixels of the image per cell of masks

Anchors = tuple[tuple[tuple[float, float], ...], ...]  # [L][A] (width, height), pixels


@dataclass(frozen=True)
class Row:
    """One line of a description.

    Attributes:
        inputs: row numbers; negative ones count back from this row.
        repeats: before the depth multiple.
        module: a key of ``MODULES``.
        args: before the width multiple.
    """

    inputs: tuple[int, ...]
    repeats: int
    module: str
    args: tuple[Any, ...]

    def to_list(self) -> list[Any]:
        inputs = self.inputs[0] if len(self.inputs) == 1 else list(self.inputs)
        args = [list(a) if isinstance(a, tuple) else a for a in self.args]
        return [inputs, self.repeats, self.module, args]


@dataclass(frozen=True)
class Layer:
    """A row with derived values: absolute input numbers (-1 is the image), channels, stride."""

    inputs: tuple[int, ...]
    repeats: int
    module: str
    args: tuple[Any, ...]
    in_channels: tuple[int, ...]
    out_channels: int
    stride: Fraction


@dataclass(frozen=True)
class RowDescription:
    """A network without its number of classes.

    Attributes:
        backbone, head: rows with consecutive numbers; the last is ``Detect``, or ``Segment`` for masks.
        anchors_px: [L][A] (width, height) pixels, in the order of the last row's inputs.
    """

    name: str
    depth_multiple: float
    width_multiple: float
    backbone: tuple[Row, ...]
    head: tuple[Row, ...]
    anchors_px: Anchors

    family = "yolov5"

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.backbone + self.head

    @property
    def prototypes(self) -> int:
        """Number of prototypes of masks; 0 for a network that finds boxes."""
        last = self.rows[-1]
        if last.module != "Segment":
            return 0
        found: int = (*last.args, MODULES["Segment"][2].default)[2]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them."""
        return {
            "family": self.family,
            **vars(self),
            "backbone": [row.to_list() for row in self.backbone],
            "head": [row.to_list() for row in self.head],
        }

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> RowDescription:
        """Check all values and return the description. Raise ConfigError, which names the wrong key or row, and ``source``."""
        check = _Checker(source)
        check.keys(values, ("family", *(field.name for field in fields(cls))))
        backbone = check.rows("backbone", values["backbone"], first=0)
        description = cls(
            name=check.name(values["name"]),
            depth_multiple=check.number("depth_multiple", values["depth_multiple"], 0.01, 10.0),
            width_multiple=check.number("width_multiple", values["width_multiple"], 0.01, 10.0),
            backbone=backbone,
            head=check.rows("head", values["head"], first=len(backbone)),
            anchors_px=check.anchors(values["anchors_px"]),
        )
        layers(description, source=source)
        return description

    def with_anchors(self, anchors_px: Sequence[Sequence[Sequence[float]]]) -> RowDescription:
        """Return the same network with other anchors [L][A][2], pixels."""
        return replace(self, anchors_px=_Checker(self.name).anchors(anchors_px))


def plain_anchors(stride: int, count: int) -> tuple[tuple[float, float], ...]:
    """Return ``count`` boxes with the area of 4 x 4 cells and aspect ratios from 2 : 1 to 1 : 2, in pixels."""
    turns = [2 * i / (count - 1) - 1 for i in range(count)] if count > 1 else [0.0]
    return tuple((4 * stride * 2 ** (t / 2), 4 * stride * 2 ** (-t / 2)) for t in turns)


# -- a user's YAML, or the `yaml` mapping inside a YOLOv5 checkpoint -------------------------------------


def read_description(path: Path) -> RowDescription:
    """Return the description in a YAML file with YOLOv5's keys. Raise ConfigError, as :func:`from_yolov5_mapping`."""
    values = {key: located.value for key, located in read_yaml(path, limit_bytes=MAX_FILE_BYTES).items()}
    return from_yolov5_mapping(values, name=path.stem[:200], source=str(path))


def from_yolov5_mapping(values: Any, *, name: str, source: str) -> RowDescription:
    """Return the description from YOLOv5's keys: nc, depth_multiple, width_multiple, anchors, backbone, head.

    As in YOLOv5, ``nc`` is ignored because the data set has it, ``anchors`` may be a number per level (automatic anchors
    replace them later), and anchors in the reverse order of the strides are reversed.

    Raises:
        ConfigError: names the wrong key or row, and ``source``.
    """
    check = _Checker(source)
    described = ("depth_multiple", "width_multiple", "backbone", "head")
    check.keys(values, (*described, "anchors"), ("nc", "ch", "yaml_file"))
    if values.get("ch", 3) != 3:
        raise check.error(
            f"ch is {short(values['ch'])}, expected 3", "only images with 3 channels are supported"
        )
    anchors = values["anchors"]
    counted = type(anchors) is int
    if counted:
        per_level = int(check.number("anchors", anchors, 1, MAX_ANCHORS))
        detect = check.rows("head", values["head"], first=0)[-1]
        anchors = [[(1, 1)] * per_level] * len(detect.inputs)
    elif (  # a pickled description may refer to one long list many times: check lengths before the lists are built
        isinstance(anchors, list)
        and len(anchors) <= MAX_LEVELS
        and all(
            isinstance(level, list) and len(level) % 2 == 0 and len(level) <= 2 * MAX_ANCHORS
            for level in anchors
        )
    ):
        anchors = [list(zip(level[::2], level[1::2], strict=True)) for level in anchors]
    description = RowDescription.from_dict(
        {"family": "yolov5", "name": name, "anchors_px": anchors, **{key: values[key] for key in described}},
        source=source,
    )
    plan = layers(description)
    strides = [plan[i].stride for i in plan[-1].inputs]
    if counted:
        return replace(description, anchors_px=tuple(plain_anchors(int(s), per_level) for s in strides))
    areas = [sum(w * h for w, h in level) for level in description.anchors_px]
    if (areas[-1] - areas[0]) * (strides[-1] - strides[0]) < 0:
        return replace(description, anchors_px=description.anchors_px[::-1])
    return description


# -- checking -------------------------------------------------------------------------------------------

REQUIRED = object()


@dataclass(frozen=True)
class Argument:
    """A positional argument of a module: a whole number in [low, high], or one of ``words``."""

    name: str
    default: Any = REQUIRED
    low: int = 0
    high: int = 0
    words: tuple[Any, ...] = ()
    lengths: tuple[int, ...] = ()  # permitted lengths of a list of such numbers
    square: bool = False  # a list of equal numbers means one of them

    def read(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) in self.lengths:
            values = tuple(self._one(v) for v in value)
            if not self.square:
                return values
            if len(set(values)) == 1:
                return values[0]
        return self._one(value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, str):
            value = {"None": None, "True": True, "False": False}.get(value, value)
        for word in self.words:
            if type(value) is type(word) and value == word:
                return value
        if self.high and type(value) is int and self.low <= value <= self.high:
            return value
        expected = [f"a whole number {self.low}..{self.high}"] if self.high else []
        expected += [str(w) for w in self.words]
        raise ValueError(f"{self.name} is {short(value)}, expected {' or '.join(expected)}")


OUT = Argument("output channels", low=1, high=MAX_CHANNELS)
KERNEL = Argument("kernel", 1, 1, MAX_KERNEL, lengths=(2,), square=True)
STRIDE = Argument("stride", 1, 1, 8)
PADDING = Argument("padding", None, 0, MAX_KERNEL, words=(None,))
SHORTCUT = Argument("shortcut", True, words=(True, False))
HEAD = Argument("classes", "nc", words=("nc",)), Argument("anchors", "anchors", words=("anchors",))

MODULES: dict[str, tuple[Argument, ...]] = {
    "Conv": (OUT, KERNEL, STRIDE, PADDING, Argument("groups", 1, 1, MAX_CHANNELS)),
    "Focus": (OUT, KERNEL, STRIDE, PADDING),
    "Bottleneck": (OUT, SHORTCUT),
    "C3": (OUT, SHORTCUT),
    "SPP": (OUT, Argument("kernels", (5, 9, 13), 1, MAX_KERNEL, lengths=tuple(range(1, 17)))),
    "SPPF": (OUT, Argument("kernel", 5, 1, MAX_KERNEL)),
    "Concat": (Argument("dimension", 1, 1, 1),),
    "nn.MaxPool2d": (
        Argument("kernel", low=1, high=MAX_KERNEL),
        Argument("stride", None, 1, 8, words=(None,)),  # None: the kernel
        Argument("padding", 0, 0, MAX_KERNEL),
    ),
    "nn.ZeroPad2d": (Argument("left, right, top, bottom", low=0, high=MAX_KERNEL, lengths=(4,)),),
    "nn.Upsample": (
        Argument("size", words=(None,)),
        Argument("scale", 2, 2, 2),
        Argument("mode", "nearest", words=("nearest",)),
    ),
    "Detect": HEAD,
    "Segment": (
        *HEAD,
        Argument("prototypes", 32, 1, MAX_CHANNELS),
        Argument("channels of the prototypes", 256, 1, MAX_CHANNELS),
    ),
}
HEADS = ("Detect", "Segment")
NOT_REPEATABLE = ("Concat", "nn.MaxPool2d", "nn.ZeroPad2d", "nn.Upsample", *HEADS)


class _Checker(Checker):
    def anchors(self, value: Any) -> Anchors:
        """Return anchors [L][A][2] in pixels, with the same number A > 0 on each level."""
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_LEVELS:
            raise self.error(f"anchors must be a list with one list per level, at most {MAX_LEVELS}")
        found: list[tuple[tuple[float, float], ...]] = []
        for i, level in enumerate(value):
            if not isinstance(level, (list, tuple)) or not 1 <= len(level) <= MAX_ANCHORS:
                raise self.error(f"anchors of level {i}: expected 1..{MAX_ANCHORS} pairs of width, height")
            for pair in level:
                good = isinstance(pair, (list, tuple)) and len(pair) == 2
                if not good or not all(type(v) in (int, float) and 0 < v <= 100_000 for v in pair):
                    what = f"{short(pair)} is not a width, height pair in pixels"
                    raise self.error(f"anchors of level {i}: {what}")
            found.append(tuple((float(w), float(h)) for w, h in level))
        if len({len(level) for level in found}) != 1:
            raise self.error("every level needs the same number of anchors")
        return tuple(found)

    def rows(self, part: str, value: Any, *, first: int) -> tuple[Row, ...]:
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_ROWS:
            raise self.error(f"{part} must be a list of 1..{MAX_ROWS} rows")
        return tuple(self.row(f"{part} row {first + i}", row) for i, row in enumerate(value))

    def row(self, where: str, value: Any) -> Row:
        if not isinstance(value, (list, tuple)) or len(value) != 4:
            raise self.error(f"{where}: expected [from, number, module, args], got {short(value)}")
        inputs, repeats, module, args = value
        inputs = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if not 1 <= len(inputs) <= 32 or not all(type(i) is int and abs(i) <= 2 * MAX_ROWS for i in inputs):
            raise self.error(f"{where}: 'from' must be a row number or a list of them, not {short(value[0])}")
        if type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS:
            raise self.error(f"{where}: number is {short(repeats)}, expected 1..{MAX_REPEATS}")
        if not isinstance(module, str) or module not in MODULES:
            raise self.error(f"{where}: unknown module {short(module)}", known_names(module, list(MODULES)))
        if module in NOT_REPEATABLE and repeats != 1:
            raise self.error(f"{where}: {module} cannot be repeated")
        return Row(tuple(inputs), repeats, module, self.args(where, module, args))

    def args(self, where: str, module: str, value: Any) -> tuple[Any, ...]:
        declared = MODULES[module]
        if not isinstance(value, (list, tuple)) or len(value) > len(declared):
            raise self.error(
                f"{where}: {module} takes a list of at most {len(declared)} arguments "
                f"({', '.join(a.name for a in declared)}), got {short(value)}"
            )
        missing = [a.name for a in declared[len(value) :] if a.default is REQUIRED]
        if missing:
            raise self.error(f"{where}: {module} needs {missing[0]}")
        try:
            return tuple(argument.read(v) for argument, v in zip(declared, value))  # noqa: B905 defaults may be left out
        except ValueError as problem:
            raise self.error(f"{where}: {module}: {problem}") from None


# -- channels and strides -------------------------------------------------------------------------------


def rounded_width(channels: float) -> int:
    """Return ``channels`` rounded up to a multiple of 8."""
    return math.ceil(channels / 8) * 8


def rounded_depth(repeats: int, multiple: float) -> int:
    """Return the scaled number of repeats, rounded (halves to even), at least 1; a single block stays single."""
    return max(round(repeats * multiple), 1) if repeats > 1 else repeats


def layers(description: RowDescription, *, source: str = "") -> list[Layer]:
    """Return channels, strides and repeats of every row. Raise ConfigError, which names a row that does not fit its inputs."""
    check = _Checker(source or description.name)
    found: list[Layer] = []
    borders: dict[int, tuple[int, int]] = {}  # of zero padding: row -> pixels of width and height
    blocks = 0
    for i, row in enumerate(description.rows):
        where = f"row {i} ({row.module})"
        inputs = tuple(i + j if j < 0 else j for j in row.inputs)
        if any(not (-1 if i == 0 else 0) <= j < i for j in inputs):
            raise check.error(f"{where}: 'from' {list(row.inputs)} must name earlier rows")
        if row.module not in ("Concat", *HEADS) and len(inputs) != 1:
            raise check.error(f"{where} takes one input, not {len(inputs)}")
        if (row.module in HEADS) != (i == len(description.rows) - 1):
            raise check.error(f"{where}: the last row must be Detect or Segment, and no other row")
        in_channels = tuple(found[j].out_channels if j >= 0 else 3 for j in inputs)
        strides = [found[j].stride if j >= 0 else Fraction(1) for j in inputs]
        padded = [j for j in inputs if j in borders]
        if padded and row.module not in ("Conv", "nn.MaxPool2d"):
            raise check.error(
                f"{where}: the map of row {padded[0]} (nn.ZeroPad2d) has a border",
                "put a Conv or nn.MaxPool2d without padding after it, which removes the border",
            )
        args = row.args + tuple(a.default for a in MODULES[row.module][len(row.args) :])
        out, stride = sum(in_channels), strides[0]
        repeats = rounded_depth(row.repeats, description.depth_multiple)
        if row.module == "Concat" and len(set(strides)) != 1:
            raise check.error(f"{where} joins maps of strides {', '.join(str(s) for s in strides)}")
        if row.module not in NOT_REPEATABLE:
            out = rounded_width(args[0] * description.width_multiple)
            args = (out, *args[1:])
        if row.module == "nn.Upsample":
            stride /= 2
        elif row.module == "nn.ZeroPad2d":
            left, right, top, bottom = args[0] if isinstance(args[0], tuple) else args * 4
            borders[i] = left + right, top + bottom
        elif row.module == "nn.MaxPool2d":
            kernel, step, padding = args
            if 2 * padding > kernel:
                raise check.error(f"{where}: padding {padding} is more than half of kernel {kernel}")
            step = kernel if step is None else step
            stride *= _checked_stride(check, where, kernel, step, padding, borders.get(inputs[0]))
        elif row.module in ("Conv", "Focus"):
            kernel, step = args[1:3]
            padding = kernel // 2 if args[3] is None else args[3]
            stride *= _checked_stride(check, where, kernel, step, padding, borders.get(inputs[0]))
            stride *= 2 if row.module == "Focus" else 1
            groups = args[4] if row.module == "Conv" else 1
            if in_channels[0] % groups or out % groups:
                raise check.error(
                    f"{where}: {groups} groups do not divide {in_channels[0]} and {out} channels"
                )
            if repeats > 1 and (stride != strides[0] or padded):
                raise check.error(f"{where}: a block that reduces the size of the map cannot be repeated")
        elif row.module in HEADS:
            out = 0  # the head has no output map
            if row.module == "Segment":
                args = (*args[:3], rounded_width(args[3] * description.width_multiple))
                if strides[0] != PROTOTYPE_STRIDE * 2:
                    raise check.error(
                        f"{where}: its first input has stride {strides[0]}, expected {PROTOTYPE_STRIDE * 2}",
                        "masks are a quarter of the image, twice as fine as that input",
                    )
            if len(inputs) != len(description.anchors_px):
                raise check.error(
                    f"{where} has {len(inputs)} inputs, but anchors are for {len(description.anchors_px)} levels"
                )
            if any(s.denominator != 1 for s in strides):
                raise check.error(f"{where}: its inputs must not be larger than the image")
        blocks += repeats
        if blocks > MAX_BLOCKS or out > MAX_CHANNELS or not MIN_STRIDE <= stride <= MAX_STRIDE:
            raise check.error(
                f"{where}: the network is too large ({blocks} blocks, {out} channels, stride {stride})"
            )
        found.append(Layer(inputs, repeats, row.module, args, in_channels, out, stride))
    return found


def _checked_stride(
    check: _Checker, where: str, kernel: int, stride: int, padding: int, border: tuple[int, int] | None
) -> int:
    """Return ``stride`` if the window reduces a map of n x stride pixels and its border to exactly n, else raise."""
    for pixels in border or (0, 0):
        if not -stride <= pixels + 2 * padding - kernel < 0:
            zeros = f", after {pixels} rows or columns of zeros" if pixels else ""
            raise check.error(
                f"{where}: kernel {kernel}, stride {stride}, padding {padding}{zeros} do not divide the size of "
                "the map by the stride"
            )
    return stride
