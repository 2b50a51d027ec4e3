"""Read logs from files, folders or standard input, and classify them."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.logs import Reader, classify, of_several
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import size_text

LOG_SUFFIXES = (".log", ".out", ".err")  # ours and torchrun's; SLURM's
MOST_FILES = 1024  # of a folder; a run has one for each rank and host
MOST_LOG_BYTES = 1 << 30  # about half a minute; a sparse file can claim terabytes


def read_log(path: Path | str) -> list[Finding]:
    """Return what logs mean: of a file, of all logs of a folder, or of standard input (``-``).

    A folder may be a run's, or the folder ``logs`` in it. Of torchrun's --log-dir, the logs in the folders below are
    read.

    Returns:
        As :func:`classify`; of a folder, one finding of each kind, with the file in which it explains most.
    Raises:
        ConfigError: a log cannot be read.
    """
    if str(path) == "-":
        return classify(_pieces(sys.stdin))
    folder = Path(path)
    if not folder.is_dir():
        return _read(folder).findings()
    folder = folder / "logs" if (folder / "logs").is_dir() else folder
    try:
        names = _logs_in(folder, "*") or _logs_in(folder, "**/*")
    except OSError as why:
        raise ConfigError(f"cannot read {folder}: {why.strerror or why}", source="--log") from None
    if not names:
        kinds = ", ".join(f"*{suffix}" for suffix in LOG_SUFFIXES)
        raise ConfigError(
            f"none of {kinds} in {folder}", source="--log", hint="a log, or the folder logs of a run"
        )
    return of_several({name: _read(folder / name) for name in names[:MOST_FILES]}, len(names))


def _logs_in(folder: Path, pattern: str) -> list[str]:
    """Return the logs' paths in the folder, rank-2 before rank-10."""
    found = (file for file in folder.glob(pattern) if file.suffix in LOG_SUFFIXES and file.is_file())
    return sorted((str(file.relative_to(folder)) for file in found), key=_natural)


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d{0,9})", name)]


def _read(path: Path) -> Reader:
    try:
        with open_foreign(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_LOG_BYTES:
                raise ConfigError(
                    f"{path} has more than the limit of {size_text(MOST_LOG_BYTES)}",
                    source="--log",
                    hint="give its last part: tail -c 500M LOG | yolofleet doctor --log -",
                )
            # PowerShell's ">" writes UTF-16
            encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
            file.seek(0)
            with io.TextIOWrapper(file, encoding=encoding, errors="replace") as text:
                return Reader().through(_pieces(text))
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"{path} cannot be read: {getattr(why, 'strerror', None) or why}",
            source="--log",
            hint="give the file of a log, or --log - for standard input",
        ) from why


def _pieces(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text file, in pieces if a line is very long."""
    while piece := file.readline(1 << 20):
        yield piece
