"""Ranks that drift apart are noticed and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fleet import on_fleet
from torch import nn

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.support import devices
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.training.agreement import check_agreement, check_settings, digest, have_equal_kernels
from yolofleet.training.parallel.process import fleet_precision
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.state import TrainState


def state_of(world: World) -> TrainState:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=0.03))
    replicas = Replicas.build(net, [world.device], world, synced=False)
    return TrainState.build(replicas, Recipe(), optimizer="SGD", weight_decay=0.0, precision="fp32")


def drifted(world: World, odd_rank: int, change: float, equal_kernels: bool) -> str:
    """The message of the check, or the digest after it."""
    state = state_of(world)
    if world.rank == odd_rank:
        next(iter(state.model.parameters())).data.view(-1)[5] += change
    try:
        check_agreement(state, world, equal_kernels=equal_kernels)
    except ClusterError as problem:
        return problem.what
    return digest(state.average.source)


def test_a_flipped_bit_names_its_rank_on_equal_machines(tmp_path: Path) -> None:
    for said in on_fleet(3, tmp_path, drifted, 1, 1e-6, True):
        assert "the weights of rank 1 (" in said


def test_on_mixed_hardware_rounding_is_mended_and_more_is_an_error(tmp_path: Path) -> None:
    mended = on_fleet(3, tmp_path, drifted, 2, 1e-6, False)
    assert len(set(mended)) == 1 and "rank" not in mended[0]
    for said in on_fleet(2, tmp_path, drifted, 1, 5.0, False):
        assert "norms differ" in said


def test_equal_ranks_agree(tmp_path: Path) -> None:
    assert len(set(on_fleet(2, tmp_path, drifted, 9, 0.0, True))) == 1


def test_digest_sees_one_bit_and_the_order_of_elements() -> None:
    t = torch.arange(6.0)
    changed = t.clone()
    changed.view(torch.int32)[3] ^= 1
    assert len({digest({"a": t}), digest({"a": changed}), digest({"a": t.flip(0)})}) == 3


def threads_differ(world: World, threads: int) -> bool:
    torch.set_num_threads(threads if world.rank else 1)
    return have_equal_kernels(world)


@pytest.mark.parametrize(("threads", "equal_kernels"), [(1, True), (2, False)])
def test_unequal_kernels_are_seen(tmp_path: Path, threads: int, equal_kernels: bool) -> None:
    assert on_fleet(2, tmp_path, threads_differ, threads) == [equal_kernels, equal_kernels]


def started(world: World, odd: dict) -> str:
    """What rank says when rank 1 was started with other settings."""
    config = TrainConfig(**(odd if world.rank == 1 else {}))
    recipe = Recipe(lr0=0.02 if odd == {"name": "lr0"} and world.rank == 1 else 0.01)
    try:
        check_settings(config, recipe, world)
    except ClusterError as problem:
        return problem.what
    return ""


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"batch": 32}, "was started with --batch 32, rank 0"),
        ({"val_period": 2}, "was started with --val-period 2, rank 0"),
        ({"name": "lr0"}, "was started with --set lr0 0.02, rank 0"),
        ({"device": "cpu:2", "data": "/elsewhere/data.yaml", "workers": 1}, ""),
    ],
)
def test_a_machine_that_was_given_another_command_is_named(tmp_path: Path, odd: dict, says: str) -> None:
    messages = on_fleet(2, tmp_path, started, odd)
    assert len(set(messages)) == 1
    assert says in messages[0] if says else not messages[0]
    assert not says or messages[0].startswith("rank 1 (")


def chosen_format(world: World, asked: str, odd_rank: int) -> str:
    """The number format that a rank takes when the devices of all but one compute in 16 bits by default."""
    devices.half_by_default = lambda device: world.rank != odd_rank  # this process ends after the test
    return fleet_precision(asked, world)


@pytest.mark.parametrize(
    ("asked", "odd_rank", "chosen"), [("auto", 9, "fp16"), ("auto", 1, "fp32"), ("bf16", 1, "bf16")]
)
def test_ranks_with_unlike_devices_compute_in_one_number_format(
    tmp_path: Path, asked: str, odd_rank: int, chosen: str
) -> None:
    assert on_fleet(2, tmp_path, chosen_format, asked, odd_rank) == [chosen, chosen]


def test_a_format_that_a_device_cannot_compute_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        fleet_precision("fp16", World.single())
