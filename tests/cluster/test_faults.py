"""Faults in the middle of a run on several machines, provoked one at a time: what is printed names them within a
minute, and nothing is left. Faults that the doctor finds before a start are in test_doctor_on_hosts.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes, yolofleet
from desk import AGENT, Command, nothing_left, session_of, worker_of
from machines import CARD, Lab, Machine, add_card_in_front, machines

from yolofleet.data.datasets.shapes import make_shapes

GIVES_UP_S = 600  # an error if a test reaches it
HOSTS = "m1:cpu:1,m2:cpu:1"
ENDLESS = [
    *SMALL,
    *("--epochs", "100000", "--threads", "1", "--val-period", "0", "--no-autoanchor", "--restarts", "0"),
]
DEMO = ["--model", "yolov5n", "--recipe", "demo", "--img", "160", "--batch", "16", "--nominal-batch", "16", "--micro-batch",
        "8", "--epochs", "24", "--restarts", "0"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Machines of its own for every test: some die."""
    with machines(2, environment=session_of(folder)) as made:
        yield made


def told(command: Command, fault: str, says: str, code: int = 4) -> None:
    """The command has ended because of what was done just now."""
    began_s = time.monotonic()
    assert command.end() == code, command.said
    took_s = time.monotonic() - began_s
    print(f"\n{fault}: named, and the command ended, after {took_s:.1f} s")
    assert re.search(says, command.said) and "Traceback" not in command.said, command.said


def wait_until(what: Callable[[], object], command: Command) -> None:
    gives_up_at_s = time.monotonic() + GIVES_UP_S
    while not what():
        assert time.monotonic() < gives_up_at_s and command.process.poll() is None, command.said
        time.sleep(0.02)


def runs_host_agent(machine: Machine) -> bool:
    return any("hosts.host_agent" in title for title in machine.processes().values())


def runs_agent(machine: Machine) -> bool:
    return any(AGENT in title for title in machine.processes().values())


@pytest.mark.parametrize(
    ("when", "is_so", "says"),
    [
        ("while it is examined", runs_host_agent, "m2: the connection to it was lost before the first message|m2: the connection to it broke|m2 is lost"),
        ("while it starts", runs_agent, "m2 is lost, with rank 1: (no message from it for 20 s|the connection to it broke)"),
    ],
)  # fmt: skip
def test_a_host_that_dies(
    lab: Lab, folder: Path, when: str, is_so: Callable[[Machine], bool], says: str
) -> None:
    command = Command(lab, folder, "train", "--data", small_shapes(folder), *ENDLESS, "--hosts", HOSTS)
    wait_until(lambda: is_so(lab.hosts[1]), command)
    lab.hosts[1].power_off()
    assert "epoch" not in command.said
    told(command, f"a host that dies {when}", says)
    nothing_left(lab)


def test_the_first_host_and_its_disk_are_lost_and_the_run_ends_with_the_same_weights(folder: Path) -> None:
    """By the command that the launcher shows. Each machine has its own disk."""
    own = folder / "own"
    own.mkdir()
    data = small_shapes(folder)
    args = [*SMALL, "--epochs", "6", "--threads", "1", "--reduce", "exact"]
    yolofleet(folder, "train", "--data", data, *args, "--device", "cpu", "--name", "whole")
    whole = json.loads((folder / "runs/train/whole/results.json").read_text())
    with machines(3, private=[own], environment=session_of(folder)) as lab:
        everywhere = ("--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1", "--save-every", "1steps", "--restarts", "0")
        command = Command(lab, own, "train", "--data", data, *args, *everywhere)
        command.wait_for("epoch 3/")
        lab.hosts[0].power_off()
        told(command, "the first host dies", "m1 is lost, with rank 0")
        shown = re.search(r"yolofleet (train --resume .*?)   # without m1", command.said)
        assert shown and "m1" not in shown[1], command.said
        again = Command(lab, own, *shlex.split(shown[1]))
        assert again.end() == 0, again.said
        assert "epoch 6/6" in again.said and "epoch 1/" not in again.said, "it went on"
        found = json.loads(lab.desk.run("cat", own / "runs/train/exp/results.json").stdout)
        assert found["weights_sha256"] == whole["weights_sha256"]
        rows = lab.desk.run("cat", own / "runs/train/exp/results.csv").stdout
        assert [row.split(",")[0] for row in rows.splitlines()[1:]] == list("123456")


