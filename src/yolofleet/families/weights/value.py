"""Trained weights as a value: tensors, and a header with everything needed to use them.

Our files are safetensors with the official tensor names, in fp32. Their header has description, class names, strides, image
size and a SHA-256 of the content (``format.py``). ``reader.py`` reads them and other formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.description import ModelDescription, description_from_dict
from yolofleet.families.networks.detector import Detector
from yolofleet.families.weights.format import non_finite, write_tensors
from yolofleet.support.errors import CheckpointError, ConfigError, NonFiniteError
from yolofleet.support.text import screen_line

if TYPE_CHECKING:
    from yolofleet.families.weights.pickles import StoredTensor

HEADER = "weights"  # key of the header in our files
FORMAT_VERSION = 1
UNCOUNTED = "num_batches_tracked"  # may be missing, because no code reads it
UNSTATED = {"img": "not stated by the file"}  # in ``extra`` of weights whose size is an assumption


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
        """Check and return a header from a file.

        Raises:
            CheckpointError: it is not a valid header of our files.
        """
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


@dataclass(frozen=True)
class TransferReport:
    """The result of :func:`transfer`.

    Attributes:
        loaded: names of the copied tensors.
        skipped: (name, reason) of the model's other tensors.
    """

    loaded: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """Return the report as one line."""
        total = len(self.loaded) + len(self.skipped)
        text = f"{len(self.loaded)} of {total} tensors taken over"
        if self.skipped:
            shown = "; ".join(f"{name} ({reason})" for name, reason in self.skipped[:6])
            more = f"; and {len(self.skipped) - 6} more" if len(self.skipped) > 6 else ""
            text += f"; freshly initialised: {shown}{more}"
        return text


# -- writing, building ---------------------------------------------------------------------------------------


def write_weights(path: Path, weights: Weights) -> None:
    """Write weights atomically.

    Raises:
        NumericsError: a tensor has NaN or infinity. StorageError: the file cannot be written. ``path`` is unchanged.
    """
    tensors = {name: as_fp32(t.detach()) for name, t in weights.tensors.items()}
    write_tensors(path, tensors, {HEADER: weights.header.to_dict()})


def model_from_weights(weights: Weights) -> Detector:
    """Return a network with these weights and names, in evaluation mode; it shares no memory with ``weights``.

    Raises:
        CheckpointError: the weights are those of a backbone only.
    """
    header = weights.header
    if "partial" in header.extra:
        raise CheckpointError(str(header.extra["partial"]), hint="use them to start a training")
    model = outline(header.description, header.nc).to_empty(device="cpu")
    state = model.state_dict()
    for name, t in state.items():
        if name in weights.tensors:
            t.copy_(weights.tensors[name])
        else:
            assert name.endswith(UNCOUNTED), name
            t.zero_()
    model.names, model.trained_px = header.names, header.trained_px
    return model.eval()


@torch.no_grad()
def transfer(model: Detector, weights: Weights) -> TransferReport:
    """Copy the tensors that fit by name and shape into ``model``; its anchors stay.

    Raises:
        CheckpointError: no convolution fits.
    """
    loaded, skipped = [], []
    for name, t in model.state_dict().items():
        given = weights.tensors.get(name)
        if name.endswith((".anchors", UNCOUNTED)):
            continue
        if given is None:
            skipped.append((name, "not in the file"))
        elif given.shape != t.shape:
            skipped.append((name, f"{shape_text(given)} in the file, {shape_text(t)} here"))
        else:
            t.copy_(given)
            loaded.append(name)
    if all(weights.tensors[name].dim() < 2 for name in loaded):  # biases may fit by chance
        raise CheckpointError(
            f"no layer of the weights ({weights.description.name}) fits the model {model.description.name}",
            hint=f"remove --model and --cfg, or use --model {weights.description.name}",
        )
    return TransferReport(tuple(loaded), tuple(skipped))


def with_class_order(weights: Weights, columns: Sequence[int]) -> Weights:
    """Return the weights with their classes in another order; the last rows of each anchor are those of its classes.

    The tensors that the network's ``classes_first`` names have the rows of the classes first.

    Args:
        columns: for each new class the number of the old one; at least two.
    """
    header, tensors = weights.header, dict(weights.tensors)
    smaller = outline(header.description, header.nc - 1)
    fewer, first = smaller.state_dict(), smaller.classes_first  # without a row of each anchor
    for name, t in weights.tensors.items():
        if name in fewer and fewer[name].shape != t.shape:
            rows = t.unflatten(0, (len(t) - len(fewer[name]), -1))  # [A, other + C, ...]
            other = rows.shape[1] - header.nc
            order = [*range(other), *(other + c for c in columns)]
            if name in first:
                order = [*columns, *range(header.nc, rows.shape[1])]
            tensors[name] = rows[:, order].flatten(0, 1)
    names = tuple(header.names[c] for c in columns)
    return Weights(tensors, replace(header, names=names))


# -- checks -------------------------------------------------------------------------------------------------


def misfits(given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int) -> list[str]:
    """Return texts about missing, extra and differently shaped tensors, compared with the description's network."""
    expected = {name: tuple(t.shape) for name, t in outline(description, nc).state_dict().items()}
    found = {name: tuple(t.shape) for name, t in given.items()}
    missing = [f"{n} is missing" for n in expected if n not in found and not n.endswith(UNCOUNTED)]
    surplus = [f"{n} is unknown" for n in found if n not in expected]
    wrong = [
        f"{n} is {found[n]} instead of {shape}"
        for n, shape in expected.items()
        if n in found and found[n] != shape
    ]
    return missing + surplus + wrong


def check_fit(
    given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int, source: str
) -> None:
    """Raise if names or shapes differ from the description's network.

    Raises:
        CheckpointError: see above.
    """
    try:
        problems = misfits(given, description, nc)
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    if not problems:
        return
    folded = "model.0.conv.bias" in given and "model.0.bn.weight" not in given
    raise CheckpointError(
        f"{source}: {len(problems)} tensors do not fit the model {description.name}: {'; '.join(problems[:3])}",
        hint="its batch normalisation is folded; use the file that training wrote"
        if folded
        else "the file belongs to another model",
    )


def check_values(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise on values that no training gives, because they would make every prediction wrong without an error.

    Raises:
        NonFiniteError: a tensor has NaN or infinity.
        CheckpointError: a tensor has values that are not real numbers, or is a negative variance.
    """
    for name, t in tensors.items():
        if name.endswith(UNCOUNTED):
            continue
        if not t.is_floating_point():
            raise CheckpointError(f"{source}: {screen_line(name)} has {t.dtype}, expected real numbers")
        if non_finite({name: t}):
            raise NonFiniteError(f"{source}: {screen_line(name)} is not finite")
        if name.endswith("running_var") and t.numel() and t.min() < 0:
            raise CheckpointError(
                f"{source}: the variance {screen_line(name)} has negative values",
                hint="the file is damaged, or belongs to another model; use another copy",
            )


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
