"""Rank 0 is paused while it trains, as on a host that is cut off, and the next attempt goes on in the same run folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import DEADLINE_S, SMALL, Forked, environment, in_ranks, kill, small_shapes

from yolofleet.runs.report.folder import COMMAND_ID

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pauses a process")


def attempt(folder: Path, run: Path, number: int, name: str) -> Forked:
    """Start an attempt of the run with one rank, as our launcher starts it on a host."""
    from yolofleet.training.rank import worker

    arguments = [str(run), str(folder / "runs/train/quiet/config.yaml"), str(number)]
    env = environment(folder) | {COMMAND_ID: "one command"}
    return Forked(folder, env, folder / f"{name}.log", lambda: worker.main(arguments))


def test_the_next_attempt_goes_on_although_rank_0_of_the_last_one_is_paused_and_wakes_later(
    tmp_path: Path,
) -> None:
    options = ["--epochs", "12", "--threads", "1", "--reduce", "exact", "--val-period", "0"]
    saves = ["--save-every", "1epochs", "--keep-last", "2", "--name", "quiet"]
    in_ranks(tmp_path, 1, "train", "--data", small_shapes(tmp_path), *SMALL, *options, *saves)
    quiet, run = tmp_path / "runs/train/quiet", tmp_path / "runs/train/paused"
    (run / "logs").mkdir(parents=True)
    first = attempt(tmp_path, run, 0, "first")
    second: Forked | None = None
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not any(run.glob("checkpoints/step-*.safetensors")):
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "first.log").read_text()
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)

        second = attempt(tmp_path, run, 1, "second")
        said = (tmp_path / "second.log").read_text
        assert second.wait() == 0, said()
        assert f"process {first.pid} on " in said() and "it lost" in said(), said()
        files = {
            path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "logs" not in path.parts
        }
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 4, (tmp_path / "first.log").read_text()
    finally:
        kill([process for process in (first, second) if process is not None])
    assert "another one has taken over" in (tmp_path / "first.log").read_text()
    left = {path: path.read_bytes() for path in files if path.exists()}
    assert left == files, "the paused process has written nothing"
    done, wanted = (json.loads((folder / "results.json").read_text()) for folder in (run, quiet))
    assert done["weights_sha256"] == wanted["weights_sha256"]
    assert len((run / "results.csv").read_text().splitlines()) == 13
