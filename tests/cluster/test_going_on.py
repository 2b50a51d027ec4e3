"""A run that goes on by itself after it lost a process, a host or a link, with the weights of a quiet run."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from commands import SIZES, small_shapes, yolofleet
from commands import SMALL_YOLOV5N as SMALL
from desk import Command, agent_of, impatient, nothing_left, session_of, worker_of
from machines import Lab, machines
from mask_data import small_masks

ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--no-plots"]
DETR = Path(__file__).resolve().parents[1] / "detr_family" / "small_detr.py"
LAST = 60  # epoch; the run is longer than a host takes to come back on a busy machine
EPOCHS = ("--epochs", str(LAST))
HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1")
TWO = ("--hosts", "m1:cpu:1,m2:cpu:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("going-on")
    (made / "tmp").mkdir()
    return made


@pytest.fixture(scope="module")
def quiet_sha256(folder: Path) -> str:
    """Of the weights of one process that nothing disturbs."""
    yolofleet(
        folder, "train", "--data", small_shapes(folder), *ARGS, *EPOCHS, "--device", "cpu", "--name", "quiet"
    )
    return str(json.loads((folder / "runs/train/quiet/results.json").read_text())["weights_sha256"])


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Three machines, each with its own disk."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    with machines(3, private=[own], environment=session_of(folder)) as made:
        yield made


def begun(lab: Lab, folder: Path, *more: str) -> Command:
    data = small_shapes(folder)
    hosts = () if "--hosts" in more or "--fleet" in more else HOSTS
    command = Command(lab, folder / "own", "train", "--data", data, *ARGS, *EPOCHS, *hosts, *more)
    command.wait_for("^epoch 3/")
    return command


def ended_as_quiet(lab: Lab, folder: Path, command: Command, quiet_sha256: str) -> None:
    assert command.end() == 0, command.said
    found = json.loads(lab.desk.run("cat", folder / "own/runs/train/exp/results.json").stdout)
    assert found["weights_sha256"] == quiet_sha256, command.said
    rows = lab.desk.run("cat", folder / "own/runs/train/exp/results.csv").stdout.splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(n) for n in range(1, LAST + 1)]
    nothing_left(lab)


def test_a_killed_worker(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    command = begun(lab, folder)
    os.kill(worker_of(lab.hosts[1]), signal.SIGKILL)
    command.wait_for("started again as 3 processes")
    assert re.search(r"rank 1 on m2 was killed \(SIGKILL\)", command.said), command.said
    ended_as_quiet(lab, folder, command, quiet_sha256)


@pytest.mark.parametrize("number", [0, 2])
def test_a_lost_host(lab: Lab, folder: Path, quiet_sha256: str, number: int) -> None:
    command = begun(lab, folder)
    lab.hosts[number].power_off()
    command.wait_for("started again as 2 processes")
    assert re.search(rf"m{number + 1} is lost, with rank {number}", command.said), command.said
    ended_as_quiet(lab, folder, command, quiet_sha256)


@pytest.mark.parametrize("network", ["dfine-toy", "dfine-toy-seg", "yolov5n-seg", "rfdetr-toy-seg"])
def test_a_lost_host_of_three_that_train_another_network(lab: Lab, folder: Path, network: str) -> None:
    """No random number of D-FINE's denoising queries depends on a rank, and nor does the raster of a mask."""
    given = ["--model", network, *SIZES, "--threads", "1", "--reduce", "exact", "--val-period", "0"]
    if "-toy" in network:
        given += ["--recipe-class", f"{DETR}:Small"]
    data = small_masks(folder / "masks") if network.endswith("-seg") else small_shapes(folder)
    argv = ["train", "--data", data, *given, "--epochs", "30"]
    yolofleet(folder, *argv, "--device", "cpu", "--name", f"quiet {network}")
    quiet = json.loads((folder / f"runs/train/quiet {network}/results.json").read_text())

    command = Command(lab, folder / "own", *argv, *HOSTS)
    command.wait_for("^epoch 3/")
    lab.hosts[2].power_off()
    command.wait_for("started again as 2 processes")
    assert command.end() == 0, command.said
    found = json.loads(lab.desk.run("cat", folder / "own/runs/train/exp/results.json").stdout)
    assert found["weights_sha256"] == quiet["weights_sha256"], command.said
    assert found["steps"] == quiet["steps"]
    nothing_left(lab)


def test_a_host_that_is_cut_off_comes_back_and_takes_part_again(
    lab: Lab, folder: Path, quiet_sha256: str
) -> None:
    command = begun(lab, folder, *impatient(folder, HOSTS[1]))
    lab.hosts[2].unplug()
    command.wait_for("started again as 2 processes")
    lab.hosts[2].plug()
    command.wait_for("started again as 3 processes")
    assert "m3 has sent no message for" in command.said and "m3 is ready" in command.said
    ended_as_quiet(lab, folder, command, quiet_sha256)


@pytest.fixture
def shared(folder: Path) -> Iterator[tuple[Lab, Path]]:
    """Two machines, and a folder that both of them and the desk see."""
    place = folder / f"shared {secrets.token_hex(3)}"
    place.mkdir()
    with machines(2, environment=session_of(folder)) as made:
        yield made, place


