"""Requests in the folder of a run: save and go on, or stop with a saved state; and the status of the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import DEADLINE_S, in_ranks, kill, small_shapes, started_ranks, train_args, wait_until

from yolofleet.runs.checkpoint.store import CheckpointStore
from yolofleet.runs.report.folder import RunFolder


def status(folder: RunFolder) -> dict:
    try:
        found: dict = json.loads(folder.status.read_text())
    except (OSError, ValueError):
        return {}
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_saves_and_stops_on_request_and_goes_on_when_it_is_resumed(tmp_path: Path, ranks: int) -> None:
    args = train_args(small_shapes(tmp_path), "--epochs", "100000", "--val-period", "0", "--reduce", "exact")
    folder = RunFolder(tmp_path / "runs" / "train" / "exp")
    saving = ("--device", "cpu", "--save-every", "0")
    log = tmp_path / "log"
    processes = started_ranks([tmp_path] * ranks, *args, *saving, home=tmp_path, log=log)

    def wait_for(ready: Callable[[], object]) -> None:
        wait_until(lambda: ready() or processes[0].poll() is not None)

    try:
        wait_for(lambda: status(folder).get("step"))
        found = status(folder)
        assert found["state"] == "running" and 0 < found["share"] < 1 and found["ranks"] == ranks
        assert not list(folder.checkpoints.glob("step-*"))
        folder.request("save").touch()
        wait_for(lambda: list(folder.checkpoints.glob("step-*.safetensors")))
        saved = CheckpointStore(folder.checkpoints).entries()[0].step
        wait_for(lambda: status(folder).get("step", 0) > saved)
        assert processes[0].poll() is None and status(folder)["saved_step"] == saved
        folder.request("stop").touch()
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        kill(processes)
    told = log.read_text()
    assert codes == [75] * ranks, told
    assert "the state is saved\n  from : a request in the run folder" in told
    stopped = status(folder)
    assert stopped["state"] == "stopped" and stopped["why"] == "a request in the run folder"
    last = CheckpointStore(folder.checkpoints).entries()[0].step
    assert last > saved and not list(folder.logs.glob("*.request"))

    folder.request("stop").touch()  # an old request stops no later run
    epochs = 8 * last // 20 + 2
    said = in_ranks(tmp_path, 2, "train", "--resume", folder.path, "--epochs", str(epochs))
    assert f"resumed after step {last} " in said
    assert status(folder)["state"] == "ended" and not folder.request("stop").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="workers of another system end otherwise")
def test_the_status_tells_why_a_run_failed(tmp_path: Path) -> None:
    args = train_args(
        small_shapes(tmp_path), "--set", "warmup_epochs=0", "--set", "lr0=1e30", "--epochs", "4"
    )
    in_ranks(tmp_path, 1, *args, code=5)
    folder = RunFolder(tmp_path / "runs" / "train" / "exp")
    assert status(folder)["state"] == "failed" and "NumericsError" in status(folder)["why"]
