"""Access to this machine: files, variables and programs. Tests replace them. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

KILLED_S = 1.0  # for a killed process to end


@dataclass(frozen=True)
class Answer:
    """Output of a program; ``code`` is None if it does not exist, or did not end in time (``late``)."""

    code: int | None = None
    out: str = ""
    late: bool = False


def command(argv: Sequence[str], deadline_s: float) -> Answer:
    """Run a program to its end. ``out`` holds both of its streams."""
    try:
        code, out, _ = run_for(
            deadline_s,
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return Answer(late=True)
    except OSError:  # not installed, or not permitted
        return Answer()
    return Answer(code, out.decode("utf-8", "replace"))


def run_for(
    deadline_s: float, argv: Sequence[str], input_bytes: bytes | None = None, **how: Any
) -> tuple[int, bytes, bytes]:
    """Return exit code, output and errors of a program.

    Unlike ``subprocess.run``, it does not wait for a program that cannot be killed: a GPU driver that hangs holds its
    caller in the kernel (state D).

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
        OSError: it cannot be started.
    """
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, **how)
    try:
        out, errors = process.communicate(input_bytes, timeout=deadline_s)
    except BaseException:  # also Ctrl-C
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):  # input that it did not read
                    stream.close()
        raise
    return process.returncode, out, errors or b""


def within(deadline_s: float, work: Callable[[], T]) -> T | None:
    """Return a function's result; None on timeout (a hung NFS mount or DNS server)."""
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(work()), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answer[0] if answer else None


@dataclass(frozen=True)
class Machine:
    """Where the doctor reads a machine. It writes nothing."""

    # proc, system, etc, dev: where /proc, /sys, /etc and /dev are
    proc: Path = Path("/proc")
    system: Path = Path("/sys")
    etc: Path = Path("/etc")
    dev: Path = Path("/dev")
    shm: Path = Path("/dev/shm")  # the folder of shared memory
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    platform: str = sys.platform
    run: Callable[[Sequence[str], float], Answer] = command  # runs a program (argv, timeout in seconds)

    @property
    def groups(self) -> Path:
        return self.system / "fs" / "cgroup"
