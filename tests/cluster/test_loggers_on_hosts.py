"""Loggers and the report of a run on two hosts, each with its own disk, also when the first host is lost."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes
from desk import Command, impatient, session_of
from logger_stores import agree, table, tensorboard_rows
from machines import Lab, machines

HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1")
KEYS = {
    "MLFLOW_TRACKING_PASSWORD": "k3y-of-the-h0sts-nobody-may-see",
    "WANDB_API_KEY": "an0ther-k3y-of-the-hosts",
}
OF_THE_DESK = "k3y-of-the-desk-nobody-may-see"
LAST = 10  # epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("logged")
    for name in ("own", "tmp"):
        (made / name).mkdir()
    return made


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Two machines; ``own`` is each machine's own disk. Logins have the keys, the desk has another."""
    with machines(2, private=[folder / "own"], environment=session_of(folder) | KEYS) as made:
        yield made


def no_key_shows(lab: Lab) -> None:
    shown = [line for machine in lab.machines for line in machine.processes().values()]
    assert shown and not any(key in line for key in (*KEYS.values(), OF_THE_DESK) for line in shown)


@pytest.mark.parametrize("tensorboard_on", ["both hosts", "the first host"])
def test_the_rows_of_a_run_that_loses_its_first_host(
    lab: Lab, folder: Path, tmp_path: Path, tensorboard_on: str
) -> None:
    own, data = folder / "own", small_shapes(folder)
    if tensorboard_on == "the first host":
        spec = importlib.util.find_spec("tensorboard")
        assert spec is not None and spec.origin is not None
        lab.hosts[1].run("mount", "-t", "tmpfs", "tmpfs", Path(spec.origin).parent)
    args = ["--data", data, *SMALL, "--threads", "1", "--epochs", str(LAST), "--save-every", "1steps"]
    command = Command(
        lab,
        own,
        *("train", *args, "--log", "tensorboard", *impatient(folder, HOSTS[1])),
        variables={"MLFLOW_TRACKING_PASSWORD": OF_THE_DESK},
    )
    command.wait_for("^epoch 3/")
    no_key_shows(lab)
    lab.hosts[0].power_off()
    command.wait_for("started again as 1 process")
    no_key_shows(lab)
    assert command.end() == 0, command.said

    lab.desk.run("cp", "-r", own / "runs/train/exp", tmp_path / "exp")
    run = tmp_path / "exp"
    expected = table(run)
    assert sorted(expected) == list(range(1, LAST + 1))
    if tensorboard_on == "both hosts":  # the second host had no store, so it got the earlier rows too
        agree(tensorboard_rows(run), expected)
        assert "not stored" not in command.said, command.said
    else:
        lines = [line for line in command.said.splitlines() if "--log tensorboard: " in line]
        assert len(lines) == 2 and "later rows try again" in lines[0], command.said
        assert f"{LAST} rows of the run not stored there" in lines[1], command.said

    for machine in (lab.hosts[1], lab.desk):
        for key in (*KEYS.values(), OF_THE_DESK):
            found = machine.run("grep", "-rlF", key, own, folder / "tmp", "/dev/shm", check=False)
            assert found.returncode == 1, found.stdout
    assert not any(key in command.said for key in (*KEYS.values(), OF_THE_DESK))
