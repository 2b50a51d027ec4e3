"""`yolofleet tune` over several hosts: the trials of one process, although a host agent and the study itself are killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import YOLOV5N, small_shapes, train_args, yolofleet
from desk import DEADLINE_S, Command, agent_of, nothing_left, session_of
from machines import Lab, Machine, machines

pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")

SPACE = "lr0: [0.001, 0.1, log]\nmomentum: [0.6, 0.98]\n"
FLEET = "silence_s: 5\ngrace_s: 6\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seen by all machines, as on NFS."""
    made = tmp_path_factory.mktemp("shared")
    (made / "tmp").mkdir()
    (made / "space.yaml").write_text(SPACE)
    (made / "fleet.yaml").write_text(f"{FLEET}hosts: [m1:cpu:1, m2:cpu:1]\n")
    (made / "turned.yaml").write_text(f"{FLEET}hosts: [m2:cpu:1, m1:cpu:1]\n")
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return small_shapes(folder, images=16, val_images=8)


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    with machines(2, environment=session_of(folder)) as made:
        yield made


def study_args(folder: Path, data: Path, *more: str | Path) -> list[str | Path]:
    args = train_args(
        data, *YOLOV5N, "--set", "warmup_epochs=0", "--save-every", "1steps", "--epochs", "4", *more
    )
    return ["tune", *args[1:], "--space", folder / "space.yaml", "--trials", "4", "--generation", "3"]


@pytest.fixture(scope="module")
def alone(folder: Path, data: Path) -> Path:
    """The same study in one process."""
    yolofleet(folder, *study_args(folder, data, "--device", "cpu", "--name", "alone"))
    return folder / "runs" / "tune" / "alone"


def table(text: str) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(text.splitlines())]


def weights_of(machine: Machine, study: Path) -> list[str]:
    files = sorted(machine.run("sh", "-c", f"ls {study}/trials/*/results.json").stdout.split())
    return [json.loads(machine.run("cat", file).stdout)["weights_sha256"] for file in files]


def wait_until(ready: Callable[[], object], command: Command) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not ready():
        assert command.process.poll() is None, command.said
        assert time.monotonic() < deadline_s, command.said
        time.sleep(0.05)


def has_state(machine: Machine, study: Path, trial: int) -> bool:
    """Whether a machine sees a checkpoint of a trial."""
    pattern = f"{study}/trials/{trial:04}/checkpoints/step-*.safetensors"
    return machine.run("sh", "-c", f"ls {pattern}", check=False).returncode == 0


def assert_same(machine: Machine, study: Path, alone: Path) -> None:
    found = table(machine.run("cat", study / "trials.csv").stdout)
    assert found == table((alone / "trials.csv").read_text()) and len(found) == 4
    assert {row["state"] for row in found} == {"complete"}
    assert weights_of(machine, study) == weights_of(machine, alone)


def test_a_study_whose_agent_and_own_process_are_killed_has_the_trials_of_one_process(
    lab: Lab, folder: Path, data: Path, alone: Path
) -> None:
    study = folder / "runs" / "tune" / "shared"
    command = Command(lab, folder, *study_args(folder, data, "--fleet", "fleet.yaml"), "--name", "shared")
    wait_until(lambda: has_state(lab.desk, study, 1), command)
    os.kill(agent_of(lab.hosts[1]), signal.SIGKILL)
    wait_until(lambda: has_state(lab.desk, study, 3), command)
    command.process.kill()
    command.end()
    nothing_left(lab)

    again = Command(lab, folder, "tune", "--resume", study, "--fleet", "turned.yaml")
    assert again.end() == 0, again.said
    assert_same(lab.desk, study, alone)
    log = (study / "logs" / "trial-0003.log").read_text()
    assert "resumed after step" in log and all(f"  {host}: 1 process on cpu" in log for host in ("m1", "m2"))
    nothing_left(lab)
