"""Which process of a torchrun prints an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yolofleet.support.errors import ClusterError, ConfigError, YolofleetError
from yolofleet.training.parallel.users_torchrun_errors import ERROR_FILE, is_told


def rank(folder: Path, number: int) -> dict[str, str]:
    """The environment of a rank; torchrun makes the folder of its error file."""
    (folder / str(number)).mkdir(parents=True, exist_ok=True)
    return {ERROR_FILE: str(folder / str(number) / "error.json")}


def told(folder: Path, *problems: YolofleetError) -> list[bool]:
    return [is_told(problem, rank(folder, number)) for number, problem in enumerate(problems)]


def test_equal_errors_are_printed_once_and_others_each(tmp_path: Path) -> None:
    same, other = ConfigError("no device 0"), ConfigError("no device 1")
    assert told(tmp_path / "attempt_0", same, same, other, same) == [False, True, False, True]
    assert told(tmp_path / "attempt_1", same) == [False]  # torchrun's next attempt
    first, second = (
        json.loads((tmp_path / f"attempt_0/{number}/error.json").read_text())["message"]["extraInfo"]
        for number in (0, 1)
    )
    assert first["py_callstack"] == same.render()
    assert int(first["timestamp"]) < int(second["timestamp"])  # torchrun takes the earliest one for the cause


def test_the_loss_of_another_rank_is_printed_only_without_a_cause(tmp_path: Path) -> None:
    lost = [ClusterError(f"rank {number} is lost") for number in range(2)]
    assert told(tmp_path / "with", ConfigError("no device 0"), *lost) == [False, True, True]
    assert told(tmp_path / "without", *lost) == [False, True]


def test_without_torchrun_or_its_logs_every_process_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = ConfigError("no device 0")
    for environment in ({}, {ERROR_FILE: ""}):
        assert not is_told(problem, environment) and not is_told(problem, environment)
    assert not list(tmp_path.iterdir())
    nowhere = {ERROR_FILE: str(tmp_path / "no/folder/error.json")}
    assert not is_told(problem, nowhere) and not is_told(problem, nowhere)


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yolofleet.training.parallel.users_torchrun_errors.AFTER_CAUSE_S", 0.0)
