"""Ranks that do not come are named, by rank 0 while it waits and by all at the end."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch

from yolofleet.errors import ClusterError
from yolofleet.parallel import world
from yolofleet.parallel.place import Place

PATIENCE_S = 4.0  # for those that never come


def come(rank: int, size: int, port: int, folder: Path, patience_s: float) -> None:
    world.SAY_MISSING_S = 1.0
    with (folder / f"said-{rank}").open("w") as said:
        world.sys.stderr = said
        try:
            met = world.World.join(
                Place(rank, size, rank, size, "torchrun", "127.0.0.1", port), torch.device("cpu"), patience_s
            )
            met.barrier()
            met.close()
            words = "met"
        except ClusterError as problem:
            words = problem.render()
        (folder / f"end-{rank}").write_text(words)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
@pytest.mark.parametrize("missing", [(), (2, 3)])
def test_ranks_that_do_not_come_are_named(tmp_path: Path, missing: tuple[int, ...]) -> None:
    size = 4 if missing else 2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    here = [r for r in range(size) if r not in missing]
    patience_s = PATIENCE_S if missing else 200.0
    ranks = [context.Process(target=come, args=(r, size, port, tmp_path, patience_s)) for r in here]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    ends = [(tmp_path / f"end-{r}").read_text() for r in here]
    said = [(tmp_path / f"said-{r}").read_text() for r in here]
    if not missing:
        assert ends == ["met", "met"] and said == ["", ""]
        return
    assert f"ClusterError: ranks 2, 3 did not come to 127.0.0.1:{port} within 4 s" in ends[0]
    assert ends[1].startswith("ClusterError: ")
    assert said == [f"waiting at 127.0.0.1:{port} for ranks 2, 3 of 4\n", ""]


def test_after_a_failure_nccl_is_broken_off_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(world.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world.dist, "destroy_process_group", lambda: done.append("orderly"))
    assert callable(world.dist.distributed_c10d._abort_process_group)  # torch has it still
    monkeypatch.setattr(
        world.dist.distributed_c10d, "_abort_process_group", lambda: done.append("broken off") or 1 / 0
    )
    for device, failed in (("cuda:0", True), ("cuda:0", False), ("cpu", True)):
        world.World(0, 2, 0, 2, torch.device(device)).close(failed=failed)
    assert done == ["broken off", "orderly", "orderly"]
