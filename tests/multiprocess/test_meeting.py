"""Ranks that do not come are named, by rank 0 while it waits and by all at the end."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_training import small_run

from yolofleet.config.load import resolve_train
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.listener import open_listener
from yolofleet.support.place import Place
from yolofleet.training.parallel import world
from yolofleet.training.parallel.store import host_store
from yolofleet.training.rank import worker

PATIENCE_S = 4.0  # for those that never come


def come(rank: int, size: int, port: int, folder: Path, patience_s: float) -> None:
    world.PRINT_MISSING_S = 1.0
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
        rank.join(900)
    ends = [(tmp_path / f"end-{r}").read_text() for r in here]
    said = [(tmp_path / f"said-{r}").read_text() for r in here]
    if not missing:
        assert ends == ["met", "met"] and said == ["", ""]
        return
    assert f"ClusterError: ranks 2, 3 did not connect to 127.0.0.1:{port} within 4 s" in ends[0]
    assert ends[1].startswith("ClusterError: ")
    assert said == [f"waiting at 127.0.0.1:{port} for ranks 2, 3 of 4\n", ""]


def meet_again(rank: int, port: int, folder: Path, restarts: int, attempt: int) -> None:
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    place = Place(rank, 2, rank, 2, "torchrun", "127.0.0.1", port)
    met = world.World.join(place, torch.device("cpu"), 200.0)
    total = int(met.all_reduce_(torch.tensor([10 * attempt + rank])))
    (folder / f"sum-{attempt}-{rank}").write_text(str(total))
    os._exit(0)  # as a rank that is killed: it removes nothing from the store


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
def test_ranks_of_agents_that_count_restarts_differently_meet_in_one_store(tmp_path: Path) -> None:
    """The second meeting has the counts of the first one, after a join. Then an agent restarts, and is replaced."""
    store = host_store(open_listener("127.0.0.1"), 200.0)
    context = multiprocessing.get_context("fork")
    for attempt, counts in enumerate([(0, 0), (0, 0), (0, 1), (2, 0)]):
        ranks = [
            context.Process(target=meet_again, args=(rank, store.port, tmp_path, count, attempt))
            for rank, count in enumerate(counts)
        ]
        for rank in reversed(ranks) if attempt % 2 else ranks:
            rank.start()
            rank.join(1)  # the second rank comes later
        for rank in ranks:
            rank.join(900)
        assert [(tmp_path / f"sum-{attempt}-{rank}").read_text() for rank in (0, 1)] == [
            str(20 * attempt + 1)
        ] * 2


def sum_on(rank: int, port: int, folder: Path, backends: list[str]) -> None:
    with (folder / f"said-{rank}").open("w") as said:
        world.sys.stderr = said
        world.devices.collective_backend = lambda device: backends[rank]
        world.devices.is_host = lambda device: "cuda" not in backends[rank]
        world.devices.select = world.devices.synchronize = lambda device: None  # a CPU in the place of a GPU
        met = world.World.join(
            Place(rank, 2, rank, 2, "torchrun", "127.0.0.1", port), torch.device("cpu"), 200.0
        )
        met.connect()
        total = int(met.all_reduce_(torch.tensor([rank + 1])))
        name = world.dist.get_backend_config()
        met.close()
    (folder / f"end-{rank}").write_text(f"{total} {name}")


def in_two_ranks(rank: Callable[..., None], *words: Any) -> None:
    """Call ``rank`` with its number, a free port and ``words`` in two processes, and wait for both."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number, port, *words)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(900)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
@pytest.mark.parametrize("backends", [["cpu:gloo,cuda:gloo", "gloo"], ["cpu:gloo,cuda:gloo"] * 2])
def test_ranks_with_different_kinds_of_devices_sum_through_gloo(tmp_path: Path, backends: list[str]) -> None:
    """NCCL on one side and gloo on the other would wait for each other for ever."""
    in_two_ranks(sum_on, tmp_path, backends)
    differ = len(set(backends)) > 1
    chosen = "cpu:gloo,cuda:gloo" if not differ else "cpu:gloo"
    for rank in range(2):
        total, name = (tmp_path / f"end-{rank}").read_text().split()
        assert total == "3" and name.startswith(chosen)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said == ["ranks have different kinds of devices: all reductions use gloo\n" if differ else "", ""]


