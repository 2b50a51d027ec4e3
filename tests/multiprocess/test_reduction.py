"""Gradients and batch-norm statistics of a step do not depend on how many ranks computed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fleet import on_fleet
from torch import nn

from yolofleet.training.parallel.batchnorm import RunningStatistics
from yolofleet.training.parallel.buckets import GradientBuckets, make_half
from yolofleet.training.parallel.exact import make_exact
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.sync_batchnorm import with_sync_batchnorm
from yolofleet.training.parallel.world import World

MICRO_BATCHES, IMAGES = 8, 3


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.03),
        nn.SiLU(),
        nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4, momentum=0.03),
        nn.Conv2d(4, 2, 1),
    )
    cast(Any, net).to(memory_format=torch.channels_last)  # torch's stub lacks memory_format
    return net


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """Return a copy of the gradient of every parameter."""
    grads = [p.grad for p in net.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad.clone() for grad in grads if grad is not None]


def running_statistics(net: nn.Module) -> torch.Tensor:
    """Concatenate the running means and variances of every batch norm."""
    found = [
        b for m in net.modules() if isinstance(m, nn.BatchNorm2d) for b in (m.running_mean, m.running_var)
    ]
    return torch.cat([b for b in found if b is not None])


def inputs() -> torch.Tensor:
    return torch.rand(MICRO_BATCHES, IMAGES, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def one_step(
    world: World, shares: tuple[float, ...], small_buckets: bool, reduce: str = "fast", steps: int = 2
) -> tuple:
    net = small_net()
    statistics = RunningStatistics(net)
    buckets = GradientBuckets(
        net.parameters(), world, statistics=statistics.size, bytes_each=256 if small_buckets else 1 << 20
    )
    if reduce == "exact":
        make_exact(buckets)
    if reduce == "fast16":
        make_half(buckets)
    x = inputs()
    for _ in range(steps):  # twice: nothing of the first step may leak into the second
        buckets.begin(MICRO_BATCHES)
        mine = Partition(shares).ranges(MICRO_BATCHES)[world.rank]
        for v in mine:
            out = net(x[v])
            statistics.collect(buckets.statistics, v, MICRO_BATCHES, IMAGES)
            if v == mine[-1]:
                buckets.start_reducing()
            (out * out).sum().backward()
            if v != mine[-1]:
                buckets.accumulate()
        buckets.finish()
        statistics.merge(buckets.statistics, MICRO_BATCHES, torch.tensor(True))
    return gradients(net), statistics.running.clone(), float(buckets.norm())


def sequential() -> tuple:
    """Plain torch: eight forward passes one after the other, gradients accumulated."""
    net = small_net()
    x = inputs()
    for _ in range(2):
        net.zero_grad()
        for v in range(MICRO_BATCHES):
            out = net(x[v])
            (out * out).sum().backward()
    return gradients(net), running_statistics(net)


def test_an_overflow_in_the_first_step_does_not_narrow_the_grid():
    """fp16's loss scale is found by steps whose gradient is infinite; the next gradient may have any size."""
    weight = nn.Parameter(torch.zeros(4))
    buckets = GradientBuckets([weight], World.single())
    make_exact(buckets)
    for scale in (float("inf"), 1e6, 1e6):
        buckets.begin(1)
        buckets.start_reducing()
        (weight * torch.tensor([0.5, -1.0, 2.0, 3.0]) * scale).sum().backward()
        buckets.finish()
    assert weight.grad is not None and weight.grad.tolist() == [0.5e6, -1e6, 2e6, 3e6]


def test_clamped_gradients_of_any_number_of_micro_batches_keep_their_sign():
    weight = nn.Parameter(torch.zeros(2))
    buckets = GradientBuckets([weight], World.single())
    make_exact(buckets)
    for scale in (1.0, 1e6):  # the second step exceeds the grid of the first
        buckets.begin(3)
        for number in range(3):
            if number == 2:
                buckets.start_reducing()
            (weight * torch.tensor([1.0, -1.0]) * scale).sum().backward()
            if number < 2:
                buckets.accumulate()
        buckets.finish()
    assert weight.grad is not None and weight.grad[0] > 3 and weight.grad[1] < -3


PARTITIONS = [(1.0,), (1.0, 1.0), (3.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 2.0)]