def test_a_stopped_rank_alone_on_its_host_at_the_demos_size(lab: Lab, folder: Path) -> None:
    data = make_shapes(folder / "shapes", images=640, val_images=128, img=160)
    command = Command(lab, folder, "train", "--data", data, *DEMO, "--hosts", HOSTS)
    command.wait_for("^epoch 2/24")  # the state of the first epoch is being saved
    time.sleep(2)
    stopped = worker_of(lab.hosts[1])
    os.kill(stopped, signal.SIGSTOP)
    told(command, "SIGSTOP", r"rank 1 \(m2, cpu\) gives no sign of life since")
    assert f"m2: rank 1: process {stopped} is stopped (state T" in command.said
    assert re.search("yolofleet train --resume .*exp", command.said)
    nothing_left(lab)


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A folder whose ``cgroup.procs`` takes processes that may use so much memory."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory" / "memory.limit_in_bytes").exists()
    group = (root / "memory" if old else root) / f"yolofleet-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if old else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(limit_bytes))
    except OSError as problem:
        shutil.rmtree(group, ignore_errors=True)
        pytest.skip(f"no control group for memory can be made here: {problem}")
    try:
        yield group
    finally:
        gives_up_at_s = time.monotonic() + 900
        while group.exists() and time.monotonic() < gives_up_at_s:
            try:
                group.rmdir()
            except OSError:  # its processes are ending
                time.sleep(0.1)


def test_a_rank_that_exceeds_the_memory_of_its_control_group(lab: Lab, folder: Path) -> None:
    with control_group(8 << 20) as group:
        command = Command(lab, folder, "train", "--data", small_shapes(folder), *ENDLESS, "--hosts", HOSTS)
        command.wait_for("epoch 1/")
        (group / "cgroup.procs").write_text(str(worker_of(lab.hosts[1])))
        says = r"rank 1 on m2 was killed \(SIGKILL\).*the kernel's out-of-memory killer: it killed [1-9]"
        told(command, "memory limit", says)
        nothing_left(lab)
    assert "--workers" in command.said


def test_a_rank_that_fails_far_away_says_why_on_the_launchers_screen(lab: Lab, folder: Path) -> None:
    """The disk of m2 loses its pictures in the middle of the run: its rank's words come, not its neighbours'."""
    data = small_shapes(folder)
    theirs = folder / "m2's own"
    shutil.copytree(data.parent, theirs)
    (folder / "fleet.yaml").write_text(
        f'hosts: [m1:cpu:1, {{host: m2, device: cpu, data: "{theirs}/data.yaml"}}]\n'
    )
    args = ["train", "--data", data, *ENDLESS, "--cache", "none", "--fleet", folder / "fleet.yaml"]
    command = Command(lab, folder, *args)
    command.wait_for("epoch 1/")
    shutil.rmtree(theirs / "images" / "train")
    told(command, "a rank fails", "Error: ", code=3)
    problem = command.said[command.said.index("Error: ") :]
    assert f"{theirs}/images/train/" in problem and "on   : rank 1, host m2" in problem, command.said
    assert "lost the others" not in command.said
    nothing_left(lab)


def test_the_wrong_card_is_the_first_one_and_is_not_taken(lab: Lab, folder: Path) -> None:
    """An address that no other host reaches, on a card before the right one in the kernel's order."""
    add_card_in_front(lab.hosts[1], "aaa0", "192.168.77.2/24")
    order = lab.hosts[1].run("ip", "-brief", "address").stdout
    assert order.index("aaa0") < order.index(CARD)
    args = [
        "train",
        "--data",
        small_shapes(folder),
        *SMALL,
        *("--max-steps", "1", "--val-period", "0"),
        "--hosts",
        HOSTS,
    ]
    command = Command(lab, folder, *args)
    assert command.end() == 0, command.said
    warning, where = (
        command.wait_for(r"m2: .*192\.168\.77\.2 \(aaa0\)"),
        command.wait_for(rf"m2: .*10\.77\.0\.2 \({CARD}\)"),
    )
    assert warning < GIVES_UP_S and where < GIVES_UP_S
