"""Requests in the folder of a run: save and go on, or stop with a saved state; and the status of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import DEADLINE_S, small_shapes, started, train_args, wait_until, yolofleet

from yolofleet.checkpoint.store import CheckpointStore
from yolofleet.report.folder import RunFolder


def status(folder: RunFolder) -> dict:
    try:
        found: dict = json.loads(folder.status.read_text())
    except (OSError, ValueError):
        return {}
    return found


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cpu:2"])
def test_a_run_saves_and_stops_on_request_and_goes_on_when_it_is_resumed(tmp_path: Path, device: str) -> None:
    args = train_args(small_shapes(tmp_path), "--epochs", "100000", "--val-period", "0", "--reduce", "exact")
    folder = RunFolder(tmp_path / "runs" / "train" / "exp")
    process = started(tmp_path, *args, "--device", device, "--save-period", "0", "--save-minutes", "0")
    wait_until(lambda: status(folder).get("step") or process.poll() is not None)
    found = status(folder)
    assert (
        found["state"] == "running"
        and 0 < found["share"] < 1
        and found["ranks"] == (2 if ":" in device else 1)
    )
    assert not list(folder.checkpoints.glob("step-*"))
    folder.request("save").touch()
    wait_until(lambda: list(folder.checkpoints.glob("step-*.safetensors")) or process.poll() is not None)
    saved = CheckpointStore(folder.checkpoints).entries()[0].step
    wait_until(lambda: status(folder).get("step", 0) > saved)
    assert process.poll() is None and status(folder)["saved_step"] == saved
    folder.request("stop").touch()
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, told
    assert "the state is saved\n  from : a request in the run folder" in told
    stopped = status(folder)
    assert stopped["state"] == "stopped" and stopped["why"] == "a request in the run folder"
    last = CheckpointStore(folder.checkpoints).entries()[0].step
    assert last > saved and not list(folder.logs.glob("*.request"))

    folder.request("stop").touch()  # an old request stops no later run
    epochs = 8 * last // 20 + 2
    said = yolofleet(
        tmp_path, "train", "--resume", folder.path, "--device", "cpu:2", "--epochs", str(epochs)
    ).out
    assert f"resumed after step {last} " in said
    assert status(folder)["state"] == "ended" and not folder.request("stop").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="workers of another system end otherwise")
def test_the_status_tells_why_a_run_failed(tmp_path: Path) -> None:
    args = train_args(
        small_shapes(tmp_path), "--set", "warmup_epochs=0", "--set", "lr0=1e30", "--epochs", "4"
    )
    outcome = yolofleet(tmp_path, *args, "--device", "cpu", code=None)
    folder = RunFolder(tmp_path / "runs" / "train" / "exp")
    assert outcome.code == 5, outcome.err
    assert status(folder)["state"] == "failed" and "NumericsError" in status(folder)["why"]
