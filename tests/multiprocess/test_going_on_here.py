"""A run of several processes on one machine that goes on by itself."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import DEADLINE_S, SMALL, YOLOV5N, environment, in_ranks, small_shapes, started, yolofleet
from user_code_example import EXAMPLES, RUN
from walks import sampled

from yolofleet.support.system.proc import descendants, rank_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0"]


@contextmanager
def training(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    data = small_shapes(folder)
    with started(folder, "train", "--data", data, *ARGS, *more, err=subprocess.STDOUT) as run:
        try:
            yield run
        finally:
            run.kill()


def read_until(run: subprocess.Popen[str], words: str) -> str:
    assert run.stdout
    said = ""
    for line in run.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def rank_1(run: subprocess.Popen[str]) -> int:
    return next(pid for pid in descendants(run.pid) if rank_of(pid) == 1)


def test_a_killed_rank_changes_nothing_in_the_result(tmp_path: Path) -> None:
    epochs = ("--epochs", "12")
    in_ranks(tmp_path, 1, "train", "--data", small_shapes(tmp_path), *ARGS, *epochs, "--name", "quiet")
    runs = tmp_path / "runs/train"
    with training(tmp_path, *epochs, "--device", "cpu:2", "--name", "killed") as run:
        read_until(run, "epoch 2/")
        os.kill(rank_1(run), signal.SIGKILL)
        said = read_until(run, "started again as 2 processes")
        # torchrun's agent reports the first end that it sees, and rank 0 ends as soon as it loses rank 1
        assert "rank 1 was killed (SIGKILL)" in said or "rank 0 lost the other ranks" in said, said
        said += run.communicate(timeout=DEADLINE_S)[0]
        assert run.returncode == 0, said
    quiet, killed = (json.loads((runs / name / "results.json").read_text()) for name in ("quiet", "killed"))
    assert killed["weights_sha256"] == quiet["weights_sha256"], said
    rows = (runs / "killed/results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(n) for n in range(1, 13)]


# As torch 2.13 reports an error of a kernel, at one of the next calls.
ILLEGAL = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FAILING = f"""
import os
import torch
from my_model import TinyNetwork
from yolofleet import TrainingRecipe

ILLEGAL = {ILLEGAL!r}

class FailingNetwork(TinyNetwork):
    passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes == 2 and os.environ.get("RANK", "1") == os.environ["FAILING_RANK"]:
            if os.environ.get("ABORTS"):  # as torch's thread that watches NCCL
                os.write(2, ("[E1] Process group watchdog thread terminated with exception: " + ILLEGAL).encode())
                os.abort()
            raise getattr(torch, "AcceleratorError", RuntimeError)(ILLEGAL)
        return super().forward(images)

class Failing(TrainingRecipe):
    def network(self, nc):
        return FailingNetwork(nc)
"""


@pytest.mark.parametrize(
    ("device", "rank", "aborts"),
    sampled([("cpu", 0, ""), ("cpu:2", 1, ""), ("cpu:2", 0, "1"), ("cpu:2", 1, "1")], 4),
)
def test_a_run_does_not_go_on_with_a_device_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, rank: int, aborts: str
) -> None:
    monkeypatch.setenv("FAILING_RANK", str(rank if device != "cpu" else 1))
    monkeypatch.setenv("ABORTS", aborts)
    shutil.copy(EXAMPLES / "my_model.py", tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    data = small_shapes(tmp_path, images=8, val_images=4)
    own: list[str | Path] = [
        "train",
        "--data",
        data,
        *RUN,
        *("--recipe-class", "failing.py:Failing", "--restarts", "3"),
    ]
    if device == "cpu":
        failed = in_ranks(tmp_path, 1, *own, code=6)
    else:
        failed = yolofleet(tmp_path, *own, "--device", device, code=6).err
    who = (
        f"the GPU of rank {rank} on {platform.node()}"
        if aborts
        else f"GPU 0 of {platform.node()} (rank {rank})"
    )
    assert f"DeviceError: {who} failed: CUDA error: an illegal memory access was encountered\n" in failed
    assert "nvidia-smi" in failed and "dmesg" in failed and "--device" in failed
    assert not re.search("bug in yolofleet|Traceback|going on with|started again", failed), failed


@pytest.mark.slow
def test_a_torchrun_of_the_user_that_restarts_its_workers_continues_the_run(tmp_path: Path) -> None:
    epochs = ("--epochs", "12", *YOLOV5N)
    data = small_shapes(tmp_path)
    yolofleet(tmp_path, "train", "--data", data, *ARGS, *epochs, "--device", "cpu", "--name", "quiet")
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"),
        *("-m", "yolofleet"),
    ]
    own = ["--device", "cpu", "--save-every", "1steps", "--name", "restarted"]
    args = ["train", "--data", data, *ARGS, *epochs, *own]
    with subprocess.Popen(
        [sys.executable, *torchrun, *map(str, args)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        said = read_until(run, "epoch 3/")
        os.kill(rank_1(run), signal.SIGKILL)
        said += run.communicate(timeout=DEADLINE_S)[0]
    assert run.returncode == 0 and "started again as 2 processes" in said, said
    assert sorted(path.name for path in (tmp_path / "runs/train").iterdir()) == ["quiet", "restarted"]
    quiet, found = (
        json.loads((tmp_path / "runs/train" / name / "results.json").read_text())
        for name in ("quiet", "restarted")
    )
    assert found["weights_sha256"] == quiet["weights_sha256"], said
