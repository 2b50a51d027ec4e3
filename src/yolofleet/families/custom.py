"""The family of networks that a user's ``TrainingRecipe`` builds by itself. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from yolofleet.families.networks.checked import short
from yolofleet.support.errors import ConfigError

NETWORKS: dict[str, Callable[[int], Any]] = {}  # of the recipe classes that this process has loaded


@dataclass(frozen=True)
class CustomDescription:
    """The name of a network that a user's ``TrainingRecipe`` builds; the description cannot build it."""

    name: str
    family: str = "custom"

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "name": self.name}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> CustomDescription:
        """Check and return the description.

        Raises:
            ConfigError: the name is not one of a class.
        """
        name = values.get("name")
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 200:
            raise ConfigError(f"name must be the name of a class, not {short(name)}", source=source)
        return cls(name)


def custom_network(description: CustomDescription, nc: int) -> Any:
    """Return the network of a user's ``TrainingRecipe``.

    Raises:
        ConfigError: this process has not loaded that class.
    """
    if description.name not in NETWORKS:
        raise ConfigError(
            f"the network {description.name} is built by a recipe class, which must be named",
            hint=f"--recipe-class FILE.py:{description.name}",
        )
    return NETWORKS[description.name](nc)
