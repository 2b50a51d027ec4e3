"""A run on one machine listens on loopback alone, and what anyone writes into its store is never executed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attack import LOOPBACK, attack, listening
from commands import environment, family, small_shapes, train_args

from yolofleet.system.proc import environment_variable, signal_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets in /proc")

DEADLINE_S = 240
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
    launch = [sys.executable, "-m", "yolofleet.launch.agent", *options, "--nproc-per-node=2"]
    return [*launch, folder / "script.py", folder]


def training(folder: Path) -> list[str | Path]:
    return [sys.executable, "-m", "yolofleet", *train_args(small_shapes(folder), "--device", "cpu:2")]


@pytest.mark.parametrize("options", [None, ("--standalone",)])
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
    mark, seen, stores = tmp_path / "executed", {}, []
    try:
        deadline = time.monotonic() + DEADLINE_S
        while run.poll() is None:
            assert time.monotonic() < deadline
            for pid in family(run.pid):
                for port, addresses in listening(pid).items():
                    if port not in seen and not environment_variable(pid, "RANK"):  # torchrun's agent
                        stores += [port] * attack("127.0.0.1", port, mark)
                    seen.setdefault(port, set()).update(addresses)
            if len(list(tmp_path.glob("met-*"))) == 2:
                (tmp_path / "go").touch()
            time.sleep(0.1)
        said = run.communicate()[0]
    finally:
        if run.poll() is None:
            signal_all(family(run.pid), signal.SIGKILL)
    assert run.returncode == 0, said
    assert set().union(*seen.values()) == LOOPBACK, seen
    assert len(stores) == 1 and len(seen) >= 3, "the store, and at least a socket of gloo's for each rank"
    assert not mark.exists(), "the attack executed code"
