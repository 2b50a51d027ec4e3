"""`yolofleet tune` over several hosts: the trials of one process, although a trial, a host or the study itself is killed."""

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
    """Seen by all machines, as on NFS; ``own`` in it is each machine's own."""
    made = tmp_path_factory.mktemp("shared")
    (made / "own").mkdir()
    (made / "tmp").mkdir()
    (made / "space.yaml").write_text(SPACE)
    (made / "fleet.yaml").write_text(f"{FLEET}hosts: [m1:cpu:1, m2:cpu:1]\n")
    (made / "turned.yaml").write_text(f"{FLEET}hosts: [m2:cpu:1, m1:cpu:1]\n")
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return small_shapes(folder, images=16, val_images=8)


@pytest.fixture(scope="module")
def lab(folder: Path, data: Path) -> Iterator[Lab]:
    with machines(2, private=[folder / "own"], environment=session_of(folder)) as made:
        copy = f"import shutil; shutil.copytree({str(data.parent)!r}, {str(folder / 'own' / 'set')!r})"
        for machine in made.machines:
            machine.run("python3", "-c", copy)
        yield made


def study_args(folder: Path, data: Path | str, *more: str | Path) -> list[str | Path]:
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
    command.wait_for("trial 1 on m2 cpu: .*; it is started again")
    wait_until(lambda: has_state(lab.desk, study, 3), command)
    command.process.kill()
    command.end()
    nothing_left(lab)

    again = Command(lab, folder, "tune", "--resume", study, "--fleet", "turned.yaml")
    assert again.end() == 0, again.said
    assert_same(lab.desk, study, alone)
    logs = {file.stem: file.read_text() for file in sorted((study / "logs").glob("trial-*.log"))}
    assert all("resumed after step" in logs[f"trial-000{number}"] for number in (1, 3))
    assert all(any(f"  {host}: 1 process on cpu" in log for log in logs.values()) for host in ("m1", "m2"))
    nothing_left(lab)


def test_a_study_of_hosts_that_share_no_disk_survives_the_loss_of_its_process_and_a_host(
    lab: Lab, folder: Path, alone: Path
) -> None:
    """It is the last test, because m2 stays switched off."""
    own, study = folder / "own", Path("runs/tune/own")
    there = own / study
    args = study_args(folder, "set/data.yaml", "--name", "own", "--fleet", folder / "fleet.yaml")
    command = Command(lab, own, *args)
    wait_until(lambda: has_state(lab.hosts[0], there, 0) and has_state(lab.hosts[1], there, 1), command)
    command.process.kill()
    command.end()
    nothing_left(lab)

    again = Command(lab, own, "tune", "--resume", study, "--fleet", folder / "turned.yaml")
    log = there / "logs" / "trial-0001.log"
    wait_until(lambda: "resumed after step" in lab.desk.run("cat", log).stdout, again)
    lab.hosts[1].power_off()
    assert again.end() == 0, again.said
    assert_same(lab.desk, there, alone)
    assert "the study goes on without m2 until it can be reached" in again.said, again.said
    text = lab.desk.run("cat", there / "logs" / "trial-0000.log").stdout
    assert "resumed after step" in text and "stay on m1" in text, text
    assert not lab.hosts[0].run("find", own, "-name", "study.journal").stdout, "only the desk has the study"
    nothing_left(lab)
