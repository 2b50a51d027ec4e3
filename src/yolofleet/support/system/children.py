"""Start child processes that import nothing from the working folder and end with their parent.

``python -m MODULE`` and ``python -c CODE`` put the working folder first on the import path. Python would then execute a
file such as ``numpy.py`` in that folder. ``yolofleet`` itself imports nothing from there, and its children must not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

PACKAGES = str(Path(__file__).resolve().parents[3])  # the folder that contains this package
# PYTHONSAFEPATH needs Python 3.11, so the child removes the working folder ("" with -c) itself
START = (
    "import sys; sys.path[:] = filter(None, sys.path); from runpy import run_module; "
    'run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)
# A thread of OpenMP that sleeps at every barrier halves the speed of a process with two threads, and one that spins for
# milliseconds (libgomp's default) takes the cores of other processes. libgomp reads both variables, others the first one.
OPENMP_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
SAFE_PATH = "PYTHONSAFEPATH"  # Python 3.11 and newer: also for processes that the child starts

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def module_argv(module: str, *words: str, python: str = "") -> list[str]:
    """Return the command of ``python -m MODULE WORDS`` without the working folder on its import path.

    Args:
        python: the interpreter; "" = this process's.
    """
    return [python or sys.executable, "-c", START, module, *words]


def with_this_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which children find this package.

    ``python -m yolofleet`` inside ``src`` of a checkout finds it through the working folder, which children ignore.
    """
    paths = environment.get("PYTHONPATH", "")
    is_first = False
    with suppress(OSError):  # of a working folder that is gone
        is_first = Path(sys.path[0]).samefile(PACKAGES)
    if not is_first or PACKAGES in paths.split(os.pathsep):
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGES, paths]))}


def module_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for :func:`module_argv`.

    Do not use it for a user's own command: ``python SCRIPT`` would not find modules beside the script.
    """
    return {**with_this_package(environment), SAFE_PATH: "1"}


def start_module(
    module: str,
    *words: str,
    environment: Mapping[str, str],
    output: int | IO[bytes] | None,
    errors: int | IO[bytes] = subprocess.STDOUT,
    stdin: int = subprocess.DEVNULL,
    keep_open: tuple[int, ...] = (),
    has_own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a module of this package as a child process, which ends when this process ends (Linux).

    Args:
        environment: see :func:`module_environment`, which this function adds.
        output, errors: standard output and standard error, as for ``subprocess.Popen``.
        keep_open: file descriptors that the child inherits.
        has_own_session: Ctrl-C reaches the child through this process only (POSIX).
    Raises:
        OSError: the process cannot be started.
    """
    return subprocess.Popen(
        module_argv(module, *words),
        env=module_environment(environment),
        stdin=stdin,
        stdout=output,
        stderr=errors,
        start_new_session=has_own_session and os.name == "posix",
        preexec_fn=partial(die_with, os.getpid()) if sys.platform == "linux" else None,
        pass_fds=keep_open,
    )


@contextmanager
def safe_spawn() -> Iterator[None]:
    """Keep the working folder off the import path of processes that multiprocessing spawns in the block.

    On Python 3.10 it stays there until the child has imported multiprocessing itself.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def die_with_parent() -> None:
    """Make the kernel (Linux) end this process when its parent dies for any reason.

    May be called between fork and exec. The kernel watches the thread that forked, so that thread must not end.
    """
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def die_with(parent: int) -> None:
    """As :func:`die_with_parent`, between fork and exec; also if the process ``parent`` has died before this call."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show of this process (Linux; 15 characters, in the main thread)."""
    if _LIBC is not None:
        _LIBC.prctl(15, name.encode()[:15])  # PR_SET_NAME


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def open_output(terminal: Mapping[str, Any] | None, environment: dict[str, str]) -> tuple[int, int]:
    """Return (our end, the children's end) of their standard output: a pipe, or a terminal of that size.

    Args:
        terminal: its ``rows``, ``columns`` and ``term``, the type that ``environment`` gets.
    """
    if terminal is None:
        return os.pipe()
    ours, theirs = os.openpty()
    resize(theirs, terminal)
    environment["TERM"] = str(terminal["term"])
    return ours, theirs


def resize(output: int, terminal: Mapping[str, Any]) -> None:
    """Set the size of a terminal, which its programs read before each drawing; no effect on a pipe."""
    import fcntl
    import struct
    import termios

    rows, columns = (min(max(int(terminal[name]), 0), 0xFFFF) for name in ("rows", "columns"))
    size = struct.pack("HHHH", rows, columns, 0, 0)
    with suppress(OSError):
        fcntl.ioctl(output, termios.TIOCSWINSZ, size)
