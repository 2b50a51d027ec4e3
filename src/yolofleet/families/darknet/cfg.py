"""Read, check and write Darknet networks (``.cfg`` files); built-in networks.

Files are untrusted: nothing is evaluated, and every size is checked before memory is allocated. Weights files store the
description as such a text too, so there is one reader and one set of checks. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from yolofleet.families.darknet.sections import (
    MAX_CHANNELS,
    MAX_SECTIONS,
    SECTIONS,
    SPELLINGS,
    SWITCHED_OFF,
    TRAINING,
    TRAINING_EVERYWHERE,
    Convolutional,
    Maxpool,
    Net,
    Route,
    Section,
    Shortcut,
    Upsample,
    Yolo,
)
from yolofleet.families.networks.checked import Checker, known_names, short
from yolofleet.storage.foreign import read_foreign, reading
from yolofleet.support.errors import ConfigError

MAX_CFG_BYTES = 1_000_000
MAX_LEVELS = 8
MIN_STRIDE, MAX_STRIDE = Fraction(1, 4), 1024
SUPPORTED = "docs/models.md lists the sections and keys of .cfg files that are understood"


@dataclass(frozen=True)
class DarknetDescription:
    """The network of a ``.cfg`` file.

    Its number of classes is a default: :meth:`with_classes` returns the network for another one.

    Attributes:
        net: image size.
        sections: those after [net], numbered from 0 as in Darknet.
    """

    name: str
    net: Net
    sections: tuple[Section, ...]

    family = "darknet"

    @property
    def nc(self) -> int:
        """Number of classes in the file."""
        return next(section.classes for section in self.sections if isinstance(section, Yolo))

    @property
    def img(self) -> int:
        """Longer side of the image size, pixels."""
        return max(self.net.width, self.net.height)

    @property
    def anchors_px(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """[L][A] (width, height), finest level first."""
        return tuple(yolo.anchors_px for _, yolo, _ in levels(layers(self)))

    def with_classes(self, nc: int) -> DarknetDescription:
        """Return the same network for ``nc`` classes."""
        sections = list(self.sections)
        for i, section in enumerate(self.sections):
            if isinstance(section, Yolo):
                sections[i] = yolo = replace(section, classes=nc)
                sections[i - 1] = replace(sections[i - 1], filters=yolo.outputs)  # type: ignore[call-arg]
        return replace(self, sections=tuple(sections))

    def with_anchors(self, anchors_px: Sequence[Sequence[Sequence[float]]]) -> DarknetDescription:
        """Return the same network with other anchors [L][A][2], pixels, finest level first."""
        flat = tuple(float(side) for level in anchors_px for anchor in level for side in anchor)
        sections = list(self.sections)
        first = 0
        for (i, yolo, _), level in zip(levels(layers(self)), anchors_px, strict=True):
            mask = tuple(range(first, first + len(level)))
            sections[i] = replace(yolo, anchors=flat, num=len(flat) // 2, mask=mask)
            first += len(level)
        return parse_cfg(replace(self, sections=tuple(sections)).cfg(), name=self.name, source=self.name)

    def cfg(self) -> str:
        """Return the text of a ``.cfg`` file; :func:`parse_cfg` reads it."""
        return "\n".join(section.text() for section in (self.net, *self.sections))

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them."""
        return {"family": self.family, "name": self.name, "cfg": self.cfg()}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> DarknetDescription:
        """Check all values and return the description. Raise ConfigError, which names the wrong key or line, and ``source``."""
        check = Checker(source)
        check.keys(values, ("family", "name", "cfg"))
        if not isinstance(text := values["cfg"], str):
            raise check.error(f"cfg must be the text of a .cfg file, not {short(text)}")
        return parse_cfg(text, name=check.name(values["name"]), source=source)


# -- reading ----------------------------------------------------------------------------------------------------


