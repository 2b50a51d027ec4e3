"""The agent that schedulers start: its workers' exit codes, and a warning that is passed on. Real torchrun agents;
their workers are small scripts."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed.run  # noqa: F401 (each copy of this process would load it)
from commands import Forked, environment, kill

from yolofleet.fleet.launch.schedulers import agent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and SIGUSR1 is POSIX")
DEADLINE_S = 900
SCRIPTS = {
    "fails": "import os, sys, time; int(os.environ['RANK']) or sys.exit(3); time.sleep(60)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "is well": "import os; assert os.environ['WORLD_SIZE'] == '2'",
    # saves for longer than torchrun waits for the end of the others (its monitor looks every 0.1 s), and like a rank of a
    # training it goes on when torchrun asks it to end because another one has ended
    "saves": (
        "import signal, sys, time, pathlib, os\n"
        "me = pathlib.Path(sys.argv[1] + os.environ['RANK'])\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.5), me.write_text('saved'), sys.exit(75)))\n"
        "me.write_text('ready')\n"
        "time.sleep(60)\n"
    ),
}


def test_exit_codes_and_the_warning(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    variables = {**environment(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    marks = [tmp_path / f"mark{rank}" for rank in (0, 1)]
    agents: dict[str, Forked] = {}
    logs: dict[str, Path] = {}
    for name, text in SCRIPTS.items():
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        logs[name] = tmp_path / f"{name}.log"
        words = ["--nproc-per-node=2", str(script), str(tmp_path / "mark")]
        agents[name] = Forked(tmp_path, variables, logs[name], partial(agent.main, words))
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not all(mark.exists() and mark.read_text() == "ready" for mark in marks):
            assert agents["saves"].poll() is None, logs["saves"].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        agents["saves"].send_signal(signal.SIGUSR1)
        codes = {name: process.wait(timeout=DEADLINE_S) for name, process in agents.items()}
    finally:
        kill([*agents.values()])
    said = {name: log.read_text() for name, log in logs.items()}
    assert codes == {"fails": 3, "is killed": 4, "is well": 0, "saves": 75}, said
    assert [mark.read_text() for mark in marks] == ["saved", "saved"]
    assert "by a user" in said["is killed"]
    assert "Traceback" not in "".join(said.values())
    assert not list((tmp_path / "tmp").glob("torchelastic_*"))
