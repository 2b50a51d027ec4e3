"""`--batch auto` on devices with little and with unequal memory: it fills the smaller one, and nothing runs out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import miniature
import pytest
import torch
from commands import small_shapes
from miniature import Accelerator
from test_runs import settings as whole_run  # noqa: F401  (a fixture)

from yolofleet import Model
from yolofleet.config.stored.job import load_config_yaml
from yolofleet.support.errors import ConfigError

MIB = 2**20


@pytest.fixture
def settings(
    whole_run: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    # freed memory is free at once, so that peaks are exact
    monkeypatch.setattr(miniature, "SWEEP_BYTES", -(2**60))
    (tmp_path / "more").mkdir()
    data = small_shapes(tmp_path / "more", images=64, val_images=4)
    without = {name: value for name, value in whole_run.items() if name != "micro_batch"}
    return {
        **without,
        "data": str(data),
        "batch": "auto",
        "val_batch": 1,
        "epochs": 3,
        "max_steps": 2,
        "nominal_batch": 64,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("smaller", "reduce"), [(0, "fast"), (1, "exact")])
def test_the_device_with_less_memory_decides_and_is_filled(
    settings: dict[str, Any], accelerator: Accelerator, smaller: int, reduce: str
) -> None:
    limits = [40 * MIB, 40 * MIB]
    limits[smaller] = 13 * MIB
    for device, limit in zip(accelerator.devices, limits, strict=True):
        device.limit_bytes = device.used_bytes() + limit
    Model("yolov5n").train(name="run", **settings, device="0,1", parallel="dp", reduce=reduce)
    config, _ = load_config_yaml(Path("runs/train/run/config.yaml"))
    stored = config.value
    assert stored.batch > 0 and stored.micro_batch > 0 and stored.batch % stored.micro_batch == 0
    # the trial has more labels than these images, so it needs more than the run
    (share,) = re.findall(
        r"images fit into a pass .*\((\d+)%\)", Path("runs/train/run/logs/rank-0.log").read_text()
    )
    assert 80 <= int(share) <= 100

    # the stored numbers count for a resumed run, on another device too
    accelerator.devices[0].limit_bytes = 2**34
    Model("yolov5n").train(resume="runs/train/run", device="0", parallel="ddp", max_steps=3, batch="auto")
    assert json.loads(Path("runs/train/run/results.json").read_text())["steps"] == 3


def test_memory_for_not_even_one_image_is_one_message(
    settings: dict[str, Any], accelerator: Accelerator
) -> None:
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + MIB
    with pytest.raises(ConfigError) as caught:
        Model("yolov5n").train(name="none", **settings, device="0")
    told = caught.value.render()  # the network alone may be too large, too
    assert "not even 1 image of 64 px fits" in told or "has too little memory for --batch auto" in told


def chosen(name: str, **settings: Any) -> tuple[int, int, str]:
    """The batch and the micro-batch of a run, and what its log says about them."""
    Model("yolov5n").train(name=name, **settings)
    folder = Path("runs/train", name)
    config = load_config_yaml(folder / "config.yaml")[0].value
    (told,) = re.findall(r"batch \d+: .*", (folder / "logs/rank-0.log").read_text())
    return config.batch, config.micro_batch, told


@pytest.mark.slow
def test_a_large_device_gets_the_batch_of_the_recipe_and_not_the_whole_data_set(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "few").mkdir()
    few = small_shapes(tmp_path / "few", images=24, val_images=4)
    settings |= {"data": str(few), "max_steps": 1}
    batch, micro_batch, told = chosen("one", **settings | {"nominal_batch": 16}, device="0")
    assert (batch, micro_batch) == (16, 16)
    assert "--nominal-batch 16 limits it, and --batch N sets another one" in told
    shared = settings | {"nominal_batch": 16, "parallel": "dp"}
    assert chosen("two", **shared, device="0,1")[:2] == (16, 8)
    batch, _, told = chosen("all", **settings | {"nominal_batch": 200}, device="0")
    assert batch == 24 and "the training split of 24 images limits it" in told


@pytest.mark.slow
def test_validation_beside_the_training_leaves_less_memory_for_a_pass(
    settings: dict[str, Any], accelerator: Accelerator
) -> None:
    settings |= {"max_steps": 1}
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 24 * MIB
    alone, _, _ = chosen("alone", **settings, device="0")
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 24 * MIB
    beside, _, told = chosen("beside", **settings | {"val_overlap": True}, device="0")
    assert 0 < beside < alone, told


@pytest.mark.slow
def test_validation_is_tried_in_the_precision_of_the_run(
    settings: dict[str, Any], accelerator: Accelerator
) -> None:
    accelerator.seen_dtypes.clear()
    chosen("half", **settings | {"precision": "bf16", "max_steps": 1, "nominal_batch": 8}, device="0")
    assert {dtype for name, dtype in accelerator.seen_dtypes if "conv" in name} == {torch.bfloat16}
