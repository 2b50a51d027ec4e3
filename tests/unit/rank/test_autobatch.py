"""The choice of the batch by memory: the search for the largest pass.

``tests/multiprocess/test_batch_by_memory.py`` makes runs in processes with limited memory,
``tests/accelerator/test_autobatch.py`` on devices with unequal memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.errors import ConfigError
from yolofleet.rank.autobatch import Measured, PassSizes, largest_that_fits_below, useful_batch
from yolofleet.rank.memory_meter import Meter
from yolofleet.system.cgroup import available_bytes

MIB = 2**20


def search(
    limit_mib: int,
    need_mib: Callable[[int], float],
    *,
    most: int = 10**6,
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
    return largest_that_fits_below(attempt, meter, most, PassSizes(micro_batch, alone)), tried


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


def test_what_runs_beside_takes_its_part_and_other_errors_end_the_search() -> None:
    def measure(work: Callable[[], None]) -> int:
        work()
        return 40

    meter = Meter(100, measure, beside_bytes=60)
    assert meter.peak_bytes(lambda: None) == 100

    def fault() -> None:
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        meter.peak_bytes(fault)


def test_every_pass_is_cut_into_micro_batches_of_8_to_16_images() -> None:
    sizes = PassSizes(0, alone=False)
    for count in range(1, 600):
        images = sizes.below(count)
        size = sizes.micro_batch(images)
        assert images % size == 0 and images > 0.9 * count
        assert size == images if images <= 16 else 8 <= size <= 16


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
