"""Options, old spellings, names, networks, errors: this version is as it was recorded.

After a change on purpose: ``python tests/golden/record.py --write``, and look at the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_errors import CASES, outcomes
from golden_files import network_line
from record import difference, made, stored
from walks import chosen

from yolofleet.families.networks.description import preset_names


@pytest.mark.parametrize(
    "name",
    chosen(
        ["options.txt", "spellings.txt", "names.txt", "networks.txt"],
        "options.txt",
        "spellings.txt",
        "names.txt",
    ),
)
def test_is_as_recorded(name: str) -> None:
    changes = difference(name, made(name))
    assert not changes, changes


def test_each_fifth_network_is_as_recorded() -> None:
    record = stored("networks.txt").splitlines()
    assert [line for line in map(network_line, preset_names()[::5]) if line not in record] == []


def test_each_third_mistake_ends_as_recorded(tmp_path: Path) -> None:
    assert list(outcomes(tmp_path, 3)) == json.loads(stored("errors.json"))["mistakes"][::3]


@pytest.mark.slow
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
