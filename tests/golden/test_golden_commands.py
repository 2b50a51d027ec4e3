"""Options, old spellings, names, networks, errors: this version is as it was recorded.

After a change on purpose: ``python tests/golden/record.py --write``, and look at the difference.
"""

from __future__ import annotations

import json

import pytest
from golden_errors import CASES
from record import difference, made, stored


@pytest.mark.parametrize("name", ["options.txt", "spellings.txt", "names.txt", "networks.txt"])
def test_is_as_recorded(name: str) -> None:
    changes = difference(name, made(name))
    assert not changes, changes


def test_mistakes_end_as_recorded() -> None:
    """Exit code, kind of error, values that the message names, files that changed, and the first line."""
    changes = difference("errors.json", made("errors.json"))
    assert not changes, changes


def test_every_recorded_mistake_is_told_once_with_its_values() -> None:
    """The record itself holds no bad message, whoever wrote it last."""
    record = json.loads(stored("errors.json"))["mistakes"]
    assert len(record) == len(CASES) >= 60
    for case, told in zip(CASES, record, strict=True):
        assert told["names"] == case.names.split("|"), told
        assert told["exit"] not in (0, 1) and told["first_line"], told
        assert told["messages"] == 1 or case.title == "states that are damaged", told
