"""Whole runs on the accelerator: training, resuming, validation and prediction give what the CPU gives."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import called, small_shapes
from miniature import Accelerator, register
from small_files import TINY

from yolofleet import Model, load_model
from yolofleet.config.load import resolve_val
from yolofleet.families.networks import index_limit
from yolofleet.support.errors import ConfigError
from yolofleet.training.rank.worker import run as run_here


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    register(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    data = small_shapes(tmp_path)
    return {
        **{"data": str(data), "model": str(TINY), "img": 64, "batch": 8, "nominal_batch": 8},
        **{"micro_batch": 2, "plots": False, "threads": 1, "epochs": 2, "precision": "fp32"},
    }


def fitted(name: str, **settings: Any) -> dict[str, Any]:
    Model("yolov5n").train(name=name, **settings)
    return json.loads(Path("runs/train", name, "results.json").read_text())


def figures(name: str, data: str, device: str) -> dict[str, Any]:
    given = {"weights": "runs/train/cpu/weights/last.safetensors", "data": data, "img": 64, "device": device}
    run_here(resolve_val({**given, "name": name, "conf": 0.0001, "plots": False, "precision": "fp32"}))
    return json.loads(Path("runs/val", name, "results.json").read_text())


def test_a_run_resumed_validated_and_used_on_the_accelerator(
    settings: dict[str, Any], accelerator: Accelerator
):
    # all four micro-batches of a step fit into the memory of the accelerator
    cpu = fitted("cpu", **settings, device="cpu", micro_batches_per_pass=4)
    assert fitted("there", **settings, device="0")["weights_sha256"] == cpu["weights_sha256"]
    assert accelerator.launched() > 1000

    # interrupted after the first epoch, and continued on the other device
    fitted("resumed", **settings, device="0", max_steps=3, save_every=("1steps",))
    Model("yolov5n").train(resume="runs/train/resumed", device="1", max_steps=5)
    resumed = json.loads(Path("runs/train/resumed/results.json").read_text())
    assert resumed["weights_sha256"] == cpu["weights_sha256"]

    there, here = figures("there", settings["data"], "1"), figures("here", settings["data"], "cpu")
    assert there["metrics"] == here["metrics"]

    pictures = sorted(Path(settings["data"]).parent.glob("images/val/*"))
    # block sizes of suppression differ between devices, its result must not
    found = [
        load_model("runs/train/cpu", device=device, conf=0.0001, precision="fp32").predict(pictures)
        for device in ("0", "cpu")
    ]
    for mine, theirs in zip(*found, strict=True):
        assert len(mine) == len(theirs) > 0
        np.testing.assert_array_equal(mine.boxes_xyxy_px, theirs.boxes_xyxy_px)
        np.testing.assert_array_equal(mine.scores, theirs.scores)


def test_a_run_in_this_process_gives_its_current_device_back(
    settings: dict[str, Any], accelerator: Accelerator
):
    fitted("second", **settings | {"epochs": 1}, device="1")
    assert accelerator.launched() and accelerator.current == 0


def test_no_pass_has_a_tensor_that_kernels_cannot_index(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(index_limit, "INDEX_LIMIT", 5 * 3 * 64 * 64)  # the images are the largest tensor
    there = fitted("there", **settings, device="0")
    assert "up to 2 in a pass" in Path("runs/train/there/logs/rank-0.log").read_text()
    given = {**settings, "micro_batches_per_pass": 2}
    assert there["weights_sha256"] == fitted("cpu", **given, device="cpu")["weights_sha256"]
    with pytest.raises(ConfigError, match="a pass of 8 images of 64 px") as caught:
        fitted("large", **settings | {"micro_batch": 8}, device="0")
    assert "--micro-batch 4" in (caught.value.hint or "")
    fitted("large-cpu", **settings | {"micro_batch": 8}, device="cpu")


def test_each_epoch_has_its_own_peak_of_memory(settings: dict[str, Any], accelerator: Accelerator):
    before_mib = accelerator.devices[0].used_bytes() / 2**20
    accelerator.devices[0].peak_bytes = 2**40  # a peak from before the run must not count
    fitted("there", **settings, device="0", val_period=0)
    with Path("runs/train/there/results.csv").open() as file:
        first, second = csv.DictReader(file)
    assert before_mib < float(first["device_memory_mib"]) < 2**20
    assert before_mib < float(second["device_memory_mib"]) < 2**20
    assert first["val_seconds"] == "" and float(second["val_seconds"]) > 0


@pytest.mark.slow
def test_the_parts_of_a_training_are_measured_on_the_accelerator(settings: dict[str, Any]):
    size = [
        f"--{name.replace('_', '-')}={settings[name]}"
        for name in ("img", "batch", "nominal_batch", "micro_batch")
    ]
    where = ["--device", "0", "--steps", "2", "--precision", "fp32", "--json", "-"]
    done = called("bench", "train", "--data", settings["data"], "--model", settings["model"], *size, *where)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["device_memory_mib"] > 0 and not found["shares_by_cpu"]
    assert all(part["rate"] > 0 and part["limit"] > 0 for part in found["parts"])
    assert found["setup"]["on_cpu"] is False


@pytest.mark.slow
def test_exact_sums_on_two_devices_of_one_process(settings: dict[str, Any]):
    settings |= {"reduce": "exact"}
    one = fitted("one", **settings, device="0")
    two = fitted("two", **settings, device="0,1", parallel="dp")
    assert (
        two["weights_sha256"]
        == one["weights_sha256"]
        == fitted("cpu", **settings, device="cpu")["weights_sha256"]
    )


def test_too_little_memory_is_reported_with_a_smaller_micro_batch(
    settings: dict[str, Any], accelerator: Accelerator
):
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 3 * 2**20
    with pytest.raises(ConfigError, match="mini:0 has too little memory for --micro-batch 2") as caught:
        fitted("full", **settings, device="0")
    assert "--micro-batch 1" in (caught.value.hint or "")
    assert torch.ones(2, device="mini:0").tolist() == [1, 1]


def test_a_chosen_micro_batch_is_kept_when_the_run_is_resumed_on_more_devices(settings: dict[str, Any]):
    settings |= {"reduce": "exact", "epochs": 1, "save_every": ("1steps",)}
    fitted("chosen", **settings | {"micro_batch": -1}, device="0", max_steps=1)
    # a new run on two devices would choose 4
    Model("yolov5n").train(resume="runs/train/chosen", device="0,1", parallel="dp", max_steps=2)
    chosen = json.loads(Path("runs/train/chosen/results.json").read_text())
    given = fitted("given", **settings | {"micro_batch": 8}, device="cpu", max_steps=2)
    assert chosen["weights_sha256"] == given["weights_sha256"]