@pytest.mark.parametrize("shares", PARTITIONS)
@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_step_equals_sequential_torch(
    shares: tuple[float, ...], small_buckets: bool, reduce: str, tmp_path: Path
) -> None:
    expected_grads, expected_running = sequential()
    for grads, running, norm in on_fleet(len(shares), tmp_path, one_step, shares, small_buckets, reduce):
        whole = torch.cat([g.flatten() for g in expected_grads])
        got = torch.cat([g.flatten() for g in grads])
        assert (got - whole).norm() / whole.norm() < 1e-6
        assert norm == pytest.approx(float(whole.norm()), rel=1e-5)
        torch.testing.assert_close(running, expected_running, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.0, 2.0)])
def test_sums_in_16_bits_are_rounded_and_equal_on_every_rank(
    shares: tuple[float, ...], tmp_path: Path
) -> None:
    expected_grads, expected_running = sequential()
    outcomes = on_fleet(len(shares), tmp_path, one_step, shares, True, "fast16")
    for grads, running, _ in outcomes:
        for found, expected in zip(grads, expected_grads, strict=True):
            # a partial sum may be larger than the sum, and the error follows it
            assert (found - expected).abs().max() < 0.02 * expected.abs().max()
            assert torch.equal(found, found.bfloat16().float())
        torch.testing.assert_close(running, expected_running, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(grads, outcomes[0][0], strict=True))


def test_exact_sums_have_equal_bits_on_every_partition(tmp_path: Path) -> None:
    """Four steps: the first on the wide grid, the others on grids that follow the values."""
    outcomes = [
        outcome
        for shares in PARTITIONS
        for outcome in on_fleet(len(shares), tmp_path, one_step, shares, len(shares) == 3, "exact", 4)
    ]
    grads, running, _ = outcomes[0]
    for other_grads, other_running, _ in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
        assert torch.equal(running, other_running)


def test_fast_sums_do_not(tmp_path: Path) -> None:
    """The test above can fail: plain float32 sums differ."""
    one, *_ = on_fleet(1, tmp_path, one_step, (1.0,), False, "fast", 1)
    three, *_ = on_fleet(3, tmp_path, one_step, (1.0, 1.0, 1.0), False, "fast", 1)
    assert not all(torch.equal(a, b) for a, b in zip(one[0], three[0], strict=True))


def poisoned_step(world: World) -> bool:
    """One micro-batch of one rank overflows."""
    net = small_net()
    buckets = GradientBuckets(net.parameters(), world)
    make_exact(buckets)
    for _ in range(2):
        buckets.begin(world.size)
        buckets.start_reducing()
        out = net(torch.full((1, 3, 16, 16), float("inf") if world.rank == 1 else 1.0))
        out.sum().backward()
        buckets.finish()
    return bool(torch.isfinite(buckets.norm()))


def test_exact_sums_tell_every_rank_of_a_value_that_is_not_finite(tmp_path: Path) -> None:
    assert on_fleet(2, tmp_path, poisoned_step) == [False, False]


def sync_pass(world: World, shares: tuple[int, ...]) -> tuple:
    net = with_sync_batchnorm(small_net(), world)
    statistics = RunningStatistics(net, counts_here=world.is_main)
    buckets = GradientBuckets(net.parameters(), world, statistics=statistics.size)
    x = inputs().flatten(0, 1)
    mine = Partition(shares).ranges(len(x))[world.rank]
    buckets.begin(1)
    out = net(x[mine.start : mine.stop])
    statistics.collect(buckets.statistics, 0, 1, len(mine))
    buckets.start_reducing()
    (out * out).sum().backward()
    buckets.finish()
    statistics.merge(buckets.statistics, 1, torch.tensor(True))
    return gradients(net), statistics.running.clone(), out.detach()


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (5.0, 1.0, 2.0), (1.0, 0.0)])
def test_sync_batchnorm_equals_one_big_batch(shares: tuple[float, ...], tmp_path: Path) -> None:
    net = small_net()
    x = inputs().flatten(0, 1)
    out = net(x)
    (out * out).sum().backward()
    results = on_fleet(len(shares), tmp_path, sync_pass, shares)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), out.detach(), rtol=1e-5, atol=1e-5)
    for grads, running, _ in results:
        for got, expected in zip(grads, gradients(net), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        torch.testing.assert_close(running, running_statistics(net), rtol=1e-5, atol=1e-6)


def exchange(world: World) -> tuple:
    payload = b"x" * world.rank if world.rank != 1 else b""
    gathered = world.all_gather_bytes(payload)
    return gathered, world.broadcast_bytes(b"from zero"), world.sum_rows([1.0, float(world.rank)])


def test_bytes_of_unequal_length_reach_every_rank(tmp_path: Path) -> None:
    for gathered, told, row in on_fleet(3, tmp_path, exchange):
        assert gathered == [b"", b"", b"xx"]
        assert told == b"from zero"
        assert row == [3.0, 3.0]
