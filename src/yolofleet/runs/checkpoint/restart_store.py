"""The newest training state in memory that outlives a worker, so that a restarted worker goes on from it.

The host agent, or the launcher on one machine, holds the files (``fleet/hosts/agent_process.py``): the number of steps done, and two
slots. A state is written into the slot with the older one. A slot has the number of the state's step, or -1 while it
is written, and then the bytes of a checkpoint (``format.py``), whose digest is checked when they are read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from yolofleet.families.weights.format import tensor_pieces
from yolofleet.runs.checkpoint.memory_slots import NUMBER, PATHS, number_in
from yolofleet.runs.checkpoint.store import Snapshot

KEEP_S = 5.0  # at least, between states
KEEP_SHARE, WRITE_SHARE = 0.01, 0.2  # at most, of the time: training stands still, a thread writes


class RestartStore:
    """The files of this host, by their paths. Raises OSError."""

    def __init__(self, paths: list[str]) -> None:
        self._progress, *self._slots = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        self._writer: threading.Thread | None = None
        self.write_s = 0.0  # of the last state
        self._kept_at_s, self._stood_s = time.monotonic(), 0.0  # the last state; training stood still for it

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RestartStore | None:
        """Return the memory that the launcher gave this process; None if it gave none."""
        with suppress(OSError):
            return cls(environment[PATHS].split(":")) if PATHS in environment else None
        return None

    def done(self, step: int) -> None:
        """Record the number of steps done, for the launcher."""
        os.pwrite(self._progress, NUMBER.pack(step), 0)

    def step(self) -> int:
        """Return the step of the newest whole state, or -1 without any."""
        return max(map(number_in, self._slots))

    @property
    def is_busy(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def is_due(self) -> bool:
        """Return whether to keep a state after the next step: seldom enough that it costs little time."""
        interval_s = max(KEEP_S, self._stood_s / KEEP_SHARE, self.write_s / WRITE_SHARE)
        return not self.is_busy and time.monotonic() - self._kept_at_s > interval_s

    def keep(self, snapshot: Snapshot, began_s: float) -> None:
        """Save the state for which training stands still since ``began_s``, unless the last one is still being written."""
        if not self.is_busy:
            self.save(snapshot)
        self._kept_at_s = time.monotonic()
        self._stood_s = self._kept_at_s - began_s

    def save(self, snapshot: Snapshot) -> None:
        """Write ``snapshot`` in the background; its tensors must not change afterwards. Skip it if memory is short."""
        self.finish_writing()
        slot = min(self._slots, key=number_in)
        self._writer = threading.Thread(target=self._write, args=(slot, snapshot), name="memory-writer")
        self._writer.start()

    def finish_writing(self) -> None:
        """Wait for the state that is being written."""
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        """Finish writing, and close the files; the states stay."""
        self.finish_writing()
        for file in (self._progress, *self._slots):
            os.close(file)

    def _write(self, slot: int, snapshot: Snapshot) -> None:
        began_s = time.monotonic()
        values = {"state": snapshot.values, "step": snapshot.step}
        with suppress(OSError, MemoryError):
            os.pwrite(slot, NUMBER.pack(-1), 0)
            end = NUMBER.size
            for piece in tensor_pieces(snapshot.tensors, values):
                while len(piece):
                    written = os.pwrite(slot, piece, end)
                    piece, end = piece[written:], end + written
            os.ftruncate(slot, end)
            os.pwrite(slot, NUMBER.pack(snapshot.step), 0)
        self.write_s = time.monotonic() - began_s

    def newest(self) -> bytes:
        """Return the newest whole state as the bytes of a checkpoint, or b"" without any."""
        slot = max(self._slots, key=number_in)
        if number_in(slot) < 0:
            return b""
        size = os.fstat(slot).st_size - NUMBER.size
        content = bytearray(size)
        view, read = memoryview(content), 0
        while read < size and (count := os.preadv(slot, [view[read:]], NUMBER.size + read)):
            read += count
        return bytes(content)
