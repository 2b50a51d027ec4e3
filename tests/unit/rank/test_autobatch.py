"""The choice of the batch by memory. ``tests/accelerator/test_autobatch.py`` makes runs on devices with unequal memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.cgroup import available_bytes
from yolofleet.training.rank.autobatch import Measured, chosen_settings, pass_sizes, useful_batch


def test_every_pass_is_cut_into_micro_batches_of_8_to_16_images() -> None:
    sizes = pass_sizes(0, 600, alone=False)
    for count in range(1, 600):
        images = max(n for n in sizes if n <= count)
        size = sizes[images]
        assert images % size == 0 and images > 0.9 * count
        assert size == images if images <= 16 else 8 <= size <= 16


@pytest.mark.parametrize(
    ("fits", "devices", "settings", "batch", "micro_batch", "together", "note"),
    [  # MiB of a pass: 50, and 10 for each image
        (1000, 1, {}, 64, 16, 4, "--nominal-batch 64 limits it, and --batch N sets another one; 64 images fit"),
        (300, 1, {}, 24, 12, 2, "24 images fit into a pass of each of 1 device"),
        (300, 3, {}, 60, 10, 2, "--nominal-batch 64 limits it"),
        (100, 4, {}, 20, 5, 1, "5 images fit into a pass of each of 4 devices"),
        (300, 2, {"reduce": "exact"}, 50, 25, None, "25 images fit"),
        (300, 2, {"micro_batch": 6}, 48, 6, 4, "24 images fit"),
        (9000, 2, {"lr_scale": "linear"}, 100, 10, 5, "an epoch of at least 50 steps limits it"),
        (9000, 1, {"device": "cpu"}, 16, 16, None, "a pass of 16 images on a CPU limits it"),
        (55, 1, {}, 0, 0, 0, "not even 1 image of 640 px fits into the memory of rank 0: 60 of 55 MiB"),
    ],
)  # fmt: skip
def test_the_memory_and_the_recipe_choose_the_batch(
    fits: int,
    devices: int,
    settings: dict[str, Any],
    batch: int,
    micro_batch: int,
    together: int | None,
    note: str,
) -> None:
    def measure(sizes: dict[int, int]) -> list[Measured]:
        images = max((n for n in sizes if 50 + 10 * n <= fits), default=0)
        used = 50 + 10 * (images or min(sizes))
        return [Measured(images, f"rank {rank}: {used} of {fits} MiB") for rank in range(devices)]

    def choose() -> tuple[dict[str, int], str]:
        config, on_cpu = TrainConfig(batch=-1, **settings), settings.get("device") == "cpu"
        return chosen_settings(config, 5000, [1.0] * devices, measure, on_cpu=on_cpu)

    if not batch:
        with pytest.raises(ConfigError, match=re.escape(note)):
            choose()
        return
    chosen, reason = choose()
    assert (chosen["batch"], chosen["micro_batch"], chosen.get("micro_batches_per_pass")) == (
        batch,
        micro_batch,
        together,
    )
    assert reason.startswith(note) and "; the least memory is that of rank 0: " in reason


@pytest.mark.parametrize(
    ("fit", "shares", "batch"),
    [
        ((30, 7, 40), (1, 1, 1), 21),  # three passes of 7
        ((40, 6), (2, 1), 18),  # the second device has a third of the batch
        ((24,), (1, 1), 48),  # one process with two devices
    ],
)
def test_the_device_with_the_least_memory_for_its_part_decides(
    fit: tuple[int, ...], shares: tuple[int, ...], batch: int
) -> None:
    found = [Measured(images, "") for images in fit]
    chosen, _ = chosen_settings(TrainConfig(batch=-1), 5000, shares, lambda _: found, on_cpu=False)
    assert chosen["batch"] == batch


@pytest.mark.parametrize(
    ("settings", "images", "batch", "limit"),
    [
        ({}, 205, 64, "--nominal-batch 64"),
        ({}, 118_287, 64, "--nominal-batch 64"),
        ({"nominal_batch": 256}, 118_287, 256, "--nominal-batch 256"),
        ({}, 40, 40, "the training split of 40 images"),
        ({"lr_scale": "linear"}, 5000, 100, "an epoch of at least 50 steps"),
        ({"lr_scale": "sqrt"}, 3000, 64, "--nominal-batch 64"),  # 60 would be below the nominal batch
        ({"micro_batch": 96}, 205, 96, "--nominal-batch 64"),
    ],
)
def test_an_automatic_batch_leaves_enough_steps(
    settings: dict[str, Any], images: int, batch: int, limit: str
) -> None:
    assert useful_batch(TrainConfig(batch=-1, **settings), images) == (batch, limit)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 0}, "--batch 0 is below 1"),
        ({"batch": 0.05}, "--batch 0.05 is neither a number of images nor auto nor a share"),
        ({"batch": "-7"}, "--batch -7 is neither a number of images nor auto nor a share"),
        ({"batch": "auto", "sync_bn": True}, "--batch auto and --sync-bn are mutually exclusive"),
        ({"batch": -1, "micro_batches_per_pass": 2}, "mutually exclusive: auto chooses both"),
        ({"batch": "some"}, "--batch some is not a whole number"),
    ],
)
def test_settings_that_contradict_an_automatic_batch(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_train({"data": "d", "model": "yolov5n", **given})
    assert says in caught.value.render()


def test_auto_is_understood_everywhere() -> None:
    for value in ("auto", "-1", -1):
        config, _ = resolve_train({"data": "d", "model": "yolov5n", "batch": value, "micro_batch": value})
        assert (config.value.batch, config.value.micro_batch, config.value.batch_memory) == (-1, -1, 0.9)
    for share in ("0.8", ".8", 0.8):
        config, _ = resolve_train({"data": "d", "model": "yolov5n", "batch": share})
        assert config.value.batch_memory == 0.8 and config.spelled("batch") == "--batch 0.8"


def test_the_memory_of_a_process_is_known_with_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    before = available_bytes()
    if before is None:
        pytest.skip("this system does not tell its free memory")
    limits = {resource.RLIMIT_AS: 2**62, resource.RLIMIT_DATA: 2**20}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (limits[name], -1))
    assert available_bytes() == 0, "the data of this process is larger than a mebibyte"
    limits[resource.RLIMIT_DATA] = resource.RLIM_INFINITY
    assert (available_bytes() or 0) > 0
