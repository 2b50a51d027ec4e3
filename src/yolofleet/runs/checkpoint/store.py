"""Full training states on disk.

A restart tries, in this order:
  1. the newest ``checkpoints/step-*.safetensors`` whose digest is right and whose values are finite;
  2. the next older one, and so on; it prints which files it skips and why;
  3. if none is complete: an error that names all of them. No file is deleted.

A background thread writes the files from a copy of the state, so training does not wait. On several machines without a
common disk, rank 0 and a rank of another machine write the same state (``runs.folder.file_writers``).

A new run in a used folder (``--exist-ok``) first moves the older states and weights aside, and a run that goes on from an older
state of its own the later states. Pruning deletes only states of
its own run, in the order in which they were written.
"""

from __future__ import annotations

import itertools
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from yolofleet.families.weights.format import non_finite, read_tensors, write_tensors
from yolofleet.runs.checkpoint.names import NAME, name_of, step_of
from yolofleet.storage.atomic import storage_error, writing
from yolofleet.storage.foreign import reading
from yolofleet.support.errors import CheckpointError, NonFiniteError
from yolofleet.support.text import quoted, screen_line

KEPT = ("checkpoints", "weights")  # folders that a later run in the same folder must not change


@dataclass(frozen=True)
class Snapshot:
    """A full state between two steps: tensors by name, and values for JSON."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


@dataclass(frozen=True)
class StoredCheckpoint:
    """One file of the store, as ``checkpoints list`` shows it."""

    path: Path
    step: int
    bytes: int


class CheckpointStore:
    """The ``checkpoints`` folder of a run; keeps the last ``keep`` states."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._written: list[Path] | None = None  # in the order of writing; None: not yet listed
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def entries(self) -> list[StoredCheckpoint]:
        """Return the regular files by step, newest first, without verification or following of links.

        Raises:
            CheckpointError: the folder is a link, or cannot be read.
        """
        self._refuse_link()
        found = []
        with reading(self.folder, CheckpointError):
            for path in self.folder.iterdir() if self.folder.exists() else ():
                status = path.lstat() if NAME.fullmatch(path.name) else None
                if status and stat.S_ISREG(status.st_mode):
                    found.append(StoredCheckpoint(path, step_of(path), status.st_size))
        return sorted(found, key=lambda e: -e.step)

    def _refuse_link(self) -> None:
        """Raise if the folder is a link, because pruning must not delete states of another folder."""
        if self.folder.is_symlink():
            raise CheckpointError(
                f"{self.folder} is a symbolic link",
                hint="replace the link by a folder; --project can name a folder on another disk",
            )

    def save(self, snapshot: Snapshot) -> None:
        """Write ``snapshot`` in the background; its tensors must not change afterwards.

        Raises:
            StorageError: the previous write failed; this one has started nevertheless.
        """
        self.finish_writing()
        failure, self._failure = self._failure, None
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint-writer")
        self._writer.start()
        if failure is not None:
            raise failure

    def _write(self, snapshot: Snapshot) -> None:
        try:
            if self._written is None:  # a resumed run also prunes states from before
                self._written = [entry.path for entry in self.entries()[::-1]]
            self._refuse_link()
            path = self.folder / name_of(snapshot.step)
            write_tensors(path, snapshot.tensors, {"state": snapshot.values, "step": snapshot.step})
            self._written = [*(old for old in self._written if old != path), path]
            while len(self._written) > max(self.keep, 1):
                self._written.pop(0).unlink(missing_ok=True)
        except OSError as problem:
            self._failure = storage_error(problem, self.folder)
        except Exception as problem:  # else the thread would end silently
            self._failure = problem

    def flush(self) -> None:
        """Wait for the pending write. Raise StorageError if it failed."""
        self.finish_writing()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish_writing(self) -> None:
        """Wait for the pending write and ignore its result, because the run has already failed or ended."""
        if self._writer is not None:
            self._writer.join()

    def newest(self) -> tuple[Path, list[str]]:
        """Return the file of the newest complete state, and notes about skipped files. Raise CheckpointError if there is none."""
        skipped: list[str] = []
        for entry in self.entries():
            try:
                load_snapshot(entry.path)
                return entry.path, skipped
            except CheckpointError as problem:
                skipped.append(problem.what)
        if skipped:
            raise CheckpointError(
                f"no complete checkpoint in {self.folder}: " + "; ".join(skipped),
                hint="use another copy of one of them, or start a new run with --weights "
                f"{quoted(self.folder.parent / 'weights' / 'last.safetensors')}",
            )
        raise CheckpointError(
            f"{self.folder} has no checkpoint", hint="the run ended before its first one; start a new run"
        )


def set_aside(run: Path) -> list[Path]:
    """Rename the folders with states and weights of an earlier run in ``run``, so that a new run does not change them.

    ``checkpoints`` becomes ``checkpoints-before-1`` and ``weights`` becomes ``weights-before-1``; the number is the
    first that is unused for both.

    Returns:
        The new names of the folders that were not empty.
    Raises:
        StorageError: a folder cannot be renamed. CheckpointError: ``checkpoints`` or ``weights`` is a link.
    """
    with writing(run):
        folders = [run / name for name in KEPT]
        for folder in folders:
            CheckpointStore(folder)._refuse_link()
        used = [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]
        number = next(n for n in itertools.count(1) if not any(_before(one, n).exists() for one in folders))
        for folder in used:
            folder.rename(_before(folder, number))
            folder.mkdir()
    return [_before(folder, number) for folder in used]


def set_aside_later(run: Path, step: int) -> Path | None:
    """Move the states of a run after ``step`` into a folder ``checkpoints-before-1``, or the first number that is unused.

    A run that goes on from an older state writes other states of these steps. Else a later resume would take the newest
    by its number, which the user has left.

    Returns:
        The folder; None if there is no later state.
    Raises:
        StorageError: a file cannot be renamed. CheckpointError: ``checkpoints`` is a link.
    """
    folder = run / KEPT[0]
    later = [entry.path for entry in CheckpointStore(folder).entries() if entry.step > step]
    if not later:
        return None
    with writing(run):
        aside = next(_before(folder, n) for n in itertools.count(1) if not _before(folder, n).exists())
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
    return aside


def _before(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}-before-{number}")


def load_snapshot(path: Path) -> Snapshot:
    """Read and verify one file. Raise CheckpointError if it is incomplete, or is not a full state."""
    return decode_snapshot(read_tensors(path), str(path))


def decode_snapshot(content: tuple[dict[str, Tensor], dict[str, Any]], origin: str) -> Snapshot:
    """Return the state from the result of ``read_tensors``.

    Raises:
        CheckpointError: it is not a full state, or (NonFiniteError) has NaN or infinity.
    """
    tensors, header = content
    if "state" not in header or "step" not in header:
        raise CheckpointError(
            f"{origin} has weights, not a training state",
            hint="--weights starts from it; --resume needs a file of checkpoints/",
        )
    step, values = header["step"], header["state"]
    if type(step) is not int or not 0 <= step < 2**53 or not isinstance(values, dict):
        raise CheckpointError(
            f"{origin} is not a complete training state: its step number or its values are missing"
        )
    if bad := non_finite(tensors):  # an earlier version wrote it
        raise NonFiniteError(f"{origin} has NaN or infinity in {screen_line(bad[0])}")
    return Snapshot(step, tensors, values)
