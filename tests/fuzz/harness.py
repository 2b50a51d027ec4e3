"""Run one case in a forked child and judge what it did.

A case is the function of (seed, number): the number says which reader it is for, and both seed its random draws. The
child works in a folder of its own:

    here/      the working folder, with the files that the case made
    tmp/ cache/ home/
    outside/   must stay as it was: victim.txt, and no file "ran"

The child may end by success or by an error of ours. A traceback, a signal, another exit code, a change outside of its
folder, a listening socket, a control character on the screen, too much memory or too much time is a failure.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from yolofleet.cli import main
from yolofleet.support.errors import YolofleetError
from yolofleet.support.system.proc import environment_variable

MOST_S = 30.0  # on a machine that is not overloaded: the load of other programs stretches it
MOST_BYTES = 2 << 30
ADDRESS_SPACE = 6 << 30  # beyond what the libraries have mapped: protects the machine, decides nothing
MOST_FILE = 3 << 30
POLL_S = 0.01
GUARD_S = 0.2  # until the guard notices that the fuzzer has ended
KILL_S = 900.0  # that killed processes get to disappear
GOOD_CODES = (0, 2, 3, 4, 5, 75)
BROKEN_CASE = 97  # exit code: the case itself could not be made
VICTIM_TEXT = "nobody may change this\n"
KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # audit events and how many of their first arguments are paths that change
    "os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.truncate": 1, "os.utime": 1,
}  # fmt: skip

HERE = ("127.0.0.1", "::1", "localhost")

Action = list[str] | Callable[[], object]


@dataclass
class Case:
    """What a reader's function gets to make its files with.

    Attributes:
        folder: the working folder, empty.
        corpus: good files.
        env: variables for the command, beside the usual ones.
    """

    reader: str
    number: int
    seed: int
    folder: Path
    corpus: Any
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}:{self.number}")


@dataclass
class Result:
    """What became of a case; ``faults`` is empty when all is well."""

    reader: str
    number: int
    code: int | None
    seconds: float
    cpu_s: float
    peak_bytes: int
    faults: list[str]
    command: str
    output: str

    @property
    def outcome(self) -> str:
        return "failed" if self.faults else "accepted" if self.code == 0 else "refused"


Reader = Callable[[Case], Action]


class Running:
    """One case under way in a child process."""

    def __init__(self, reader: str, make: Reader, number: int, seed: int, corpus: Any, root: Path) -> None:
        self.reader, self.number = reader, number
        self.root = root
        for name in ("here", "tmp", "cache", "home", "outside"):
            (root / name).mkdir(parents=True)
        (root / "outside" / "victim.txt").write_text(VICTIM_TEXT)
        self.began_s = time.monotonic()
        self.most_s = MOST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        self.peak_bytes = 0
        self.stopped = ""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _child(Case(reader, number, seed, root / "here", corpus), make, root)

    def poll(self) -> Result | None:
        """Return the result if the case has ended; end it if it takes too long or too much."""
        ended, status, usage = os.wait4(self.pid, os.WNOHANG)
        if ended:
            return self._judge(status, usage)
        self.peak_bytes = max(self.peak_bytes, _resident(self.pid))
        if self.peak_bytes > MOST_BYTES * 1.05:
            self._stop("memory")
        elif time.monotonic() - self.began_s > self.most_s + 1.0:
            self._stop("time")
        return None

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        os.kill(self.pid, signal.SIGKILL)  # its own children are killed when it is judged

    def _judge(self, status: int, usage: resource.struct_rusage) -> Result:
        seconds = time.monotonic() - self.began_s
        peak_bytes = max(usage.ru_maxrss * 1024, self.peak_bytes)
        kill_below(self.root)
        said = b"".join(_read(self.root / name) for name in ("stdout", "stderr"))
        told = said.decode("utf-8", "surrogateescape")
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        faults = []
        if self.stopped == "time" or seconds > self.most_s:
            faults.append(f"it took more than {MOST_S:.0f} s")
        elif self.stopped != "memory" and code is None:
            faults.append(f"signal {signal.Signals(os.WTERMSIG(status)).name}")
        if peak_bytes > MOST_BYTES:
            faults.append(f"it used more than {MOST_BYTES >> 30} GiB of memory")
        if code == BROKEN_CASE:
            faults.append("the case could not be made")
        elif "Traceback (most recent call last)" in told:
            faults.append("traceback: " + _last_line(told))
        elif code is not None and code not in GOOD_CODES:
            faults.append(f"exit code {code}")
        elif code and not said.strip():
            faults.append(f"exit code {code} without a message")
        found = CONTROLS.search(told)
        if found:
            faults.append(f"control character {found[0]!a} on the screen")
        faults += [
            line for line in _read(self.root / "audit").decode("utf-8", "replace").splitlines() if line
        ][:5]
        faults += self._outside()
        command = _read(self.root / "command").decode("utf-8", "backslashreplace")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Result(self.reader, self.number, code, seconds, cpu_s, peak_bytes, faults, command, told)

    def _outside(self) -> list[str]:
        outside = self.root / "outside"
        if (outside / "ran").exists():
            return ["a payload was executed"]
        names = sorted(path.name for path in outside.iterdir()) if outside.is_dir() else []
        if names != ["victim.txt"] or (outside / "victim.txt").read_text() != VICTIM_TEXT:
            return ["a file outside of its folder was changed"]
        if sorted(p.name for p in self.root.iterdir() if p.name not in ("stdout", "stderr", "audit", "command")) != [
            "cache", "here", "home", "outside", "tmp"
        ]:  # fmt: skip
            return ["a file outside of its folder was made"]
        return []

    def remove(self) -> None:
        """Delete the folder of the case, whatever lies in it."""
        shutil.rmtree(os.fsencode(self.root), ignore_errors=True)


def kill_below(folder: Path) -> None:
    """Kill every process whose working folder or HOME lies below ``folder``, and wait until all are gone.

    A case may start processes in sessions of their own, which a signal to its process group does not reach.

    Raises:
        TimeoutError: some are still there after ``KILL_S``.
    """
    deadline_s = time.monotonic() + KILL_S
    while found := _processes_below(folder):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes {found} below {folder} cannot be killed")
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def guard(folder: Path) -> None:
    """Start a process that waits for the end of this one, however it ends, and then kills what works below ``folder``."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()  # Ctrl-C and a signal to the group are for the fuzzer
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # else a reader of the fuzzer's output would wait until the guard ends
            os.dup2(null, stream)
        while os.getppid() == parent:
            time.sleep(GUARD_S)
        kill_below(folder)
    finally:
        os._exit(0)


