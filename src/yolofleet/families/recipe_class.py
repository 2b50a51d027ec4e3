"""Your own model, loss or data set: a subclass of ``TrainingRecipe``, named with ``--recipe-class FILE.py:CLASS``.

docs/extend.md has an example of each. A run asks the class for its parts while it is built; the step does not know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from yolofleet.config.schema import Recipe
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.families import custom
from yolofleet.families.build import family_loss
from yolofleet.families.family import Family
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import Detector
from yolofleet.families.table import BUILT_IN, FAMILIES
from yolofleet.support.errors import ConfigError, YolofleetError

FLAG = "--recipe-class"


class TrainingRecipe:
    """The parts of a run that a subclass may replace; each method by itself. Every rank calls them with equal arguments.

    Attributes:
        family: a model family of your own. ``--model`` then takes the names of its networks, and weights its descriptions.
    """

    family: Family | None = None

    def dataset(self, data: str) -> DatasetSpec:
        """Return the data set that ``--data`` names; ``data.datasets.spec.listed_dataset`` makes one from lists."""
        return load_dataset(data)

    def network(self, nc: int) -> Detector:
        """Return the network for ``nc`` classes. It replaces --model and --cfg; its initial weights come from
        ``Detector.initialise``."""
        raise NotImplementedError

    def loss(self, model: Detector, recipe: Recipe, img: int) -> DetectionLoss:
        """Return the loss of a network; the default is that of its family.

        Args:
            img: training size, pixels.
        """
        return family_loss(model, recipe, img)

    @property
    def description(self) -> custom.CustomDescription | None:
        """The description of the own network, for checkpoints and weights; None without one."""
        kind = type(self)
        return None if kind.network is TrainingRecipe.network else custom.CustomDescription(kind.__name__)


def load_recipe_class(name: str) -> TrainingRecipe:
    """Return an object of the class that ``--recipe-class`` names; "" gives yolofleet's own parts.

    From then on, this process can read weights of the class's network.

    Raises:
        ConfigError: the code cannot be loaded.
    """
    recipe_class = TrainingRecipe()
    if name:
        from yolofleet.config.user_code import load_class

        recipe_class = load_class(name, TrainingRecipe, FLAG)()
        for method in ("dataset", "network", "loss"):
            if getattr(type(recipe_class), method) is not getattr(TrainingRecipe, method):
                call = getattr(recipe_class, method)
                setattr(recipe_class, method, reporting(call, f"{type(recipe_class).__name__}.{method}"))
    if (family := recipe_class.family) is not None:
        if family.name in BUILT_IN:
            raise ConfigError(f"{FLAG} {name}: the family {family.name} is built in", hint="use another name")
        parts = ("from_dict", "network", "loss", "preset_names", "preset")
        reported: Any = {part: reporting(getattr(family, part), f"{family.name}.{part}") for part in parts}
        FAMILIES[family.name] = replace(family, user_code=True, **reported)
    if recipe_class.description is not None:
        custom.NETWORKS[recipe_class.description.name] = recipe_class.network
    return recipe_class


def reporting(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of the user that raises ConfigError for each of its exceptions.

    An exception of any other type would count as a fault of the host, which the run would leave out.
    """
    return partial(_reported, call, name)  # pickle can send it to a loader process


def _reported(call: Callable[..., Any], name: str, *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except YolofleetError:
        raise
    except Exception as problem:
        from yolofleet.config.user_code import failure_of_code

        raise failure_of_code(f"{name} failed", problem) from None
