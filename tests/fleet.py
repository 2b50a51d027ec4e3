"""Real gloo processes for tests: forked, so that each costs milliseconds."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from yolofleet.training.parallel.world import World

DEADLINE_S = 900


def _plain(value: Any) -> Any:
    """Tensors as arrays: they outlive the process that made them."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


def _back(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_back, value))
    return value


def _member(rank: int, size: int, meet: str, work: Callable[..., Any], args: tuple, results: Any) -> None:
    try:
        torch.set_num_threads(1)
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meet}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=900),
            )
        world = World(rank, size, rank, size, torch.device("cpu"))
        results.put((rank, _plain(work(world, *args)), None))
        world.close()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def on_fleet(size: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``work(world, *args)`` in ``size`` processes; the results in rank order."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this test forks its processes, which this platform cannot")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    meet = folder / f"meet-{size}-{len(list(folder.iterdir()))}"
    members = [
        context.Process(target=_member, args=(r, size, str(meet), work, args, results), daemon=True)
        for r in range(size)
    ]
    for member in members:
        member.start()
    try:
        got = [results.get(timeout=DEADLINE_S) for _ in members]
    finally:
        for member in members:
            member.join(900)
            if member.is_alive():
                member.kill()
    for rank, _, problem in got:
        assert problem is None, f"rank {rank}:\n{problem}"
    return [_back(value) for _, value, _ in sorted(got, key=lambda g: g[0])]
