"""Runs that do not depend on the launcher: they outlive it and the host that supervises them, and are never run twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes, yolofleet
from desk import Command, impatient, nothing_left, session_of
from machines import Lab, Machine, machines

from yolofleet.support.system.proc import rank_of

ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--no-plots", "--epochs", "60"]
HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("detached")
    (made / "tmp").mkdir()
    return made


@pytest.fixture(scope="module")
def quiet_sha256(folder: Path) -> str:
    """Of the weights of one process that nothing disturbs."""
    yolofleet(folder, "train", "--data", small_shapes(folder), *ARGS, "--device", "cpu", "--name", "quiet")
    return str(json.loads((folder / "runs/train/quiet/results.json").read_text())["weights_sha256"])


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Four machines, each with its own disk. The last one is not in the fleet at first."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    with machines(4, private=[own], environment=session_of(folder)) as made:
        yield made


def detached(lab: Lab, folder: Path, *more: str, hosts: tuple[str, str] = HOSTS) -> None:
    """Start a run, whose launcher ends when it has begun."""
    command = Command(
        lab, folder / "own", "train", "--data", small_shapes(folder), *ARGS, *hosts, "--detach", *more
    )
    assert command.end() == 0, command.said
    assert "to see it again: yolofleet fleet attach exp-" in command.said, command.said


def workers(machine: Machine) -> list[int]:
    return [pid for pid in machine.processes() if rank_of(pid) is not None]


def weights_of(lab: Lab, machine: Machine, folder: Path) -> str:
    text = machine.run("cat", folder / "own/runs/train/exp/results.json").stdout
    return str(json.loads(text)["weights_sha256"])


def test_the_run_outlives_its_launcher_and_two_launchers(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    """The second one hands over to the host that was lost first, and was started again."""
    detached(lab, folder, hosts=impatient(folder, HOSTS[1]))
    seen = Command(lab, folder / "own", "fleet", "attach", *HOSTS)
    seen.wait_for("^epoch 2/")
    os.kill(seen.process.pid, signal.SIGKILL)
    seen.end()
    elsewhere = Command(lab, folder / "own", "fleet", "attach", *HOSTS, machine=lab.hosts[3])
    elsewhere.wait_for("^epoch 4/")
    lab.hosts[0].power_off()
    elsewhere.wait_for("m2 supervises the run from now on")
    lab.hosts[0].power_on()
    elsewhere.wait_for("going on with 3 processes on m2, m3, m1")
    gives_up_at_s = time.monotonic() + 900
    while not any("detached.standby" in command for command in lab.hosts[0].processes().values()):
        assert time.monotonic() < gives_up_at_s, elsewhere.said
        time.sleep(0.2)
    lab.hosts[1].power_off()
    elsewhere.wait_for("m1 supervises the run from now on")
    assert elsewhere.end() == 0, elsewhere.said
    assert weights_of(lab, lab.hosts[3], folder) == quiet_sha256
    nothing_left(lab)


def test_a_split_network_has_one_launcher(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    """The first host is alone, and lives: it ends its workers before the others begin again, and joins them later."""
    detached(lab, folder, hosts=impatient(folder, HOSTS[1]))
    seen = Command(lab, folder / "own", "fleet", "attach", *HOSTS, machine=lab.hosts[1])
    seen.wait_for("^epoch 3/")
    lab.hosts[0].unplug()
    gives_up_at_s = time.monotonic() + 900
    while "m2 supervises the run from now on" not in seen.said:
        assert time.monotonic() < gives_up_at_s, seen.said
        time.sleep(0.2)
    assert not workers(lab.hosts[0])
    seen.wait_for("resumed after step")
    assert not workers(lab.hosts[0])
    lab.hosts[0].plug()
    seen.wait_for("started again as 3 processes")
    assert seen.end() == 0, seen.said
    assert weights_of(lab, lab.hosts[1], folder) == quiet_sha256
    nothing_left(lab)


def test_two_hosts_go_on_when_the_first_is_switched_on_again(
    lab: Lab, folder: Path, quiet_sha256: str
) -> None:
    """The second one has no majority without it, and it knows nothing of the run any more."""
    two = ("--hosts", "m1:cpu:1,m2:cpu:1")
    detached(lab, folder, hosts=impatient(folder, two[1]))
    seen = Command(lab, folder / "own", "fleet", "attach", *two, machine=lab.hosts[3])
    seen.wait_for("^epoch 3/")
    lab.hosts[0].power_off()
    seen.wait_for("m1 supervises the run, and does not answer")
    lab.hosts[0].power_on()
    seen.wait_for("m2 supervises the run from now on")
    seen.wait_for("m1 is ready")
    assert seen.end() == 0, seen.said
    assert weights_of(lab, lab.hosts[3], folder) == quiet_sha256
    nothing_left(lab)


def test_a_host_is_added(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    data = small_shapes(folder)
    command = Command(lab, folder / "own", "train", "--data", data, *ARGS, *HOSTS)
    command.wait_for("^epoch 2/")
    added = Command(lab, folder / "own", "fleet", "add", "m4:cpu:1", *HOSTS)
    assert added.end() == 0, added.said
    command.wait_for("m4 is ready")
    command.wait_for("started again as 4 processes")
    assert command.end() == 0, command.said
    assert weights_of(lab, lab.desk, folder) == quiet_sha256
    nothing_left(lab)
