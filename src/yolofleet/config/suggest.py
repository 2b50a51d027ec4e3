"""The name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when none is near."""
    folded = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower()[:100], folded, 1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """A hint for an error message, or None."""
    near = nearest(name, names)
    return f"did you mean {near}?" if near else None


def shown(value: object) -> str:
    """A stranger's value for a message: one line, never long."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = text.isprintable() and text.strip() == text and text
    text = text if plain else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."
