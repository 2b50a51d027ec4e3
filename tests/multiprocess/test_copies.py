"""Machines without a common disk: a second one keeps states, weights and results, and a resume finds the newest."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Process, in_ranks, kill, results, small_shapes, started_ranks, train_args

from yolofleet.runs.checkpoint.store import CheckpointStore

DEADLINE_S = 600
LONG = ("--epochs", "8", "--reduce", "exact", "--name", "run")  # 20 steps


class Machines:
    """Working folders that stand for disks of machines; one process of a run works in each."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder, self.names = folder, names
        self.runs = {name: folder / name / "runs/train/run" for name in names}
        for name in names:
            (folder / name).mkdir(exist_ok=True)

    def start(
        self, order: str, *args: str | Path, first: Callable[[], object] = lambda: None
    ) -> list[Process]:
        """Start a rank in each folder of ``order``; the first has rank 0. Each calls ``first``."""
        places, log = [self.folder / name for name in order], self.folder / f"{order}.log"
        return started_ranks(places, *args, "--device", "cpu", home=self.folder, log=log, first=first)

    def train(self, order: str, *args: str | Path) -> None:
        ranks = self.start(order, *args)
        try:
            ended = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
        finally:
            kill(ranks)
        assert not any(ended), self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def steps(self, name: str) -> list[int]:
        """Return the steps of the states on a machine, newest first."""
        return [entry.step for entry in CheckpointStore(self.runs[name] / "checkpoints").entries()]

    def epochs(self, name: str) -> list[int]:
        with (self.runs[name] / "results.csv").open() as file:
            return [int(row["epoch"]) for row in csv.DictReader(file)]


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path, "abc")


def test_a_run_outlives_the_machine_of_rank_0(tmp_path: Path, machines: Machines) -> None:
    data = small_shapes(tmp_path)
    args = train_args(data, *LONG)
    in_ranks(tmp_path, 1, *args)
    whole = results(tmp_path / "runs/train/run")

    ranks = machines.start("abc", *args, "--save-every", "1steps", "--checkpoint-copies", "3")
    deadline_s = time.monotonic() + DEADLINE_S
    while not machines.runs["b"].joinpath("weights/best.safetensors").exists():
        assert time.monotonic() < deadline_s and ranks[0].poll() is None, machines.logs()
        time.sleep(0.05)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        rank.wait(timeout=DEADLINE_S)
    assert machines.steps("a") == machines.steps("b") == machines.steps("c")

    shutil.rmtree(tmp_path / "a")
    newest, *_ = CheckpointStore(machines.runs["c"] / "checkpoints").entries()
    newest.path.unlink()  # c was behind
    machines.runs["c"].joinpath("results.csv").unlink()
    shutil.rmtree(machines.runs["c"] / "weights")
    machines.train("cb", "train", "--resume", "runs/train/run")
    assert f"resumed after step {newest.step} " in machines.logs(), "the newest state of all machines"
    for name in "cb":
        assert results(machines.runs[name])["weights_sha256"] == whole["weights_sha256"], name
        assert machines.epochs(name) == [*range(1, 9)], "rows from before the loss, too"
        assert machines.runs[name].joinpath("weights/best.safetensors").is_file()
        assert machines.runs[name].joinpath("config.yaml").is_file()
        assert machines.steps(name)[0] == 20
        assert not list(machines.runs[name].glob(".disk-*"))


def test_a_second_resume_of_a_run_that_runs_is_refused_on_each_of_its_disks(
    tmp_path: Path, machines: Machines
) -> None:
    data = small_shapes(tmp_path, images=16, val_images=4)
    args = train_args(
        data, "--epochs", "10000", "--val-period", "0", "--save-every", "1steps", "--name", "run"
    )
    ranks = machines.start("ab", *args)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(machines.runs[name].is_dir() and machines.steps(name) for name in "ab"):
            assert time.monotonic() < deadline_s and ranks[0].poll() is None, machines.logs()
            time.sleep(0.05)
        for name in "ab":
            (again,) = machines.start(name, "train", "--resume", "runs/train/run")
            assert again.wait(timeout=DEADLINE_S)
            assert "another process is writing into" in (tmp_path / f"{name}.log").read_text(), (
                machines.logs()
            )
        assert all(rank.poll() is None for rank in ranks), machines.logs()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            rank.wait(timeout=DEADLINE_S)
        assert "the state is saved" in machines.logs()
    finally:
        kill(ranks)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_the_user_is_told_once_that_the_disk_of_the_copy_refuses(tmp_path: Path, machines: Machines) -> None:
    def with_a_full_disk() -> None:
        import resource

        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    args = train_args(small_shapes(tmp_path), "--name", "run", "--save-every", "1epochs")
    ranks = machines.start("ab", *args, first=with_a_full_disk)
    try:
        assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [0, 0], machines.logs()
    finally:
        kill(ranks)
    told = (machines.runs["a"] / "logs/rank-0.log").read_text()
    lines = [line for line in told.splitlines() if "the copy of the run there is not complete" in line]
    assert len(lines) == 1 and ": cannot write " in lines[0], told
    assert lines[0].partition(" warning: ")[2] in machines.logs(), "it is on the screen"
    assert machines.steps("a")[0] == 5 and not machines.steps("b")


def test_a_lock_that_a_killed_process_left_is_removed_at_the_next_start_on_each_disk(
    tmp_path: Path, machines: Machines
) -> None:
    for run in machines.runs.values():
        run.mkdir(parents=True)
        (run / ".lock").write_text('["x", [0], "m1", 1, "t"]')
    args = train_args(small_shapes(tmp_path), "--name", "run", "--exist-ok", "--checkpoint-copies", "1")
    machines.train("abc", *args)
    assert not list(tmp_path.glob("*/runs/train/run/.lock"))


@pytest.mark.slow
@pytest.mark.parametrize(("more", "copies"), [((), "ab"), (("--checkpoint-copies", "1"), "a")])
def test_how_many_machines_keep_states(
    tmp_path: Path, machines: Machines, more: tuple[str, ...], copies: str
) -> None:
    machines.train("abc", *train_args(small_shapes(tmp_path), "--name", "run", *more))
    for name, run in machines.runs.items():
        kept = bool(machines.steps(name)), (run / "weights/last.safetensors").exists()
        assert kept == ((name in copies),) * 2


@pytest.mark.slow
def test_a_copy_that_cannot_be_written_ends_nothing(tmp_path: Path, machines: Machines) -> None:
    machines.runs["b"].mkdir(parents=True)
    machines.runs["b"].joinpath("checkpoints").write_text("in the way of a folder")
    machines.train("abc", *train_args(small_shapes(tmp_path), "--name", "run"))
    assert machines.steps("a") == machines.steps("c") and machines.steps("a")
