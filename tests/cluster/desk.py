"""The desk: somebody types a command there, reads what comes, and looks after the machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from commands import environment
from machines import Lab, Machine

from yolofleet.support.system.proc import rank_of

DEADLINE_S = 900
SESSION = ("YOLOFLEET_CACHE", "YOLOFLEET_OFFLINE", "OMP_NUM_THREADS")
AGENT = "yolofleet.training.parallel.torchrun_agent"  # in the command line of a torchrun agent of ours


class Command:
    """A command that somebody gives at the desk, or at another machine, and the lines that they see, as they come."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *args: str | Path,
        machine: Machine | None = None,
        module: str = "yolofleet",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        os.chdir(folder)  # the machines take over this process's folder
        self.began_s = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            (machine or lab.desk).argv(sys.executable, "-m", module, *args),
            env=environment(folder) | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began_s, line.rstrip("\n")))

    @property
    def said(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, pattern: str) -> float:
        """Seconds from the start until a line fitted."""
        while time.monotonic() - self.began_s < DEADLINE_S:
            for at_s, line in self.lines:
                if re.search(pattern, line):
                    return at_s
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in\n{self.said}")

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(900)
        return code


def impatient(folder: Path, hosts: str, silence_s: int = 5) -> tuple[str, str]:
    """Return the options for ``--hosts`` that are given up after so many seconds without a message; it writes a file."""
    file = folder / "impatient.yaml"
    file.write_text(f"silence_s: {silence_s}\nhosts: [{hosts}]\n")
    return "--fleet", str(file)


def session_of(folder: Path) -> dict[str, str]:
    """Return what a login on a machine finds in its environment."""
    env = environment(folder)
    return {name: env[name] for name in SESSION} | {"TMPDIR": str(folder / "tmp")}


def nothing_left(lab: Lab) -> float:
    """Seconds until no machine had a process or port of ours."""
    began_s = time.monotonic()
    while left := lab.left_behind():
        assert time.monotonic() - began_s < DEADLINE_S, left
        time.sleep(0.1)
    return time.monotonic() - began_s


def worker_of(machine: Machine) -> int:
    return next(pid for pid in machine.processes() if rank_of(pid) is not None)


def agent_of(machine: Machine) -> int:
    return next(p for p, c in machine.processes().items() if AGENT in c)
