"""How a step is dealt to devices: who has nothing to do is said, and what cannot be normalised refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yolofleet.runs.report.clock import Clock
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.schedule import SpeedProbe, StepPlan, StepSplitter


def splitter(
    shares: str, *, micro_batch: int, batch: int = 64, img: int = 640, low: float = 1
) -> StepSplitter:
    return StepSplitter(
        partition=Partition.parse(shares, shares.count(",") + 1),
        rank=0,
        replicas=1,
        micro_batch=micro_batch,
        batch=batch,
        dataset_images=1000,
        sync_bn=False,
        sizes=(low, 1),
        img=img,
        stride=32,
        seed=0,
    )


@pytest.mark.parametrize(
    ("shares", "micro_batch", "says"),
    [
        ("1,1,1,1", 16, ""),
        ("1,1,1,1,1,1,1,1", 16, "4 of 8 devices would have nothing to do: a step of 64 images has 4 micro-batches of 16; --micro-batch 8 "),
        ("1,1,1", 32, "1 of 3 devices would have nothing to do: a step of 64 images has 2 micro-batches of 32; --micro-batch 16 "),
        ("1,1,0", 32, ""),  # the third was told to have nothing to do
    ],
)  # fmt: skip
def test_devices_without_work_are_counted(shares: str, micro_batch: int, says: str) -> None:
    made = splitter(shares, micro_batch=micro_batch)
    assert "; ".join(filter(None, made.idle(64))).startswith(says) and bool(made.idle(64)[0]) == bool(says)
    made.check(0)  # a run that goes on may have another fleet
    if not says:
        made.check(64)
    else:
        with pytest.raises(ConfigError, match="would have nothing to do"):
            made.check(64)


def test_a_batch_that_is_too_small_for_the_fleet_says_so() -> None:
    problem, instead = splitter("1,1,1,1", micro_batch=1, batch=2).idle(2)
    assert problem.startswith("2 of 4 devices") and instead == "a larger --batch, or 2 devices"


def test_the_last_epochs_have_the_configured_size() -> None:
    made = replace(splitter("1", micro_batch=16, low=0.5), sizes_until=3)  # epochs of 1000 images
    plans = [StepPlan(step, 64 * step, 64, 0, 0, 0) for step in range(60)]
    sizes = [made.size_of(plan) for plan in plans]
    assert {size for size in sizes[:47] if size} == set(range(320, 641, 32))
    assert None not in sizes[:47] and sizes[47:] == [None] * 13  # 47 * 64 = 3008


@pytest.mark.parametrize(
    ("micro_batch", "img", "low", "works"),
    [(1, 32, 1, False), (2, 32, 1, True), (1, 64, 1, True), (1, 64, 0.5, False), (1, 96, 0.5, True)],
)
def test_a_single_value_cannot_be_normalised(micro_batch: int, img: int, low: float, works: bool) -> None:
    made = splitter("1", micro_batch=micro_batch, img=img, low=low)
    if works:
        made.check(64)
    else:
        with pytest.raises(ConfigError, match="a single value"):
            made.check(64)


def test_devices_of_several_processes_get_each_image_and_each_number_once() -> None:
    made = replace(splitter("1,1,1,1", micro_batch=8), replicas=2)
    keys = [key for rank in (0, 1) for key in replace(made, rank=rank).keys(StepPlan(3, 192, 64, 0, 0, 0))]
    assert [key.ordinal for key in keys] == list(range(8))
    assert [at for key in keys for _, at in key.samples] == list(range(192, 256))


@pytest.mark.parametrize("sync_bn", [False, True])
@pytest.mark.parametrize(("devices", "batch"), [(1, 16), (2, 16), (3, 32), (4, 16), (8, 16), (5, 64)])
def test_each_device_is_measured_however_few_micro_batches_a_step_has(
    devices: int, batch: int, sync_bn: bool
) -> None:
    shared = splitter(",".join("1" * devices), micro_batch=16, batch=batch)
    ranks = [replace(shared, rank=rank, rotates=True, sync_bn=sync_bn) for rank in range(devices)]
    probes, clocks = [SpeedProbe() for _ in ranks], [Clock() for _ in ranks]
    for step in range(1000):
        plan = StepPlan(step, step * batch, batch, 0, 0, 0)
        keys = [rank.keys(plan) for rank in ranks]
        seen = [at for of_rank in keys for key in of_rank for _, at in key.samples]
        assert sorted(seen) == sorted(n % 1000 for n in range(step * batch, step * batch + batch))
        for clock, of_rank in zip(clocks, keys, strict=True):
            for _ in of_rank:
                with clock("compute"):
                    sum(range(1000))
        done = {
            probe.is_done(plan, rank, clock) for probe, rank, clock in zip(probes, ranks, clocks, strict=True)
        }
        assert len(done) == 1  # all ranks must share their speeds after the same step
        if done == {True}:
            break
    assert step < 10 * devices and all(probe.images >= 16 * 6 and probe.compute_s > 0 for probe in probes)


def test_a_rank_that_is_too_slow_for_a_micro_batch_is_named() -> None:
    made = splitter("1,1,1", micro_batch=16)
    assert made.idle_ranks(64) == [] and made.with_speeds([90.0, 1.0, 90.0]).idle_ranks(64) == [1]
    devices = replace(splitter("1,1,1,1", micro_batch=16), replicas=2).with_speeds([1.0, 90.0])
    assert devices.idle_ranks(64) == [0]
