"""A run on one machine listens on loopback alone, and what anyone writes into its store is never executed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attack import LOOPBACK, attack, listening
from commands import environment, family, small_shapes, train_args

from yolofleet.fleet.doctor.machine_facts import CHILD_S
from yolofleet.fleet.doctor.probes import run_probe
from yolofleet.support.listener import open_listener
from yolofleet.support.system.proc import rank_of, signal_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets in /proc")

DEADLINE_S = 900
# meets the other rank, then waits until the test lets it end
SCRIPT = """
import sys, time, pathlib, os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(sys.argv[1], f"met-{os.environ['RANK']}").touch()
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
dist.barrier()
"""


def agent(folder: Path, *options: str) -> list[str | Path]:
    (folder / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "yolofleet.fleet.launch.schedulers.agent", *options, "--nproc-per-node=2"]
    return [*launch, folder / "script.py", folder]


def training(folder: Path) -> list[str | Path]:
    return [
        sys.executable,
        "-m",
        "yolofleet",
        *train_args(small_shapes(folder), "--device", "cpu:2", "--epochs", "100000"),
    ]


@pytest.mark.parametrize("options", [None, pytest.param(("--standalone",), marks=pytest.mark.slow)])
def test_a_run_on_one_machine_listens_on_loopback_alone_and_executes_nothing(
    tmp_path: Path, options: tuple[str, ...] | None
) -> None:
    command = training(tmp_path) if options is None else agent(tmp_path, *options)
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    mark = tmp_path / "executed"
    seen: dict[int, set[str]] = {}
    stores: list[int] = []
    try:
        deadline = time.monotonic() + DEADLINE_S
        while run.poll() is None:
            assert time.monotonic() < deadline
            for pid in family(run.pid):
                for port, addresses in listening(pid).items():
                    if port not in seen and rank_of(pid) is None:  # torchrun's agent
                        stores += [port] * attack("127.0.0.1", port, mark)
                    seen.setdefault(port, set()).update(addresses)
            if stores and len(seen) >= 3:  # the store, and at least a socket of gloo's for each rank
                (tmp_path / "go").touch()
                if options is None:
                    run.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        said = run.communicate(timeout=DEADLINE_S)[0]
    finally:
        if run.poll() is None:
            signal_all(family(run.pid), signal.SIGKILL)
    assert run.returncode == (75 if options is None else 0), said
    assert set().union(*seen.values()) == LOOPBACK, seen
    assert len(stores) == 1
    assert not mark.exists(), "the attack executed code"


def test_the_sum_of_the_doctor_listens_on_the_chosen_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain TCPStore listens on all addresses, and whoever reaches it may write into it."""
    monkeypatch.setitem(CHILD_S, "all_reduce", 900.0)  # a slow machine needs longer to import torch
    with open_listener("127.0.0.1") as trial:
        port = trial.getsockname()[1]
    shared = {"address": "127.0.0.1", "port": port, "size": 2, "deadline_s": 900, "card": "lo"}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_probe, "all_reduce", {**shared, "rank": 0})
        deadline = time.monotonic() + 900
        seen: set[str] = set()
        while not seen:  # rank 0 waits for the other
            assert time.monotonic() < deadline and not first.done(), first.result()
            time.sleep(0.2)
            seen = set().union(*(listening(pid).get(port, set()) for pid in family(os.getpid())))
        second = pool.submit(run_probe, "all_reduce", {**shared, "rank": 1})
        answers = [first.result(900), second.result(900)]
    assert seen == LOOPBACK
    for answer in answers:
        assert answer["problem"] == "" and answer["seconds"] > 0 and answer["barrier_s"] > 0
