"""Whole runs on GPUs: number formats, equal bits on any fleet, resuming, validation and prediction. `make test-gpu`."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import YOLOV5N, environment, killed_at_step, results, train_args, yolofleet
from gpu_devices import (
    DEVICE,
    IS_GPU,
    KIND,
    ONE,
    PRECISIONS,
    TWO,
    are_equal_devices,
    needs_gpu,
    only_cuda,
    only_gpus,
    shared_by,
)
from gpu_runs import EXACT, LONG, bits, losses, trained
from safetensors.torch import load_file

from yolofleet.families.weights.format import non_finite
from yolofleet.support.devices import has_tf32

pytestmark = needs_gpu
# PP-YOLOE's recipe varies it, and a graph has one size
ONE_SIZE = ("--set", "size_low=1", "--set", "size_high=1")
FAMILIES = ["yolov5n", "yolov3-tiny", "ppyoloe-s", "rtdetrv2-r18", "dfine-n"]


# -- one GPU ---------------------------------------------------------------------------------------------------


@only_gpus
def test_fp16_learns_what_fp32_learns(tmp_path: Path, data: Path) -> None:
    half = trained(tmp_path, "half", data, *LONG, "--device", ONE)
    full = trained(tmp_path, "full", data, *LONG, "--device", ONE, "--precision", "fp32")
    assert half["steps"] == full["steps"] == 30
    assert losses(tmp_path, "half") == pytest.approx(losses(tmp_path, "full"), rel=0.05)


@pytest.mark.parametrize("more", [("--precision", "bf16"), ("--optimizer", "AdamW")])
def test_other_settings_learn_what_the_cpu_learns(tmp_path: Path, data: Path, more: tuple[str, ...]) -> None:
    here = () if more[0] == "--precision" else more
    trained(tmp_path, "gpu", data, *LONG, "--precision", "fp32", "--device", ONE, *more)
    trained(tmp_path, "cpu", data, *LONG, "--precision", "fp32", "--device", "cpu", *here)
    assert losses(tmp_path, "gpu") == pytest.approx(losses(tmp_path, "cpu"), rel=0.1)


@pytest.mark.parametrize(
    ("more", "device"),
    [
        (("--val-overlap",), ONE),
        (("--batch", "auto"), ONE),
        (("--precision", "tf32"), ONE),
        (("--passes", "compiled"), ONE),
        (("--reduce", "fast16"), TWO),
    ],
)
def test_a_training_with_an_option_of_gpus_ends_with_finite_losses_and_weights(
    tmp_path: Path, data: Path, more: tuple[str, ...], device: str
) -> None:
    if not IS_GPU and more[0] in ("--precision", "--passes"):
        pytest.skip("needs an NVIDIA GPU, or takes minutes on a CPU")
    if "tf32" in more and not has_tf32(DEVICE):
        pytest.skip("needs an NVIDIA GPU with TensorFloat-32 (Ampere or newer)")
    trained(tmp_path, "run", data, "--device", device, *more)
    assert math.isfinite(losses(tmp_path, "run"))
    assert not non_finite(load_file(tmp_path / "runs/train/run/weights/last.safetensors"))


def test_a_study_trains_on_the_gpu(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")
    args = [arg for arg in train_args(data, *YOLOV5N, "--epochs", "1")[1:] if arg != "--no-plots"]
    yolofleet(tmp_path, "tune", *args, "--trials", "2", "--device", ONE)
    assert len(list(tmp_path.glob("runs/tune/exp/trials/*/results.json"))) == 2


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", FAMILIES)
def test_exact_sums_give_equal_bits_again_and_after_a_kill(
    tmp_path: Path, data: Path, model: str, precision: str
) -> None:
    more = ("--model", model, "--device", ONE, "--precision", precision)
    check_a_kill(tmp_path, data, more, resume_on=())


@only_cuda
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", FAMILIES)
def test_cuda_graphs_change_no_bit(tmp_path: Path, data: Path, model: str, precision: str) -> None:
    """Over three epochs with validations; the last step of each has fewer images."""
    more = ("--deterministic", "--micro-batch", "4", "--epochs", "3", "--device", ONE)
    more += ("--model", model, "--precision", precision, *ONE_SIZE)
    found = []
    for passes in ("graphs", "plain"):
        done = yolofleet(tmp_path, *train_args(data, *YOLOV5N, "--name", passes, "--passes", passes, *more))
        assert ("CUDA graphs" in done.out) == (passes == "graphs")
        found.append(results(tmp_path / "runs/train" / passes)["weights_sha256"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "more",
    [
        ("--optimizer", "Adam"),
        ("--optimizer", "AdamW"),
        ("--precision", "bf16"),
        ("--set", "size_low=0.5", "--set", "size_high=1.5"),
        ("--freeze", "backbone"),
    ],
    ids=" ".join,
)
def test_other_settings_give_equal_bits_after_a_kill(
    tmp_path: Path, data: Path, more: tuple[str, ...]
) -> None:
    check_a_kill(tmp_path, data, (*more, "--device", ONE), resume_on=())


def check_a_kill(folder: Path, data: Path, more: tuple[str, ...], *, resume_on: tuple[str, ...]) -> None:
    """Train twice, the second time with SIGKILL in the middle and a resume; both must end with the same bits."""
    more = (*LONG, *EXACT, *more)
    whole = trained(folder, "whole", data, *more)
    assert math.isfinite(losses(folder, "whole"))
    killed = folder / "runs/train/killed"
    saving = ("--name", "killed", "--save-every", "4steps", "--keep-last", "9")
    killed_at_step(folder, 8, killed, *train_args(data, *YOLOV5N, *more, *saving))
    yolofleet(folder, "train", "--resume", killed, *resume_on)
    assert results(killed)["weights_sha256"] == whole["weights_sha256"]


def test_loader_processes_change_no_bit(tmp_path: Path, data: Path) -> None:
    alone = bits(tmp_path, "alone", data, "--device", ONE, "--workers", "0")
    assert bits(tmp_path, "loaded", data, "--device", ONE, "--workers", "2") == alone


def test_validation_gives_the_figures_of_the_cpu(tmp_path: Path, data: Path) -> None:
    weights = weights_of_a_run(tmp_path, data)
    size = ("--img", "64", "--conf", "0.01")
    for name, more in {"gpu": ("--device", ONE, "--precision", "fp32"), "cpu": ("--device", "cpu")}.items():
        yolofleet(tmp_path, "val", "--weights", weights, "--data", data, "--name", name, *size, *more)
    gpu, cpu = (results(tmp_path / "runs/val" / name)["metrics"] for name in ("gpu", "cpu"))
    assert gpu["mAP50"] == pytest.approx(cpu["mAP50"], abs=0.01)


def test_prediction_gives_the_boxes_of_the_cpu(tmp_path: Path, data: Path) -> None:
    weights = weights_of_a_run(tmp_path, data)
    found = {}
    for name, device in {"gpu": ONE, "cpu": "cpu"}.items():
        more = ("--img", "64", "--conf", "0.001", "--save", "none", "--save-json", "--precision", "fp32")
        source = data.parent / "images/val"
        yolofleet(
            tmp_path,
            *("predict", "--weights", weights, "--source", source, "--name", name, "--device", device),
            *more,
        )
        found[name] = rows_of(tmp_path / "runs/predict" / name)
    assert len(found["gpu"]) > 0
    # a score within rounding of --conf may be on either side of it
    clear = {name: rows[rows[:, 4] > 0.00101] for name, rows in found.items()}
    assert clear["gpu"].shape == clear["cpu"].shape
    order = [np.lexsort(rows.round(2).T) for rows in clear.values()]
    gpu, cpu = (rows[at] for rows, at in zip(clear.values(), order, strict=True))
    np.testing.assert_allclose(gpu[:, :4], cpu[:, :4], atol=0.1)
    np.testing.assert_allclose(gpu[:, 4], cpu[:, 4], rtol=1e-2)


def weights_of_a_run(folder: Path, data: Path) -> Path:
    trained(folder, "run", data, *LONG, "--device", ONE)
    return folder / "runs/train/run/weights/last.safetensors"


def rows_of(run: Path) -> np.ndarray:
    """Return [M, 6] of a prediction's JSON: x1, y1, x2, y2, score, class."""
    pictures = json.loads((run / "predictions.json").read_text())
    boxes = [box for picture in pictures for box in picture["detections"]]
    return np.array([[*box["box_xyxy_px"], box["score"], box["class"]] for box in boxes], float)


