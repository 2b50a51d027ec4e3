"""Fail a test that leaves something behind in its process, on the machine or in the checkout.

A pytest plugin: ``tests/conftest.py`` registers it. After the teardown of each test it compares the state of this
process with the state before the setup. A fixture of a module or session owns what exists since its setup, until
its own teardown. Costs about 1 ms a test. Without /proc, processes and open files are not compared.
"""

# ruff: noqa: PTH109, PTH115, PTH208 (text takes a third of the time of Path objects)

from __future__ import annotations

import _signal  # of 64 signals, the enumerations of ``signal`` take a third of a millisecond
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

PROC = Path("/proc")
# Only a test that leaks waits this long. A thread or process that a test asked to end needs far less, even on a
# machine that is busy, so the result does not depend on load.
LEAVES_S = float(os.environ.get("YOLOFLEET_TEST_LEAVES_S", "300"))
# in the environment of every process that a test starts, so it is known after its parent has ended, too
MARK = "YOLOFLEET_TEST_PROCESS"

ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest changes it at each phase of a test",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it when it loads its compiler",
    "TRITON_CACHE_DIR": "torch sets it when it loads its compiler",
    "CUDA_MODULE_LOADING": "torch 2.6 sets it when it asks for CUDA",
    "LD_LIBRARY_PATH": "OpenCV sets it when it is imported",
    **dict.fromkeys(
        ("CUBLAS_WORKSPACE_CONFIG", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
        "a run sets it in its process, to the same value each time",
    ),
}
ALLOWED_THREADS = {
    "pytest_timeout": "pytest-timeout cancels it, but does not join it",
    "fsspecIO": "fsspec has one for all of a process",
    "tqdm_monitor": "tqdm, which the client of the Hugging Face hub uses, has one for all of a process",
    **{f"asyncio_{n}": "the loop in that thread looks up host names in up to 32 of them" for n in range(32)},
}
ALLOWED_FILES = {  # names that end so
    "/dev/urandom": "libraries open it once and keep it",
    "/dev/null": "pytest and subprocess open it",
    **dict.fromkeys(
        ("/readers.lock", "/readers.lock (deleted)"), "a process holds the files of a mirror until it ends"
    ),
    ".ttf": "matplotlib keeps its fonts open",
    "/libuuid/clock.txt": "libuuid, which ONNX calls for names of files, keeps its clock open where uuid-runtime is installed",
}
CUDA_FILES = ("/dev/nvidia", "anon_inode:[eventfd]")  # the driver opens them when it is first used
ALLOWED_ENTRIES = (".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__", ".coverage", ".git")

SIGNALS = [int(number) for number in signal.valid_signals()]
Key = tuple[Any, ...]  # its kind, then what identifies it
State = set[Key]  # what exists


@dataclass(frozen=True)
class Change:
    """What a fixture of a module or session made, and what it replaced or removed."""

    made: State
    removed: State


_changes: dict[Any, Change] = {}  # by fixture, from its setup to its teardown
_before: State = set()
_failed = pytest.StashKey[bool]()


# -- what exists ---------------------------------------------------------------------------------------------------


def state(root: Path) -> State:
    """Return what a test may leave behind and what exists now."""
    found: State = {("folder", _working_folder())}
    found |= {("variable", *pair) for pair in os.environ.items() if pair[0] not in ALLOWED_VARIABLES}
    found |= {("signal", number, _signal.getsignal(number)) for number in SIGNALS}
    for thread in threading.enumerate():
        if thread.name not in ALLOWED_THREADS and type(thread) is not threading._DummyThread:
            found.add(("thread", thread))
    for folder in (root, root / "runs"):
        with suppress(OSError):
            found |= {("entry", folder, name) for name in os.listdir(folder) if name not in ALLOWED_ENTRIES}
    files = list(_open_files())
    ends = Counter(target for _, target in files)
    has_cuda = any(target.startswith(CUDA_FILES[0]) for target in ends)
    for descriptor, target in files:
        # libuv, which torch's store uses, makes one pipe from the process to itself and keeps it
        is_of_libuv = target.startswith("pipe:") and ends[target] > 1
        is_of_cuda = has_cuda and target.startswith(CUDA_FILES)
        if not (is_of_libuv or is_of_cuda or target.endswith(tuple(ALLOWED_FILES))):
            found.add(("file", descriptor, target))
    with suppress(OSError):
        found |= {("process", name) for name in os.listdir(PROC) if name.isdecimal()}
    if table := sys.modules.get("yolofleet.families.table"):
        found |= {("family", name) for name in table.FAMILIES.keys() - table.BUILT_IN}
    return found


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "that no longer exists"


def _target(thread: threading.Thread) -> str:
    return getattr(getattr(thread, "_target", None), "__qualname__", type(thread).__qualname__)


def _open_files() -> Iterator[tuple[int, str]]:
    with suppress(OSError):
        for name in os.listdir(PROC / "self/fd"):
            with suppress(OSError):  # that of the listing itself
                yield int(name), os.readlink(f"/proc/self/fd/{name}")


# -- what is left ---------------------------------------------------------------------------------------------------


