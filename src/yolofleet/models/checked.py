"""Texts about untrusted values, for error messages. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


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
