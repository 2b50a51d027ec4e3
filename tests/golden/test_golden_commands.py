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
    """Exit code, kind of error, files that changed, and the first line; the values that the message names."""
    changes = difference("errors.json", made("errors.json"))
    assert not changes, changes


def test_every_mistake_is_recorded() -> None:
    record = json.loads(stored("errors.json"))["mistakes"]
    assert [told["mistake"] for told in record] == [case.title for case in CASES] and len(CASES) >= 60
