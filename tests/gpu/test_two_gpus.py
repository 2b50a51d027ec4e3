"""What needs a second GPU: their order, one that is left alone, and memory that runs out on one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import YOLOV5N, ran, small_shapes, train_args, yolofleet
from gpu_devices import ONE, SECOND, SWAPPED, TWO, are_equal_devices, needs_gpu, only_gpus, two_gpus
from gpu_runs import bits, trained

pytestmark = [*needs_gpu, two_gpus]
LEFT_MIB = 2560  # of the second GPU: enough for the libraries, too little for the micro-batch below


def test_the_order_of_the_gpus_changes_no_bit(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_equal_devices():
        pytest.skip("the GPUs are of different products")
    first = bits(tmp_path, "first", data, "--device", ONE)
    assert bits(tmp_path, "second", data, "--device", SECOND) == first
    assert bits(tmp_path, "swapped", data, "--device", SWAPPED) == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert bits(tmp_path, "reordered", data, "--device", TWO) == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert bits(tmp_path, "only second", data, "--device", ONE) == first


USES_THE_SECOND = """
import sys, torch
from yolofleet import load_model

if sys.argv[1] != "cpu":
    assert not torch._C._cuda_hasPrimaryContext(0)
model = load_model(sys.argv[2], device=sys.argv[1], conf=0.001)
assert len(model.predict(sys.argv[3])) == 10
if sys.argv[1] != "cpu":
    assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0), "GPU 0 was touched"
"""


def test_prediction_on_the_second_gpu_leaves_the_first_alone(tmp_path: Path, data: Path) -> None:
    trained(tmp_path, "run", data, "--device", SECOND)
    ran(tmp_path, sys.executable, "-c", USES_THE_SECOND, SECOND, "runs/train/run", data.parent / "images/val")


USES_CUDA_FIRST = """
import sys, torch
from yolofleet import Model

used = torch.ones(8, device="cpu" if sys.argv[1].startswith("cpu") else "cuda")  # as the cells of a notebook before
sizes = {"img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "epochs": 1, "plots": False}
run = Model("yolov5n").train(data=sys.argv[2], device=sys.argv[1], **sizes)
assert run.weights.is_file() and float(used.sum()) == 8
"""


def test_a_process_that_has_used_cuda_trains_on_two_gpus(tmp_path: Path, data: Path) -> None:
    ran(tmp_path, sys.executable, "-c", USES_CUDA_FIRST, TWO, data)


FILLS_A_GPU = """
import sys, torch

keep = torch.empty(torch.cuda.mem_get_info(1)[0] - (int(sys.argv[1]) << 20), dtype=torch.uint8, device="cuda:1")
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def filled_second_gpu() -> Iterator[None]:
    """Hold the memory of the second GPU, except ``LEFT_MIB``, in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", FILLS_A_GPU, str(LEFT_MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as filler:
        assert filler.stdout is not None and filler.stdout.readline() == "full\n"
        try:
            yield
        finally:
            filler.kill()


@only_gpus
def test_memory_that_runs_out_on_one_gpu_ends_all_ranks(tmp_path: Path) -> None:
    more = ("--img", "640", "--batch", "128", "--micro-batch", "64", "--nominal-batch", "128")
    more += ("--device", TWO, "--cache", "none", "--stall-s", "10")
    with filled_second_gpu():
        err = yolofleet(tmp_path, *train_args(small_shapes(tmp_path), *YOLOV5N, *more), code=2).err
    assert "has too little memory for" in err and "--micro-batch" in err
