"""The board at the desk, in a browser, while two hosts train: it shows both, survives a restart, and its button ends the run."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser, browser
from browser import missing as browser_missing
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes
from desk import Command, nothing_left, session_of, worker_of
from machines import Lab, Machine, machines

WAIT_S = 900
CLONE_NEWNET = 0x40000000
ARGS = [*SMALL, "--threads", "1", "--val-period", "0", "--epochs", "100000"]
HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "own").mkdir()
    return tmp_path


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Two hosts, each with its own disk in ``own``, as the desk."""
    with machines(2, private=[folder / "own"], environment=session_of(folder)) as made:
        yield made


@contextmanager
def on_network_of(machine: Machine) -> Iterator[None]:
    """Let this thread, and the processes that it starts, use the network of a machine inside the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{machine.sshd.pid}/ns/net", os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(home, CLONE_NEWNET) == 0
        os.close(there)
        os.close(home)


def until(chromium: Browser, script: str, board: Command, wanted: object = True) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while (found := chromium.run(f"return {script}")) != wanted:
        assert time.monotonic() < deadline_s, (script, found, board.said)
        time.sleep(0.2)


@pytest.mark.skipif(bool(browser_missing()), reason=browser_missing())
def test_the_board_follows_a_run_of_two_hosts_and_stops_it(lab: Lab, folder: Path) -> None:
    own, data = folder / "own", small_shapes(folder)
    run = Command(lab, own, "train", "--data", data, *ARGS, *HOSTS, "--save-every", "0")
    run.wait_for("^epoch 2/")
    board = Command(lab, own, "board", "--port", "0", "--allow", "stop,save")
    board.wait_for("^http://127.0.0.1:")
    url = next(line for _, line in board.lines if line.startswith("http://127.0.0.1:"))
    token = url.partition("token=")[2]
    assert all(token not in command for machine in lab.machines for command in machine.processes().values())
    with on_network_of(lab.desk), browser(folder) as chromium:
        chromium.open(url)
        until(chromium, "document.querySelector('.runs .state')?.textContent", board, "running")
        assert chromium.run("return location.href") == url.partition("?")[0]
        chromium.run("document.querySelector('.runs a').click()")
        ranks = "document.querySelector('[aria-label=\"Seconds of the ranks\"] tbody')?.innerText ?? ''"
        until(chromium, f"/m1/.test({ranks}) && /m2/.test({ranks})", board)
        chromium.run("window.stays = true")

        press = "[...document.querySelectorAll('button[type=button]')].find((b) => b.textContent.startsWith('{}')).click()"
        chromium.run(press.format("save"))
        until(chromium, "document.querySelector('.live p').textContent.includes('saved at step')", board)

        # a run that had to start at step 0 again would count as a new one
        os.kill(worker_of(lab.hosts[1]), signal.SIGKILL)
        run.wait_for("started again as 2 processes")
        starts = "document.querySelectorAll('[aria-label=\"Starts of the run\"] tbody tr').length"
        until(chromium, starts, board, 2)
        until(
            chromium,
            "document.querySelector('[aria-label=\"Events\"]')?.innerText.includes('rank 1 on m2 was killed')",
            board,
        )
        until(chromium, "document.querySelector('.state').dataset.state", board, "running")

        for _ in range(2):
            chromium.run(press.format("stop"))
        assert run.end() == 75, run.said
        until(chromium, "document.querySelector('.state').dataset.state", board, "stopped")
        assert chromium.run("return window.stays") is True and chromium.messages() == []
    saved = lab.hosts[0].run("ls", own / "runs/train/exp/checkpoints").stdout
    assert "step-" in saved and re.search(r"--resume \S*runs/train/exp", run.said), run.said
    board.process.send_signal(signal.SIGINT)
    assert board.end() == 0 and "the board has ended" in board.said and "Traceback" not in board.said
    nothing_left(lab)
