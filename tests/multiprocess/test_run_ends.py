"""Where a run ends by itself: after minutes or without progress, on one process, on two, and after a kill."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
from commands import events_of, in_ranks, killed_at_step, results, train_args, yolofleet

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
EXACT = ["--reduce", "exact", "--no-autoanchor"]
VALUES = ("lr0=0.002", "lr_factors=backbone:0.5", "ema_decay=0", "warmup_epochs=0")
ADAMAX = ["--optimizer", "Adamax", *(word for value in VALUES for word in ("--set", value))]
RISING = """
import copy

from yolofleet import TrainingRecipe
from yolofleet.families.yolov5.loss import Yolov5Loss


class RisingLoss(Yolov5Loss):
    def at(self, progress):
        loss = copy.copy(self)
        loss.gains = self.gains * (10 if progress >= 0.5 else 1)
        return loss


class Rising(TrainingRecipe):
    def loss(self, model, recipe, img):
        parts = {"anchors_px": model.anchors_px, "strides": model.strides, "codings": model.codings}
        return RisingLoss(nc=model.nc, recipe=recipe, img=img, **parts)
"""
IN_TIME = [*EXACT, *ADAMAX, "--epochs", "500", "--val-period", "0"]  # the last --epochs wins


def repeated(folder: Path, data: Path, steps: int, name: str) -> Path:
    """The run on one process whose last step is known from the start."""
    more = ["--lr-schedule", "cooldown", "--max-steps", str(steps), "--name", name]
    in_ranks(folder, 1, *train_args(data, *IN_TIME, *more))
    return folder / "runs/train" / name


def test_a_run_of_minutes_on_two_processes_is_the_run_on_one_with_its_last_step(
    folder: Path, data: Path
) -> None:
    args = train_args(data, *IN_TIME, "--minutes", "0.03", "--name", "minutes")
    said = in_ranks(folder, 2, *args)
    run = folder / "runs/train/minutes"
    (decided,) = events_of(run, "ends_in_time")
    steps = results(run)["steps"]
    assert decided["last_step"] == steps == decided["step"] + decided["step"] // 4
    assert f"--minutes 0.03: the run ends after step {steps}" in said
    seconds = results(run)["seconds"]
    assert sum(seconds.values()) - seconds["start"] >= 0.8 * 0.03 * 60
    again = repeated(folder, data, steps, "minutes again")
    assert results(again)["weights_sha256"] == results(run)["weights_sha256"]
    with (again / "results.csv").open() as file:
        *_, last = csv.DictReader(file)
    if steps >= 5:
        assert float(last["lr"]) == pytest.approx(0.002 * 0.01, rel=1e-4)


@pytest.mark.slow
@needs_proc
def test_the_minutes_of_a_killed_run_count_and_more_minutes_go_on(folder: Path, data: Path) -> None:
    run = folder / "runs/train/killed"
    args = train_args(data, *IN_TIME, "--minutes", "0.1", "--save-every", "2steps", "--name", run.name)
    killed_at_step(folder, 6, run, *args, "--device", "cpu")
    yolofleet(folder, "train", "--resume", run, "--device", "cpu:2")
    first = results(run)
    again = repeated(folder, data, first["steps"], "killed again")
    assert results(again)["weights_sha256"] == first["weights_sha256"]

    assert "had ended already" in yolofleet(folder, "train", "--resume", run, "--device", "cpu").out
    refused = yolofleet(folder, "train", "--resume", run, "--minutes", "0", "--device", "cpu", code=None)
    assert refused.code != 0 and "lr_schedule was cooldown, is linear" in refused.err
    said = yolofleet(folder, "train", "--resume", run, "--minutes", "0.2", "--device", "cpu").out
    assert "--minutes changes from 0.1 to 0.2" in said or "the run ends after step" in said
    assert results(run)["steps"] > first["steps"]


def test_a_run_that_detects_nothing_names_weights_of_its_own_family(folder: Path, data: Path) -> None:
    args = train_args(data, "--model", "yolov3-tiny", "--max-steps", "1", "--name", "nothing")
    said = in_ranks(folder, 1, *args)
    assert (
        "nothing was detected yet: train longer (--epochs), or from trained weights (--weights yolov3-tiny)"
        in said
    )


def test_a_run_whose_loss_rises_says_so_once_and_after_a_resume_no_more(folder: Path, data: Path) -> None:
    (folder / "rising.py").write_text(RISING)
    own = ["--recipe-class", "rising.py:Rising"]
    length = ["--epochs", "4", "--val-period", "0", "--max-steps", "8"]  # in epoch 4
    said = in_ranks(folder, 2, *train_args(data, *EXACT, *own, *length, "--name", "rises"))
    (warning,) = (line for line in said.splitlines() if "diverge" in line)
    expected = (
        r"warning: the loss rose from \S+ in epoch [12] to \S+ in epoch 3: the training diverges; a lower lr0"
    )
    assert re.match(expected, warning)
    again = in_ranks(folder, 1, "train", "--resume", folder / "runs/train/rises", *own, "--max-steps", "0")
    assert "epoch 4/4" in again and "the training diverges" not in again


@pytest.mark.slow
def test_the_row_of_an_epoch_has_the_losses_of_all_its_images_after_an_end_in_mid_epoch(
    folder: Path, data: Path
) -> None:
    epoch = [*EXACT, "--val-period", "0", "--epochs", "1"]  # the last --epochs wins
    rows = {}
    in_ranks(folder, 1, *train_args(data, *epoch, "--name", "undisturbed"))
    in_ranks(folder, 1, *train_args(data, *epoch, "--max-steps", "1", "--name", "ended"))
    ended = folder / "runs/train/ended"
    assert results(ended)["steps"] < results(ended.with_name("undisturbed"))["steps"]
    for more in ([], ["--max-steps", "0"]):  # the first one finds the run ended, and writes nothing anew
        said = yolofleet(folder, "train", "--resume", ended, "--device", "cpu", *more).out
        assert ("had ended already" in said) == (not more)
    for run in (ended, ended.with_name("undisturbed")):
        with (run / "results.csv").open() as file:
            rows[run.name] = [
                {key: value for key, value in row.items() if key.strip().startswith("train/")}
                for row in csv.DictReader(file)
            ]
    assert rows["ended"] == rows["undisturbed"] and len(rows["ended"]) == 1