@pytest.mark.parametrize("is_paused", [False, True], ids=["cut off", "paused"])
def test_the_first_host_is_lost_and_still_has_the_lock_of_a_run_folder_that_all_share(
    shared: tuple[Lab, Path], folder: Path, quiet_sha256: str, is_paused: bool
) -> None:
    lab, place = shared
    data = small_shapes(folder)
    argv = ["train", "--data", data, *ARGS, *EPOCHS, *impatient(folder, TWO[1])]
    command = Command(lab, place, *argv)
    command.wait_for("^epoch 3/")
    paused = list(lab.hosts[0].processes()) if is_paused else []
    try:
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        if not is_paused:
            lab.hosts[0].unplug()
        command.wait_for("started again as")  # a paused host answers logins, and may take part again
        assert command.end() == 0, command.said
        run = place / "runs/train/exp"
        before = {
            path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "logs" not in path.parts
        }
    finally:
        for pid in paused:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        lab.hosts[0].plug()
    nothing_left(lab)
    assert {path: path.read_bytes() for path in before} == before, "the host that woke has written nothing"
    assert json.loads((run / "results.json").read_text())["weights_sha256"] == quiet_sha256, command.said
    rows = (run / "results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(n) for n in range(1, LAST + 1)]


def test_a_link_that_is_down_for_ten_seconds_costs_no_restart(
    lab: Lab, folder: Path, quiet_sha256: str
) -> None:
    command = begun(lab, folder)
    lab.hosts[1].unplug()
    time.sleep(10)
    lab.hosts[1].plug()
    ended_as_quiet(lab, folder, command, quiet_sha256)
    assert "started again" not in command.said and "m2 answers again" in command.said


def test_a_spare_host_takes_the_place_of_a_lost_one(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    command = begun(lab, folder, *impatient(folder, f"{TWO[1]},m3:cpu:1:spare,m4:cpu:1:spare"))
    assert "warning: the spare host m4 is left out" in command.said
    lab.hosts[0].power_off()
    command.wait_for("started again as 2 processes")
    assert "the spare host m3 takes part" in command.said
    ended_as_quiet(lab, folder, command, quiet_sha256)


def test_a_host_that_will_be_taken_away_leaves_the_others_to_it(
    lab: Lab, folder: Path, quiet_sha256: str
) -> None:
    flag = folder / "own/notice"
    command = begun(lab, folder, "--preempt-notice", f"test -e {flag}")
    lab.hosts[0].run("touch", flag)
    command.wait_for("started again as 2 processes")
    assert "m1 is left out: its machine will be taken away" in command.said
    lab.hosts[0].power_off()
    ended_as_quiet(lab, folder, command, quiet_sha256)


def test_a_run_waits_for_the_hosts_that_it_needs(lab: Lab, folder: Path, quiet_sha256: str) -> None:
    command = begun(lab, folder, *impatient(folder, TWO[1]), "--min-devices", "2")
    lab.hosts[1].unplug()
    command.wait_for("too few hosts are left: waiting 10 minutes for m2")
    lab.hosts[1].plug()
    command.wait_for("started again as 2 processes")
    ended_as_quiet(lab, folder, command, quiet_sha256)


def test_the_agents_on_two_hosts_are_killed_one_after_the_other(
    lab: Lab, folder: Path, quiet_sha256: str
) -> None:
    """torchrun's agent on one host, then the host agent, which the launcher talks to, on another."""
    command = begun(lab, folder)
    os.kill(agent_of(lab.hosts[1]), signal.SIGKILL)
    command.wait_for("started again as 3 processes")
    command.wait_for("^epoch 5/")
    os.kill(next(p for p, c in lab.hosts[2].processes().items() if "hosts.host_agent" in c), signal.SIGKILL)
    command.wait_for("started again as 2 processes")
    ended_as_quiet(lab, folder, command, quiet_sha256)


def test_spares_with_another_torch_or_other_data_are_left_out(lab: Lab, folder: Path) -> None:
    here = folder / "own/shapes"
    for host in lab.hosts:
        host.run("cp", "-r", small_shapes(folder).parent, here)
    metadata = Path(torch.__file__).parent.parent / f"torch-{torch.__version__}.dist-info/METADATA"
    other = folder / "METADATA"
    other.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13\n")
    lab.hosts[1].run("mount", "--bind", other, metadata)  # on that machine alone
    lab.hosts[2].run("sh", "-c", f"rm '{here}'/labels/train/*1.txt")
    hosts = ("--hosts", "m1:cpu:1,m2:cpu:1:spare,m3:cpu:1:spare")
    command = Command(
        lab, folder / "own", "train", "--data", here / "data.yaml", *ARGS, "--epochs", "1", *hosts
    )
    assert command.end() == 0, command.said
    assert re.search(r"warning: the spare host m2 is left out: .*m2: 1\.13", command.said), command.said
    assert "warning: the spare host m3 is left out: " in command.said, command.said
    assert "epoch 1/1" in command.said
