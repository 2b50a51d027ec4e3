"""The shape of plain values that come from somewhere that is not believed. Standard library alone.

A shape is a type; a function that says whether it is one; None; ABSENT: the key is not there; (shape, shape): any of
these; [shape]: a list of such; {key: shape}: a mapping with these keys and perhaps others; {str: shape}: one from texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST = 1e15  # of any number
ABSENT = object()


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < MOST  # NaN is not


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < MOST


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def fits(value: Any, shape: Any) -> bool:
    return misfit(value, shape) is None


def misfit(value: Any, shape: Any) -> str | None:
    """Where a value is not of a shape, as ``['cards'][0]['mtu']``; "" = it is another thing altogether; None: it fits."""
    if isinstance(shape, tuple):
        misfits = [misfit(value, one) for one in shape]
        return None if None in misfits else max(misfits, key=lambda at: len(at or ""))
    if isinstance(shape, list):
        if not isinstance(value, list):
            return ""
        return _first((at, item, shape[0]) for at, item in enumerate(value))
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return ""
        if str in shape:
            return _first((key, item, shape[str]) for key, item in value.items())
        return _first((key, value.get(key, ABSENT), of) for key, of in shape.items())
    if shape is None or shape is ABSENT:
        good = value is shape
    else:
        good = isinstance(value, shape) if isinstance(shape, type) else shape(value)
    return None if good else ""


def _first(parts: Iterable[tuple[Any, Any, Any]]) -> str | None:
    for key, value, shape in parts:
        inner = misfit(value, shape)
        if inner is not None:
            return f"[{key!r}]{inner}"
    return None
