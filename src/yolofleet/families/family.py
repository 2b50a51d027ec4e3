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

from yolofleet.config.schema.recipe import Recipe

# Text "MODULE:NAME" below ``yolofleet.families``, so that a process imports only the parts that it uses; or the object.
# "" where a family has none.
Part: TypeAlias = str | Callable[..., Any]
MASKED = "-seg"  # ends the names of networks that find masks


def load(part: Part) -> Any:
    """Return the object that ``part`` names, and import its module."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return attrgetter(name)(import_module(f"yolofleet.families.{module}"))


@dataclass(frozen=True)
class WeightsFile:
    """A format of weights files of another project."""

    kind: str  # name of the format; files of several families may have one kind
    read: Part  # (path, description of a network that is not built in, or None) -> Weights; raises CheckpointError
    suffixes: tuple[str, ...] = ()  # of such files; the first one is that of published weights
    pattern: str = ""  # regular expression of other names of such files
    recognises: Part = ""  # path -> whether it is a file of this family; needed if others read this kind
    write: Part = ""  # (path, weights)
    shapes: Part = ""  # path -> shapes by tensor name, of a file that ``read`` refuses; None without any
    companion: Part = ""  # name of published weights -> (suffix, text) of the file that must be beside them


@dataclass(frozen=True)
class Family:
    """A model family.

    The network's class says the rest: whether boxes need suppression (``needs_nms``), whether a training step passes the
    targets (``reads_targets``), how images are padded, and which blocks change in an export (``fold``, ``for_export``).
    """

    name: str  # in descriptions, weights files and checkpoints
    from_dict: Part  # (values, source=) -> description, from the result of its to_dict; raises ConfigError
    network: Part  # (description, number of classes) -> Detector
    loss: Part  # (network, recipe, training size px) -> DetectionLoss
    recipe: str = "scratch-low"  # name or file of the default recipe
    hyperparameters: type[Recipe] = Recipe  # a subclass has those that only its loss reads
    network_values: Part = ""  # (recipe's name, description) -> values of that network that differ
    other_recipes: tuple[str, ...] = ()  # in folders of other families, but made for its networks too
    small_recipe: str = ""  # that for new classes from weights on few images; "": none was measured
    small_scratch_recipe: str = ""  # that for few images from scratch
    preset_names: Part = list  # () -> names of the built-in networks
    preset: Part = ""  # name -> description
    # (description, names of untrained tensors) -> description to train, and a note about what it changes or ""
    to_train: Part = ""
    canonical: Part = ""  # name in another project -> name of a built-in network, or None
    description_files: Mapping[str, Part] = field(default_factory=dict)  # by suffix: path -> description
    weights_files: tuple[WeightsFile, ...] = ()
    published: Part = dict  # () -> published weights, ``Item`` by name
    # "FORMAT", "FORMAT --half", "FORMAT --int8": why not
    no_export: Mapping[str, str] = field(default_factory=dict)
    safetensors_use: str = ""  # how another program reads our files; ``{file}`` is the path
    task: Any = None  # a ``tasks.task.Task`` of a user's family, if its networks name one that is not ours
    user_code: bool = False  # of network and loss, about which nothing is known then

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Hyperparameters that its loss reads, and not every loss."""
        return tuple(name for name in self.hyperparameters.model_fields if name not in Recipe.model_fields)
