"""How this computer is read: files, variables and the answers of its programs. Tests give others. No torch."""

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

KILLED_S = 1.0  # until a process that was killed is gone


@dataclass(frozen=True)
class Answer:
    """What a program said; ``code`` is None when there is no such program, or it did not end in time (``late``)."""

    code: int | None = None
    out: str = ""
    late: bool = False


def command(argv: Sequence[str], deadline_s: float) -> Answer:
    """Run a program to its end; ``out`` holds both of its streams."""
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
    except OSError:  # not installed, or not for us
        return Answer()
    return Answer(code, out.decode("utf-8", "replace"))


def run_for(
    deadline_s: float, argv: Sequence[str], given: bytes | None = None, **how: Any
) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a program. Unlike ``subprocess.run``, it does not wait for one that nobody can end:
    a GPU's driver that is stuck holds whoever asks it in the kernel (state D).

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
        OSError: it cannot be started.
    """
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, **how)
    try:
        out, errors = process.communicate(given, timeout=deadline_s)
    except BaseException:  # Ctrl-C, too
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):  # what it did not read
                    stream.close()
        raise
    return process.returncode, out, errors or b""


def within(deadline_s: float, work: Callable[[], T]) -> T | None:
    """What a function gives; None when it does not end in time, as one that a network disk or name server holds."""
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(work()), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answer[0] if answer else None


@dataclass(frozen=True)
class Machine:
    """Everything that is read of a computer goes through here, and nothing is written.

    Attributes:
        proc, system, etc, dev: where /proc, /sys, /etc and /dev are.
        shm: the folder of shared memory.
        run: answers of programs (argv, seconds at most).
    """

    proc: Path = Path("/proc")
    system: Path = Path("/sys")
    etc: Path = Path("/etc")
    dev: Path = Path("/dev")
    shm: Path = Path("/dev/shm")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    platform: str = sys.platform
    run: Callable[[Sequence[str], float], Answer] = command

    @property
    def groups(self) -> Path:
        return self.system / "fs" / "cgroup"
