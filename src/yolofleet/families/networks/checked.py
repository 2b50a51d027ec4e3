"""Checks of untrusted descriptions, and texts about their values for error messages. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yolofleet.support.errors import ConfigError

MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Checker:
    """Checks values of a description. Each method raises ConfigError for a wrong value; ``source`` is for messages."""

    source: str

    def error(self, what: str, hint: str | None = None) -> ConfigError:
        return ConfigError(what, source=self.source, hint=hint)

    def keys(
        self,
        values: Any,
        required: Sequence[str],
        optional: Sequence[str] = (),
        *,
        owner: str = "a model description",
    ) -> None:
        """Raise unless ``values`` is a mapping with the required keys, and no unknown ones."""
        if not isinstance(values, Mapping):
            raise self.error(f"{owner} must be a mapping, not {type(values).__name__}")
        known = [*required, *optional]
        for key in values:
            if key not in known:
                raise self.error(f"unknown key {short(key)}", known_names(key, known))
        for key in required:
            if key not in values:
                raise self.error(f"key {key} is missing")

    def number(self, name: str, value: Any, low: float, high: float) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(f"{name} is {short(value)}, expected a number in {low:g}..{high:g}")
        return float(value)

    def flag(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise self.error(f"{name} is {short(value)}, expected true or false")
        return value

    def name(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > 200:
            raise self.error(f"name must be a text of at most 200 characters, not {short(value)}")
        return value


def known_names(value: Any, known: Sequence[str]) -> str:
    """Return the hint that lists the known names, the nearest one first."""
    near = difflib.get_close_matches(value[:100], known, 1) if isinstance(value, str) else []
    return (f"did you mean {near[0]}? " if near else "") + "known: " + ", ".join(known)


def short(value: Any) -> str:
    """Return an untrusted value as a short text."""
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return f"[{', '.join(_word(v) for v in value)}]"
    return _word(value)


def _word(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:60])
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    return f"something of type {type(value).__name__}"