class Published:
    """What ranks have told the store."""

    def __init__(self, *texts: str) -> None:
        self.texts = [text.encode() for text in texts]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        assert keys == [f"here/{rank}" for rank in range(len(self.texts))]
        return self.texts


def test_two_ranks_that_see_the_same_single_gpu_are_refused() -> None:
    place = Place(0, 3, 0, 3)
    both = "cpu:gloo,cuda:nccl"
    apart = Published(f"{both} a 0", f"{both} b 0", f"{both} b 1")
    assert world._common_backend(apart, place, both) == both  # type: ignore[arg-type]
    unbound = Published(f"{both} ", f"{both} ", f"{both} ")
    assert world._common_backend(unbound, place, both) == both  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="ranks 1 and 2 see the same single device: b 0"):
        world._common_backend(Published(f"{both} a 0", f"{both} b 0", f"{both} b 0"), place, both)  # type: ignore[arg-type]


def join_by_srun(rank: int, port: int, folder: Path, uuids: list[str]) -> None:
    world.devices.collective_backend = lambda device: "cpu:gloo,cuda:gloo"
    world.devices.is_host = lambda device: False
    world.devices.select = lambda device: None  # a CPU in the place of a GPU
    world.devices.uuid_of = lambda device: uuids[rank]
    place = Place(rank, 2, rank, 2, "srun", "127.0.0.1", port, only_device="0")
    try:
        met = world.World.join(place, torch.device("cpu"), 200.0)
        text = str(int(met.all_reduce_(torch.tensor([rank + 1]))))
    except ClusterError as problem:
        text = problem.what
    (folder / f"end-{rank}").write_text(text)
    os._exit(0)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
@pytest.mark.parametrize(
    ("uuids", "ends"),
    [(["5a", "5b"], "3"), (["5a", "5a"], "ranks 0 and 1 see the same single device: .* 0 5a")],
)
def test_two_gpus_that_srun_both_calls_0_are_two(tmp_path: Path, uuids: list[str], ends: str) -> None:
    """With ConstrainDevices of its cgroup.conf, each task sees its own GPU as number 0."""
    in_two_ranks(join_by_srun, tmp_path, uuids)
    for rank in range(2):
        assert re.fullmatch(ends, (tmp_path / f"end-{rank}").read_text())


NCCL_REFUSES = "NCCL error in: ProcessGroupNCCL.cpp:1\nncclInvalidUsage: Duplicate GPU detected"


