"""The hyperparameters of a run: built-in recipes, the user's values (``recipe_file.py``), and those of the network's family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from yolofleet.config.resolve import DEFAULT, Layer, Resolved, Sourced, resolve
from yolofleet.config.schema import Recipe, WorkloadSettings
from yolofleet.config.schema.train import default_micro_batch
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.families.family import Family, load
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

DEFAULT_RECIPE = "scratch-low"
DEFAULT_SOURCE = f"recipe {DEFAULT_RECIPE} (default)"  # of its values if the user named no recipe
Workload = TypeVar("Workload", bound=WorkloadSettings)
FEW_IMAGES = 1000  # of a training set: with fewer, a family may have another recipe to start from weights
# setting -> the field of a recipe that names its value for lr0, and the settings that decide it
REFERENCES = {
    "nominal_batch": ("reference_batch", ("nominal_batch",)),
    "optimizer": ("reference_optimizer", ("optimizer", "optimizer_class")),
}
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
    values, sources = {}, dict(recipe.sources)
    for name in recipe_names():
        source = f"recipe {name}"
        if source in recipe.sources.values():
            found = load(family.network_values)(name, network)
            values.update({key: value for key, value in found.items() if recipe.sources[key] == source})
            sources.update(dict.fromkeys(values, f"{source} for {network.name}"))
    return replace(recipe, value=recipe.value.model_copy(update=values), sources=sources)


def is_free(config: Resolved[Workload], recipe: Resolved[Recipe]) -> bool:
    """Return whether the user chose neither a recipe nor what a recipe's learning rate depends on."""
    asked = (name for _, names in REFERENCES.values() for name in names if name in config.sources)
    return (
        DEFAULT_SOURCE in recipe.sources.values()
        and recipe.sources["lr0"] in (DEFAULT, DEFAULT_SOURCE)
        and not any(map(config.is_given, asked))
    )


def with_references(config: Resolved[Workload], recipe: Resolved[Recipe]) -> Resolved[Workload]:
    """Return the settings with the images of a step and the optimizer that the recipe names, where the user named none."""
    changed: dict[str, Any] = {}
    sources = dict(config.sources)
    for setting, (field, names) in REFERENCES.items():
        source = recipe.sources[field]
        is_named = any(config.is_given(name) for name in names if name in sources)
        if setting in sources and not is_named and source not in (DEFAULT, DEFAULT_SOURCE):
            changed[setting], sources[setting] = getattr(recipe.value, field), source
    batch, nominal = config.value.batch, changed.get("nominal_batch", 0)
    if 0 < nominal < batch and not config.is_given("batch"):
        batch = changed["batch"] = nominal
        sources["batch"] = sources["nominal_batch"]
    if nominal and not config.is_given("micro_batch") and batch > 0:
        changed["micro_batch"] = default_micro_batch(batch, nominal)
    return replace(config, value=config.value.model_copy(update=changed), sources=sources)


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
