"""How this computer is read: files, variables and the answers of its programs. Tests give others. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """What a program said; ``code`` is None when there is no such program, or it did not end in time (``late``)."""

    code: int | None = None
    out: str = ""
    late: bool = False


def command(argv: Sequence[str], deadline_s: float) -> Answer:
    """Run a program to its end; ``out`` holds both of its streams."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return Answer(late=True)
    except OSError:  # not installed, or not for us
        return Answer()
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"))


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


def text_of(path: Path) -> str:
    """A small file of the kernel's; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # EINVAL too: the speed of a card that is down
        return ""


def number_of(path: Path) -> int | None:
    """The whole number in a file; None where there is none."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def folders_in(path: Path) -> list[Path]:
    """What is in a folder, by name; [] where it cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