def read_cfg(path: Path) -> DarknetDescription:
    """Return the network of a ``.cfg`` file, with the file's name. Raise ConfigError, also as :func:`parse_cfg`."""
    with reading(path, ConfigError, "check the path"):
        content = read_foreign(path, limit_bytes=MAX_CFG_BYTES)
    text = content.decode("utf-8-sig", errors="replace")  # comments may be in any encoding
    return parse_cfg(text, name=path.stem[:200], source=str(path))


def parse_cfg(text: str, *, name: str, source: str) -> DarknetDescription:
    """Return the network that the text of a ``.cfg`` file describes.

    Raises:
        ConfigError: names the line, section and key that are wrong or not supported, and ``source``.
    """
    check = Checker(source)
    if len(text) > MAX_CFG_BYTES:
        what = f"a network description can have at most {MAX_CFG_BYTES} bytes, and the file is larger"
        raise check.error(what, "check the path")
    found = [_section(*part, check) for part in _parts(text, check)]
    if not found or not isinstance(found[0], Net):
        raise check.error("the file does not begin with [net]", "is it a Darknet .cfg file?")
    description = DarknetDescription(name, found[0], tuple(found[1:]))
    layers(description, source=source)
    return description


def _parts(text: str, check: Checker) -> list[tuple[str, int, dict[str, tuple[str, int]]]]:
    """Return kind, line and {key: (value, line)} of each section, as texts."""
    parts: list[tuple[str, int, dict[str, tuple[str, int]]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = "".join(re.split("[#;\0]", line, maxsplit=1)[0].split())  # Darknet ignores all white space
        if line.startswith("[") and line.endswith("]"):
            kind = SPELLINGS.get(line[1:-1], line[1:-1])
            if kind not in SECTIONS:
                hint = known_names(kind, list(SECTIONS))
                raise check.error(f"line {number}: unknown section {short(line)}", hint)
            if len(parts) > MAX_SECTIONS:
                what = f"line {number}: a network can have at most {MAX_SECTIONS} sections"
                raise check.error(what, SUPPORTED)
            parts.append((kind, number, {}))
        elif line:
            name, equals, value = line.partition("=")
            if not equals or not parts:
                what = f"line {number}: expected a [section] or key=value inside one, got {short(line)}"
                raise check.error(what, "is it a Darknet .cfg file?")
            kind, _, given = parts[-1]
            if name in given and name in SECTIONS[kind].file_keys():
                raise check.error(f"line {number} [{kind}]: {name} is given twice", "remove one of them")
            given[name] = value, number
    return parts


def _section(kind: str, line: int, given: Mapping[str, tuple[str, int]], check: Checker) -> Section:
    keys = SECTIONS[kind].file_keys()
    values: dict[str, Any] = {}
    for name, (text, number) in given.items():
        where = f"line {number} [{kind}]"
        if name in keys:
            attribute, how = keys[name]
            try:
                values[attribute] = how.read(text)
            except ValueError as problem:
                raise check.error(f"{where}: {name}: {problem}", SUPPORTED) from None
        elif kind == "net" or name in TRAINING_EVERYWHERE or name in TRAINING.get(kind, ()):
            continue  # [net] has only training keys besides the image size
        elif text != SWITCHED_OFF.get(kind, {}).get(name):
            what = f"{where}: {short(name)} with the value {short(text)} is not supported"
            raise check.error(what, known_names(name, list(keys)))
    for f in fields(SECTIONS[kind]):
        if f.default is MISSING and f.name not in values:
            name = f.metadata["key"].name or f.name
            raise check.error(f"line {line} [{kind}]: {name} is missing", SUPPORTED)
    return SECTIONS[kind](line=line, **values)


# -- inputs, channels and strides -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A section with derived values: absolute input numbers (-1 is the image), channels, stride."""

    section: Section
    inputs: tuple[int, ...]
    in_channels: tuple[int, ...]
    out_channels: int
    stride: Fraction


def levels(plan: Sequence[Layer]) -> list[tuple[int, Yolo, int]]:
    """Return (number, section, stride) of each [yolo], finest level first, in any order of the file."""
    found = [(i, x.section, int(x.stride)) for i, x in enumerate(plan) if isinstance(x.section, Yolo)]
    return sorted(found, key=lambda level: level[2])


def layers(description: DarknetDescription, *, source: str = "") -> list[Layer]:
    """Return inputs, channels and strides of every section. Raise ConfigError, which names one that does not fit."""
    check, sections = Checker(source or description.name), description.sections
    found: list[Layer] = []
    for i, section in enumerate(sections):
        try:
            found.append(_layer(i, sections, found))
        except ValueError as problem:
            where = f"line {section.line}" if section.line else f"section {i}"
            raise check.error(f"{where} [{section.kind}]: {problem}", SUPPORTED) from None
    _check_levels(found, check)
    return found


def _layer(i: int, sections: Sequence[Section], found: Sequence[Layer]) -> Layer:
    section = sections[i]
    inputs = section.inputs(i)
    for j in inputs:
        if not (-1 if i == 0 and not isinstance(section, Route) else 0) <= j < i:
            raise ValueError(f"section {i} must read earlier sections, not section {j}")
        if j >= 0 and isinstance(sections[j], Yolo):
            raise ValueError("it cannot read the boxes of a [yolo]; put a [route] before it")
        if _is_detection(j, sections) and not isinstance(section, Yolo):
            raise ValueError(f"it cannot read section {j}, which belongs to a [yolo]")
    if isinstance(section, Yolo) and not _is_detection(i - 1, sections):
        raise ValueError(
            "the section before it must be [convolutional] with activation=linear, without groups and batch_normalize"
        )
    strides = [found[j].stride if j >= 0 else Fraction(1) for j in inputs]
    if len(set(strides)) > 1:
        raise ValueError(f"it cannot join maps of strides {', '.join(str(s) for s in strides)}")
    in_channels = tuple(found[j].out_channels if j >= 0 else 3 for j in inputs)
    out, stride = section.output(in_channels, strides[0])
    if (out > MAX_CHANNELS and not _is_detection(i, sections)) or not MIN_STRIDE <= stride <= MAX_STRIDE:
        raise ValueError(f"the network is too large ({out} channels, stride {stride})")
    return Layer(section, inputs, in_channels, out, stride)


def _is_detection(i: int, sections: Sequence[Section]) -> bool:
    """Return whether section ``i`` computes the raw predictions of a [yolo] after it."""
    conv = sections[i] if i >= 0 else None
    return (
        isinstance(conv, Convolutional)
        and (conv.activation, conv.groups, conv.batch_normalize) == ("linear", 1, 0)
        and i + 1 < len(sections)
        and isinstance(sections[i + 1], Yolo)
    )


def _check_levels(plan: Sequence[Layer], check: Checker) -> None:
    found = [yolo for _, yolo, _ in levels(plan)]
    if not 1 <= len(found) <= MAX_LEVELS:
        raise check.error(
            f"expected 1 to {MAX_LEVELS} [yolo] sections, got {len(found)}",
            "classification networks and detectors older than YOLOv3 are not supported",
        )
    for what, values in (
        ("classes", [yolo.classes for yolo in found]),
        ("anchors", [len(yolo.anchors_px) for yolo in found]),
    ):
        if len(set(values)) > 1:
            shown = ", ".join(str(value) for value in values)
            raise check.error(f"the [yolo] sections have {shown} {what}; all need the same number", SUPPORTED)
    wanted = {i for i, layer in enumerate(plan) if isinstance(layer.section, Yolo)}
    for i in range(len(plan) - 1, -1, -1):
        if i in wanted:
            wanted.update(plan[i].inputs)
        elif isinstance(plan[i].section, Convolutional):
            line = plan[i].section.line
            raise check.error(f"line {line} [convolutional]: no [yolo] depends on it", "remove the section")


# -- built-in ---------------------------------------------------------------------------------------------------

ANCHORS = (10, 13, 16, 30, 33, 23, 30, 61, 62, 45, 59, 119, 116, 90, 156, 198, 373, 326)
TINY_ANCHORS = (10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319)
CLASSES = 80


def preset_names() -> list[str]:
    return list(PRESETS)


def preset(name: str) -> DarknetDescription:
    """Return the network of the published weights of one of the names from :func:`preset_names`."""
    img, sections = PRESETS[name]
    return DarknetDescription(name, Net(width=img, height=img), tuple(sections()))


def companion(name: str) -> tuple[str, str]:
    """Return the suffix and the text of the file beside published weights of a built-in network."""
    return ".cfg", preset(name).cfg()


def _conv(filters: int, size: int, stride: int = 1) -> Section:
    return Convolutional(
        batch_normalize=1, filters=filters, size=size, stride=stride, pad=1, activation="leaky"
    )


def _detection(mask: tuple[int, ...], anchors: tuple[int, ...]) -> list[Section]:
    yolo = Yolo(mask=mask, anchors=tuple(map(float, anchors)), classes=CLASSES, num=len(anchors) // 2)
    return [Convolutional(filters=yolo.outputs, pad=1, activation="linear"), yolo]


def _yolov3(*, spp: bool = False) -> list[Section]:
    """Return Darknet-53 and three levels, coarsest first (arXiv:1804.02767).

    ``spp``: with spatial pyramid pooling before the coarsest level (arXiv:1406.4729).
    """
    found = [_conv(32, 3)]
    stages = []  # last section of each
    for filters, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        found.append(_conv(filters, 3, stride=2))
        for _ in range(blocks):
            found += [_conv(filters // 2, 1), _conv(filters, 3), Shortcut(sources=(-3,))]
        stages.append(len(found) - 1)
    for level, filters in enumerate((512, 256, 128)):
        if level:
            found += [
                Route(layers=(-4,)),
                _conv(filters, 1),
                Upsample(),
                Route(layers=(-1, stages[-1 - level])),
            ]
        found += [_conv(filters, 1), _conv(2 * filters, 3), _conv(filters, 1)]
        if spp and level == 0:
            for back, size in ((-2, 5), (-4, 9)):
                found += [Maxpool(size=size), Route(layers=(back,))]
            found += [Maxpool(size=13), Route(layers=(-1, -3, -5, -6)), _conv(filters, 1)]
        found += [_conv(2 * filters, 3), _conv(filters, 1), _conv(2 * filters, 3)]
        first = 6 - 3 * level
        found += _detection((first, first + 1, first + 2), ANCHORS)
    return found


def _tiny() -> list[Section]:
    """Return YOLOv3-tiny. Its finer level has anchors 1, 2, 3, which the published weights were trained with.

    Later files have 0, 1, 2, with which the same weights detect much less.
    """
    found: list[Section] = []
    for filters in (16, 32, 64, 128, 256):
        found += [_conv(filters, 3), Maxpool(size=2, stride=2)]
    fine = len(found) - 2
    found += [_conv(512, 3), Maxpool(size=2), _conv(1024, 3), _conv(256, 1), _conv(512, 3)]
    found += _detection((3, 4, 5), TINY_ANCHORS)
    found += [Route(layers=(-4,)), _conv(128, 1), Upsample(), Route(layers=(-1, fine)), _conv(256, 3)]
    return found + _detection((1, 2, 3), TINY_ANCHORS)


PRESETS: dict[str, tuple[int, Callable[[], list[Section]]]] = {  # image size and sections
    "darknet-yolov3": (608, _yolov3),
    "darknet-yolov3-spp": (608, lambda: _yolov3(spp=True)),
    "darknet-yolov3-tiny": (416, _tiny),
}
