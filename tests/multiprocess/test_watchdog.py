"""Ranks that hang, in all ways that a process can: one report names them, and everything ends."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import environment, family, free_port, in_ranks, small_shapes, train_args

from yolofleet.config.load import resolve_train
from yolofleet.runs.report.clock import Clock
from yolofleet.support import devices
from yolofleet.support.errors import ClusterError, YolofleetError
from yolofleet.support.system.proc import rank_of, started_ticks, stat_fields
from yolofleet.training.parallel import stall, watchdog
from yolofleet.training.parallel.activity import Heartbeat
from yolofleet.training.parallel.stall import RankInfo, RankSnapshot, answer_of, parsed, received
from yolofleet.training.parallel.watchdog import Watchdog
from yolofleet.training.parallel.world import World
from yolofleet.training.rank import worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks at them in /proc")

STALL_S = 4.0
DEADLINE_S = 900
FIRST = 120  # steps, until beats of a steady state have been exchanged


# -- forked ranks that do nothing but meet: milliseconds to start ------------------------------------------------


class Failure(Exception):
    """Ends the work of a rank, but not its process."""


def steps(world: World, clock: Clock, number: int, load: Callable[[int], None] = lambda step: None) -> None:
    for step in range(number):
        with clock("data"):
            load(step)
            time.sleep(0.02)
        with clock("comm"):
            world.barrier()
        clock.step(1)


def member(rank: int, folder: Path, port: int, agent_store: bool, work: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(agent_store)
    dist.init_process_group("gloo", timeout=timedelta(seconds=900))
    world, clock = World(rank, 2, rank, 2, torch.device("cpu")), Clock()
    world.activity.clock = clock

    def report(error: ClusterError) -> None:
        (folder / f"report-{rank}").write_text(error.render())

    try:
        with Watchdog(
            world,
            stall_s=STALL_S,
            timeout_s=60,
            log=folder / f"rank-{rank}.log",
            checkpoints=folder,
            resume="resume it",
            say=report,
        ):
            clock.training()
            steps(world, clock, FIRST)
            (folder / f"steady-{rank}").touch()
            work(world, clock)
    except Failure:
        time.sleep(DEADLINE_S)
    world.close()
    os._exit(0)  # a fork of pytest: nothing of pytest's own end


@contextmanager
def two_ranks(folder: Path, work: Callable[..., None], *, agent_store: bool = True) -> Iterator[list]:
    """Two forked ranks in ``work`` after some first steps; the store is ours, or rank 0's."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent_store else None
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=member, args=(r, folder, port, agent_store, work)) for r in range(2)]
    for rank in ranks:
        rank.start()
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(list(folder.glob("steady-*"))) < 2:
            assert all(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline_s
            time.sleep(0.02)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        del store


def connecting(rank: int, folder: Path, port: int) -> None:
    """One of two ranks whose device is taken for a GPU; rank 1 hangs where NCCL connects."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=900))
    devices.is_host = lambda device: False

    def hang(self: World, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(DEADLINE_S)
        return tensor

    def report(error: YolofleetError) -> None:
        (folder / f"report-{rank}").write_text(error.render())

    if rank == 1:
        World.all_reduce_ = hang  # type: ignore[method-assign]  # in this fork alone
    config, _ = resolve_train(
        {"data": "shapes", "model": "yolov5n", "stall_s": 0.5, "timeout_s": 60, "project": str(folder)}
    )
    world = World(rank, 2, rank, 2, torch.device("cpu"))
    worker._run(config, None, None, world, report)


@pytest.mark.slow
def test_a_rank_that_hangs_where_nccl_connects_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=connecting, args=(rank, tmp_path, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        assert codes(ranks) == [4, 4]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert "ClusterError: rank 1 " in the_report(tmp_path)
    assert "connecting" in the_report(tmp_path)


def codes(ranks: list) -> list[int | None]:
    for rank in ranks:
        rank.join(DEADLINE_S)
    return [rank.exitcode for rank in ranks]


def the_report(folder: Path) -> str:
    (report,) = folder.glob("report-*")  # exactly one
    return report.read_text()


HOSTILE = (
    '{"number', "", "null", "[]", "7", "[" * 100_000, "9" * 5000, '"\\ud800"', "\x00", "{}", '{"saved": 3, "found": 7}',
    '[["a", {}], "silent"]', '[[0, 1e400], "stuck"]', '[[7], "stuck"]', '{"rank": 1}', '{"saved": "s", "found": {"1": {}}}',
    '{"number": "1", "phase": 2, "step": [], "collectives": NaN, "waiting": 0, "last": null, "age_s": "x", '
    '"limit_s": NaN, "silence_s": {}, "ended": 1, "failed": "no"}',
)  # fmt: skip


@pytest.mark.slow
def test_texts_in_the_store_that_no_rank_writes_end_no_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = World.store  # its keys have a random prefix, so a stranger in the store must be let in
    monkeypatch.setattr(
        World,
        "store",
        lambda self, *given, **named: self.__dict__.setdefault("kept", meet(self, *given, **named)),
    )

    def write_and_stop(world: World, clock: Clock) -> None:
        store = world.__dict__["kept"]
        for text in HOSTILE * (world.rank == 1):
            for key in ("heartbeat/1", "heartbeat/0", "member/0", "question", "answer/1", "written/1"):
                store.set(key, text)
            steps(world, clock, 20)
        if world.rank == 1:
            store.set("answer/1", HOSTILE[0])  # it will not answer by itself
            os.kill(os.getpid(), signal.SIGSTOP)
        walk(world, clock)

    with two_ranks(tmp_path, write_and_stop) as ranks:
        assert codes(ranks) == [4, -signal.SIGKILL]
    assert "ClusterError: rank 1 " in the_report(tmp_path)
    assert "gives no sign of life" in the_report(tmp_path)


@pytest.mark.slow
def test_a_process_that_somebody_else_names_as_a_rank_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forging:
        """A store in which somebody replaces the process of rank 1."""

        def __init__(self, store: Any, victim: int) -> None:
            self.store, self.victim = store, victim

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def set(self, key: str, text: str) -> None:
            forged = {"pid": self.victim, "started_ticks": started_ticks(self.victim)}
            self.store.set(key, json.dumps(json.loads(text) | forged) if key == "member/1" else text)

    other_parent = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", other_parent], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        victim = int(parent.stdout.readline())
        try:
            meet = World.store  # its keys have a random prefix, so the forger must be let in
            monkeypatch.setattr(
                World, "store", lambda self, *given, **named: Forging(meet(self, *given, **named), victim)
            )
            with two_ranks(tmp_path, walk) as ranks:
                os.kill(ranks[1].pid, signal.SIGSTOP)
                ranks[0].join(DEADLINE_S)
                assert ranks[0].exitcode == 4
            assert "gives no sign of life" in the_report(tmp_path)
            assert parent.poll() is None, "somebody killed its child"
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)


def test_only_a_process_of_the_same_parent_and_program_is_a_sibling() -> None:
    def started(*argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    look = "import sys, os, yolofleet.support.system.proc as w; print([w.is_sibling(int(p)) for p in sys.argv[1:]])"
    python, other = started(sys.executable, "-c", "input()"), started("cat")
    with python, other:
        words = [sys.executable, "-c", look, *map(str, (python.pid, other.pid, os.getpid(), 1, 2**22 + 1))]
        assert subprocess.check_output(words).decode().strip() == str([True, *[False] * 4])
        python.communicate(b"\n")
        other.communicate(b"")


@pytest.mark.slow
def test_a_rank_that_does_not_report_a_stall_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "REPORTER_S", 1.0)
    turn = Watchdog._turn  # it is this rank's watchdog alone that must fail
    monkeypatch.setattr(
        Watchdog, "_turn", lambda self, verdict: turn(self, verdict) if self.world.rank else math.inf
    )

    def work(world: World, clock: Clock) -> None:
        steps(world, clock, 100, load=turns_for_ever if world.rank == 1 else lambda step: None)

    with two_ranks(tmp_path, work) as ranks:
        assert codes(ranks) == [4, 4]
    assert "rank 1 " in the_report(tmp_path)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_is_no_message_is_nothing(text: str) -> None:
    value = parsed(text.encode("utf-8", "surrogatepass"))
    assert [received(kind, value) for kind in (Heartbeat, RankInfo, RankSnapshot)] == [None, None, None]
    assert answer_of(text.encode("utf-8", "surrogatepass"), 2)[1] == {}


def test_what_a_rank_publishes_is_read_as_it_was() -> None:
    beat = Heartbeat(1, "start", 0, 0, False, "", 0.5, math.inf, 30.0, False)
    member = RankInfo(1, "h", "cpu", 77, 12345, "m", "/l")
    findings = RankSnapshot("s", "S", ("a", "b"), ())
    for published in (beat, member, findings):
        assert received(type(published), parsed(json.dumps(vars(published)).encode())) == published


def walk(world: World, clock: Clock) -> None:
    steps(world, clock, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "agent_store"), [(0, True), (1, True), (0, False)])
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path, stopped: int, agent_store: bool) -> None:
    (tmp_path / "step-00000008.safetensors").touch()
    with two_ranks(tmp_path, walk, agent_store=agent_store) as ranks:
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        assert codes(ranks)[1 - stopped] == 4
        assert codes(ranks)[stopped] == -signal.SIGKILL, "its neighbour ends what cannot end itself"
    report = the_report(tmp_path)
    first, *more = report.splitlines()
    assert re.match(rf"ClusterError: rank {stopped} \(.*, cpu\) gives no sign of life since ..:..:..", first)
    assert f"process {ranks[stopped].pid} is stopped" in report
    assert f"other: rank {1 - stopped} waits in collective" in report and "all_reduce float32 [1]" in report
    assert (
        "saved: step-00000008.safetensors" in report and "kill -CONT" in more[-1] and "resume it" in more[-1]
    )


def test_a_rank_that_fails_while_another_is_stuck_in_a_collective_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL: the failed process still exists, so its sockets tell the other nothing."""
    monkeypatch.setattr(stall, "LEFT_GRACE_S", 2.0)

    def work(world: World, clock: Clock) -> None:
        if world.rank == 1:
            raise Failure
        with clock("comm"):
            world.barrier()

    with two_ranks(tmp_path, work) as ranks:
        ranks[0].join(DEADLINE_S)
        assert ranks[0].exitcode == 4
        assert ranks[1].exitcode is None
    report = the_report(tmp_path)
    assert re.match(r"PeerFailed: rank 1 \(.*, cpu\) failed in .*; other ranks still wait for it", report)
    assert "other: rank 0 waits in collective" in report and "its own message says why" in report


def turns_for_ever(step: int) -> None:
    while True:
        time.sleep(0.01)


def holds_pythons_lock(step: int) -> None:
    ctypes.PyDLL(None).sleep(DEADLINE_S)


@pytest.mark.parametrize(
    ("hang", "says", "code"),
    [
        (turns_for_ever, f"makes no progress since .*, in 'data' after step {FIRST}", 4),
        pytest.param(
            *(holds_pythons_lock, "gives no sign of life since .*, last seen in '....", -signal.SIGKILL),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_hangs_in_its_code_shows_its_stack(
    tmp_path: Path, hang: Callable[[int], None], says: str, code: int
) -> None:
    def work(world: World, clock: Clock) -> None:
        steps(world, clock, 100, load=hang if world.rank == 1 else lambda step: None)

    with two_ranks(tmp_path, work) as ranks:
        assert codes(ranks) == [4, code]
    report = the_report(tmp_path)
    assert re.match(rf"ClusterError: rank 1 \(.*\) {says}", report)
    stack = report[report.index("stack:") :]
    assert hang.__name__ in stack.splitlines()[0] and "steps" in stack.splitlines()[1]


@pytest.mark.slow
def test_slow_but_moving_long_jobs_and_a_pause_of_all_ranks_are_no_stalls(tmp_path: Path) -> None:
    def slowly(step: int) -> None:
        time.sleep(STALL_S / 2)

    def work(world: World, clock: Clock) -> None:
        steps(world, clock, 2, load=slowly if world.rank == 1 else lambda step: None)
        with clock("evaluate"):
            if world.rank == 1:
                time.sleep(1.8 * STALL_S)
            world.barrier()
        (tmp_path / f"paused-{world.rank}").touch()
        steps(world, clock, 100)

    with two_ranks(tmp_path, work) as ranks:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.glob("paused-*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                os.kill(rank.pid, sent)
            if sent == signal.SIGSTOP:
                time.sleep(1.8 * STALL_S)
        assert codes(ranks) == [0, 0]
    assert not list(tmp_path.glob("report-*"))


# -- real runs ---------------------------------------------------------------------------------------------------


def test_a_run_with_a_stopped_rank_ends_with_the_report_and_resumes(tmp_path: Path) -> None:
    data, run = small_shapes(tmp_path), tmp_path / "runs" / "train" / "stopped"
    args = train_args(data, "--device", "cpu:2", "--name", run.name, "--save-every", "2steps")
    args += ["--epochs", "200", "--val-period", "0", "--restarts", "0"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "yolofleet", *map(str, args), "--stall-s", str(STALL_S)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(int(f.stem.split("-")[1]) >= 8 for f in run.glob("checkpoints/step-*.safetensors")):
        assert launcher.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    everybody = family(launcher.pid)
    ranks = sorted((rank, pid) for pid in everybody if (rank := rank_of(pid)) is not None)
    (_, rank_0), (_, rank_1) = ranks
    (server,) = {int(stat_fields(pid)[1]) for pid in (rank_0, rank_1)}
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, (
        "workers are forked from a process without threads"
    )
    os.kill(rank_1, signal.SIGSTOP)
    _, said = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 4, said
    assert "\nClusterError: rank 1 (" in said and f"process {rank_1} is stopped" in said
    assert said.count("ClusterError") == 1 and f"yolofleet train --resume {run}" in said
    assert not [pid for pid in everybody if Path(f"/proc/{pid}").exists()]

    saved = re.search(r"saved: step-(\d+)", said)
    assert saved is not None
    found = int(saved[1])
    enough = str(found // 3 + 1)  # 20 images in steps of 8
    resumed = in_ranks(tmp_path, 1, "train", "--resume", run, "--epochs", enough)
    assert f"resumed after step {found} " in resumed


ALONE = """
import sys, time
from yolofleet.data.input.sample import TrainSamples

sample, began = TrainSamples.sample, time.monotonic()
calls = []

def slow_once(self, epoch, position, *more):
    calls.append(position)
    if len(calls) == 80:  # the tenth step
        time.sleep(7)
    return sample(self, epoch, position, *more)

TrainSamples.sample = slow_once
from yolofleet.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_of_one_process_says_where_it_is_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    args = train_args(small_shapes(tmp_path), "--device", "cpu", "--workers", "0", "--max-steps", "12")
    args += ["--epochs", "9", "--val-period", "0", "--stall-s", str(STALL_S)]
    done = subprocess.run(
        [sys.executable, "alone.py", *map(str, args)],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: no progress since") == 1
    assert re.search(r"in 'data' after step 9\n", done.stderr) and "slow_once" in done.stderr
    assert "its data loader does not deliver" in done.stderr and "12 steps" in done.stdout
