"""Start command lines of yolofleet in copies of this process, which has torch loaded, and end them.

A copy saves the seconds that torch takes to load. This process must not ask for devices, because a process that has used
CUDA cannot be forked.
"""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from gpu_check.machine import StageFailed
from yolofleet.measure.selftest.contract import copy_of_this_process
from yolofleet.support.system.children import adopt_orphans
from yolofleet.support.system.proc import end_descendants
from yolofleet.support.text import echo

END_S = 10.0  # for the processes of a stage to end after SIGKILL


def become_stage(log: Path) -> None:
    """Give this process a session of its own, adopt the orphans of its children, and write its output to ``log``."""
    if sys.platform != "win32":
        os.setsid()
    adopt_orphans()  # so that a process whose parent has died is found
    with log.open("wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def start_command(*argv: str | Path) -> BaseProcess:
    """Start a command line of yolofleet, and show it in the log."""
    texts = list(map(str, argv))
    echo(f"\n$ yolofleet {shlex.join(texts)}")
    return copy_of_this_process(_main, texts)


def _main(argv: list[str]) -> int:
    """Do what ``python -m yolofleet ARGV`` does."""
    sys.argv[1:] = argv
    runpy.run_module("yolofleet", run_name="__main__")
    return 0


def command(*argv: str | Path) -> None:
    """Run a command line of yolofleet to its end.

    Raises:
        StageFailed: its exit code is not 0.
    """
    process = start_command(*argv)
    process.join()
    if process.exitcode:
        raise StageFailed(
            f"`yolofleet {' '.join(map(str, argv[:2]))} ...` ended with exit code {process.exitcode}"
        )


def has_ended(process: BaseProcess) -> bool:
    """Return whether a child process has ended, without reaping it: its number stays its own until then."""
    if sys.platform == "win32":
        return not process.is_alive()
    assert process.pid is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_group(process: BaseProcess) -> None:
    """Kill a stage with all its processes: its descendants, which may have sessions of their own, and its group."""
    assert process.pid is not None
    if not has_ended(process):
        end_descendants(process.pid)
    if sys.platform != "win32":
        with suppress(OSError):  # the group is the stage's own (_stage_process), and may be empty
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(END_S)
