"""The machine-readable events of a run: one JSON object per line, from every rank and host."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.closing import Closing
from yolofleet.support.files.atomic import jsonable, open_append
from yolofleet.support.files.foreign import read_at
from yolofleet.support.text import echo


class EventLog(Closing):
    """Appends events of one rank; :meth:`write` flushes each line to the operating system.

    Lost events must never end a run: after a disk error it calls ``warn`` once and writes no more.

    Args:
        path: ``RunFolder.events(rank)``.
        warn: gets the reason of a disk error, once.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        warn: Callable[[str], None] = lambda text: echo(text, to=sys.stderr),
    ) -> None:
        self.path, self.rank = path, rank
        self.host = socket.gethostname()
        self._warn = warn
        self._file: TextIO | None = None
        self._attempt(self._open)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open_append(self.path)
        # Names that are not UTF-8 reach this file as lone surrogates, whose escapes are valid JSON.
        self._file = TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="\n")
        size = os.fstat(file.fileno()).st_size
        if size and read_at(file.fileno(), size - 1, 1) != b"\n":
            self._file.write("\n")  # a crash has cut the last line; start a new one

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as problem:
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.close()
                except OSError:  # close() flushes again, to the same full disk
                    pass
            self._warn(f"events are no longer written to {self.path}: {problem.strerror or problem}")

    def write(self, kind: str, **fields: Any) -> None:
        """Write an event. Fields are JSON values, NumPy scalars or paths; NaN and infinity become null."""
        if self._file is None:
            return
        event = {"time": round(time.time(), 3), "rank": self.rank, "host": self.host, "kind": kind}
        line = json.dumps(event | jsonable(fields), ensure_ascii=False)

        def append(file: TextIO = self._file) -> None:
            file.write(line + "\n")
            file.flush()

        self._attempt(append)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def record_event(folder: RunFolder, kind: str, **values: Any) -> None:
    """Append an event to those of the launcher, for the report. Print a warning if the disk is full."""
    with EventLog(folder.launcher_events, rank=-1) as events:
        events.write(kind, **values)
