"""What shared code must know about a model family. No torch here.

A family is one folder beside this file: a description of its networks, a ``Detector``, a ``DetectionLoss``, and what else
it has: blocks, published weights, files of other projects, hyperparameters, recipes (``recipes/*.yaml``) and search spaces
(``spaces/*.yaml``). Its ``FAMILY`` names them, and ``table.py`` lists the families. Shared code reaches a family only
through that object. A whole family in one file: tests/toy_family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

# Text "MODULE:NAME" below ``yolofleet.families``, so that a process imports only the parts that it uses; or the object.
# "" where a family has none.
Part: TypeAlias = str | Callable[..., Any]

# hyperparameters of the loss of networks with anchors
ANCHOR_FIELDS = (
    *("box", "cls", "cls_pw", "obj", "obj_pw", "anchor_t"),
    *("fl_gamma", "label_smoothing", "autobalance"),
)


def load(part: Part) -> Any:
    """Return the object that ``part`` names, and import its module."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return attrgetter(name)(import_module(f"yolofleet.families.{module}"))


@dataclass(frozen=True)
class WeightsFile:
    """A format of weights files of another project.

    Attributes:
        kind: name of the format; files of several families may have one kind.
        read: (path, description or None) -> ``Weights``; raises CheckpointError.
        suffixes: of such files; the first one is that of published weights.
        pattern: regular expression of other names of such files.
        recognises: path -> whether the file is one of this family, if another family reads files of the same kind.
        write: (path, weights).
        shapes: path -> shapes of the tensors by name, of a file that ``read`` refuses; None if it has none.
        companion: name of published weights -> (suffix, text) of the file that reading them needs beside them.
    """

    kind: str
    read: Part
    suffixes: tuple[str, ...] = ()
    pattern: str = ""
    recognises: Part = ""
    write: Part = ""
    shapes: Part = ""
    companion: Part = ""


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: the family's name in descriptions, weights files and checkpoints.
        from_dict: (values, source=) -> description, from the result of its ``to_dict``; raises ConfigError.
        network: (description, number of classes) -> ``Detector``. The class also says whether boxes need suppression
            (``needs_nms``), how images are padded, and which of its blocks change in an export (``fold``, ``for_export``).
        loss: (network, recipe, training size px) -> ``DetectionLoss``.
        recipe: name of the default recipe.
        small_recipe: name of the default recipe from weights on few images; "": none was measured.
        fields: shared hyperparameters that its loss reads, and not every loss.
        hyperparameters: a pydantic model with hyperparameters of this family alone.
        preset_names: () -> names of the built-in networks. preset: name -> description.
        canonical: name in another project -> name of a built-in network, or None.
        description_files: path -> description, by suffix.
        weights_files: formats of other projects.
        published: () -> published weights, ``Item`` by name.
        no_int8: formats of export that cannot hold an 8-bit form of the network, and why.
        safetensors_use: how another program reads the tensors of our files; ``{file}`` is the path.
        user_code: nothing is known about the network and the loss, because they are code of the user.
    """

    name: str
    from_dict: Part
    network: Part
    loss: Part
    recipe: str = "scratch-low"
    small_recipe: str = ""
    fields: tuple[str, ...] = ()
    hyperparameters: Part = ""
    preset_names: Part = list
    preset: Part = ""
    canonical: Part = ""
    description_files: Mapping[str, Part] = field(default_factory=dict)
    weights_files: tuple[WeightsFile, ...] = ()
    published: Part = dict
    no_int8: Mapping[str, str] = field(default_factory=dict)
    safetensors_use: str = ""
    user_code: bool = False

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Hyperparameters that its loss reads, and not every loss."""
        own = load(self.hyperparameters).model_fields if self.hyperparameters else ()
        return (*self.fields, *own)