class Nccl:
    """torch's collectives for a rank alone: one call fails, when it is started or when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: int, when: str) -> None:
        self.failing, self.when, self.calls = failing, when, 0
        for name in ("all_reduce", "all_gather", "broadcast"):
            monkeypatch.setattr(world.dist, name, self.collective)

    def collective(self, *_: object, **__: object) -> SimpleNamespace:
        self.calls += 1
        fails = self.calls == self.failing

        def refuse() -> None:
            raise world.dist.DistBackendError(NCCL_REFUSES)

        if fails and self.when == "start":
            refuse()
        return SimpleNamespace(wait=refuse if fails else lambda: None)


def step_of(model: str) -> Callable[[], object]:
    run = small_run(model, images=2)
    run.world.size = 2
    return run.do


def talk_of(name: str) -> Callable[[], object]:
    mine = world.World(0, 2, 0, 2, torch.device("cpu"))
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: mine.all_gather_bytes(b"text"),
        "broadcast": lambda: mine.broadcast_bytes(b"text"),
        "barrier": mine.barrier,
    }
    return calls[name]


@pytest.mark.parametrize("when", ["start", "wait"])
@pytest.mark.parametrize(
    ("make", "name", "calls"),
    [
        (step_of, "yolov3-narrow", 4),  # counts, statistics, two buckets
        (step_of, "ppyoloe-narrow", 5),  # counts, statistics, two buckets, the divisor
        (talk_of, "gather", 2),  # lengths, bytes
        (talk_of, "broadcast", 2),
        (talk_of, "barrier", 1),
    ],
)
def test_an_error_of_nccl_at_each_call_of_a_training_step_and_of_a_message_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[str], Callable[[], object]],
    name: str,
    calls: int,
    when: str,
) -> None:
    unharmed = Nccl(monkeypatch, failing=0, when=when)
    make(name)()
    assert unharmed.calls == calls
    says = {"start": "rank 0 could not start", "wait": "rank 0 lost the other ranks in a collective"}[when]
    for number in range(1, calls + 1):
        nccl = Nccl(monkeypatch, failing=number, when=when)
        with pytest.raises(ClusterError, match=says) as caught:
            make(name)()
        assert nccl.calls >= number and "NCCL error" in str(caught.value.source)
        assert when == "wait" or "NCCL_DEBUG=INFO" in caught.value.render()


def test_an_error_that_shows_after_the_first_collective_of_a_device_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    mine = world.World(1, 2, 1, 2, torch.device("meta"))
    Nccl(monkeypatch, failing=0, when="start")
    monkeypatch.setattr(world.devices, "synchronize", fails)  # as a GPU fails; a CPU cannot
    with pytest.raises(ClusterError, match="rank 1 could not sum a number on meta") as caught:
        mine.connect()
    assert caught.value.source == "CUDA error: unspecified launch failure"


class LeftAtOnce(Exception):
    """In the place of ``os._exit``."""


@pytest.mark.parametrize(("device", "at_once"), [("cuda:0", True), ("cpu", False)])
def test_a_rank_whose_device_failed_speaks_first_and_then_ends_without_leaving_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, at_once: bool
) -> None:
    """NCCL's abort may wait for the other ranks, and nobody would read why this one failed."""
    done: list[object] = []
    mine = world.World(0, 2, 0, 2, torch.device(device))

    def ends(code: int) -> None:
        done.append(code)
        raise LeftAtOnce

    def reports(problem: BaseException) -> int:
        done.append("words")
        return 7

    # a GPU and other ranks, which this machine need not have, and a failure after all have joined
    monkeypatch.setattr(worker, "prepare_process", lambda *_: torch.device(device))
    monkeypatch.setattr(worker.devices, "selected", lambda _: nullcontext())
    monkeypatch.setattr(worker.World, "join", lambda *_: mine)
    monkeypatch.setattr(worker.World, "close", lambda self, failed=False: done.append("close"))
    monkeypatch.setattr(worker, "shared_folder", lambda *_: 1 / 0)
    monkeypatch.setattr(worker.os, "_exit", ends)
    config, _ = resolve_train({"data": "shapes", "model": "yolov5n"})
    with pytest.raises(LeftAtOnce if at_once else ZeroDivisionError):
        worker.run(config, None, RunFolder(tmp_path), on_failure=reports)
    assert done == (["words", 7] if at_once else ["close"])


def test_a_gpu_that_this_build_of_torch_has_no_kernels_for_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(
            "CUDA error: no kernel image is available for execution on the device\nCompile with"
        )

    monkeypatch.setattr(worker, "prepare_process", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(worker.devices, "selected", lambda _: nullcontext())
    monkeypatch.setattr(worker.World, "join", lambda *_: world.World.single("cuda:1"))
    monkeypatch.setattr(worker, "shared_folder", fails)
    config, _ = resolve_train({"data": "shapes", "model": "yolov5n"})
    with pytest.raises(ConfigError, match="has no kernels for GPU 1 of ") as caught:
        worker.run(config, None, RunFolder(tmp_path))
    assert "pytorch.org" in caught.value.hint and "for execution" in str(caught.value.source)


def test_after_a_failure_nccl_is_broken_off_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def aborts() -> None:
        done.append("broken off")
        raise ZeroDivisionError

    monkeypatch.setattr(world.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world.dist, "destroy_process_group", lambda: done.append("orderly"))
    assert callable(world.dist.distributed_c10d._abort_process_group)  # torch has it still
    monkeypatch.setattr(world.dist.distributed_c10d, "_abort_process_group", aborts)
    for device, failed in (("cuda:0", True), ("cuda:0", False), ("cpu", True)):
        world.World(0, 2, 0, 2, torch.device(device)).close(failed=failed)
    assert done == ["broken off", "orderly", "orderly"]
