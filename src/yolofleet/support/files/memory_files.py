"""Files in memory (Linux) that outlive the processes that write them, and vanish with the process that made them."""

from __future__ import annotations

import os
from pathlib import Path

from yolofleet.support.files.atomic import whole_file
from yolofleet.support.files.lock import exclusive
from yolofleet.support.files.memory_slots import NUMBER, PATHS, number_in

SLOTS = 2  # for the newest state, and the one that is being written
PIECE_BYTES = 1 << 20


class MemoryFiles:
    """The files of a run's workers on one host: the number of steps done, and slots for states.

    ``runs/checkpoint/restart_store.py`` writes and reads them in the workers.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self) -> None:
        self._files = [os.memfd_create(f"yolofleet-{number}") for number in range(1 + SLOTS)]

    @property
    def environment(self) -> dict[str, str]:
        """The variable for the workers."""
        return {PATHS: ":".join(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)}

    def steps_done(self) -> int:
        """Return the number of steps that the workers have done; -1 if they have done none."""
        return number_in(self._files[0])

    def save_newest(self, checkpoints: Path) -> None:
        """Write the newest state into a folder of checkpoints, unless the folder has it or a newer one.

        Raises:
            OSError, StorageError: the disk refuses.
        """
        slot = max(self._files[1:], key=number_in)
        path = checkpoints / f"step-{number_in(slot):08d}.safetensors"
        if number_in(slot) < 0 or any(
            other.name >= path.name for other in checkpoints.glob("step-*.safetensors")
        ):
            return
        # A run that starts here removes temporary files: with the lock of the folder, it refuses to start meanwhile.
        with exclusive(checkpoints.parent / ".lock"), whole_file(path) as file:
            end = NUMBER.size
            while piece := os.pread(slot, PIECE_BYTES, end):
                file.write(piece)
                end += len(piece)

    def close(self) -> None:
        """Free the memory."""
        for file in self._files:
            os.close(file)
