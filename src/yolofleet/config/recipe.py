"""The hyperparameters of a run: built-in recipes, the user's values (``recipe_file.py``), and those of the network's family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from yolofleet.config.resolve import DEFAULT, Layer, Resolved, Sourced, resolve, with_values
from yolofleet.config.schema import Recipe
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.families.family import Family, load
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

DEFAULT_RECIPE = "scratch-low"
DEFAULT_SOURCE = f"recipe {DEFAULT_RECIPE} (default)"  # of its values if the user named no recipe
YOLOV5_FOLDERS = ("", ".", "data", "data/hyps")


def family_files(kind: str) -> dict[str, Path]:
    """Return the YAML files of the model families in their folders ``kind`` (recipes, spaces), by name."""
    families = Path(__file__).resolve().parents[1] / "families"
    return {file.stem: file for file in families.glob(f"*/{kind}/*.yaml")}


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(family_files("recipes"))


def load_recipe(
    name_or_path: str = "", overrides: Iterable[str | Sourced] = (), *, hyperparameters: Layer | None = None
) -> Resolved[Recipe]:
    """Return the hyperparameters. Each source overrides those before it: defaults, recipe, ``hyperparameters``, ``overrides``.

    Args:
        name_or_path: a built-in name, a file, or the name of a YOLOv5 hyp file; "" means ``scratch-low``.
        overrides: texts ``key=value``.
        hyperparameters: section of a configuration file.

    Raises:
        ConfigError: the recipe or a key is unknown, or a value is out of range.
    """
    notes: list[str] = []
    layers: list[Layer] = []
    if hyperparameters is None or set(hyperparameters) < set(Recipe.model_fields):
        layer = _read(name_or_path or DEFAULT_RECIPE, notes)
        layers.append(
            layer if name_or_path else {key: Sourced(e.value, DEFAULT_SOURCE) for key, e in layer.items()}
        )
    layers.append(hyperparameters or {})
    if overrides := list(overrides):
        from yolofleet.config.recipe_file import overridden  # only with --set

        layers.append(overridden(overrides))
    return resolve(Recipe, layers, notes)


def parse_lr_factors(text: str, source: str = "") -> dict[str, float]:
    """Return part -> factor from ``PART:FACTOR, ...``. Raise ConfigError for another form, or a part that comes twice."""
    factors: dict[str, float] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        part, _, number = (word.strip() for word in entry.rpartition(":"))
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not part or part.isdigit() or part in factors or not 0 < factor < math.inf:
            raise ConfigError(
                f"lr_factors: {shown(entry)} is not PART:FACTOR, with a factor above 0 and each part once",
                source=source or None,
                hint="such as backbone:0.1,model.24.:2; a part is backbone, or a prefix or pattern of parameter names. "
                "--freeze stops layers",
            )
        factors[part] = factor
    return factors


def with_default(recipe: Resolved[Recipe], name: str) -> Resolved[Recipe]:
    """Return the user's values over the default recipe ``name`` of a model family.

    Return ``recipe`` itself if the user named a recipe or a file has all values. This is a separate step, because the
    family is known only after the weights are read.
    """
    chosen = {
        key: Sourced(getattr(recipe.value, key), source)
        for key, source in recipe.sources.items()
        if source not in (DEFAULT, DEFAULT_SOURCE)
    }
    if any(source.startswith("recipe ") for _, source in chosen.values()):
        return recipe
    return resolve(Recipe, [_read(name, []), chosen], recipe.notes)


def for_network(recipe: Resolved[Recipe], family: Family, network: Any) -> Resolved[Recipe]:
    """Return the recipe with the values that its family has for the network of a description.

    A value that a user set stays.
    """
    if not family.network_values:
        return recipe
    for name in recipe_names():
        source = f"recipe {name}"
        if source in recipe.sources.values():
            found = load(family.network_values)(name, network)
            values = {key: value for key, value in found.items() if recipe.sources[key] == source}
            recipe = with_values(recipe, values, dict.fromkeys(values, f"{source} for {network.name}"))
    return recipe


def is_listed(source: str) -> bool:
    """Return whether a hyperparameter comes from a built-in recipe or a line of a file, which may list all of them."""
    return source.startswith("recipe ") or re.search(r":\d+$", source) is not None


def given_fields(recipe: Resolved[Recipe]) -> dict[str, str]:
    """Return the source of each hyperparameter that the user set, by name.

    Those of a list with the value of the schema do not count.
    """
    return {
        name: source
        for name, source in recipe.sources.items()
        if source not in (DEFAULT, DEFAULT_SOURCE)
        and (getattr(recipe.value, name) != Recipe.model_fields[name].default or not is_listed(source))
    }


def _read(name_or_path: str, notes: list[str]) -> dict[str, Sourced]:
    builtin, path = _builtin_name(name_or_path), Path(name_or_path)
    if builtin is not None:
        values = read_yaml(family_files("recipes")[builtin])
        return {key: Sourced(e.value, f"recipe {builtin}") for key, e in values.items()}
    if not _is_file(name_or_path):
        near = did_you_mean(name_or_path, recipe_names())
        raise ConfigError(
            f"recipe {shown(name_or_path)} is neither built in nor a file",
            hint=f"{near + ' ' if near else ''}built in: {', '.join(recipe_names())}",
        )
    from yolofleet.config.recipe_file import read_recipe_file  # only with --recipe FILE

    return read_recipe_file(path, notes)


def _builtin_name(name_or_path: str) -> str | None:
    """Return ``scratch-low`` for that name, and for ``hyp.scratch-low.yaml`` if there is no such file; else None."""
    names = recipe_names()
    if name_or_path in names:
        return name_or_path
    path = PurePosixPath(name_or_path.replace("\\", "/"))
    name = path.name.removeprefix("hyp.").removesuffix(".yaml")
    if path.suffix == ".yaml" and name in names and str(path.parent) in YOLOV5_FOLDERS:
        return None if _is_file(name_or_path) else name
    return None


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  (Path.is_file raises if a name is too long)