def leaks(before: State, root: Path) -> list[str]:
    """Return the words for what exists now, did not before, belongs to no fixture, and stays."""
    now = state(root)
    if new := _new(before, now):
        if any(key[0] == "file" for key in new):
            gc.collect()  # a file in a cycle of objects that nobody can reach any more
        gives_up_at_s = time.monotonic() + LEAVES_S
        for key in new:
            if key[0] == "thread":
                _await_thread(key[1], gives_up_at_s)
            elif key[0] == "process":
                _await_end(key[1], gives_up_at_s)
        now = state(root)
    left = [key for key in new if key in now and _stays(key)]
    words = [_words(key) for key in left]
    words += [f"environment variable {key[1]} is gone" for key in _missing(before, now)]
    if "PYTEST_XDIST_WORKER" in os.environ and any(key[0] == "entry" for key in left):
        words.append("(a test that ran at the same time in another worker may have made it in the checkout)")
    return sorted(words)


def _await_thread(thread: threading.Thread, gives_up_at_s: float) -> None:
    while not thread.is_alive() and thread in threading.enumerate() and time.monotonic() < gives_up_at_s:
        time.sleep(0.01)  # it is about to start, and join() refuses it until then
    if thread.is_alive():
        thread.join(max(gives_up_at_s - time.monotonic(), 0))


def _without_fixtures(now: State) -> State:
    """Return ``now`` as it would be without the fixtures that exist."""
    for change in reversed(_changes.values()):
        now = (now - change.made) | change.removed
    return now


def _new(before: State, now: State) -> list[Key]:
    new = now.difference(before, *(change.made for change in _changes.values()))
    return [key for key in new if key[0] != "process" or _is_leaked(key[1])]


def _missing(before: State, now: State) -> list[Key]:
    """Return the variables that were removed by none of the fixtures that exist."""
    names = {key[1] for key in now if key[0] == "variable"}
    return [k for k in _not_by_fixtures(before) if k[0] == "variable" and k[1] not in names]


def _not_by_fixtures(before: State) -> State:
    return before.difference(*(change.removed for change in _changes.values()))


def _stays(key: Key) -> bool:
    if key[0] == "thread":
        return bool(key[1].is_alive())
    return key[0] != "process" or _is_leaked(key[1])


def _is_leaked(pid: str) -> bool:
    """Return whether a living process descends from this one."""
    status = _stat(pid)
    if not status or status[0] in "ZX":
        return False
    ancestor = int(pid)
    while status and ancestor != os.getpid():
        ancestor = int(status[1])
        status = _stat(ancestor)
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    return ancestor == os.getpid() or mark in _read(f"{pid}/environ").split(b"\0")


def _stat(pid: int | str) -> list[str]:
    """Return state, parent and more of /proc/PID/stat; [] if there is no such process."""
    return _read(f"{pid}/stat").rpartition(b")")[2].decode("ascii", "replace").split()


def _read(name: str) -> bytes:
    try:
        return (PROC / name).read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _await_end(pid: str, gives_up_at_s: float) -> None:
    while _is_leaked(pid) and time.monotonic() < gives_up_at_s:
        time.sleep(0.01)


def _words(key: Key) -> str:
    match key:
        case ("folder", folder):
            return f"working folder {folder}"
        case ("variable", name, value):
            return f"environment variable {name}={value[:80]}"
        case ("signal", number, handler):
            return f"handler of signal {number}: {handler}"
        case ("thread", thread):
            return f"thread {thread.name} ({_target(thread)})"
        case ("family", name):
            return f"family of networks {name}, which later tests would find beside the built-in ones"
        case ("entry", folder, name):
            return f"{folder / name} in the checkout"
        case ("process", pid):
            command = _read(f"{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f"process {pid}: {command[:200]}"
        case (_, descriptor, target):
            port = _port(target[len("socket:[") : -1]) if target.startswith("socket:") else ""
            return f"open file {descriptor}: {target}{port}"
    raise AssertionError(key)


def _port(inode: str) -> str:
    """Return the port where a socket listens, as words; "" if it does not."""
    for line in (_read("self/net/tcp") + _read("self/net/tcp6")).decode().splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[9] == inode and fields[3] == "0A":
            return f", listens on port {int(fields[1].rpartition(':')[2], 16)}"
    return ""


def put_back(before: State, root: Path) -> None:
    """End the processes that a test left and restore what else can be, so that later tests do not fail for it."""
    for key in _new(before, state(root)):
        if key[0] == "process":
            with suppress(OSError):
                os.kill(int(key[1]), signal.SIGKILL)
        elif key[0] == "variable":
            os.environ.pop(key[1], None)
        elif key[0] == "family":
            sys.modules["yolofleet.families.table"].FAMILIES.pop(key[1])
    for key in _not_by_fixtures(before):
        match key:
            case ("variable", name, value):
                os.environ[name] = value
            case ("folder", folder):
                os.chdir(folder)
            case ("signal", number, handler):
                if handler is not None and _signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


# -- hooks of pytest ------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    os.environ[MARK] = f"{os.getpid()}"
    if PROC.is_dir():
        resource_tracker.ensure_running()  # Python keeps it, so it must exist before the first test that needs it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    global _before
    _before = _without_fixtures(state(item.config.rootpath))
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if isinstance(item, pytest.Function):
        item.funcargs.clear()  # pytest keeps the values of fixtures, and files that these hold open, a little longer
    root = item.config.rootpath
    if found := leaks(_before, root):
        put_back(_before, root)
        if not item.stash.get(_failed, False):  # its traceback keeps objects alive
            pytest.fail("this test leaves behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    root = request.config.rootpath
    before = state(root)
    result = yield
    now = state(root)
    _changes[fixturedef] = Change(now - before, before - now)
    return result


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    _changes.pop(fixturedef, None)
