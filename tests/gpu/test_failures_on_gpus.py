"""One rank fails alone: the others end soon, the message names the rank, and the run goes on or resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import YOLOV5N, family, results, small_shapes, started, train_args, yolofleet
from gpu_devices import ON_CPUS, ONE, TWO, needs_gpu, shared_by

from yolofleet.support.system.proc import rank_of

pytestmark = [*needs_gpu, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
STALL_S = 10.0
BOUND_S = 900  # an error if a test reaches it: the run waits for a rank that is gone
STEPS = ("--max-steps", "40", "--epochs", "100", "--val-period", "0", "--reduce", "exact")


@dataclass
class Ended:
    """How a run ended after one of its ranks was disturbed.

    Attributes:
        left: its processes that still exist.
    """

    code: int
    err: str
    left: list[int]


def disturbed(folder: Path, run: Path, args: list[str | Path], disturb: Callable[[int], None]) -> Ended:
    """Start a run, disturb rank 1 after some steps, and wait for the end of the run."""
    launcher = started(folder, *args, out=subprocess.DEVNULL)
    everybody = [launcher.pid]
    try:
        deadline_s = time.monotonic() + BOUND_S
        while not any(int(f.stem.split("-")[1]) >= 8 for f in run.glob("checkpoints/step-*.safetensors")):
            assert launcher.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        everybody = family(launcher.pid)
        # its loader processes, which come after it, have the variable too
        rank_1 = next(pid for pid in everybody if rank_of(pid) == 1)
        disturb(rank_1)
        _, err = launcher.communicate(timeout=BOUND_S)
    finally:
        for pid in everybody if launcher.poll() is None else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return Ended(launcher.returncode, err, [pid for pid in everybody if Path(f"/proc/{pid}").exists()])


@pytest.mark.parametrize(
    ("sent", "model", "devices"),
    [
        (signal.SIGTERM, "yolov5n", TWO),
        (signal.SIGKILL, "yolov5n", TWO),
        (signal.SIGKILL, "yolov5n", shared_by(3)),
        (signal.SIGKILL, "yolov3-tiny", shared_by(3)),
        (signal.SIGKILL, "ppyoloe-s", shared_by(3)),
        (signal.SIGKILL, "dfine-n", shared_by(3)),
    ],
)
def test_a_signal_to_one_rank_ends_all_and_the_run_goes_on_or_resumes(
    tmp_path: Path, sent: signal.Signals, model: str, devices: str
) -> None:
    data, run = small_shapes(tmp_path), tmp_path / "runs/train/signalled"
    common = ("--model", model, *STEPS)
    yolofleet(tmp_path, *train_args(data, *common, "--device", ONE, "--name", "whole"))
    more = ("--device", devices, "--name", run.name, "--save-every", "2steps", "--stall-s", str(STALL_S))
    ended = disturbed(tmp_path, run, train_args(data, *common, *more), lambda pid: os.kill(pid, sent))
    if sent is signal.SIGTERM:  # a request: the step under way ends on all ranks, and the state is saved
        assert ended.code == 75, ended.err
        yolofleet(tmp_path, "train", "--resume", run)
    else:
        # the driver may need longer to end a killed process than the others wait for a sign of life
        named = "rank 1 was killed (SIGKILL)" in ended.err or re.search(
            r"rank 1 \(.*gives no sign of life", ended.err
        )
        assert ended.code == 0 and named, ended.err
    assert not ended.left
    assert results(run)["weights_sha256"] == results(tmp_path / "runs/train/whole")["weights_sha256"]


def test_memory_that_runs_out_on_all_gpus_is_reported_with_a_smaller_micro_batch(tmp_path: Path) -> None:
    if ON_CPUS:
        pytest.skip("the CPU of a test machine has enough memory, or none for the other tests")
    more = ("--img", "4096", "--batch", "60", "--micro-batch", "30", "--nominal-batch", "60")
    more += ("--workers", "0")  # loader processes would need 180 GiB of shared memory
    args = train_args(small_shapes(tmp_path), *YOLOV5N, "--cache", "none", "--device", TWO, *more)
    err = yolofleet(tmp_path, *args, code=2).err
    assert "has too little memory for" in err and "--micro-batch" in err
