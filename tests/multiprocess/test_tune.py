"""`yolofleet tune` with real processes: killed, stopped and resumed, several trials side by side, trials that fail."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from commands import (
    DEADLINE_S,
    YOLOV5N,
    called,
    family,
    kill,
    small_shapes,
    started,
    started_ranks,
    train_args,
    wait_until,
    working_in,
    yolofleet,
)

from yolofleet.config.recipe import load_recipe
from yolofleet.support.system.proc import children

pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

SPACE = "lr0: [0.001, 0.1, log]\nmomentum: [0.6, 0.98]\n"


def tune_args(folder: Path, *more: str | Path) -> list[str | Path]:
    (folder / "space.yaml").write_text(SPACE)
    args = train_args(small_shapes(folder, images=16, val_images=8), "--set", "warmup_epochs=0", *more)
    return ["tune", *args[1:], "--space", "space.yaml", "--save-every", "1steps"]


def table(study: Path) -> list[dict[str, str]]:
    with (study / "trials.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def weights(study: Path) -> list[str]:
    found = sorted(study.glob("trials/*/results.json"))
    return [json.loads(file.read_text())["weights_sha256"] for file in found]


def test_a_stopped_study_ends_its_trial_and_goes_on_with_it(tmp_path: Path) -> None:
    study = tmp_path / "runs" / "tune" / "exp"
    args = tune_args(tmp_path, "--trials", "1", "--epochs", "8", "--device", "cpu")
    log = tmp_path / "log"

    def saved_trials() -> set[Path]:
        return {state.parent for state in study.glob("trials/*/checkpoints/step-*")}

    (process,) = started_ranks([tmp_path], *args, home=tmp_path, log=log)
    try:
        wait_until(lambda: [*study.glob("trials/*/checkpoints/step-*")] or process.poll() is not None)
        processes = family(process.pid)
        process.send_signal(signal.SIGTERM)
        code, told = process.wait(timeout=DEADLINE_S), log.read_text()
    finally:
        kill([process])
    assert code == 75, told
    assert f"yolofleet tune --resume {study.relative_to(tmp_path)}" in told and "Traceback" not in told
    # helpers of multiprocessing notice the end of their parent a little later
    wait_until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])
    with working_in(tmp_path):
        refused = called("tune", "--resume", "auto", "--epochs", "3")
        assert refused.code == 2 and "--epochs 3 differs from the study's 8" in refused.err
        done = called("tune", "--resume", "auto")
        assert done.code == 0, done.out + done.err
    assert [row["state"] for row in table(study)] == ["complete"]
    assert "resumed after step" in (study / "logs" / "trial-0000.log").read_text()
    assert (study / "best.yaml").is_file()
    # one cache for the trials of a machine, also after a resume
    told = (study / "trials/0000/logs/rank-0.log").read_text()
    caches = [line for line in told.splitlines() if "images: cache: ram" in line]
    assert caches and all("shared by the runs of a study" in line for line in caches)


@pytest.mark.slow
def test_a_study_that_is_killed_twice_has_the_same_trials(tmp_path: Path) -> None:
    args = tune_args(tmp_path, "--trials", "6", "--generation", "3", *YOLOV5N)
    runs = tmp_path / "runs" / "tune"
    yolofleet(tmp_path, *args, "--device", "cpu:2", "--name", "whole")

    study = runs / "killed"
    process = started(tmp_path, *args, "--device", "cpu:2", "--name", "killed")
    wait_until(lambda: list(study.glob("trials/*/checkpoints/step-*")), process)
    process.kill()  # the study: the kernel tells its trials to stop
    process.communicate()
    process = started(tmp_path, "tune", "--resume", study, "--device", "cpu:2")
    wait_until(lambda: list(study.glob("trials/0003/checkpoints/step-*")), process)
    for pid in children(process.pid):  # a trial: the study starts it again
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "it is started again" in (study / "logs" / "tune.log").read_text(), process)
    process.kill()
    process.communicate()
    yolofleet(tmp_path, "tune", "--resume", "auto", "--device", "cpu")

    assert table(study) == table(runs / "whole") and len(table(study)) == 6
    assert weights(study) == weights(runs / "whole") and len(weights(study)) == 6
    assert {row["state"] for row in table(study)} == {"complete"}
    best = load_recipe(str(study / "best.yaml")).value
    row = max(table(study), key=lambda row: float(row["fitness"]))
    assert (best.lr0, best.momentum) == (float(row["lr0"]), float(row["momentum"]))
    assert list(study.glob("trials/*/weights/best.safetensors"))
    assert not list(study.glob("trials/*/checkpoints"))

    yolofleet(
        tmp_path, "tune", "--resume", study, "--device", "cpu:2", "--trials", "7", "--devices-per-trial", "2"
    )
    assert table(study)[:6] == table(runs / "whole") and len(table(study)) == 7


@pytest.mark.slow
def test_trials_that_fail_are_recorded_and_several_in_a_row_end_the_study(tmp_path: Path) -> None:
    study = tmp_path / "runs" / "tune" / "exp"
    # without clipping, a rate of 1e30 makes the first update infinite
    args = tune_args(tmp_path, "--trials", "9", "--failures", "2", "--device", "cpu:2", "--max-steps", "2")
    args += ["--set", "clip_norm=0", "--set", "lr0=1e30", "--generation", "2"]
    (tmp_path / "space.yaml").write_text("lr0: [1e29, 1e31, log]\n")
    told = yolofleet(tmp_path, *args, code=2)
    assert "the last 2 trials failed" in told.err and "Traceback" not in told.err
    failed = [row for row in table(study) if row["state"] == "failed"]
    assert len(failed) == 2 and all("NumericsError: " in row["reason"] for row in failed)
    assert not (study / "best.yaml").exists()
