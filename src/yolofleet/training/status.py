"""Write the state of a run for other processes, and take their requests, through files in the folder of the run.

`yolofleet board` reads and writes these files. They are no signals, because a board may run on another machine that shares
only the disk, and because no signal asks a run to save and go on. A launcher whose machine does not share the disk of rank 0
copies them (``fleet/launch/run_on_hosts.py``).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import REQUESTS, RunFolder
from yolofleet.storage.atomic import write_unsynced
from yolofleet.support.errors import ClusterError, Stopped, YolofleetError
from yolofleet.support.system.signals import request_stop
from yolofleet.training.parallel.world import World

PERIOD_S = 2.0  # between two looks for requests, and between two states on the disk
END_S = 5.0  # for the thread to end; a network disk may block it


class RunStatus:
    """Writes ``logs/status.json`` of a run from a thread of rank 0, and takes requests.

    Errors of the disk are ignored, because events and results report them.

    Args:
        clock: of rank 0; only its current phase is read.
        on_stop: called from the thread when ``stop`` is requested.
    """

    def __init__(self, folder: RunFolder, clock: Clock, world: World, on_stop: Callable[[], object]) -> None:
        self.folder, self._clock, self._on_stop = folder, clock, on_stop
        self._values: dict[str, Any] = {"host": world.host, "ranks": world.size, "restarts": world.restarts}
        self._noted_at_s = -math.inf
        self._asks_save = self._is_over = False
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="run-status", daemon=True)
        for kind in REQUESTS:  # to the process before this one
            folder.take_request(kind)
        self._write("running")
        self._thread.start()

    @property
    def is_due(self) -> bool:
        """Whether :meth:`note` was not called for ``PERIOD_S``."""
        return time.monotonic() - self._noted_at_s >= PERIOD_S

    def note(self, **values: Any) -> None:
        """Set values of the file. NaN becomes null."""
        self._noted_at_s = time.monotonic()
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._values = self._values | finite  # a new mapping: the thread may be reading the old one

    def take_save(self) -> bool:
        """Return whether ``save`` was requested since the last call."""
        if not self._asks_save:
            return False
        self._asks_save = False
        return True

    def close(self, state: str, why: str = "") -> None:
        """End the thread, and write the last state: ``ended``, ``stopped`` or ``failed``."""
        self._closing.set()
        self._thread.join(END_S)
        self._write(state, why)

    def _serve(self) -> None:
        while not self._closing.wait(PERIOD_S) and self._write("running"):
            if self.folder.take_request("stop"):
                self._on_stop()
            if self.folder.take_request("save"):
                self._asks_save = True

    def _write(self, state: str, why: str = "") -> bool:
        """Write the state; return False if another process has taken over the folder."""
        phase = self._clock.phase if state == "running" else ""
        values = {"state": state, "why": why, "time": round(time.time(), 3), "phase": phase, **self._values}
        if not self._writing.acquire(timeout=END_S):
            return True  # the thread is stuck on a hung disk
        try:
            with suppress(OSError):
                if not self._is_over:  # the thread may have been stuck when the run ended
                    self._is_over = state != "running"
                    write_unsynced(self.folder.status, json.dumps(values).encode())
            return True
        except ClusterError:
            return False
        finally:
            self._writing.release()


@contextmanager
def published_status(
    folder: RunFolder,
    clock: Clock,
    world: World,
    on_stop: Callable[[], object] = lambda: request_stop("a request in the run folder"),
) -> Iterator[RunStatus]:
    """Run a :class:`RunStatus` for the block, which is the run; its end decides the last state."""
    status = RunStatus(folder, clock, world, on_stop)
    try:
        yield status
    except (Stopped, KeyboardInterrupt) as problem:
        status.close("stopped", problem.source or "" if isinstance(problem, Stopped) else str(problem))
        raise
    except BaseException as problem:
        what = problem.what if isinstance(problem, YolofleetError) else str(problem)
        status.close("failed", f"{type(problem).__name__}: {what}"[:1000])
        raise
    status.close("ended")
