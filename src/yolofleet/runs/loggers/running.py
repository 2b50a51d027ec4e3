"""Rank 0's side of the loggers. Each has a thread and a child process, so that no logger can stop or slow the training.

The training thread only puts a row into a queue. The thread of the logger sends it to the child and waits for the
answer. A row that the child could not store is sent again before the next one.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from yolofleet.config.loggers import logger_names, servers_of, wandb_server
from yolofleet.config.schema import TrainConfig
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.redaction import Redaction
from yolofleet.support.system.children import module_argv, module_environment
from yolofleet.support.text import screen_line

MOST_WAITING = 1000  # rows that wait for a logger; more are dropped
FINISH_S = 20.0  # longest wait for all loggers at the end of a run; the packages themselves wait up to 12 s
STOP_S = 3.0  # the same for a run that stops or fails: its machine may be switched off soon
KILLED_S = 1.0  # longest wait after a kill: a child may hang in the kernel, on a network disk
MOST_STARTS = 3  # maximum starts of a crashing child


class LoggerProcess:
    """One logger, seen from rank 0.

    Args:
        run: the attributes of :class:`LoggedRun`.
        lines: gets one line when the logger fails for the first time.
    """

    def __init__(self, name: str, run: Mapping[str, Any], lines: queue.SimpleQueue[str]) -> None:
        self.name, self._run, self._lines = name, run, lines
        # the run is resumed, and has no store here: another host wrote it, or the logger is new
        self.lacks_rows = run["resumed"] and not Path(run["folder"]).exists()
        self.dropped, self.timed_out = 0, False
        self._sent = self._done = self._starts = 0
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._child: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def row(self, text: str) -> None:
        """Send a row, as JSON. Never waits."""
        if self._sent - self._done >= MOST_WAITING:
            self.dropped += 1
        else:
            self._sent += 1
            self._messages.put(text)

    def end(self, finished: bool) -> None:
        """Send the end of the run."""
        self._messages.put(json.dumps(finished))
        self._messages.put(None)

    def wait(self, until_s: float) -> bool:
        """Wait for the child until a moment of ``time.monotonic``; return whether it has ended."""
        self._thread.join(max(until_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the child and everything that its package has started. Does not wait."""
        self.timed_out = True  # first: then the thread ends a child that it is just starting
        if self._child is not None:
            _kill(self._child)

    def lost(self) -> int:
        """Return the number of rows that are not stored."""
        return self.dropped + self._sent - self._done

    def _work(self) -> None:
        waiting: deque[str] = deque()
        warned = False
        while (text := self._messages.get()) is not None:
            is_end = text in ("true", "false")
            if not is_end:
                waiting.append(text)
            problem = ""
            while waiting and not problem:
                problem = self._ask(waiting[0])
                if not problem:
                    waiting.popleft()
                    self._done += 1
            if is_end:
                problem = self._ask(text) or problem
            if problem and not self.timed_out and (not warned or (is_end and not waiting)):
                warned = True
                what_follows = "" if is_end else "; the training goes on, and later rows try again"
                self._lines.put(f"--log {self.name}: {problem}{what_follows}")
        self._end_child()

    def _end_child(self) -> None:
        if self._child is not None:
            with suppress(OSError):
                self._child.__exit__(None, None, None)  # closes the pipes and waits

    def _ask(self, text: str) -> str:
        """Send a message to the child and return its answer: "" or what failed."""
        try:
            child = self._running()
            if child is not None and child.stdin is not None and child.stdout is not None:
                child.stdin.write(text + "\n")
                child.stdin.flush()
                if answer := child.stdout.readline():
                    return screen_line(json.loads(answer))
        except (OSError, ValueError) as problem:
            return f"its process failed: {problem}"
        return "its process has ended"

    def _running(self) -> subprocess.Popen[str] | None:
        """Return the child, and start it again if it has died; return None if it has died too often."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        if self._starts >= MOST_STARTS or self.timed_out:
            return None
        self._starts += 1
        self._end_child()
        self._child = subprocess.Popen(
            module_argv("yolofleet.runs.loggers.child", self.name),
            env=module_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in a terminal reaches the run, not its loggers
        )
        if self.timed_out:
            _kill(self._child)
        assert self._child.stdin is not None
        resumed = self._run["resumed"] or self._starts > 1
        self._child.stdin.write(json.dumps({**self._run, "resumed": resumed}) + "\n")
        return self._child


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a child and the processes that its package has started."""
    if hasattr(os, "killpg"):
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()


