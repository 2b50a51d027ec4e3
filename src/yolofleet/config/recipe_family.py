"""Warnings about a recipe that was made for networks of another family."""

from __future__ import annotations

import re
from typing import Any

from yolofleet.config.recipe import family_files
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe
from yolofleet.families.table import FAMILIES


def family_warnings(recipe: Resolved[Recipe], network: Any) -> list[str]:
    """Return warnings that the recipe of the user was made for networks of other families than that of a description.

    A built-in recipe belongs to its folder. A file shows its families by the hyperparameters that not every family has;
    the ``config.yaml`` of a run has those of all families, so it shows none.
    """
    family = FAMILIES[network.family]
    if family.user_code:
        return []
    made_for = []
    folders = {name: file.parents[1].name for name, file in family_files("recipes").items()}
    for name, folder in folders.items():
        is_own = folder in (family.name, folders.get(family.recipe)) or name in family.other_recipes
        if not is_own and f"recipe {name}" in recipe.sources.values():
            made_for.append(f"recipe {name} was made for the family {folder}")
    listed = {name: source for name, source in recipe.sources.items() if re.search(r":\d+$", source)}
    others = {name for other in FAMILIES.values() for name in other.own_fields} - {*family.own_fields}
    theirs = [name for name in listed if name in others]
    if theirs and not listed.keys() & family.own_fields:
        file = listed[theirs[0]].rpartition(":")[0]
        made_for.append(f"{file} has {', '.join(theirs)}, which {family.name} does not have")
    return [
        f"{reason}: its learning rate, optimizer and augmentation may not suit {network.name} of the family {family.name}; "
        f"without --recipe, {network.name} takes {family.recipe}"
        for reason in made_for
    ]
