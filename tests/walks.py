"""Walks over many cases: the quick tests take some of them, and the slow tests the others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def chosen(cases: Iterable[object], *quick: object) -> list[object]:
    """Return parameters of one value each: the ``quick`` ones as they are, the others marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def sampled(cases: Iterable[object], every: int) -> list[object]:
    """Return parameters: each ``every``-th case as it is, the others marked slow.

    The first case is quick. A case that is a tuple gives one value to each of several names.
    """
    return [
        case
        if number % every == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
