"""A short part of the fuzzer with a fixed seed; `make fuzz` runs it for as long as wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the fuzzer forks, and watches processes in /proc"
)
DEADLINE_S = 1200


def fuzz(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def readers() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    try:
        from readers import READERS
    finally:
        del sys.path[:2]
    return len(READERS)


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_every_reader_answers_broken_files_with_one_message(rounds: int) -> None:
    done = fuzz("run.py", "--seed", "7", "--cases", str(rounds * readers()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("fault", ["terminal-codes", "named-pipes", "yaml-tags"])
def test_a_fault_that_is_put_back_is_found(fault: str) -> None:
    done = fuzz("put_back.py", fault, "--seed", "1")
    assert done.returncode == 0 and "found by case" in done.stdout, done.stdout + done.stderr


def test_a_case_is_the_same_whenever_it_is_repeated() -> None:
    first, second = (fuzz("run.py", "--seed", "3", "--case", "22").stdout for _ in range(2))
    assert first.startswith("reader: ") and first.splitlines()[0] == second.splitlines()[0]
