"""What an exported file says about itself: inside the file where the format has a place for it, else beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from yolofleet import __version__
from yolofleet.errors import CheckpointError

KEY = "yolofleet"  # the entry that holds the facts, in every format
VERSION = 1
MAX_TEXT = 16 * 2**20  # characters
MAX_CLASSES = 100_000
MAX_SIDE_PX = 100_000
MAX_BATCH = 4096
MAX_PIXELS = 2**27  # of all images that a file takes at once: 1.5 GiB as float32
IMAGES, DECODED, BOXES = "images", "decoded", "boxes"  # names of the input and of the outputs
COMPUTES = {
    DECODED: "images [N, 3, H, W] float32 RGB in 0..1 -> decoded [N, K, 5 + C] float32: cx, cy, w, h in pixels of the "
    "input, objectness, class probabilities; score = objectness x probability",
    BOXES: "images [N, 3, H, W] float32 RGB in 0..1 -> boxes [N, max_det, 6] float32: x1, y1, x2, y2 in pixels of the "
    "input, score, class; best first, then rows of zeros",
}


@dataclass(frozen=True)
class Suppression:
    """Non-maximum suppression inside a file; see ``geometry.nms.detections`` (a place is its best class only)."""

    conf: float
    iou: float
    max_det: int
    agnostic: bool


@dataclass(frozen=True)
class ExportMetadata:
    """The description of an exported file.

    Attributes:
        family, model: of the network; "unknown" for a file of another program.
        names: class names.
        strides: of the levels, pixels.
        size_hw: height and width of the images it takes; None = any multiples of the largest stride.
        batch: images that it takes at once; None = any number.
        half: computes in 16 bits inside; inputs and outputs are float32 all the same.
        nms: what is suppressed inside; None = the output is decoded, not suppressed.
    """

    family: str
    model: str
    names: tuple[str, ...]
    strides: tuple[int, ...]
    size_hw: tuple[int, int] | None
    batch: int | None
    half: bool = False
    nms: Suppression | None = None

    @property
    def output(self) -> str:
        return DECODED if self.nms is None else BOXES

    @property
    def stride(self) -> int:
        """Sides of images are multiples of it, pixels."""
        return max(self.strides)

    def to_json(self) -> str:
        values = {
            "version": VERSION,
            "yolofleet": __version__,
            **asdict(self),
            "computes": COMPUTES[self.output],
        }
        return json.dumps(values, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> ExportMetadata:
        """Facts from a file.

        Raises:
            CheckpointError: they are not what :meth:`to_json` writes.
        """
        if len(text) > MAX_TEXT:
            raise CheckpointError(f"{source}: its description has {len(text):,} characters")
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise CheckpointError(
                    f"{source} has a description of an unknown version",
                    hint="export it again with this version",
                )
            nms, size, batch = values["nms"], values["size_hw"], values["batch"]
            facts = cls(
                family=_word(values["family"]),
                model=_word(values["model"]),
                names=class_names(values["names"]),
                strides=tuple(_whole(s, 4096) for s in values["strides"]),
                size_hw=None
                if size is None
                else (_whole(size[0], MAX_SIDE_PX), _whole(size[1], MAX_SIDE_PX)),
                batch=None if batch is None else _whole(batch, MAX_BATCH),
                half=values["half"] is True,
                nms=None if nms is None else _suppression(nms),
            )
            if not 1 <= len(facts.strides) <= 16:
                raise ValueError(f"{len(facts.strides)} strides")
            if (facts.batch or 1) * prod(facts.size_hw or (1,)) > MAX_PIXELS:
                raise ValueError(f"images of more than {MAX_PIXELS:,} pixels at once")
            return facts
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as problem:
            raise CheckpointError(
                f"{source} has a wrong description: {str(problem)[:100]}", hint="export it again"
            ) from None


def class_names(values: Any) -> tuple[str, ...]:
    """Names without characters that a terminal would obey.

    Raises:
        ValueError, TypeError: not a list of 1 to 100,000 texts.
    """
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= MAX_CLASSES:
        raise ValueError("names are not a list")
    return tuple(_word(name) for name in values)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is not a text")
    return "".join(c if c.isprintable() else "?" for c in value[:200])


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"a number is {str(value)[:40]}")
    return value


def _unit(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"a threshold is {str(value)[:40]}")
    return float(value)


def _suppression(values: Any) -> Suppression:
    return Suppression(
        _unit(values["conf"]),
        _unit(values["iou"]),
        _whole(values["max_det"], 1_000_000),
        values["agnostic"] is True,
    )
