"""Your own model, loss or data set: a subclass of ``TrainingRecipe``, named with ``--recipe-class FILE.py:CLASS``.

docs/extend.md has an example of each. A run asks the class for its parts while it is built; the step does not know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from yolofleet.config.schema import Recipe
from yolofleet.datasets.sources import load_dataset
from yolofleet.datasets.spec import DatasetSpec
from yolofleet.errors import YolofleetError
from yolofleet.families import custom
from yolofleet.families.build import family_loss
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.detector import Detector

FLAG = "--recipe-class"


class TrainingRecipe:
    """The parts of a run that a subclass may replace; each method by itself. Every rank calls them with equal arguments."""

    def dataset(self, data: str) -> DatasetSpec:
        """Return the data set that ``--data`` names; ``datasets.spec.listed_dataset`` makes one from lists."""
        return load_dataset(data)

    def network(self, nc: int) -> Detector:
        """Return the network for ``nc`` classes. It replaces --model and --cfg; its initial weights come from
        ``Detector.initialise``."""
        raise NotImplementedError

    def loss(self, model: Detector, recipe: Recipe, img: int) -> DetectionLoss:
        """Return the loss of a network; the default is that of its family.

        Args:
            recipe: hyperparameters.
            img: training size, pixels.
        """
        return family_loss(model, recipe, img)

    @property
    def description(self) -> custom.CustomDescription | None:
        """The description of the own network, for checkpoints and weights; None without one."""
        kind = type(self)
        return None if kind.network is TrainingRecipe.network else custom.CustomDescription(kind.__name__)


def has_own_loss(recipe_class: TrainingRecipe) -> bool:
    """Return whether the class has a loss, which may read any hyperparameter."""
    return type(recipe_class).loss is not TrainingRecipe.loss


def load_recipe_class(name: str) -> TrainingRecipe:
    """Return an object of the class that ``--recipe-class`` names; "" gives yolofleet's own parts.

    From then on, this process can read weights of the class's network.

    Raises:
        ConfigError: the code cannot be loaded.
    """
    recipe_class = TrainingRecipe()
    if name:
        from yolofleet.extend.user_code import load_class

        recipe_class = load_class(name, TrainingRecipe, FLAG)()
        for method in ("dataset", "network", "loss"):
            if getattr(type(recipe_class), method) is not getattr(TrainingRecipe, method):
                setattr(recipe_class, method, _reported(recipe_class, method))
    if recipe_class.description is not None:
        custom.NETWORKS[recipe_class.description.name] = recipe_class.network
    return recipe_class


def _reported(recipe_class: TrainingRecipe, method: str) -> Callable[..., Any]:
    """Return a method of the user's class that raises ConfigError for each of its exceptions.

    An exception of any other type would count as a fault of the host, which the run would leave out.
    """
    call = getattr(recipe_class, method)

    def checked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except YolofleetError:
            raise
        except Exception as problem:
            from yolofleet.extend.user_code import failure_of_code

            raise failure_of_code(f"{type(recipe_class).__name__}.{method} failed", problem) from None

    return checked
