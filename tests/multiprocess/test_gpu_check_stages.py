"""The stages of `make test-gpu STAGES=all` for real, at toy size: on CPUs and on the simulated accelerator."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration as registration
from commands import Outcome, ran
from gpu_check.stages import STAGES

TESTS = Path(__file__).resolve().parents[1]
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
ON_MINI = TESTS / "accelerator" / "gpu_check_on_mini.py"
NEEDS_MINI = pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend")
    or not hasattr(torch.library.Library, "fallback"),
    reason="this torch has no devices made in Python",
)
# A stage of each kind, of steps and of runs: what the others do has quick tests of its own. All stages are slow tests.
OF_PROCESSES = "elastic"
ON_ONE_DEVICE = "overflow,killed-run"


def stages_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the result of each stage that ran, and the reason of each that did not."""
    found = json.loads((folder / "results.json").read_text())
    return {row["name"]: row["result"] for row in found["stages"]}, found["left_out"]


def assert_time_for_all(left_out: dict[str, str]) -> None:
    """Every stage but those of tests/gpu ran, or had a better reason than the time."""
    late = [name for name, reason in left_out.items() if reason.startswith("no time")]
    assert not [name for name in late if not name.startswith("tests-")]


def on_mini(folder: Path, *more: str) -> None:
    words = ("--minutes", "15", "--device", "0,1", "--out", "out", *more)
    ran(folder, sys.executable, ON_MINI, *words, deadline_s=1000, variables=PATHS)


def on_cpus(folder: Path, *more: str) -> Outcome:
    return ran(
        folder,
        sys.executable,
        "-m",
        "gpu_check",
        *more,
        deadline_s=1000,
        variables=PATHS,
    )


@NEEDS_MINI
@pytest.mark.timeout(1000)
def test_stages_of_one_process_pass_on_the_simulated_accelerator(tmp_path: Path) -> None:
    on_mini(tmp_path, "--stages", ON_ONE_DEVICE)
    ran, left_out = stages_of(tmp_path / "out")
    assert ran == dict.fromkeys(["data", *ON_ONE_DEVICE.split(",")], "passed") and not left_out


@NEEDS_MINI
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_stages_on_the_simulated_accelerator(tmp_path: Path) -> None:
    on_mini(tmp_path)
    ran, left_out = stages_of(tmp_path / "out")
    assert ran.keys() | left_out.keys() == {stage.name for stage in STAGES}
    assert {*ON_ONE_DEVICE.split(","), "device-checks", "equal-bits", "speed-exact"} <= ran.keys()
    assert_time_for_all(left_out)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.timeout(1000)
def test_stages_of_several_processes_pass_on_cpus(tmp_path: Path) -> None:
    args = ("--minutes", "15", "--device", "cpu:2", "--out", "out", "--stages", OF_PROCESSES)
    done = on_cpus(tmp_path, *args)
    ran, left_out = stages_of(tmp_path / "out")
    assert ran == dict.fromkeys(["data", *OF_PROCESSES.split(",")], "passed") and not left_out
    assert "all 2 stages that ran have passed" in done.out


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_stages_on_cpus(tmp_path: Path) -> None:
    on_cpus(tmp_path, "--minutes", "15", "--device", "cpu:2", "--out", "out")
    ran, left_out = stages_of(tmp_path / "out")
    assert ran.keys() | left_out.keys() == {stage.name for stage in STAGES}
    assert {"killed-rank", "sync-bn", "epoch-2", "batch512-2", "speed-bf16"} <= ran.keys()
    assert_time_for_all(left_out)
