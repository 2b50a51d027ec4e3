"""Trained weights as a value: tensors, and a header with everything needed to use them.

Our files are safetensors with the official tensor names, in fp32. Their header has description, class names, strides, image
size and a SHA-256 of the content (``format.py``). ``reader.py`` reads them and other formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.description import ModelDescription, description_from_dict
from yolofleet.families.networks.detector import Detector
from yolofleet.families.weights.format import write_tensors
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.text import screen_line

HEADER = "weights"  # key of the header in our files
FORMAT_VERSION = 1
UNCOUNTED = "num_batches_tracked"  # may be missing, because no code reads it
UNSTATED = {"img": "not stated by the file"}  # in ``extra`` of weights whose size is an assumption
ASSUMED = "assumed"  # key in ``extra``: see ``WeightsHeader.assumed``


@dataclass(frozen=True)
class WeightsHeader:
    """The header of a weights file.

    Attributes:
        img: image size in training, pixels; 640 if the file does not state it, see ``trained_px``.
        extra: JSON values, such as epoch and step.
    """

    description: ModelDescription
    nc: int
    names: tuple[str, ...]
    strides: tuple[int, ...]
    img: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Detector, *, img: int, extra: Mapping[str, Any] | None = None) -> WeightsHeader:
        return cls(model.description, model.nc, model.names, model.strides, img, extra or {})

    @property
    def family(self) -> str:
        return self.description.family

    @property
    def trained_px(self) -> int | None:
        """Return the image size in training, pixels; None: the file does not state it."""
        return None if self.extra.get("img") == UNSTATED["img"] else self.img

    @property
    def assumed(self) -> dict[str, str]:
        """Return what the reader assumed because the file does not state it: "names" or "activation" -> a sentence."""
        found = self.extra.get(ASSUMED)
        return (
            {str(k): screen_line(v, limit=300) for k, v in found.items()} if isinstance(found, dict) else {}
        )

    @property
    def anchors_px(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """[L][A] width, height; () if the family has no anchors."""
        return getattr(self.description, "anchors_px", ())

    def to_dict(self) -> dict[str, Any]:
        return {  # other programs find family and anchors at the top level
            "version": FORMAT_VERSION,
            "family": self.family,
            "description": self.description.to_dict(),
            "nc": self.nc,
            "names": list(self.names),
            "strides": list(self.strides),
            "anchors_px": self.anchors_px,
            "img": self.img,
            "extra": dict(self.extra),
        }

    @classmethod
    def from_dict(cls, values: Any, *, source: str) -> WeightsHeader:
        """Check and return a header from a file. Raise CheckpointError if it is not one of our files."""
        if not isinstance(values, dict) or values.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{source} has a header of an unknown version",
                hint="a newer yolofleet wrote it; update yolofleet",
            )
        try:
            description = description_from_dict(values["description"], source=source)
            nc, names, strides, img = (values[key] for key in ("nc", "names", "strides", "img"))
            model = outline(description, whole_number(nc))
            extra = values.get("extra", {})
            if tuple(strides) != model.strides or len(names) != nc or not isinstance(extra, dict):
                raise ValueError("its strides, names or extra do not fit its model")
            return cls(description, nc, class_names(names, nc), model.strides, whole_number(img), extra)
        except ConfigError as problem:
            raise CheckpointError(f"{source}: {problem.what}", hint=problem.hint) from None
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"{source} has a wrong header: {problem}") from None


@dataclass(frozen=True)
class Weights:
    """Tensors by official name (CPU; floats are fp32), and their header."""

    tensors: dict[str, Tensor]
    header: WeightsHeader

    @property
    def description(self) -> ModelDescription:
        return self.header.description


def write_weights(path: Path, weights: Weights) -> None:
    """Write weights atomically.

    Raises:
        NumericsError: a tensor has NaN or infinity. StorageError: the file cannot be written. ``path`` is unchanged.
    """
    tensors = {name: as_fp32(t.detach()) for name, t in weights.tensors.items()}
    write_tensors(path, tensors, {HEADER: weights.header.to_dict()})


def class_names(value: Any, nc: int) -> tuple[str, ...]:
    """Return class names from a list or a {number: name}, without control characters; numbers without names."""
    if isinstance(value, dict):
        value = [value.get(i) for i in range(nc)]
    if not isinstance(value, (list, tuple)) or len(value) != nc or not all(isinstance(v, str) for v in value):
        return tuple(str(i) for i in range(nc))
    return tuple("".join(c if c.isprintable() else "?" for c in v[:200]) for v in value)


def whole_number(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise ValueError(f"expected a whole number from 1 to 1,000,000, got {str(value)[:40]}")
    return value


def as_fp32(t: Tensor) -> Tensor:
    """Return floats of any width as fp32 on the CPU; integers keep their type."""
    return t.to("cpu", torch.float32) if t.is_floating_point() else t.cpu()


def shape_text(t: Tensor) -> str:
    return "x".join(str(n) for n in t.shape) or "one number"