def _processes_below(folder: Path) -> list[int]:
    """Return the processes whose working folder or HOME lies below ``folder``; those of other users are not seen."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            places = (str((process / "cwd").readlink()), environment_variable(int(process.name), "HOME"))
            if any(place.startswith(f"{folder}{os.sep}") for place in places):
                found.append(int(process.name))
    return found


# -- the child -----------------------------------------------------------------------------------------------


def _child(case: Case, make: Reader, root: Path) -> NoReturn:
    code, made = BROKEN_CASE, False
    try:
        os.setsid()
        os.chdir(case.folder)
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        os.environ.clear()
        os.environ.update(variables)
        os.environ.update(
            HOME=str(root / "home"),
            TMPDIR=str(root / "tmp"),
            YOLOFLEET_CACHE=str(root / "cache"),
            YOLOFLEET_OFFLINE="1",
            COLUMNS="120",
        )
        tempfile.tempdir = None  # it remembers TMPDIR
        sys.dont_write_bytecode = True  # a module that only this case loads may not be compiled yet
        streams = [os.open(os.devnull, os.O_RDONLY)]
        streams += [
            os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for name in ("stdout", "stderr")
        ]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="strict", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        action = make(case)
        words = (
            shlex.join(["yolofleet", *action])
            if isinstance(action, list)
            else getattr(action, "__doc__", None) or str(action)
        )
        variables_text = " ".join(f"{name}={shlex.quote(value)}" for name, value in case.env.items())
        (root / "command").write_bytes(os.fsencode(f"{variables_text} {words}".strip()))
        os.environ.update(case.env)
        _limit()
        sys.addaudithook(_watcher(root))
        made = True
        code = main(action) if isinstance(action, list) else _run(action)
        _look_for_listeners(root)
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as the end of a program does
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
        code = 1 if made else BROKEN_CASE
    finally:
        os._exit(code)


def _run(action: Callable[[], object]) -> int:
    """Call a function as the command line calls a verb."""
    try:
        action()
    except YolofleetError as problem:
        print(problem.render(), file=sys.stderr)
        return problem.exit_code
    return 0


def _limit() -> None:
    faulthandler.disable()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, mapped + ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _watcher(root: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that notes what a command must not do, in the file ``audit``."""
    allowed = tuple(os.path.realpath(root / name) + os.sep for name in ("here", "tmp", "cache", "home"))
    allowed += ("/dev/null", "/dev/shm/", "/proc/self/", f"/proc/{os.getpid()}/")
    notes = os.open(root / "audit", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    is_busy = threading.local()

    def note(text: str) -> None:
        os.write(notes, (ascii(text)[1:-1] + "\n").encode())

    def check_path(event: str, value: Any) -> None:
        if isinstance(value, int) or value is None:
            return
        path = Path(os.fsdecode(value))
        real = os.path.realpath(path) if event == "open" else f"{os.path.realpath(path.parent)}/{path.name}"
        if not (real + os.sep).startswith(allowed):
            note(f"{event} of a file outside of its folder: {real}")

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if getattr(is_busy, "now", False):
            return
        is_busy.now = True
        try:
            if event == "open":
                if isinstance(values[2], int) and values[2] & WRITES:
                    check_path(event, values[0])
            elif event in CHANGES:
                for value in values[: CHANGES[event]]:
                    check_path(event, value)
            elif event == "os.system":
                note(f"os.system {values}")
            elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
                _check_program(values[0], note, root)
            elif event in ("socket.connect", "socket.bind"):
                at, address = values
                if at.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
                    note(f"{event} {address}")
        except Exception as problem:
            note(f"audit of {event}: {problem!r}")
        finally:
            is_busy.now = False

    return hook


def _check_program(program: Any, note: Callable[[str], None], root: Path) -> None:
    """A program below the case's folder was brought by a stranger, unless the case itself allows it."""
    path = shutil.which(os.fsdecode(program)) if program is not None else None
    if path and os.path.realpath(path).startswith(os.path.realpath(root) + os.sep) and "trusted" not in path:
        note(f"started a stranger's program: {path}")


def _look_for_listeners(root: Path) -> None:
    sockets = set()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            target = str(handle.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                with (root / "audit").open("a") as notes:
                    notes.write(f"it listens on {fields[1]}\n")


# -- looking -------------------------------------------------------------------------------------------------


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _read(path: Path, most: int = 4 << 20) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _last_line(text: str) -> str:
    """The exception of the last traceback, without what differs from case to case."""
    at = text.rfind("Traceback (most recent call last)")
    lines = [line for line in text[at:].splitlines() if line and not line.startswith(("this is a bug", " "))]
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text[at:])
    ours = [f"{Path(file).name}:{line}" for file, line, _ in places if "yolofleet" in file]
    what = lines[1] if len(lines) > 1 else "?"
    return f"{what[:120]} [{ours[-1] if ours else '?'}]"
