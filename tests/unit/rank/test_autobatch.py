"""The choice of the batch by memory: the search for the largest pass.

``tests/multiprocess/test_batch_by_memory.py`` makes runs in processes with limited memory,
``tests/accelerator/test_autobatch.py`` on devices with unequal memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.cgroup import available_bytes
from yolofleet.training.rank import autobatch
from yolofleet.training.rank.autobatch import (
    Measured,
    Meter,
    largest_that_fits_below,
    pass_sizes,
    useful_batch,
)

MIB = 2**20


def search(
    limit_mib: int,
    need_mib: Callable[[int], float],
    *,
    most: int = 1000,
    micro_batch: int = 0,
    alone: bool = False,
    refuses: bool = True,
) -> tuple[Measured, list[int]]:
    """Return the largest pass and the sizes that were tried, on a device that refuses memory beyond its limit."""
    tried: list[int] = []

    def attempt(count: int) -> None:
        tried.append(count)
        if refuses and need_mib(count) > limit_mib / 0.9:
            raise torch.OutOfMemoryError(f"{count} images")

    def peak_bytes(work: Callable[[], None]) -> int:
        before = len(tried)
        work()
        return int(need_mib(tried[-1] if len(tried) > before else 0) * MIB)

    meter = Meter(limit_mib * MIB, peak_bytes)
    sizes = list(pass_sizes(micro_batch, most, alone=alone))
    return largest_that_fits_below(attempt, meter, sizes), tried


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("limit", "fixed", "each"), [(900, 100, 10), (81920, 700, 153.7), (900, 10, 33.3)])
def test_the_largest_pass_uses_most_of_the_memory_and_no_trial_exceeds_it(
    limit: int, fixed: float, each: float, alone: bool
) -> None:
    found, tried = search(limit, lambda n: fixed + each * n, alone=alone)
    assert found.used_bytes <= limit * MIB
    assert fixed + each * (found.images + (1 if alone else 3)) > limit, "another image would have fitted"
    assert found.used_bytes > 0.8 * limit * MIB
    assert all(fixed + each * n <= limit for n in tried), "a kernel that kills would have killed it"
    assert len(tried) < 16


def test_steps_in_the_need_of_memory_are_found_by_measuring() -> None:
    found, tried = search(1000, lambda n: 50 + 10 * n + (300 if n > 20 else 0), alone=True)
    assert found.images == 65 and found.used_bytes <= 1000 * MIB
    jump, tried = search(1000, lambda n: 50 + 10 * n + (900 if n > 20 else 0), alone=True)
    assert 10 <= jump.images <= 20, tried


def test_limits_other_than_memory_count() -> None:
    assert search(900, lambda n: 1.0 * n, most=16, alone=True)[0].images == 16
    assert search(900, lambda n: 10.0 * n, micro_batch=8)[0].images == 88
    assert search(900, lambda n: 10.0 * n, micro_batch=8, alone=True)[0].images == 8
    none, tried = search(9, lambda n: 10.0 * n)
    assert (none.images, none.used_bytes, tried) == (0, 10 * MIB, [1])


def test_other_errors_end_the_search() -> None:
    def fault(_: object) -> int:
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        Meter(100, fault).peak_bytes(lambda: None)


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
        (1000, 1, {}, 64, 16, 4, "--nominal-batch 64 limits it, and --batch N sets another one; 64 images were tried"),
        (300, 1, {}, 24, 12, 2, "24 images fit into a pass of each of 1 device"),
        (300, 3, {}, 60, 10, 2, "--nominal-batch 64 limits it"),
        (100, 4, {}, 20, 5, 1, "5 images fit into a pass of each of 4 devices"),
        (300, 2, {"reduce": "exact"}, 50, 25, None, "25 images fit"),
        (300, 2, {"micro_batch": 6}, 48, 6, 4, "24 images fit"),
        (9000, 2, {"lr_scale": "linear"}, 100, 10, 5, "an epoch of at least 50 steps limits it"),
        (9000, 1, {"device": "cpu"}, 16, 16, None, "a pass of 16 images on a CPU limits it"),
        (55, 1, {}, 0, 0, 0, "not even 1 image of 640 px fits into the memory of rank 0 (host, cuda): 60.0 MiB of 55.0 MiB"),
    ],
)  # fmt: skip
def test_the_memory_and_the_recipe_choose_the_batch(
    monkeypatch: pytest.MonkeyPatch, fits: int, devices: int, settings: dict[str, Any], batch: int, micro_batch: int,
    together: int | None, note: str,
) -> None:  # fmt: skip
    def measured(*given: Any) -> Measured:
        alone = settings.get("device") == "cpu" or "reduce" in settings
        most = max(given[-1])
        micro = settings.get("micro_batch", 0)
        return search(fits, lambda n: 50 + 10 * n, most=most, micro_batch=micro, alone=alone)[0]

    for name in ("host_meter", "device_meter"):
        monkeypatch.setattr(autobatch, name, lambda *_: None)
    monkeypatch.setattr(autobatch, "_measured", measured)
    said: list[str] = []
    world = SimpleNamespace(
        device=torch.device(settings.get("device", "cuda")), rank=0, size=devices, host="host",
        activity=SimpleNamespace(doing=lambda _: nullcontext()), gather=lambda mine: [mine] * devices,
    )  # fmt: skip
    config, console = TrainConfig(batch=-1, **settings), SimpleNamespace(fact=said.append)
    given: Any = (config, None, 5000, 0, world, console)
    if not batch:
        with pytest.raises(ConfigError, match=re.escape(note)):
            autobatch.measured_batch(*given)
        return
    chosen = autobatch.measured_batch(*given)
    assert (chosen["batch"], chosen["micro_batch"], chosen.get("micro_batches_per_pass")) == (
        batch,
        micro_batch,
        together,
    )
    assert said[0].startswith(f"batch {batch}: {note}")


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
        ({"batch": 16, "batch_memory": 0.5}, "--batch-memory 0.5 has no effect with --batch 16"),
        ({"batch": "auto", "batch_memory": 1.5}, "--batch-memory 1.5 is above 1"),
        ({"batch": "auto", "sync_bn": True}, "--sync-bn and --batch auto are mutually exclusive"),
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
        assert (config.value.batch, config.value.micro_batch) == (-1, -1)


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
