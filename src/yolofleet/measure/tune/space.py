"""The search space of ``yolofleet tune``: a YAML file with the keys of a recipe, and a range for each.

``lr0: [0.001, 0.1, log]`` is a range, drawn evenly on a logarithmic scale. ``nesterov: [true, false]`` is a list of choices,
for values that are not numbers. The recipe's own checks decide which bounds and choices are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from yolofleet.config.recipe import DEFAULT_RECIPE, family_files, no_such
from yolofleet.config.resolve import Sourced, resolve
from yolofleet.config.schema import Recipe
from yolofleet.families.family import Family
from yolofleet.storage.yaml_lines import read_scalar, read_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

LOG = "log"
DIGITS = 4  # significant digits of a drawn number
Value: TypeAlias = float | int | bool | str


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both of the type of the recipe's value."""

    low: float
    high: float
    log: bool = False

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high

    def rounded(self, value: Value) -> Value:
        """Return a number of this range with ``DIGITS`` significant digits."""
        if isinstance(value, int):
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def listed(self) -> list[Any]:
        return [self.low, self.high, *([LOG] if self.log else [])]


@dataclass(frozen=True)
class Choices:
    """Texts or truth values."""

    values: tuple[Value, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def rounded(self, value: Value) -> Value:
        return value

    def listed(self) -> list[Any]:
        return list(self.values)


Space: TypeAlias = Mapping[str, Range | Choices]


def default_space(family: Family) -> dict[str, Range | Choices]:
    """Return the space of the default recipe of a family, without values that a family of the user does not have."""
    files = family_files("spaces")
    return read_space(files.get(family.recipe, files[DEFAULT_RECIPE]), family, every=False)


def read_space(given: Path | str, family: Family, *, every: bool = True) -> dict[str, Range | Choices]:
    """Return a space. Raise ConfigError, with the line, for a key that the family lacks or an invalid range.

    Args:
        given: a file, or the text ``NAME=RANGE`` of one value.
        every: False: leave out what the family does not have.
    """
    model = family.hyperparameters
    found: dict[str, Range | Choices] = {}
    only, is_text, text = str(given).partition("=")
    if is_text and not Path(given).exists():
        rows = {only.strip(): (read_scalar(text, "--space"), "--space")}
    else:
        rows = {name: (listed, f"{given}:{line}") for name, (listed, line) in read_yaml(Path(given)).items()}
    for name, (listed, source) in rows.items():
        if name not in model.model_fields:
            if every:
                raise no_such(name, Sourced(listed, source), family)
            continue
        is_number = model.model_fields[name].annotation in (int, float)
        found[name] = (_range if is_number else _choices)(model, name, listed, source)
    if not found:
        raise ConfigError(f"{given} names no values to search", hint="lr0: [0.001, 0.1, log]")
    return found


def _range(model: type[Recipe], name: str, listed: Any, source: str) -> Range:
    hint = f"{name}: [lowest, highest] or [lowest, highest, log]"
    if not isinstance(listed, list) or len(listed) not in (2, 3) or listed[2:] not in ([], [LOG]):
        raise ConfigError(f"{name}: {shown(listed)} is not a range", source=source, hint=hint)
    low, high = (_checked(model, name, bound, source) for bound in listed[:2])
    if not low < high:
        raise ConfigError(
            f"{name}: the range from {low:g} to {high:g} has no numbers between", source=source, hint=hint
        )
    if LOG in listed and low <= 0:
        raise ConfigError(
            f"{name}: a range with log must begin above 0, and this one begins at {low:g}",
            source=source,
            hint=f"{name}: [{high / 1000:g}, {high:g}, log], or leave out log",
        )
    return Range(low, high, LOG in listed)


def _choices(model: type[Recipe], name: str, listed: Any, source: str) -> Choices:
    if not isinstance(listed, list) or len(listed) < 2 or len(set(map(str, listed))) < len(listed):
        raise ConfigError(
            f"{name}: {shown(listed)} is not a list of two or more different choices",
            source=source,
            hint=f"{name}: [first, second]; a value that is not searched needs no line here: --set {name}=...",
        )
    return Choices(tuple(_checked(model, name, choice, source) for choice in listed))


def _checked(model: type[Recipe], name: str, value: Any, source: str) -> Any:
    return getattr(resolve(model, [{name: Sourced(value, source)}]).value, name)
