"""Loggers and the report of a run on two hosts, each with its own disk, also when the first host is lost."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import browser, opened_s
from browser import missing as no_browser
from commands import SMALL, small_shapes
from desk import Command, nothing_left, session_of
from logger_stores import agree, table, tensorboard_rows
from machines import Lab, machines

from yolofleet.datasets.shapes import make_shapes

HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1")
KEYS = {
    "MLFLOW_TRACKING_PASSWORD": "k3y-of-the-h0sts-nobody-may-see",
    "WANDB_API_KEY": "an0ther-k3y-of-the-hosts",
}
OF_THE_DESK = "k3y-of-the-desk-nobody-may-see"
LAST = 10  # epoch
MOST_BYTES = 5_000_000  # of a report


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
    args = ["--data", data, *SMALL, "--threads", "1", "--epochs", str(LAST), "--save-steps", "1"]
    command = Command(
        lab,
        own,
        *("train", *args, "--log", "tensorboard", *HOSTS, "--host-timeout", "5"),
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


def test_the_report_of_eight_classes_on_two_hosts(lab: Lab, folder: Path, tmp_path: Path) -> None:
    own, data = folder / "own", make_shapes(folder / "eight classes", images=64, val_images=48, img=320)
    for number, label in enumerate(sorted((data.parent / "labels").rglob("*.txt"))):
        rows = [line.split(maxsplit=1) for line in label.read_text().splitlines()]
        label.write_text("".join(f"{int(kind) + 4 * (number % 2)} {rest}\n" for kind, rest in rows))
    names = [f"class {number}" for number in range(8)]
    data.write_text(json.dumps({"path": ".", "train": "images/train", "val": "images/val", "names": names}))
    args = ["--data", data, *SMALL, "--plots", "--threads", "1", "--epochs", "2", "--set", "lr0=0.01"]
    command = Command(lab, own, "train", *args, *HOSTS)
    assert command.end() == 0, command.said
    nothing_left(lab, 10)
    page = tmp_path / "report.html"
    page.write_text(lab.desk.run("cat", own / "runs/train/exp/report.html").stdout, encoding="utf-8")
    assert page.stat().st_size < MOST_BYTES
    content = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', page.read_text(encoding="utf-8")
    )
    assert content is not None
    run = json.loads(content[1])["run"]
    assert [(rank["rank"], rank["host"]) for rank in run["timeline"]["ranks"]] == [(0, "m1"), (1, "m2")]
    assert all(rank["seconds"]["compute"] > 0 for rank in run["timeline"]["ranks"])
    assert len(run["figures"]["names"]) == 8 and run["figures"]["images"]
    if no_browser():
        pytest.skip(no_browser())
    with browser(tmp_path) as session:
        times_s = []
        for width_px in (1280, 390):
            session.show_as(width_px)
            times_s.append(opened_s(session, page))
            assert session.messages() == []
    print(
        f"\nreport.html: {page.stat().st_size / 1e6:.2f} MB, opened in {times_s[0]:.2f} s, {times_s[1]:.2f} s on a phone"
    )
