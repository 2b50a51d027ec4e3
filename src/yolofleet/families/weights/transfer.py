"""Put trained weights into a network: all of them, or those that fit a network to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from yolofleet.families.build import outline
from yolofleet.families.networks.detector import Detector
from yolofleet.families.weights.value import UNCOUNTED, Weights, shape_text
from yolofleet.support.errors import CheckpointError


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
    model.names, model.trained_px, model.assumed = header.names, header.trained_px, header.assumed
    return model.eval()


@torch.no_grad()
def transfer(model: Detector, weights: Weights) -> TransferReport:
    """Copy the tensors that fit by name and shape into ``model``; its anchors stay. Raise CheckpointError if none fits."""
    loaded, skipped, other = [], [], _other_heads(model, weights)
    for name, t in model.state_dict().items():
        given = weights.tensors.get(name)
        if name.endswith((".anchors", UNCOUNTED)):
            continue
        if name in other:
            skipped.append((name, other[name]))
        elif given is None:
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


def _other_heads(model: Detector, weights: Weights) -> dict[str, str]:
    """Return why tensors with rows of classes are left out by name, if the file has other rows beside them.

    Shapes cannot show it: 80 classes have as many rows as 48 classes and 32 coefficients of masks.
    """
    theirs = outline(weights.description, weights.header.nc)
    if theirs.rows_behind_classes == model.rows_behind_classes:
        return {}
    more = outline(model.description, model.nc + 1).state_dict()
    why = f"those in the file find {theirs.task}, and these {model.task}"
    return {name: why for name, t in model.state_dict().items() if t.shape != more[name].shape}


def with_class_order(weights: Weights, columns: Sequence[int]) -> Weights:
    """Return the weights with their classes in another order; the last rows of each anchor are those of its classes.

    The tensors that the network's ``classes_first`` names have the rows of the classes first.

    Args:
        columns: for each new class the number of the old one; at least two.
    """
    header, tensors = weights.header, dict(weights.tensors)
    smaller = outline(header.description, header.nc - 1)
    fewer, first = smaller.state_dict(), smaller.classes_first  # without a row of each anchor
    behind = smaller.rows_behind_classes
    for name, t in weights.tensors.items():
        if name in fewer and fewer[name].shape != t.shape:
            rows = t.unflatten(0, (len(t) - len(fewer[name]), -1))  # [A, other + C, ...]
            other = rows.shape[1] - header.nc - behind
            order = [*range(other), *(other + c for c in columns), *range(other + header.nc, rows.shape[1])]
            if name in first:
                order = [*columns, *range(header.nc, rows.shape[1])]
            tensors[name] = rows[:, order].flatten(0, 1)
    names = tuple(header.names[c] for c in columns)
    return Weights(tensors, replace(header, names=names))
