"""A run whose copy lies at an address: it goes on from there when its machine is gone. A folder stands for the store."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    DEADLINE_S,
    SMALL,
    SMALL_YOLOV5N,
    events_of,
    in_ranks,
    kill,
    killed_at_step,
    results,
    small_shapes,
    started,
    started_ranks,
    wait_until,
    yolofleet,
)

from yolofleet.support.system.proc import descendants, rank_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
EPOCHS = 40
ARGS = [*SMALL_YOLOV5N, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def quiet(folder: Path, data: Path) -> str:
    """The hash of the weights of a run without any trouble."""
    in_ranks(folder, 1, "train", "--data", data, *ARGS, "--name", "quiet")
    return str(results(folder / "runs/train/quiet")["weights_sha256"])


def store_of(folder: Path) -> tuple[Path, str]:
    """A folder and its address."""
    return folder / "store/run", f"file://{folder}/store/run"


def pass_time(store: Path) -> None:
    """Let the holder of the lease be silent for so long that it counts as gone."""
    for path in store.glob(".lease/0*"):
        os.utime(path, (time.time() - 1000,) * 2)


def rows(run: Path) -> list[str]:
    return [row.split(",")[0] for row in (run / "results.csv").read_text().splitlines()[1:]]


def test_a_run_goes_on_from_its_address_alone(tmp_path: Path) -> None:
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    args = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", "4"]
    alone = tmp_path / "runs/train/alone"
    in_ranks(tmp_path, 1, "train", "--data", data, *args, "--name", "alone")
    in_ranks(tmp_path, 1, "train", "--resume", alone, "--epochs", "6")
    machine = tmp_path / "first machine"
    machine.mkdir()
    copied = ("--checkpoint-to", address)
    in_ranks(machine, 1, "train", "--data", data, *args, *copied, "--name", "run")
    shutil.rmtree(machine)
    in_ranks(tmp_path, 2, "train", "--resume", address, "--epochs", "6")
    run = tmp_path / "runs/train/run"
    assert results(run)["weights_sha256"] == results(alone)["weights_sha256"]
    assert rows(run) == [str(epoch) for epoch in range(1, 7)]
    for name in ("results.csv", "results.json", "weights/last.safetensors", "events.jsonl"):
        assert (store / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.slow
def test_a_machine_that_is_gone_costs_nothing_but_time(tmp_path: Path, quiet: str) -> None:
    """Killed with all its processes and without its disk, then again, on other numbers of ranks."""
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    machine = tmp_path / "first machine"
    machine.mkdir()
    copied = ("--checkpoint-to", address)
    killed_at_step(machine, 10, store, "train", "--data", data, *ARGS, *copied, "--device", "cpu:2")
    shutil.rmtree(machine)
    pass_time(store)
    machine = tmp_path / "second machine"
    machine.mkdir()
    reached = max(int(path.stem.split("-")[1]) for path in store.glob("checkpoints/step-*"))
    killed_at_step(machine, reached + 1, store, "train", "--resume", address, ranks=1)
    shutil.rmtree(machine)
    pass_time(store)
    done = yolofleet(tmp_path, "train", "--resume", address, "--device", "cpu:3")
    run = tmp_path / "runs/train/run"
    assert results(run)["weights_sha256"] == quiet, done.err
    assert rows(run) == [str(epoch) for epoch in range(1, EPOCHS + 1)]
    assert {event["epoch"] for event in events_of(run, "epoch")} == set(range(1, EPOCHS + 1))
    assert len(events_of(run, "start")) == 3
    for name in (
        "results.csv",
        "results.json",
        "weights/last.safetensors",
        "weights/best.safetensors",
        "events.jsonl",
    ):
        assert (store / name).read_bytes() == (run / name).read_bytes(), name
    assert {path.name for path in (store / "checkpoints").iterdir()} >= {
        max(path.name for path in (run / "checkpoints").glob("step-*"))
    }
    listed = yolofleet(tmp_path, "checkpoints", "verify", address)
    assert listed.out.count("whole") == 2 and address in listed.out
    page = yolofleet(tmp_path, "report", "run", address).out.strip()
    assert address in (tmp_path / page).read_text()
    assert not (store / "report.html").exists()  # --no-plots; the store was only read


@pytest.mark.slow
def test_a_second_resume_is_refused_while_the_run_goes_on(tmp_path: Path) -> None:
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    copied = ("--checkpoint-to", address)
    first = started(tmp_path, "train", "--data", data, *ARGS, "--epochs", "900", *copied, "--device", "cpu:2")
    try:
        wait_until(lambda: any(store.glob("checkpoints/step-*")), first)
        second = yolofleet(tmp_path, "train", "--resume", address, "--device", "cpu:2", code=2)
        assert second.err.count("goes on on") == 1 and "Traceback" not in second.err, second.err
        os.kill(first.pid, signal.SIGINT)
        first.communicate(timeout=DEADLINE_S)
    finally:
        first.kill()
    assert first.returncode == 75
    assert [path.name for path in (tmp_path / "runs/train").iterdir()] == ["exp"]
    # a new run does not replace it, and a resume of the run that has ended only copies it again
    refused = yolofleet(tmp_path, "train", "--data", data, *ARGS, "--checkpoint-to", address, code=2)
    assert "has a run already" in refused.err and f"--resume {address}" in refused.err
    ended = yolofleet(tmp_path, "train", "--resume", "runs/train/exp", "--max-steps", "1", *copied)
    assert "the run had ended already" in ended.out and "has not ended on" not in ended.out
    assert (store / "results.json").read_bytes() == (tmp_path / "runs/train/exp/results.json").read_bytes()


@pytest.mark.slow
def test_a_killed_rank_0_takes_its_own_lease_again(tmp_path: Path, quiet: str) -> None:
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    command: list[str | Path] = ["train", "--data", data, *ARGS, "--checkpoint-to", address]
    run = started(tmp_path, *command, "--device", "cpu:2", err=subprocess.STDOUT)
    try:
        wait_until(lambda: any(store.glob("checkpoints/step-*")), run)
        os.kill(next(pid for pid in descendants(run.pid) if rank_of(pid) == 0), signal.SIGKILL)
        said = run.communicate(timeout=DEADLINE_S)[0]
    finally:
        run.kill()
    assert run.returncode == 0 and "started again" in said, said
    assert "has not ended on" not in said, "it waited for its own lease"
    assert results(tmp_path / "runs/train/exp")["weights_sha256"] == quiet
    assert (store / "results.json").exists() and not list(tmp_path.glob("**/*-before-*"))


@pytest.mark.slow
def test_a_scheduler_repeats_one_command_on_machines_without_a_common_disk(
    tmp_path: Path, quiet: str
) -> None:
    """The ranks of two machines, as torchrun starts them; both machines are lost once."""
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    command: list[str | Path] = ["train", "--data", data, *ARGS, "--checkpoint-to", address]
    command += ["--resume", "auto", "--exist-ok"]
    log = tmp_path / "ranks.log"
    for attempt in ("first", "second"):
        places = [tmp_path / f"{attempt} {number}" for number in range(2)]
        for place in places:
            place.mkdir()
        ranks = started_ranks(places, *command, "--device", "cpu", home=tmp_path, log=log)
        try:
            if attempt == "first":
                wait_until(lambda: any(store.glob("checkpoints/step-*")))
            else:
                assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [0, 0], log.read_text()
        finally:
            kill(ranks)
        pass_time(store)
    assert "nothing to resume in file://" in log.read_text() and "resumed after step" in log.read_text()
    assert results(places[0] / "runs/train/exp")["weights_sha256"] == quiet
    assert rows(places[0] / "runs/train/exp") == [str(epoch) for epoch in range(1, EPOCHS + 1)]
    # the second machine keeps the copies that it would keep without a store
    assert rows(places[1] / "runs/train/exp") == rows(places[0] / "runs/train/exp")


@pytest.mark.slow
def test_an_address_that_fails_ends_the_run_before_it_begins(tmp_path: Path, data: Path) -> None:
    (tmp_path / "file").touch()
    copied = ("--checkpoint-to", f"file://{tmp_path}/file/run")
    said = yolofleet(tmp_path, "train", "--data", data, *ARGS, *copied, "--device", "cpu:2", code=3).err
    assert said.count("Error:") == 1 and "Not a directory" in said and "Traceback" not in said, said
    assert not (tmp_path / "runs/train/exp").exists()


@pytest.mark.slow
def test_a_run_whose_copying_process_is_killed_goes_on_and_says_so(tmp_path: Path, quiet: str) -> None:
    data, (store, address) = small_shapes(tmp_path), store_of(tmp_path)
    command: list[str | Path] = ["train", "--data", data, *ARGS, "--checkpoint-to", address]
    run = started(tmp_path, *command, "--device", "cpu", err=subprocess.STDOUT)
    try:
        wait_until(lambda: any(store.glob("checkpoints/step-*")), run)
        copies = [
            p for p in descendants(run.pid) if b"bucket_copy" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]
        assert len(copies) == 1
        os.kill(copies[0], signal.SIGKILL)
        said = run.communicate(timeout=DEADLINE_S)[0]
    finally:
        run.kill()
    assert run.returncode == 3, said
    assert said.count("nothing more is copied to") == 1 and "Traceback" not in said, said
    assert f"--checkpoint-to {address}"[:40] in said
    assert results(tmp_path / "runs/train/exp")["weights_sha256"] == quiet
    pass_time(store)
    yolofleet(tmp_path, "train", "--resume", "runs/train/exp", "--checkpoint-to", address)
    assert (store / "results.json").exists()
