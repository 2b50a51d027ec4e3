"""What other modules ask about the files of the mirrors of stores. The path of a file tells whether it belongs to one.

A mirror (``mirror.py``) has all files of an address, but a file has no content until something needs it. Its mode says so:
``ABSENT``. Opening such a file downloads its content (:func:`with_content`, which ``foreign.py`` calls). :func:`download`
does so for many files at a time. For the files of a disk, the functions here cost little and do not import the mirror.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from yolofleet.storage.caches import ABSENT, is_mirrored

if TYPE_CHECKING:
    from yolofleet.storage.mirror import Mirror
    from yolofleet.storage.shards import Stored

TOUCHED_EVERY_S = 60.0  # the time of the last reading is as exact as this


def mirror_of(path: str) -> Mirror | None:
    """Return the mirror in which an absolute path without links lies; None: in none."""
    if not is_mirrored(path):
        return None
    from yolofleet.storage.mirror import Mirror

    return Mirror.of(path)


def with_content(path: str, handle: int, found: os.stat_result) -> tuple[int, os.stat_result]:
    """Return an open file after its content is downloaded, if it is an absent one of a mirror; else ``handle``.

    Raises:
        StorageError: the content cannot be read or stored. ``handle`` stays open.
        OSError: the file is gone.
    """
    if stat.S_IMODE(found.st_mode) != ABSENT and time.time() - found.st_atime < TOUCHED_EVERY_S:
        return handle, found  # the usual case, without a look at the path
    path = os.path.realpath(path)
    mirror = mirror_of(path)
    return mirror.opened(path, handle, found) if mirror else (handle, found)


def download(paths: Sequence[str]) -> int:
    """Download the absent contents of some files, many at a time; return how many were absent.

    Args:
        paths: absolute; all of one mirror, or none.
    Raises:
        StorageError: the store cannot be read, or the disk cannot be written.
    """
    mirror = mirror_of(paths[0]) if paths else None
    return mirror.download(paths) if mirror else 0


def listed_by_store(paths: Sequence[str]) -> dict[str, Stored] | None:
    """Return what the store's list says of those of these files that it has, by path; None for files of a disk.

    Args:
        paths: absolute; all of one mirror, or none.
    Raises:
        StorageError: the table of the mirror is damaged.
    """
    mirror = mirror_of(paths[0]) if paths else None
    return mirror.listed(paths) if mirror else None


def address_of(path: str | os.PathLike[str]) -> str:
    """Return the address in the store of a file or folder of a mirror; "" for other paths."""
    whole = os.path.realpath(path)
    mirror = mirror_of(whole)
    return mirror.address(whole) if mirror else ""