# -- two processes: on two GPUs, or on one that they share -----------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", FAMILIES)
def test_two_gpus_give_the_bits_of_one(tmp_path: Path, data: Path, model: str, precision: str) -> None:
    if not are_equal_devices():
        pytest.skip("the GPUs are of different products")
    common = ("--model", model, "--precision", precision)
    one = bits(tmp_path, "one", data, *common, "--device", ONE)
    for name, more in {
        "two": (),
        "uneven": ("--shares", "3,1"),
        "idle": ("--shares", "1,0"),
        "measured": ("--shares", "auto"),
        "replicas": ("--parallel", "dp"),
    }.items():
        assert bits(tmp_path, name, data, *common, "--device", TWO, *more) == one, name


@pytest.mark.parametrize("model", FAMILIES)
def test_three_processes_on_one_gpu_give_the_bits_of_one(tmp_path: Path, data: Path, model: str) -> None:
    """NCCL refuses a GPU twice, so their reductions use gloo. Everything else is what several GPUs do."""
    common = ("--model", model, "--deterministic", "--micro-batch", "4", *ONE_SIZE)
    one = bits(tmp_path, "one", data, *common, "--device", ONE)
    for name, more in {
        "equal": (),
        "uneven": ("--shares", "4,2,1"),
        "idle": ("--shares", "2,0,1"),
        "graphs": ("--shares", "2,1,1", *(("--passes", "graphs") if KIND == "cuda" else ())),
    }.items():
        assert bits(tmp_path, name, data, *common, "--device", shared_by(3), *more) == one, name


