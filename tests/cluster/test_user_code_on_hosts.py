"""A user's model, loss, data set and callbacks on several hosts: each host has its own copy of the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import yolofleet
from desk import Command, nothing_left, session_of
from machines import Lab, Machine, machines
from user_code_example import CODE, OWN_RUN, RUN, make_user_code

HOSTS = ["--hosts", "m1:cpu:1,m2:cpu:1"]
FAILING = """
import os
from my_model import TinyNetwork
from yolofleet import TrainingRecipe

class FailingNetwork(TinyNetwork):
    passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes == 2 and os.uname().nodename == "m2":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nCUDA kernel errors might be")
        return super().forward(images)

class Failing(TrainingRecipe):
    def network(self, nc):
        return FailingNetwork(nc)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``code`` in it has the examples and a data set; ``own`` is each machine's own."""
    made = tmp_path_factory.mktemp("shared")
    for name in ("own", "tmp", "code"):
        (made / name).mkdir()
    make_user_code(made / "code")
    return made


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    with machines(2, private=[folder / "own"], environment=session_of(folder)) as made:
        for machine in made.machines:
            copy_of_code(machine, folder)
        yield made


def copy_of_code(machine: Machine, folder: Path) -> None:
    machine.run("sh", "-c", f"rm -rf '{folder}/own/'* && cp -r '{folder}/code/.' '{folder}/own'")


def test_two_hosts_train_what_one_process_trains(lab: Lab, folder: Path) -> None:
    yolofleet(folder / "code", *OWN_RUN, "--device", "cpu", "--name", "one")
    command = Command(lab, folder / "own", *OWN_RUN, *HOSTS, "--name", "two")
    assert command.end() == 0, command.said
    two = json.loads(lab.desk.run("cat", folder / "own/runs/train/two/results.json").stdout)
    one = json.loads((folder / "code/runs/train/one/results.json").read_text())
    assert two["weights_sha256"] == one["weights_sha256"]
    events = lab.hosts[0].run("cat", folder / "own/runs/train/two/journal.jsonl").stdout.splitlines()
    assert json.loads(events[0]) == {"event": "start", "step": 0, "ranks": 2, "resumed": False}
    assert json.loads(events[-1])["event"] == "stop"
    nothing_left(lab)

    resume = ["train", "--resume", "runs/train/two", "--epochs", "3"]
    command = Command(lab, folder / "own", *resume, *HOSTS)
    assert command.end() == 2 and "--recipe-class all_parts.py:All" in command.said, command.said
    command = Command(lab, folder / "own", *resume, *HOSTS, *CODE)
    assert command.end() == 0 and "epoch 3/3" in command.said and "epoch 2/3" not in command.said


def without(lab: Lab, folder: Path, name: str) -> Command:
    """Run the command to its end while m2 lacks a file."""
    lab.hosts[1].run("sh", "-c", f"cd '{folder}/own' && find . -name {name} -delete")
    command = Command(lab, folder / "own", *OWN_RUN, *HOSTS)
    command.end()
    copy_of_code(lab.hosts[1], folder)
    return command


@pytest.mark.parametrize("name", ["all_parts.py", "my_limit.py", "my_model.py"])
def test_a_host_without_a_file_of_the_code_is_named_before_the_run(lab: Lab, folder: Path, name: str) -> None:
    command = without(lab, folder, name)
    assert command.process.returncode == 4 and f"m2: {name} does not exist" in command.said, command.said
    assert "meeting at" not in command.said and "Traceback" not in command.said
    nothing_left(lab)


def test_a_host_without_the_data_is_named(lab: Lab, folder: Path) -> None:
    command = without(lab, folder, "labels.csv")
    assert command.process.returncode == 2, command.said
    assert "rank 1, host m2" in command.said and "All.dataset failed: FileNotFoundError" in command.said
    assert "labels.csv" in command.said and "Traceback" not in command.said, command.said
    nothing_left(lab)


@pytest.mark.parametrize("restarts", ["2", "0"])
def test_a_run_goes_on_without_the_host_whose_gpu_failed(lab: Lab, folder: Path, restarts: str) -> None:
    for machine in lab.machines:
        machine.run("sh", "-c", f"cat > '{folder}/own/failing.py' <<'END'\n{FAILING}END")
    own = ["train", "--data", "small shapes/data.yaml", *RUN, "--recipe-class", "failing.py:Failing"]
    command = Command(lab, folder / "own", *own, *HOSTS, "--restarts", restarts)
    code = command.end()
    assert "DeviceError: GPU 0 of m2 (rank 1) failed: CUDA error: uncorrectable ECC error" in command.said
    assert "bug in yolofleet" not in command.said and "Traceback" not in command.said, command.said
    if restarts == "0":
        assert code == 6 and "nvidia-smi" in command.said, command.said
    else:
        assert (
            code == 0
            and "m2 is left out: one of its GPUs failed\ngoing on with 1 process on m1" in command.said
        ), command.said
    nothing_left(lab)
