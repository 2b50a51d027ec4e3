"""Whole runs on GPUs: fp16 and its loss scale, equal bits, NCCL, DataParallel, failures. `make test-gpu`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from commands import killed_at_step, results, small_shapes, train_args, yolofleet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONE, TWO = "0", "0,1"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LONG = ("--epochs", "12", "--val-period", "0")  # 30 steps


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return small_shapes(tmp_path)


def losses(folder: Path, name: str) -> float:
    """Of the last epoch, all terms."""
    with (folder / "runs/train" / name / "results.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    return sum(float(value) for key, value in row.items() if key.startswith("train/"))


def trained(folder: Path, name: str, data: Path, *more: str) -> dict:
    yolofleet(folder, *train_args(data, "--name", name, *more))
    return results(folder / "runs/train" / name)


def test_fp16_learns_what_fp32_learns(tmp_path: Path, data: Path) -> None:
    half = trained(tmp_path, "half", data, *LONG, "--device", ONE)
    full = trained(tmp_path, "full", data, *LONG, "--device", ONE, "--precision", "fp32")
    assert half["steps"] == full["steps"] == 30
    assert losses(tmp_path, "half") == pytest.approx(losses(tmp_path, "full"), rel=0.05)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("model", ["yolov5n", "yolov3-tiny", "ppyoloe-s"])
def test_exact_sums_give_equal_bits_again_and_after_a_kill(
    tmp_path: Path, data: Path, model: str, precision: str
) -> None:
    more = (*LONG, "--model", model, "--device", ONE, "--reduce", "exact", "--precision", precision)
    first = trained(tmp_path, "first", data, *more)
    assert trained(tmp_path, "second", data, *more)["weights_sha256"] == first["weights_sha256"]
    third = tmp_path / "runs/train/third"
    killed_at_step(
        tmp_path,
        8,
        third,
        *train_args(data, "--name", "third", *more, "--save-steps", "4", "--keep-last", "9"),
    )
    yolofleet(tmp_path, "train", "--resume", third)
    assert results(third)["weights_sha256"] == first["weights_sha256"]


@two_gpus
def test_two_gpus_give_the_bits_of_one(tmp_path: Path, data: Path) -> None:
    one = trained(tmp_path, "one", data, *LONG, "--reduce", "exact", "--device", ONE)
    for name, more in {
        "two": (),
        "uneven": ("--shares", "3,1"),
        "measured": ("--shares", "auto"),
        "lanes": ("--parallel", "dp"),
    }.items():
        two = trained(tmp_path, name, data, *LONG, "--reduce", "exact", "--device", TWO, *more)
        assert two["weights_sha256"] == one["weights_sha256"], name


@two_gpus
@pytest.mark.parametrize("more", [(), ("--sync-bn",), ("--parallel", "dp"), ("--optimizer", "AdamW")])
def test_two_gpus_learn_what_one_learns(tmp_path: Path, data: Path, more: tuple[str, ...]) -> None:
    trained(tmp_path, "one", data, *LONG, "--device", ONE, *(more if "--optimizer" in more else ()))
    trained(tmp_path, "two", data, *LONG, "--device", TWO, *more)
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=0.1)


@two_gpus
def test_memory_that_runs_out_on_gpus_is_said_and_everybody_ends(tmp_path: Path, data: Path) -> None:
    more = (
        "--device",
        TWO,
        "--img",
        "4096",
        "--batch",
        "512",
        "--micro-batch",
        "256",
        "--nominal-batch",
        "512",
    )
    said = yolofleet(tmp_path, *train_args(data, "--cache", "none", *more), code=2).err
    assert "has too little memory for" in said and "--micro-batch" in said


def test_validation_gives_the_figures_of_the_cpu(tmp_path: Path, data: Path) -> None:
    trained(tmp_path, "run", data, *LONG, "--device", ONE)
    weights = tmp_path / "runs/train/run/weights/last.safetensors"
    for name, more in {"gpu": ("--device", ONE, "--precision", "fp32"), "cpu": ("--device", "cpu")}.items():
        yolofleet(
            tmp_path,
            "val",
            "--weights",
            weights,
            "--data",
            data,
            "--img",
            "64",
            "--name",
            name,
            "--conf",
            "0.01",
            *more,
        )
    gpu, cpu = (results(tmp_path / "runs/val" / name)["metrics"] for name in ("gpu", "cpu"))
    assert gpu["mAP50"] == pytest.approx(cpu["mAP50"], abs=0.01)


def test_selftest_and_doctor(tmp_path: Path) -> None:
    yolofleet(tmp_path, "doctor")
    yolofleet(tmp_path, "selftest", "--device", TWO if torch.cuda.device_count() > 1 else ONE)
