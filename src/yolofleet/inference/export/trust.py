"""Refuse the exported files of other people whose runtime can be made to execute what they hold.

Opening such a file needs the user's word, ``--trust``. The files that this machine has exported need none: the cache folder,
where no other user can write, keeps their digests.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from yolofleet.inference.export.formats import Format
from yolofleet.support.errors import CheckpointError, ConfigError, StorageError
from yolofleet.support.files.atomic import write_bytes
from yolofleet.support.files.caches import cache_folder
from yolofleet.support.files.foreign import digest_of, open_downloaded

MAX_BYTES = 4 << 30  # of each part of an exported file; yolov5x needs 0.35 GB


def check_trusted(format: Format, path: Path, *, trust: bool) -> None:
    """Raise unless ``path`` is complete, and data, or trusted by the user, or exported on this machine.

    Raises:
        CheckpointError: a part is missing, too large, or not a regular file.
        ConfigError: the file can execute code, and nobody vouches for it; or it is data, so that ``trust`` has no meaning.
    """
    try:
        for part in format.module.parts(path):
            os.close(open_downloaded(part, MAX_BYTES)[0])
        if not format.danger:
            check_meant(path, trust)
            return
        if trust or _record(format, path).exists():
            return
    except OSError as problem:
        raise CheckpointError(
            f"cannot read {problem.filename or path}: {problem.strerror or problem}",
            hint="copy all parts of the file together, or export it again",
        ) from None
    raise ConfigError(
        f"{path} may execute anything with your rights: {format.danger}",
        hint="--trust (in Python: trust=True) if you trust its author; or export the weights on this machine, or as ONNX",
    )


def check_meant(path: Path | str, trust: bool) -> None:
    """Raise ConfigError if the user trusts a file that is read as data."""
    if trust:
        raise ConfigError(f"--trust: {path} is read as data, which needs no trust", hint="leave it out")


def remember_export(format: Format, path: Path) -> None:
    """Store the digest of a file that this process has written, so that it needs no ``--trust`` on this machine."""
    if format.danger:
        with suppress(StorageError):  # without it, the user types --trust
            write_bytes(_record(format, path), b"")


def _record(format: Format, path: Path) -> Path:
    digests = "".join(map(digest_of, format.module.parts(path)))
    return cache_folder("exported") / hashlib.sha256(f"{format.name} {digests}".encode()).hexdigest()
