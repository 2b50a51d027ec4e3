"""Load an exported file with its runtime, and run it.

Opening a file of other people whose runtime can be made to execute what it holds needs the user's word, ``--trust``. The files
that this machine has exported need none: the cache folder, where no other user can write, keeps their digests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.formats import Format
from yolofleet.storage.atomic import write_bytes
from yolofleet.storage.caches import cache_folder
from yolofleet.storage.foreign import digest_of, open_downloaded, reading
from yolofleet.support.errors import CheckpointError, ConfigError, StorageError, YolofleetError

MAX_BYTES = 4 << 30  # of each part of an exported file; yolov5x needs 0.35 GB


@dataclass(frozen=True)
class Opened:
    """An exported file that its runtime has loaded.

    Attributes:
        place: name and version of the runtime, and its device, as text.
        run: returns the outputs for images float32 [B, 3, H, W], or the only one; only one thread may call it at a time.
    """

    metadata: ExportMetadata
    place: str
    run: Callable[[np.ndarray], np.ndarray | list[np.ndarray]]


def open_format(format: Format, path: Path, device: str | None, threads: int) -> Opened:
    """Load ``path`` with the runtime of ``format``, in this process.

    Args:
        device: such as ``cpu`` or ``cuda:0``; None: the fastest that the runtime supports here.
    Raises:
        CheckpointError: the file is damaged or incomplete, or another program wrote it, or it fits another GPU or version.
        ConfigError: the runtime does not support ``device``, or this system.
    """
    try:
        with reading(path, CheckpointError, "check the path"):
            opened = format.module.open_file(path, device, threads)
    except YolofleetError:
        raise
    except Exception as problem:  # each runtime has its own exceptions
        raise CheckpointError(
            f"cannot load {path} as {format.name}: {first_line(problem)}", hint="use another copy"
        ) from None
    assert isinstance(opened, Opened)
    return opened


def run_once(path: Path, opened: Opened, images: np.ndarray) -> list[np.ndarray]:
    """Return the outputs for ``images`` as float32. Raise CheckpointError if the runtime fails."""
    try:
        found = opened.run(images)
        return [np.asarray(one, np.float32) for one in (found if isinstance(found, list) else [found])]
    except YolofleetError:
        raise
    except Exception as problem:  # each runtime has its own exceptions
        raise CheckpointError(
            f"{path} cannot be run: {first_line(problem)}", source=opened.place, hint="export it again"
        ) from None


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's text, or its class name; at most 200 characters."""
    lines = str(problem).strip().splitlines()
    return " ".join((lines or [type(problem).__name__])[0].split())[:200]


def cpu_only(device: str | None, what: str) -> None:
    """Raise ConfigError if ``device`` is not None and not a CPU; ``what`` names the runtime."""
    if device is not None and device.partition(":")[0] != "cpu":
        raise ConfigError(f"{what} runs on the CPU only, not on {device}", hint="--device cpu")


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
