"""Full training states on disk.

A restart tries, in this order:
  1. the newest ``checkpoints/step-*.safetensors`` whose digest is right;
  2. the next older one, saying which was passed over and why; and so on;
  3. if none is whole: an error that names them all. Nothing is deleted.

Files are written by rank 0 in a background thread from a copy of the state, so training does not wait.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from yolofleet.checkpoint.format import read_tensors, write_tensors
from yolofleet.errors import CheckpointError
from yolofleet.files.atomic import storage_error

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
    """The ``checkpoints`` folder of a run; keeps the last ``keep`` states."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def entries(self) -> list[StoredCheckpoint]:
        """Files by step, newest first (not verified)."""
        found = []
        for path in self.folder.glob("step-*.safetensors"):
            if match := NAME.fullmatch(path.name):
                found.append(StoredCheckpoint(path, int(match[1]), path.stat().st_size))
        return sorted(found, key=lambda e: -e.step)

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
            path = self.folder / f"step-{snapshot.step:08d}.safetensors"
            write_tensors(path, snapshot.tensors, {"state": snapshot.values, "step": snapshot.step})
            for old in self.entries()[self.keep :]:
                old.path.unlink(missing_ok=True)
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

    def settle(self) -> None:
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


def load_snapshot(path: Path) -> Snapshot:
    """Read and verify one file.

    Raises:
        CheckpointError: not whole, or not a full state.
    """
    return decode_snapshot(read_tensors(path), str(path))


def decode_snapshot(content: tuple[dict[str, Tensor], dict[str, Any]], origin: str) -> Snapshot:
    tensors, header = content
    if "state" not in header or "step" not in header:
        raise CheckpointError(
            f"{origin} holds weights, not a training state",
            hint="--weights starts from it; --resume needs a file of checkpoints/",
        )
    return Snapshot(int(header["step"]), tensors, header["state"])
