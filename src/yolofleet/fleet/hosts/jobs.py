"""The list of jobs on this host: one small file for each, which its host agent writes. No daemon and no lock.

The files are on the machine's own disk, in a folder of the user, because hosts may share home folders. Standard library
alone.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from yolofleet.storage.atomic import write_text, writing
from yolofleet.storage.caches import own_temporary_folder
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.shards import is_plain
from yolofleet.support.errors import StorageError
from yolofleet.support.system.proc import started_at
from yolofleet.support.text import shown

KEPT = 20  # records of ended jobs
MOST_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """A job on this host."""

    job: str  # its name, the same on every host of the fleet
    title: str  # a short description for a person
    host: str
    folder: str  # run folder on this host; "" for a command
    node: int
    ranks: tuple[int, int]  # the first rank on this host, and their number
    host_agent: tuple[int, str]  # (PID, start time) of the process that ends the job here on SIGTERM
    # began_s, ended_s: seconds since 1970; 0 = not yet
    began_s: float
    ended_s: float = 0.0
    code: int | None = None  # exit code of the agent, None while it runs

    @property
    def runs(self) -> bool:
        return not self.ended_s and started_at(self.host_agent[0]) == self.host_agent[1] != ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "runs": self.runs}


def folder() -> Path:
    """Return the folder of this user's jobs on this host. Make it if it is missing.

    Raises:
        StorageError: another user made it, or may open it; or it cannot be written.
    """
    found = own_temporary_folder() / socket.gethostname()
    with writing(found, "set TMPDIR"):
        found.mkdir(mode=0o700, exist_ok=True)
    return found


def file_of(job: str, kind: str) -> Path:
    """Return a file of a job: its record (``json``), its ``lease``, or the ``console`` of its launcher on this host.

    Raises:
        ValueError: it is not the name of a job. StorageError: see :func:`folder`.
    """
    name = f"{job}.{kind}"
    if "/" in name or name.startswith(".") or not is_plain(name):
        raise ValueError(f"{shown(job)} is not the name of a job")
    return folder() / name


def write(record: Record) -> None:
    """Write a record. If the disk refuses, the job runs, but ``fleet ps`` and ``stop`` do not find it."""
    with suppress(OSError, ValueError, StorageError):
        write_text(file_of(record.job, "json"), json.dumps(asdict(record)))


def keep() -> None:
    """Touch all files of this folder. Many systems delete temporary files that nothing has touched for ten days."""
    with suppress(OSError, StorageError):
        for path in folder().iterdir():
            with suppress(OSError):
                os.utime(path, follow_symlinks=False)


def records() -> list[Record]:
    """Return all records, the newest first. Remove those of jobs that ended long ago."""
    found = []
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            values = json.loads(read_foreign(path, limit_bytes=MOST_RECORD_BYTES, follow=False))
            values |= {"ranks": tuple(values["ranks"]), "host_agent": tuple(values["host_agent"])}
            found.append((path, Record(**values)))
    found.sort(key=lambda entry: -entry[1].began_s)
    ended = [path for path, record in found if not record.runs]
    for path in ended[KEPT:]:
        with suppress(OSError):
            path.unlink()
    forgotten = set(ended[KEPT:])
    return [record for path, record in found if path not in forgotten]
