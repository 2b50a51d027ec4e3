"""The interface between a run and a logger. ``child.py`` runs each logger in a process of its own.

A new logger is a subclass of :class:`Logger`, in a module of this folder with its name, and a row in ``config/loggers.py``.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.support.files.atomic import write_bytes, write_json
from yolofleet.support.files.foreign import read_foreign_text

MAX_ID_BYTES = 4 << 10
PROBE_BYTES = 64 << 10


@dataclass(frozen=True)
class LoggedRun:
    """The run as a logger knows it.

    Attributes:
        folder: for the files of this logger, inside the run folder. The logger creates it.
        name, project: of the run: the names of its folder and of the folder above.
        settings: by name, as numbers and text, without secrets.
        server: address of ``--log-server``; "" = write files, and send nothing.
        resumed: the run continues from a checkpoint.
    """

    folder: Path
    name: str
    project: str
    settings: Mapping[str, Any]
    server: str
    resumed: bool

    @property
    def _id_file(self) -> Path:
        return self.folder / "run-id.json"

    def known_id(self) -> str:
        """Return the identifier of this run in the store, if the run is resumed and has used the same server; else ""."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            if self.resumed:
                stored = json.loads(read_foreign_text(self._id_file, limit_bytes=MAX_ID_BYTES, follow=False))
                if stored["server"] == self.server and re.fullmatch(r"[\w-]{1,64}", stored["id"]):
                    return str(stored["id"])
        return ""

    def forget_id(self) -> None:
        """Remove the identifier of an earlier run in the same folder."""
        with suppress(OSError):
            self._id_file.unlink()

    def keep_id(self, identifier: str) -> None:
        """Store the identifier for a resumed run."""
        write_json(self._id_file, {"server": self.server, "id": identifier})

    def check_disk(self) -> None:
        """Write a file and delete it: packages that write in the background hide a full disk.

        Raises:
            StorageError: the disk is full, or has another fault.
        """
        probe = self.folder / ".probe"
        write_bytes(probe, bytes(PROBE_BYTES))
        probe.unlink()


def check_archives(archives: Collection[Path]) -> None:
    """Raise if a package has written no archive, or one that is not whole: packages hide failures of the disk.

    Raises:
        OSError: names the archive.
    """
    damaged = [archive.name for archive in archives if not zipfile.is_zipfile(archive)]
    if damaged or not archives:
        raise OSError(f"{', '.join(damaged) or 'its archive'} was not written; is the disk full?")


class Logger:
    """Base of loggers: a store outside of ``results.csv``. Every method may block or raise: the training does not wait.

    After an exception of ``__init__`` or :meth:`row`, the same method gets the same row again, before the next one.
    So ``__init__`` must be able to run twice.

    Args:
        run: see :class:`LoggedRun`.
    """

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        run.folder.mkdir(parents=True, exist_ok=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Store a row of ``results.csv``; every value is finite.

        The row of an epoch comes again with more columns if its validation ends later, and after a resume or a
        rollback: it replaces the earlier row of this epoch.
        """
        raise NotImplementedError

    def picture(self, path: Path, epoch: int) -> None:
        """Store a picture of the last validation, a JPEG or PNG; its name is that of the file without suffix."""
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """Flush and close the store. Not called after a kill.

        Args:
            finished: False if the run was stopped or failed.
        """
