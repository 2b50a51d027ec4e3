"""Sums inside each host first: the same sums for any distribution of ranks over hosts, and an error if a rank is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fleet import on_fleet

from yolofleet.errors import ClusterError
from yolofleet.parallel.world import LARGE, World

TENSORS = 6


def sums(world: World, hosts: str) -> tuple[str, list[torch.Tensor]]:
    """Sum integers and floats; ``hosts`` has a letter for each rank."""
    world.host = hosts[world.rank]
    note = world.sum_in_levels()
    tensors = []
    for number in range(TENSORS):  # large and small ones in turn
        dtype = (torch.int32, torch.float32, torch.bfloat16)[number % 3]
        size = LARGE + number if number % 2 else 100
        tensors.append(torch.full((size,), (number + 1) * 2**world.rank, dtype=dtype))
    works = [world.all_reduce_async(tensor) for tensor in tensors]
    for work in works:
        world.wait(work)
    return note, [tensor.double() for tensor in tensors]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("aabb", "sums inside each of 2 hosts first, then between them"),
        ("abab", "sums inside each of 2 hosts first, then between them"),
        ("abba", "sums inside each of 2 hosts first, then between them"),
        ("aab", "sums inside each of 2 hosts first, then between them"),
        ("aa", ""),
        ("ab", ""),
    ],
)
def test_sums_in_levels_are_those_of_all_ranks(hosts: str, says: str, tmp_path: Path) -> None:
    for note, tensors in on_fleet(len(hosts), tmp_path, sums, hosts):
        assert note == says
        for number, tensor in enumerate(tensors):
            expected = (number + 1) * (2 ** len(hosts) - 1)
            assert (tensor == expected).all(), (number, tensor[:3], expected)


def lost_rank(world: World) -> str:
    """Rank 3 ends before the sum."""
    world.host = "aabb"[world.rank]
    world.sum_in_levels()
    if world.rank == 3:
        dist.barrier()
        return "ends"
    dist.barrier()
    try:
        world.all_reduce_(torch.ones(LARGE))
    except ClusterError as problem:
        return problem.what
    return "no error"


@pytest.mark.skipif(os.name == "nt", reason="gloo notices it late there")
def test_a_lost_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    found = on_fleet(4, tmp_path, lost_rank)
    assert found[2] == "rank 2 lost the other ranks in a collective" and found[3] == "ends"
