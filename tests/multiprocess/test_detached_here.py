"""A run on this machine alone that outlives its launcher: ``--detach`` without hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import SIZES, TINY, results, small_shapes, wait_until, yolofleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="host agents run on Linux"),
]


def test_a_detached_run_is_listed_stopped_and_resumed(tmp_path: Path) -> None:
    """The weights are those of a run that nobody detached or stopped."""
    (tmp_path / "tmp").mkdir()
    data, own = small_shapes(tmp_path), {"TMPDIR": str(tmp_path / "tmp")}
    settings = ["--data", str(data), "--model", str(TINY), *SIZES, "--threads", "1", "--reduce", "exact"]
    settings += ["--val-period", "0", "--epochs", "60"]
    yolofleet(tmp_path, "train", *settings, "--device", "cpu", "--name", "quiet")

    begun = yolofleet(tmp_path, "train", *settings, "--device", "cpu:2", "--detach", variables=own)
    assert "in Python yolofleet.attach('exp-" in begun.err
    folder = tmp_path / "runs/train/exp"
    log = folder / "logs/rank-0.log"
    wait_until(lambda: log.is_file() and "epoch 1/" in log.read_text())
    assert "train runs/train/exp" in yolofleet(tmp_path, "fleet", "ps", variables=own).out
    yolofleet(tmp_path, "fleet", "stop", "exp", variables=own)
    assert "no jobs run" in yolofleet(tmp_path, "fleet", "ps", variables=own).out
    ended = yolofleet(tmp_path, "fleet", "attach", folder, variables=own, code=75)
    assert "epoch 1/60: " in ended.out and f"results are in {folder}" in ended.err

    yolofleet(tmp_path, "train", "--resume", folder, "--detach", variables=own)
    yolofleet(tmp_path, "fleet", "attach", folder, variables=own)
    assert results(folder)["weights_sha256"] == results(tmp_path / "runs/train/quiet")["weights_sha256"]
