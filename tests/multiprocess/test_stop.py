"""Requests to stop a run of several processes: a signal in the middle of a validation, and --preempt-notice."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from commands import (
    DEADLINE_S,
    YOLOV5N,
    family,
    in_ranks,
    kill,
    results,
    small_shapes,
    started,
    started_ranks,
    train_args,
    wait_until,
    yolofleet,
)

from yolofleet.runs.checkpoint.store import CheckpointStore
from yolofleet.support.system.proc import rank_of
from yolofleet.training import preempt_notice

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
SAVING = ("--save-every", "1steps", "--reduce", "exact")
SLOW = """
import time
from yolofleet import Callback

class Slow(Callback):
    \"\"\"Leaves the cores to other tests until the notice is asked for again, seconds later.\"\"\"

    def step(self, step):
        time.sleep(0.2)
"""

LATE = """
import signal
from pathlib import Path
from yolofleet import Callback
from yolofleet.training.report import TrainReport

finish = TrainReport.finish


def stopped(report):
    if not Path("stopped").exists():
        Path("stopped").touch()
        signal.raise_signal(signal.SIGTERM)
    finish(report)


class Late(Callback):
    def __init__(self):
        TrainReport.finish = stopped
"""


def rows(run: Path) -> list[tuple[str, str, str]]:
    with (run / "results.csv").open() as file:
        found = csv.DictReader(file)
        return [(row["epoch"], row["train/box_loss"], row["metrics/mAP50-95"]) for row in found]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", ["1", "2"])
def test_a_request_to_one_rank_ends_the_validation_of_all_and_a_resumed_run_repeats_it(
    tmp_path: Path, epochs: str
) -> None:
    data = small_shapes(tmp_path, images=16, val_images=600)
    args = train_args(data, *SAVING, "--epochs", epochs, "--val-batch", "1", *YOLOV5N)
    run, whole = (tmp_path / "runs" / "train" / name for name in ("stopped", "whole"))
    process = started(tmp_path, *args, "--device", "cpu:2", "--name", run.name)
    wait_until(lambda: list(run.glob("checkpoints/step-*1.safetensors")) or process.poll() is not None)
    ranks = {rank_of(pid): pid for pid in family(process.pid)}
    time.sleep(0.5)  # the second step ends the epoch: it is much shorter, and the validation much longer
    os.kill(ranks[1], signal.SIGUSR1)
    _, told = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 75, told
    assert "stopped on request after step 2; the state is saved\n  from : SIGUSR1\n" in told
    assert not (run / "results.csv").exists(), "the validation came to its end"
    said = yolofleet(tmp_path, "train", "--resume", run, "--device", "cpu").out
    assert "resumed after step 2 " in said
    yolofleet(tmp_path, *args, "--device", "cpu", "--name", whole.name)
    assert rows(run) == rows(whole) and len(rows(run)) == int(epochs)
    assert results(run)["metrics"] == results(whole)["metrics"]
    assert results(run)["weights_sha256"] == results(whole)["weights_sha256"]
    assert CheckpointStore(run / "checkpoints").entries()[0].step == 2 * int(epochs)


def test_a_stop_leaves_out_the_rest_of_a_validation_beside_the_training(tmp_path: Path) -> None:
    data = small_shapes(tmp_path, images=16, val_images=100)
    args = train_args(data, *SAVING, "--epochs", "3", "--val-batch", "1", "--val-overlap", "--device", "cpu")
    run, log = tmp_path / "runs" / "train" / "exp", tmp_path / "log"
    ranks = started_ranks([tmp_path] * 2, *args, home=tmp_path, log=log)
    try:
        wait_until(lambda: (run / "results.csv").exists() or ranks[0].poll() is not None)
        ranks[1].send_signal(signal.SIGUSR1)
        assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [75, 75], log.read_text()
    finally:
        kill(ranks)
    assert 1 <= len(rows(run)) <= 2
    in_ranks(tmp_path, 1, "train", "--resume", run)
    assert [epoch for epoch, _, _ in rows(run)] == ["1", "2", "3"] and rows(run)[2][2]


def test_a_stop_after_the_last_step_names_the_command_that_writes_the_report(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    args = train_args(small_shapes(tmp_path), "--epochs", "1", "--callbacks", "late.py:Late")
    run = tmp_path / "runs" / "train" / "exp"
    said = in_ranks(tmp_path, 1, *args, code=75)
    assert "stopped on request after the last step" in said and "from : SIGTERM" in said
    command = next(line for line in said.splitlines() if "try  : " in line).partition("yolofleet ")[2]
    assert "--resume" in command and not (run / "results.json").exists()
    in_ranks(tmp_path, 1, *shlex.split(command))
    assert results(run)["steps"] == int(list(csv.DictReader((run / "results.csv").open()))[-1]["step"])


def test_a_stopped_run_has_a_report_of_its_last_validation(tmp_path: Path) -> None:
    args = train_args(small_shapes(tmp_path), "--epochs", "10000", "--plots", "--device", "cpu")
    run, log = tmp_path / "runs" / "train" / "exp", tmp_path / "log"
    ranks = started_ranks([tmp_path] * 2, *args, home=tmp_path, log=log)

    def is_validated() -> bool:
        return (run / "results.csv").exists() and len(
            rows(run)
        ) >= 3  # the first, second and fourth have figures

    try:
        wait_until(lambda: is_validated() or ranks[0].poll() is not None)
        ranks[0].send_signal(signal.SIGUSR1)
        assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [75, 75], log.read_text()
    finally:
        kill(ranks)
    figures = json.loads((run / "report.json").read_text())
    assert figures["confusion"] and figures["images"]
    assert figures["metrics"]["mAP50-95"] == pytest.approx(float(rows(run)[-1][2]), abs=1e-4)
    assert "<title>" in (run / "report.html").read_text()


def test_a_preempt_notice_stops_all_ranks_and_names_the_host(tmp_path: Path) -> None:
    data, flag = small_shapes(tmp_path), tmp_path / "the machine goes"
    (tmp_path / "slow.py").write_text(SLOW)
    args = train_args(data, *SAVING, "--epochs", "10000", "--val-period", "0", "--callbacks", "slow.py:Slow")
    args += ["--preempt-notice", f"test -e {shlex.quote(str(flag))}", "--device", "cpu"]
    run, log = tmp_path / "runs" / "train" / "exp", tmp_path / "log"
    often = partial(setattr, preempt_notice, "PERIOD_S", 0.2)
    ranks = started_ranks([tmp_path] * 2, *args, home=tmp_path, log=log, first=often)
    try:
        wait_until(lambda: list(run.glob("checkpoints/step-*.safetensors")) or ranks[0].poll() is not None)
        processes = [pid for rank in ranks for pid in family(rank.pid)]
        flag.touch()
        codes = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
    finally:
        kill(ranks)
    told = log.read_text()
    assert codes == [75, 75], told
    assert "the state is saved\n  from : --preempt-notice on " in told
    assert "the state was saved" in (run / "logs" / "rank-0.log").read_text()
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_preempt_notice_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    args = train_args(small_shapes(tmp_path), "--epochs", "10000", "--val-period", "0")
    told = in_ranks(tmp_path, 1, *args, "--preempt-notice", "true", code=75)
    assert "  from : --preempt-notice on " in told and "Traceback" not in told
