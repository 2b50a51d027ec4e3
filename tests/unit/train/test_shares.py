"""Shares that follow the speed of the ranks: what is decided, when, and that all ranks decide the same.

Times are given, never measured.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan, StepSplitter
from yolofleet.training.shares import (
    LEAST_GAIN,
    LEAST_GAIN_INSIDE,
    SpeedShares,
    fastest_counts,
    mean_s,
    next_counts,
    trial_counts,
    trial_period,
)


@pytest.mark.parametrize(
    ("what", "counts", "times_s", "expected"),
    [
        ("equal ranks", [4, 4], [1, 1], [4, 4]),
        ("all slow equally", [4, 4], [20, 20], [4, 4]),
        ("noise of 10 %", [32, 32], [1.05, 0.95], [32, 32]),
        ("noise of 10 % on four ranks", [16] * 4, [1.05, 0.95, 1.0, 0.95], [16] * 4),
        # 4 x 1.2 s = 4.8 s, and with 3 and 5 the other needs 5 s
        ("less than one micro-batch", [4, 4], [1.2, 1], [4, 4]),
        ("a third slower", [4, 4], [1.35, 1], [3, 5]),
        # 29 x 1.2 s = 34.8 s and 35 s instead of 38.4 s
        ("a fifth slower, many micro-batches", [32, 32], [1.2, 1], [29, 35]),
        # alone 8 s, with one micro-batch on the slow rank 20 s
        ("20 times slower", [4, 4], [1, 20], [8, 0]),
        # 61 s and 60 s; alone 64 s
        ("20 times slower, many micro-batches", [32, 32], [1, 20], [61, 3]),
        ("one micro-batch for each", [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]),
        ("one micro-batch for each, one slow", [1, 1, 1, 1], [1, 1, 1, 20], [2, 1, 1, 0]),
        ("fewer micro-batches than ranks", [1, 0, 1], [1, 1, 1], [1, 0, 1]),
        ("fewer micro-batches than ranks, one slow", [1, 0, 1], [20, 1, 1], [0, 1, 1]),
        ("a rank was never measured", [2, 2, 2], [1, 0, 1], [2, 2, 2]),
        ("no rank was measured", [3, 1], [0, 0], [3, 1]),
        ("without work, still slow", [8, 0], [1, 20], [8, 0]),
        ("without work, hardly useful", [8, 0], [1, 7.9], [8, 0]),
        ("without work, fast again", [8, 0], [1, 1], [4, 4]),
        ("without work, half as fast", [8, 0], [1, 2], [6, 2]),
        ("one rank", [8], [3], [8]),
    ],
)  # fmt: skip
def test_who_computes_what(what: str, counts: list[int], times_s: list[float], expected: list[int]) -> None:
    assert next_counts(counts, times_s, LEAST_GAIN) == expected, what


def test_inside_an_epoch_a_change_must_save_more() -> None:
    assert next_counts([32, 32], [1.2, 1], LEAST_GAIN_INSIDE) == [32, 32]
    assert next_counts([4, 4], [1, 20], LEAST_GAIN_INSIDE) == [8, 0]


def test_no_other_division_ends_sooner() -> None:
    for times_s in ([1.0, 1.0, 3.0], [0.5, 2.0, 0.7], [1.0, 9.0, 9.0]):
        for count in range(1, 9):
            counts = fastest_counts(times_s, count)
            every = [(a, b, count - a - b) for a in range(count + 1) for b in range(count + 1 - a)]
            ends_s = [max(n * s for n, s in zip(one, times_s, strict=True)) for one in [*every, counts]]
            assert sum(counts) == count and ends_s[-1] == min(ends_s)


def test_a_trial_takes_one_micro_batch_from_the_busiest() -> None:
    assert trial_counts([8, 0]) == [7, 1]
    assert trial_counts([3, 0, 4, 0]) == [2, 1, 3, 1]
    assert trial_counts([1, 0, 1]) == [1, 0, 1]  # nobody has several


def test_trials_cost_two_hundredths_of_the_time() -> None:
    assert trial_period([4, 4], [1, 1]) == 0
    assert trial_period([8, 0], [1, 8]) == 50
    # three steps of 20 s instead of 8 s: 36 s in 225 steps of 8 s
    assert trial_period([8, 0], [1, 20]) == 225


def test_one_slow_sample_is_an_accident() -> None:
    assert mean_s([1.0, 1.0, 9.0, 1.0]) == 1.0 and mean_s([2.0, 4.0]) == 2.0
    assert mean_s([]) == mean_s([3.0]) == 0.0


# -- ranks together ------------------------------------------------------------------------------------


@dataclass
class Meeting:
    """Where ranks that are threads exchange values."""

    ranks: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = json.loads(json.dumps(value))
        self.barrier.wait()
        every = [self.values[at] for at in range(self.ranks)]
        self.barrier.wait()
        return every


@dataclass
class ThreadWorld(World):
    meeting: Meeting = field(kw_only=True)

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.gather(self.rank, value)


@dataclass
class Fleet:
    """Ranks whose micro-batches take ``times_s(step, rank)``.

    Attributes:
        decided: after each change, for each rank: the step, and the micro-batches of each device.
        timed: steps that each rank has timed.
        events: of rank 0.
    """

    times_s: Callable[[int, int], float]
    ranks: int = 2
    replicas: int = 1
    micro_batch: int = 8
    batch: int = 64
    steps: int = 100
    per_epoch: int = 10
    device: str = "cpu"
    asked: tuple[int, ...] = ()
    decided: list[list[tuple[int, list[int]]]] = field(init=False)
    timed: list[list[int]] = field(init=False)
    events: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Fleet:
        self.decided, self.timed = [[] for _ in range(self.ranks)], [[] for _ in range(self.ranks)]
        meeting = Meeting(self.ranks)
        with ThreadPoolExecutor(self.ranks) as pool:
            list(pool.map(self._rank, range(self.ranks), [meeting] * self.ranks))
        assert all(decided == self.decided[0] for decided in self.decided), "ranks decide differently"
        return self

    def _rank(self, rank: int, meeting: Meeting) -> None:
        try:
            self._steps(rank, meeting)
        except BaseException:
            meeting.barrier.abort()
            raise

    def _steps(self, rank: int, meeting: Meeting) -> None:
        device = torch.device(self.device)
        world = ThreadWorld(rank, self.ranks, rank, self.ranks, device, meeting=meeting)
        replicas: Any = SimpleNamespace(
            all=[None] * self.replicas, lead=SimpleNamespace(device=device), timed=False, passes_s=0.0
        )
        devices = self.ranks * self.replicas
        splitter = StepSplitter(
            partition=Partition.equal(devices), rank=rank, replicas=self.replicas, micro_batch=self.micro_batch,
            batch=self.batch, dataset_images=self.batch * self.per_epoch, sync_bn=False, sizes=(1, 1), img=64,
            stride=32, seed=0, rotates=True,
        )  # fmt: skip
        log: Any = SimpleNamespace(write=lambda kind, **fields: self.events.append(fields))
        shares = SpeedShares(world, replicas, self.batch, log)
        for step in range(self.steps):
            plan = StepPlan(step, step * self.batch, self.batch, 0, 0, 0)
            if replicas.timed:
                replicas.passes_s = splitter.most_of(plan) * self.times_s(step, rank)
                self.timed[rank].append(step)
            ends_epoch = (step + 1) % self.per_epoch == 0
            changed = shares.after(plan, splitter, ends_epoch=ends_epoch, is_asked=step in self.asked)
            if changed is not None:
                splitter = changed
                counts = [len(part) for part in splitter.partition.ranges(splitter.divided(self.batch))]
                self.decided[rank].append((step, counts))


def test_a_rank_that_is_slow_for_a_while_loses_its_work_and_gets_it_back() -> None:
    def times_s(step: int, rank: int) -> float:
        return 0.01 * (9 if rank and 30 <= step < 70 else 1)

    fleet = Fleet(times_s, steps=130)
    events = fleet.run().events
    # measured in steps 3 to 9; at the end of step 29 nothing has changed; a trial is in steps 100 to 102
    assert fleet.decided[0] == [(9, [4, 4]), (39, [8, 0]), (109, [4, 4])]
    assert [event["micro_batches"] for event in events] == [[4, 4], [8, 0], [4, 4]]
    assert [event["step"] for event in events] == [10, 40, 110]
    assert [event["seconds"][1] for event in events] == [0.01, 0.09, 0.01]
    first, slow, again = (event["why"] for event in events)
    assert first == "shares of the ranks by measured speed: 4, 4 of the 8 micro-batches of a step"
    assert slow.startswith("shares follow the speed: rank 1 (") and slow.endswith(
        ", cpu) computes 0 instead of 4 of the 8 micro-batches of a step: one takes 0.09 s, 0.01 s before; "
        "rank 1 gets none, and is measured again every 50 steps"
    )
    assert again.endswith(
        "computes 4 instead of 0 of the 8 micro-batches of a step: one takes 0.01 s, 0.09 s before"
    )


def test_inside_an_epoch_ranks_compare_when_rank_0_asks() -> None:
    fleet = Fleet(
        lambda step, rank: 0.2 if rank == 2 and step >= 30 else 0.01,
        ranks=3, per_epoch=1000, asked=(40, 60), steps=70,
    )  # fmt: skip
    events = fleet.run().events
    assert fleet.decided[0] == [(9, [3, 2, 3]), (40, [4, 4, 0])]
    assert "rank 2 (" in events[1]["why"]


def test_noise_changes_nothing() -> None:
    noise = torch.rand(100, 4, generator=torch.Generator().manual_seed(3))
    fleet = Fleet(
        lambda step, rank: 0.01 * (0.95 + 0.1 * float(noise[step, rank])),
        ranks=4, micro_batch=1,
    )  # fmt: skip
    assert fleet.run().events[0]["micro_batches"] == [16] * 4 and len(fleet.decided[0]) == 1


def test_devices_of_a_process_share_its_work() -> None:
    fleet = Fleet(lambda step, rank: 0.03 if rank else 0.01, replicas=2, steps=20)
    assert fleet.run().events[0]["micro_batches"] == [6, 2]
    assert fleet.decided[0] == [(9, [3, 3, 1, 1])]


def test_a_device_that_has_to_be_waited_for_is_timed_now_and_then() -> None:
    fleet = Fleet(lambda step, rank: 1.0 if rank and step > 19 else 0.01, device="meta")
    fleet.run()
    assert fleet.decided[0] == [(9, [4, 4]), (39, [8, 0])]
    assert fleet.timed[0] == [*range(11), *range(16, 100, 8)]
    assert fleet.timed[1] == [*range(11), 16, 24, 32, *range(40, 100)]  # without work, it costs nothing


@pytest.mark.parametrize(("devices", "batch"), [(1, 16), (2, 16), (3, 32), (4, 16), (8, 16), (5, 64)])
def test_each_device_is_measured_however_few_micro_batches_a_step_has(devices: int, batch: int) -> None:
    fleet = Fleet(
        lambda step, rank: 0.01 + 0.0001 * rank,
        ranks=devices, micro_batch=16, batch=batch, steps=10 * devices, per_epoch=1000,
    )  # fmt: skip
    events = fleet.run().events
    assert events[0]["seconds"] == [round(0.01 + 0.0001 * rank, 6) for rank in range(devices)]


@pytest.mark.parametrize("sync_bn", [False, True])
@pytest.mark.parametrize(("devices", "batch"), [(2, 16), (3, 32), (8, 16), (5, 64)])
def test_a_step_has_each_image_once_while_devices_change_places(
    devices: int, batch: int, sync_bn: bool
) -> None:
    shared = StepSplitter(
        partition=Partition.equal(devices), rank=0, replicas=1, micro_batch=16, batch=batch, dataset_images=1000,
        sync_bn=sync_bn, sizes=(1, 1), img=64, stride=32, seed=0, rotates=True,
    )  # fmt: skip
    for step in range(20):
        plan = StepPlan(step, step * batch, batch, 0, 0, 0)
        keys = [replace(shared, rank=rank).keys(plan) for rank in range(devices)]
        seen = [at for of_rank in keys for key in of_rank for _, at in key.samples]
        assert sorted(seen) == sorted(n % 1000 for n in range(step * batch, step * batch + batch))