class Loggers:
    """The loggers of a run; none on ranks other than 0.

    Args:
        run: the attributes of :class:`LoggedRun`, without those of one logger.
        warn: gets one line for each logger that fails, and one at the end for each that lost rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        servers: Mapping[str, str],
        folder: Path,
        run: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # printed by the training thread
        own = {name: {"folder": str(folder / name), "server": servers.get(name, "")} for name in names}
        self._processes = [LoggerProcess(name, {**run, **own[name]}, self._lines) for name in names]

    def row(self, row: Mapping[str, float]) -> None:
        """Send a row of ``results.ResultsTable.write`` to every logger. Never waits."""
        self._send(row, self._processes)

    def begin(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Send the rows of a resumed run to the loggers that have no store of them. Never waits."""
        for row in rows:
            self._send(row, [process for process in self._processes if process.lacks_rows])

    def pictures(self, paths: Iterable[Path], epoch: int) -> None:
        """Send pictures of the last validation to every logger. Never waits."""
        for path in paths:
            for process in self._processes:
                process.row(json.dumps({"picture": str(path.absolute()), "epoch": epoch}))

    def _send(self, row: Mapping[str, float], processes: Sequence[LoggerProcess]) -> None:
        if processes:
            text = json.dumps({name: value for name, value in row.items() if math.isfinite(value)})
            for process in processes:
                process.row(text)
            self._tell()

    def close(self, finished: bool) -> None:
        """End all loggers, and warn about those that lost rows. Waits ``FINISH_S`` or ``STOP_S``, and ``KILLED_S``."""
        until_s = time.monotonic() + (FINISH_S if finished else STOP_S)
        for process in self._processes:
            process.end(finished)
        late = [process for process in self._processes if not process.wait(until_s)]
        for process in late:
            process.kill()
        until_s = time.monotonic() + KILLED_S
        for process in late:  # a thread whose child cannot be killed ends with this process
            process.wait(until_s)
        self._tell()
        for process in self._processes:
            if lost := process.lost():
                rows = "1 row" if lost == 1 else f"{lost} rows"
                self._warn(f"--log {process.name}: {rows} of the run not stored there; results.csv has all")
            elif process.timed_out:
                self._warn(f"--log {process.name}: not closed in time; the last rows may be missing there")

    def _tell(self) -> None:
        while not self._lines.empty():
            self._warn(self._lines.get())


@contextmanager
def started_loggers(
    config: TrainConfig,
    folder: RunFolder,
    console: NullConsole,
    closing: AbstractContextManager[None],
    *,
    resumed: bool,
) -> Iterator[Loggers]:
    """Start the loggers for the block, the training; enter ``closing`` while they end. For rank 0 only."""
    names = logger_names(config)
    without_secrets, path = Redaction(os.environ), folder.path.resolve()
    values = {**config.model_dump(mode="json"), "log": ",".join(names)}.items()  # no addresses
    settings = {k: v if isinstance(v, (bool, int, float)) else without_secrets(str(v)) for k, v in values}
    run = {"name": path.name, "project": path.parent.name, "settings": settings, "resumed": resumed}
    servers = servers_of(config)
    if "wandb" in names and "wandb" not in servers:
        servers["wandb"], note = wandb_server(os.environ)
        console.note(note)
    loggers = Loggers(names, servers, path, run, console.warn)
    finished = False
    try:
        yield loggers
        finished = True
    finally:
        with closing:
            loggers.close(finished)
