"""When a run saves by itself, and what a resumed run makes of epochs after its last state."""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path

import pytest
from commands import YOLOV5N, family, results, small_shapes, started, train_args, wait_until, yolofleet

from yolofleet.runs.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
EPOCHS = 8
LONG = ("--epochs", str(EPOCHS), "--val-period", "0", "--reduce", "exact", "--keep-last", "99", *YOLOV5N)


def rows(run: Path) -> list[tuple[str, str]]:
    path = run / "results.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [(row["epoch"], row["train/box_loss"]) for row in csv.DictReader(file)]


def epochs_saved(run: Path) -> list[int]:
    return sorted(entry.step // 2 for entry in CheckpointStore(run / "checkpoints").entries())


@pytest.mark.slow
def test_skipped_saves_change_no_result_of_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    data = small_shapes(tmp_path, images=16, val_images=4)
    run, whole = (tmp_path / "runs" / "train" / name for name in ("killed", "whole"))
    yolofleet(
        tmp_path, *train_args(data, *LONG, "--name", whole.name, "--save-every", "1epochs", "--device", "cpu")
    )
    assert epochs_saved(whole) == list(range(1, EPOCHS + 1))

    process = started(tmp_path, *train_args(data, *LONG, "--name", run.name, "--device", "cpu:2"))
    wait_until(lambda: len(rows(run)) >= 4, process)
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    epochs, saved = len(rows(run)), epochs_saved(run)
    # an epoch takes far less than a hundred times as long as a save
    assert saved[0] == 1 and len(saved) < epochs <= EPOCHS
    said = yolofleet(tmp_path, "train", "--resume", run, "--device", "cpu").out
    assert f"resumed after step {2 * saved[-1]} " in said
    assert rows(run) == rows(whole) and epochs_saved(run)[-1] == EPOCHS
    assert results(run)["weights_sha256"] == results(whole)["weights_sha256"]
