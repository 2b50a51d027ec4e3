"""How a step is dealt to devices: who has nothing to do is said, and what cannot be normalised refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.schedule import StepPlan, StepSplitter


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
        ("1,1,1,1,1,1,1,1", 16, "4 of 8 devices get no work: a step of 64 images has 4 micro-batches of 16; --micro-batch 8 "),
        ("1,1,1", 32, "1 of 3 devices get no work: a step of 64 images has 2 micro-batches of 32; --micro-batch 16 "),
        # larger micro-batches would do for equal shares
        ("3,1", 32, "1 of 2 devices get no work: a step of 64 images has 2 micro-batches of 32; --micro-batch 16 "),
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
        with pytest.raises(ConfigError, match="get no work"):
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


def test_a_rank_without_work_gets_one_micro_batch_in_trials_only() -> None:
    made = replace(splitter("3,1,0", micro_batch=16), trial=Partition((2.0, 1.0, 1.0)), trial_period=50)
    ranks = [replace(made, rank=rank) for rank in range(3)]
    for step in (49, 50, 51, 52, 53):
        plan = StepPlan(step, 64 * step, 64, 0, 0, 0)
        counts = [2, 1, 1] if step in (50, 51, 52) else [3, 1, 0]
        assert [rank.most_of(plan) for rank in ranks] == [len(rank.keys(plan)) for rank in ranks] == counts
    assert [rank.largest_pass(64) for rank in ranks] == [16, 16, 0]
