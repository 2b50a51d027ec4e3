"""What a run writes for spreadsheets and scripts: ``results.csv`` with a row per epoch, and events as JSON lines."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import check_fence, emit_json, is_deleted, jsonable, open_append, write_csv
from yolofleet.storage.foreign import read_at, read_foreign_text
from yolofleet.support.closing import Closing
from yolofleet.support.errors import StorageError
from yolofleet.support.place import is_first
from yolofleet.support.text import echo, screen_line

MOST_NUMBER = 1e300  # sums of larger numbers may overflow
MOST_WHOLE = 1e15  # a float has all digits of smaller whole numbers
MAX_BYTES = 256 << 20
MOST_RESULTS_BYTES = 1 << 30
MOST_COLUMNS = 256  # yolofleet writes far fewer
MOST_ROWS = 1_000_000


METRICS = "metrics/"  # begins the columns of figures
MAP50, MAP = "mAP50", "mAP50-95"


@dataclass(frozen=True)
class Judgement:
    """The figures that a task judges predictions by. Files of a run have them, because a reader of a run has no task."""

    columns: Mapping[str, str]  # the figure of each column of results.csv
    of_class: Mapping[str, str]  # figures on the screen, and the names of the same figures of one class
    fitness_of: Mapping[str, float]  # the weights of figures in the number that chooses the best weights

    @property
    def main(self) -> str:
        """The figure that counts most."""
        return max(self.fitness_of, key=lambda name: self.fitness_of[name])

    def fitness(self, figures: Mapping[str, float | None]) -> float:
        """Return the number that chooses the best weights; a figure without objects counts as 0."""
        return sum(weight * max(figures.get(name) or 0.0, 0.0) for name, weight in self.fitness_of.items())

    def stored(self) -> dict[str, Any]:
        """Return it as ``task`` of a file, for ``history.judgement_of``."""
        return {name: dict(values) for name, values in vars(self).items()}


# What runs of older versions do not say. Fitness as in YOLOv5
OF_BOXES = Judgement(
    {
        METRICS + name: figure
        for name, figure in (("precision", "P"), ("recall", "R"), (MAP50, MAP50), (MAP, MAP))
    },
    {"P": "P", "R": "R", MAP50: "AP50", MAP: "AP"},
    {MAP50: 0.1, MAP: 0.9},
)


def columns(losses: Sequence[str], metrics: Iterable[str] = OF_BOXES.columns) -> list[str]:
    """Return the column names of the table; ``losses``: kinds of loss terms; ``metrics``: columns of the task."""
    return [
        "epoch",  # epochs done, from 1
        "step",  # optimizer updates done
        "images",  # images seen
        *(f"train/{kind}_loss" for kind in losses),
        *metrics,
        *(f"val/{kind}_loss" for kind in losses),
        "lr",
        "seconds",  # of the epoch, including validation and checkpoint
        "images_per_s",
        "data_share",
        "compute_share",
        "comm_share",
        "val_seconds",  # of the epoch's validation; empty without one
        "device_memory_mib",  # peak of the epoch, the largest of the ranks; empty on a CPU
    ]


def read_rows(
    path: Path, *, limit_bytes: int = MAX_BYTES, most_rows: int = MOST_ROWS, follow: bool = True
) -> list[dict[str, str]]:
    """Return the rows of a ``results.csv`` as text, by epoch; none without a file.

    Args:
        follow: False: a symbolic link cannot be read.
    Raises:
        StorageError: the file cannot be read, or has another format.
    """
    if not path.is_file():
        return []
    try:
        text = read_foreign_text(path, limit_bytes=limit_bytes, follow=follow)
        if text.count("\n") > most_rows + 1:
            raise ValueError(f"expected at most {most_rows:,} rows")
        lines = csv.reader(io.StringIO(text, newline=""))
        names = next(lines, [])
        if len(names) > MOST_COLUMNS:
            raise ValueError(f"expected at most {MOST_COLUMNS} columns, got {len(names):,}")
        rows = [dict(zip(names, cells, strict=False)) for cells in lines]
        return sorted((row for row in rows if row.get("epoch")), key=_epoch)
    except (OSError, ValueError, csv.Error) as problem:
        raise StorageError(
            f"cannot read {path}: {_reason(problem)}", hint="move it away; the run then writes a new one"
        ) from None


def number(value: object, most: float = MOST_NUMBER) -> float | None:
    """Return the number in a value or a cell of unknown origin; None for anything else, and from ``most`` on."""
    with suppress(TypeError, ValueError, OverflowError):
        found = float(value)  # type: ignore[arg-type]
        if abs(found) < most and not isinstance(value, bool):
            return int(found) if found.is_integer() and abs(found) < MOST_WHOLE else found
    return None


def numbers(row: Mapping[str, str]) -> dict[str, float]:
    """Return the cells of a row of :func:`read_rows` that are numbers."""
    return {name: found for name, cell in row.items() if (found := number(cell)) is not None}


class ResultsTable:
    """The file ``results.csv``. Every epoch rewrites it atomically, so it is never incomplete or has an epoch twice.

    Args:
        losses: kinds of loss terms: box, obj, cls. metrics: columns of the task's figures.
    """

    def __init__(self, path: Path, losses: Sequence[str], metrics: Iterable[str] = OF_BOXES.columns) -> None:
        self.path, self.columns = path, columns(losses, metrics)
        self.rows: list[dict[str, str]] = []  # as last written

    def write(self, row: Mapping[str, float]) -> None:
        """Add the row of ``row["epoch"]``; remove rows of that and later epochs, from before a resume.

        Columns that are missing or not finite stay empty (an epoch without validation).

        Raises:
            StorageError: the file cannot be written.
        """
        unknown = sorted(set(row) - set(self.columns))
        assert not unknown, f"no such columns: {unknown}"
        kept = [old for old in read_rows(self.path) or self.rows if _epoch(old) < row["epoch"]]
        self._replace([*kept, {name: _cell(value) for name, value in row.items()}])

    def drop_after(self, epochs_done: int) -> None:
        """Remove the rows of epochs that a resumed run trains again. Raise StorageError if the file cannot be written."""
        rows = read_rows(self.path)
        kept = [row for row in rows if _epoch(row) <= epochs_done]
        if len(kept) < len(rows):
            self._replace(kept)

    def _replace(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows
        write_csv(self.path, [self.columns, *([row.get(name, "") for name in self.columns] for row in rows)])


def _epoch(row: Mapping[str, str]) -> int:
    try:
        return int(row["epoch"])
    except ValueError:
        text = screen_line(row["epoch"], limit=20)
        raise ValueError(f"expected a whole number as epoch, got {text}") from None


def _reason(problem: Exception) -> str:
    """Return what is wrong with a file, without its path."""
    if isinstance(problem, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def _cell(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if math.isfinite(value) else ""


def emit_results(code: int, results: Path, json_out: str) -> int:
    """Write a run's ``results.json`` to the target of ``--json``, if the run has succeeded. Return ``code``."""
    if json_out and code == 0 and is_first(os.environ) and results.is_file():
        emit_json(json.loads(read_foreign_text(results, limit_bytes=MOST_RESULTS_BYTES)), json_out)
    return code


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
                with suppress(OSError):  # close() flushes again, to the same full disk
                    file.close()
            self._warn(f"events are no longer written to {self.path}: {problem.strerror or problem}")

    def write(self, kind: str, **fields: Any) -> None:
        """Write an event. Fields are JSON values, NumPy scalars or paths; NaN and infinity become null."""
        if self._file is None:
            return
        check_fence(self.path)
        if is_deleted(self.path):  # somebody has deleted the folder of the run
            self._file.close()
            self._attempt(self._open)
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
