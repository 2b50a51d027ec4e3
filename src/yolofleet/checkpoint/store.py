"""Full training states on disk.

A restart tries, in this order:
  1. the newest ``checkpoints/step-*.safetensors`` whose digest is right;
  2. the next older one, saying which was passed over and why; and so on;
  3. if none is whole: an error that names them all. Nothing is deleted.

Files are written by rank 0 in a background thread from a copy of the state, so training does not wait.

A new run in a folder that was used before (``--exist-ok``) first moves the older states and weights aside; pruning
deletes the states of its own run only, in the order in which they were written.
"""

from __future__ import annotations

import itertools
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from yolofleet.checkpoint.format import read_tensors, write_tensors
from yolofleet.errors import CheckpointError
from yolofleet.files.atomic import storage_error

KEPT = ("checkpoints", "weights")  # folders of a run that a later run in the same place must not touch
NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """A full state at a step border: tensors by name, and JSON-able values."""

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
    """The ``checkpoints`` folder of a run; keeps the ``keep`` states that were written last."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._written: list[Path] | None = (
            None  # in the order in which they were written; None = not yet listed
        )
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def entries(self) -> list[StoredCheckpoint]:
        """Return the regular files by step, newest first (not verified). Links are not followed.

        Raises:
            CheckpointError: the folder is a link, or cannot be read.
        """
        self._refuse_link()
        found = []
        try:
            for path in self.folder.iterdir() if self.folder.exists() else ():
                match = NAME.fullmatch(path.name)
                status = path.lstat() if match else None
                if match and status and stat.S_ISREG(status.st_mode):
                    found.append(StoredCheckpoint(path, int(match[1]), status.st_size))
        except OSError as problem:
            raise CheckpointError(f"cannot read {self.folder}: {problem.strerror or problem}") from None
        return sorted(found, key=lambda e: -e.step)

    def _refuse_link(self) -> None:
        """Pruning must not delete states of another folder."""
        if self.folder.is_symlink():
            raise CheckpointError(
                f"{self.folder} is a symbolic link",
                hint="put the states themselves there; --project may name a folder on another disk",
            )

    def save(self, snapshot: Snapshot) -> None:
        """Write in the background; ``snapshot``'s tensors must not change any more.

        Raises:
            StorageError: an earlier write failed.
        """
        self.flush()
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint-writer")
        self._writer.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            if self._written is None:  # a resumed run goes on with the states that it left
                self._written = [entry.path for entry in self.entries()[::-1]]
            self._refuse_link()
            path = self.folder / f"step-{snapshot.step:08d}.safetensors"
            write_tensors(path, snapshot.tensors, {"state": snapshot.values, "step": snapshot.step})
            self._written = [*(old for old in self._written if old != path), path]
            while len(self._written) > max(self.keep, 1):
                self._written.pop(0).unlink(missing_ok=True)
        except OSError as problem:
            self._failure = storage_error(problem, self.folder)
        except Exception as problem:  # a thread's own end would be silent
            self._failure = problem

    def flush(self) -> None:
        """Wait for the write under way.

        Raises:
            StorageError: it failed.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish_writing(self) -> None:
        """Wait for the write under way, whatever becomes of it: for a run that has failed otherwise."""
        if self._writer is not None:
            self._writer.join()

    def newest(self) -> tuple[Path, list[str]]:
        """The newest whole state's file, and a note per file that was passed over.

        Raises:
            CheckpointError: there is none.
        """
        passed_over: list[str] = []
        for entry in self.entries():
            try:
                load_snapshot(entry.path)
                return entry.path, passed_over
            except CheckpointError as problem:
                passed_over.append(problem.what)
        if passed_over:
            raise CheckpointError(
                f"no whole checkpoint in {self.folder}: " + "; ".join(passed_over),
                hint=f"another copy of one of them, or a new run with --weights {self.folder.parent / 'weights' / 'last.safetensors'}",
            )
        raise CheckpointError(
            f"{self.folder} has no checkpoint", hint="the run ended before its first one; start it anew"
        )


def set_aside(run: Path) -> list[Path]:
    """Move states and weights of an earlier run in the folder ``run`` out of the way of a new one.

    ``checkpoints`` becomes ``checkpoints-before-1`` and ``weights`` becomes ``weights-before-1``; the number is the
    first that is free for both.

    Returns:
        The new names of the folders that held something.
    Raises:
        StorageError: the disk refused. CheckpointError: ``checkpoints`` or ``weights`` is a link.
    """
    try:
        used = [folder for folder in (run / name for name in KEPT) if _holds_something(folder)]
        number = next(
            n for n in itertools.count(1) if not any(_before(run / name, n).exists() for name in KEPT)
        )
        for folder in used:
            folder.rename(_before(folder, number))
            folder.mkdir()
    except OSError as problem:
        raise storage_error(problem, run) from None
    return [_before(folder, number) for folder in used]


def _holds_something(folder: Path) -> bool:
    CheckpointStore(folder)._refuse_link()
    return folder.is_dir() and any(folder.iterdir())


def _before(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}-before-{number}")


def load_snapshot(path: Path) -> Snapshot:
    """Read and verify one file.

    Raises:
        CheckpointError: not whole, or not a full state.
    """
    return decode_snapshot(read_tensors(path), str(path))


def decode_snapshot(content: tuple[dict[str, Tensor], dict[str, Any]], origin: str) -> Snapshot:
    """Return the state that ``read_tensors`` found.

    Raises:
        CheckpointError: it is not a full state.
    """
    tensors, header = content
    if "state" not in header or "step" not in header:
        raise CheckpointError(
            f"{origin} holds weights, not a training state",
            hint="--weights starts from it; --resume needs a file of checkpoints/",
        )
    step, values = header["step"], header["state"]
    if type(step) is not int or not 0 <= step < 2**53 or not isinstance(values, dict):
        raise CheckpointError(
            f"{origin} is not a whole training state: its step number or its values are missing"
        )
    return Snapshot(step, tensors, values)
