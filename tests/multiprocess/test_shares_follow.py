"""``--shares auto`` follows the speed of the ranks, and the weights stay those of fixed shares."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import DEADLINE_S, events_of, in_ranks, results, small_shapes, started, wait_until, yolofleet
from user_code_example import EXAMPLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="interrupts the run with a signal"),
]
# 20 images, 8 micro-batches in a step
RUN = [
    "--recipe-class", "slowed.py:Slowed", "--img", "64", "--batch", "16", "--nominal-batch", "16", "--micro-batch", "2",
    "--no-plots", "--val-period", "0", "--threads", "1", "--workers", "0", "--reduce", "exact", "--epochs", "100000",
]  # fmt: skip
# while the file ``slow`` exists, a forward pass of rank 1 takes 36 times as long, so that a whole pass takes about 13 times as long
SLOWED = """
import os
import time
from my_model import TinyNetwork
from yolofleet import TrainingRecipe

class SlowedNetwork(TinyNetwork):
    def forward(self, images):
        began_s = time.perf_counter()
        raws = super().forward(images)
        if self.training and os.environ.get("RANK") == "1" and os.path.exists("slow"):
            time.sleep(36 * (time.perf_counter() - began_s))
        return raws

class Slowed(TrainingRecipe):
    def network(self, nc):
        return SlowedNetwork(nc)
"""


def test_a_rank_that_is_slow_for_a_while_changes_shares_and_not_one_bit(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "my_model.py", tmp_path)
    (tmp_path / "slowed.py").write_text(SLOWED)
    data, run = small_shapes(tmp_path), tmp_path / "runs" / "train" / "followed"
    job: list[str | Path] = [
        "train",
        "--data",
        data,
        *RUN,
        "--name",
        run.name,
        *("--device", "cpu:2", "--shares", "auto"),
    ]
    with started(tmp_path, *job, err=subprocess.STDOUT, out=subprocess.DEVNULL) as process:
        try:

            def shares() -> list[list[int]]:
                found = (run / "events.jsonl").exists() and events_of(run, "shares")
                return [event["micro_batches"] for event in found or ()]

            wait_until(shares, process)
            (tmp_path / "slow").touch()
            wait_until(lambda: shares()[-1][1] == 0, process)
            (tmp_path / "slow").unlink()
            wait_until(lambda: shares()[-1][1] > 0, process)
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 75
        finally:
            process.kill()
    log = (run / "logs" / "rank-0.log").read_text()
    assert "shares follow the speed: rank 1 (" in log and "rank 1 gets none" in log
    last_step = max(int(path.stem.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")) + 1
    resumed = yolofleet(
        tmp_path, "train", "--resume", run, "--recipe-class", RUN[1], "--max-steps", str(last_step)
    )
    fixed = ["--name", "fixed", "--shares", "3,1", "--max-steps", str(last_step)]
    in_ranks(tmp_path, 2, "train", "--data", data, *RUN, *fixed)
    found, expected = (results(run.with_name(name)) for name in (run.name, "fixed"))
    assert found["steps"] == expected["steps"] == last_step, resumed.out
    assert found["weights_sha256"] == expected["weights_sha256"]
