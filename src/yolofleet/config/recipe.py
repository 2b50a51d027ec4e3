"""The hyperparameters of a run: built-in recipes, the user's values (``recipe_file.py``), and those of the network's family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic.fields import FieldInfo

from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Layer, Resolved, Sourced, resolve, with_values
from yolofleet.config.schema import GivenRecipe, Recipe
from yolofleet.families.family import Family, load
from yolofleet.families.table import BUILT_IN, FAMILIES, owners
from yolofleet.storage.yaml_lines import read_yaml
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
    name_or_path: str = "",
    overrides: Iterable[str | Sourced] = (),
    *,
    hyperparameters: Layer | None = None,
    own_code: bool = False,
) -> Resolved[GivenRecipe]:
    """Return the hyperparameters. Each source overrides those before it: defaults, recipe, ``hyperparameters``, ``overrides``.

    Args:
        name_or_path: a built-in name, a file, or the name of a YOLOv5 hyp file; "" means ``scratch-low``.
        overrides: texts ``key=value``.
        hyperparameters: section of a configuration file.
        own_code: see :func:`given_recipe`.

    Raises:
        ConfigError: the recipe or a key is unknown, or a value is out of range.
    """
    notes: list[str] = []
    layers: list[Layer] = []
    is_complete = hyperparameters is not None and hyperparameters.keys() >= Recipe.model_fields.keys()
    if name_or_path:
        try:
            layers.append(_read(name_or_path, notes))
        except ConfigError:
            if not is_complete:  # the file of a run has all values, so it does not need the recipe's file
                raise
    elif not is_complete:
        usual = _read(DEFAULT_RECIPE, notes)
        layers.append(
            {key: Sourced(e.value, DEFAULT_SOURCE) for key, e in usual.items() if key in Recipe.model_fields}
        )
    layers.append(hyperparameters or {})
    if overrides := list(overrides):
        from yolofleet.config.recipe_file import overridden  # only with --set

        layers.append(overridden(overrides))
    return given_recipe(layers, notes, own_code=own_code)


def given_recipe(
    layers: Sequence[Layer], notes: Sequence[str] = (), *, own_code: bool = False
) -> Resolved[GivenRecipe]:
    """Return hyperparameters that somebody gave, before the family of the network is known.

    Args:
        own_code: the run loads code of the user, which may have a family with hyperparameters of its own.

    Raises:
        ConfigError: no family has a hyperparameter, or a value is out of range.
    """
    merged: dict[str, Sourced] = {}
    for layer in layers:
        merged |= layer
    if not own_code:
        for name in merged.keys() - Recipe.model_fields.keys():
            if not (having := owners(name)):
                raise no_such(name, merged[name])
            checked = resolve(having[0].hyperparameters, [{name: merged[name]}]).value
            merged[name] = merged[name]._replace(value=getattr(checked, name))
    return resolve(GivenRecipe, [merged], notes)


def is_hyperparameter(name: str) -> bool:
    """Return whether all networks or those of a built-in family have this hyperparameter."""
    return name in Recipe.model_fields or any(name in family.own_fields for family in BUILT_IN.values())


def no_such(name: str, entry: Sourced, family: Family | None = None) -> ConfigError:
    """Return the error about a hyperparameter that a family does not have; None: that no family has."""
    own = family.own_fields if family else [own for one in FAMILIES.values() for own in one.own_fields]
    if family and (having := [one.name for one in owners(name) if one.preset]):
        return ConfigError(
            f"{name} belongs to {' and '.join(having)}, and the network is of the family {family.name}",
            source=entry.source,
            hint=f"leave it out; {family.name} has: {', '.join(own)}" if own else "leave it out",
        )
    from yolofleet.config.words.unknown import instead_of  # errors alone need it

    known = dict.fromkeys([*Recipe.model_fields, *own])
    asked = f"--set {name}={shown(entry.value)}: " if entry.source == COMMAND_LINE else ""
    return ConfigError(
        f"{asked}the recipe has no {shown(name)}",
        source=entry.source,
        hint=instead_of("setting", name) or did_you_mean(name, known) or f"it has {', '.join(known)}",
    )


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


def recipe_of(given: Resolved[Recipe], family: Family, network: Any, default: str = "") -> Resolved[Recipe]:
    """Return the recipe of a network: the values that a user gave, over a default recipe of its family.

    No default recipe is read if the user named one. Of a recipe that is given, the values that
    the family has for the network of a description replace those that the user did not change.

    Args:
        given: as :func:`given_recipe` returns it. The family is known only after the weights are read.
        network: a description.
        default: name or file; "" = that of the family.

    Raises:
        ConfigError: a value is out of range, or belongs to another family, so that it would have no effect.
    """
    chosen = {key: Sourced(value, given.sources[key]) for key, value in given.value}
    layers = [chosen]
    if not any(e.source.startswith("recipe ") and e.source != DEFAULT_SOURCE for e in chosen.values()):
        usual = _read(default or family.recipe, [])
        layers = [usual, {k: e for k, e in chosen.items() if e.source not in (DEFAULT, DEFAULT_SOURCE)}]
    own = [_of_family(layer, family) for layer in layers]
    recipe = resolve(family.hyperparameters, own, given.notes)
    for name in recipe_names() if family.network_values else ():
        source = f"recipe {name}"
        if source in recipe.sources.values():
            found = load(family.network_values)(name, network)
            values = {key: value for key, value in found.items() if recipe.sources[key] == source}
            recipe = with_values(recipe, values, dict.fromkeys(values, f"{source} for {network.name}"))
    return recipe


def _of_family(layer: Layer, family: Family) -> Layer:
    """Return the hyperparameters that the family has. Raise ConfigError if another one would have an effect elsewhere."""
    mine = family.hyperparameters.model_fields
    for name, entry in layer.items():
        theirs = [one.hyperparameters.model_fields[name] for one in owners(name)]
        if name not in mine and (not theirs or is_chosen(entry.value, entry.source, theirs[0])):
            raise no_such(name, entry, family)
    return {name: entry for name, entry in layer.items() if name in mine}


def family_warnings(given: Resolved[Recipe], family: Family, network: Any) -> list[str]:
    """Return warnings that the recipe of the user was made for networks of other families than that of a description.

    A built-in recipe belongs to its folder. A file shows its families by the hyperparameters that not every family has;
    the ``config.yaml`` of a run has those of all families, so it shows none.
    """
    made_for = []
    folders = {name: file.parents[1].name for name, file in family_files("recipes").items()}
    for name, folder in folders.items() if not family.user_code else ():
        is_own = folder in (family.name, folders.get(family.recipe)) or name in family.other_recipes
        if not is_own and f"recipe {name}" in given.sources.values():
            made_for.append(f"recipe {name} was made for the family {folder}")
    listed = {name: s for name, s in given.sources.items() if is_listed(s) and not s.startswith("recipe ")}
    theirs = [name for name in listed if name not in family.hyperparameters.model_fields]
    if theirs and not listed.keys() & family.own_fields:
        file = listed[theirs[0]].rpartition(":")[0]
        made_for.append(f"{file} has {', '.join(theirs)}, which {family.name} does not have")
    return [
        f"{reason}: its learning rate, optimizer and augmentation may not suit {network.name} of the family {family.name}; "
        f"without --recipe, {network.name} takes {family.recipe}"
        for reason in made_for
    ]


def is_listed(source: str) -> bool:
    """Return whether a hyperparameter comes from a built-in recipe or a line of a file, which may list all of them."""
    return source.startswith("recipe ") or re.search(r":\d+$", source) is not None


def is_chosen(value: Any, source: str, field: FieldInfo) -> bool:
    """Return whether a user chose a hyperparameter. One of a list with the value of the schema does not count."""
    return source not in (DEFAULT, DEFAULT_SOURCE) and (value != field.default or not is_listed(source))


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