@pytest.mark.parametrize("more", [(), ("--sync-bn",), ("--parallel", "dp"), ("--optimizer", "AdamW")])
def test_two_gpus_learn_what_one_learns(tmp_path: Path, data: Path, more: tuple[str, ...]) -> None:
    trained(tmp_path, "one", data, *LONG, "--device", ONE, *(more if "--optimizer" in more else ()))
    trained(tmp_path, "two", data, *LONG, "--device", TWO, *more)
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=0.1)


@pytest.mark.parametrize(("first", "then"), [(TWO, ONE), (ONE, TWO)])
def test_a_run_resumes_on_another_number_of_gpus(tmp_path: Path, data: Path, first: str, then: str) -> None:
    check_a_kill(tmp_path, data, ("--device", first), resume_on=("--device", then))


@only_cuda
def test_doctor_finds_no_fault(tmp_path: Path) -> None:
    yolofleet(tmp_path, "doctor")


# -- a GPU and a CPU -------------------------------------------------------------------------------------------


@only_gpus
def test_a_gpu_and_a_cpu_learn_what_the_gpu_learns(tmp_path: Path, data: Path) -> None:
    """Their common backend is gloo, and their common number format fp32."""
    trained(tmp_path, "gpu", data, *LONG, "--device", ONE, "--precision", "fp32")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parents[2] / "train.py"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    args = [*map(str, train_args(data, *YOLOV5N, "--name", "both", *LONG))][1:]  # without the verb
    nodes = []
    for node, device in enumerate((ONE, "cpu")):
        command = [*agent, *where, "--node-rank", str(node), script, *args, "--device", device]
        output = (tmp_path / f"node-{node}.log").open("w")
        nodes.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment(tmp_path), stdout=output, stderr=subprocess.STDOUT
            )
        )
    try:
        codes = [node.wait(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    logs = [(tmp_path / f"node-{node}.log").read_text() for node in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    assert "all reductions use gloo" in "".join(logs)
    assert losses(tmp_path, "both") == pytest.approx(losses(tmp_path, "gpu"), rel=0.1)
