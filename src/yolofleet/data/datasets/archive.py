"""Unpack untrusted archives: zip, tar and tar.gz, recognised by content.

Only files and folders are unpacked, all below the given folder, and none replaces a different existing file. Names, sizes
and counts in the archive are untrusted. The archive is unpacked into a temporary folder first, so a bad or interrupted one
leaves no files.

This is our own code because ``shutil`` and the filters of ``tarfile`` limit neither the unpacked size nor the number of
files.
"""

from __future__ import annotations

import filecmp
import gzip
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from yolofleet.storage.fetch import SPARE_BYTES
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import DataError, StorageError
from yolofleet.support.text import size_text

MAX_RATIO = 30  # unpacked bytes for each byte of the archive; annotations in JSON have 6
MIN_BOUND_BYTES = 1 << 20  # small archives may have a larger ratio
MAX_MEMBERS = 3_000_000
MAX_NAME_CHARS = 1000
MAX_DEPTH = 32
LEFT_OUT = ("__MACOSX", ".DS_Store")
_MAX_READ_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_HINT = "download it again from its publisher"
_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{name}{i}" for name in ("COM", "LPT") for i in range(1, 10))}
_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
)


class _Unsafe(Exception):
    """The archive is damaged or unsafe; the text continues a sentence that starts with its name."""


def unpack(archive: Path, folder: Path, *, strip: str = "") -> int:
    """Unpack the files of ``archive`` below ``folder``; return their number.

    Args:
        strip: leading folders to remove from every name, such as ``coco128``; a member elsewhere is an error.
    Raises:
        DataError: the file is not an archive, is damaged, would write outside of the folder, replace files or fill the
            disk. ``folder`` is then unchanged, except for files moved before a conflict with an existing file.
        StorageError: the disk is full or failing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder, prefix=".unpacking-"))
    except OSError as problem:
        raise _refused_by_disk(problem, folder) from None
    try:
        count = _write_all(archive, beside, tuple(strip.split("/")) if strip else ())
        _move_into(beside, folder)
        return count
    except _Unsafe as problem:
        raise DataError(f"{archive} {problem}", hint=_HINT) from None
    except _DAMAGE as problem:
        what = str(problem).splitlines()[0][:100] if str(problem) else type(problem).__name__
        raise DataError(f"{archive} is damaged ({what})", hint=_HINT) from None
    except OSError as problem:
        raise _refused_by_disk(problem, folder) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_all(archive: Path, folder: Path, strip: tuple[str, ...]) -> int:
    bound = max(MIN_BOUND_BYTES, archive.stat().st_size * MAX_RATIO)
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    count, written = 0, 0
    for number, (name, size, opened) in enumerate(_members(archive, bound, free)):
        if number >= MAX_MEMBERS:
            raise _Unsafe(f"has more than {MAX_MEMBERS:,} members")
        parts = _checked_parts(name, strip)
        if size > bound - written:
            raise _Unsafe(f"unpacks to more than {MAX_RATIO} times its size")
        _check_space(archive, size, free - written)
        if not parts:
            continue
        target = folder.joinpath(*parts)
        try:
            if opened is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with opened() as source, target.open("xb") as file:
                written += _copy(source, file, size)
        except (FileExistsError, NotADirectoryError):
            raise _Unsafe(f"has {name[:200]!r} twice") from None
        count += 1
    return count


def _copy(source: IO[bytes], file: IO[bytes], size: int) -> int:
    """Copy a member; return the bytes written. Raise _Unsafe if its size is not ``size``."""
    done = 0
    while chunk := source.read(min(_CHUNK_BYTES, size - done + 1)):
        done += len(chunk)
        if done > size:
            break
        file.write(chunk)
    if done != size:
        raise _Unsafe("is damaged: the size of a member differs from its header")
    return done


def _checked_parts(name: str, strip: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of a member below the folder; () for a member to skip."""
    shown = repr(name[:200])
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    bad = (
        name.startswith("/")
        or ".." in parts
        or len(name) > MAX_NAME_CHARS
        or len(parts) > MAX_DEPTH
        or any(c in name for c in '\\:*?"<>|')
        or not all(c.isprintable() for c in name)
        # Windows drops dots and spaces at the end, and opens devices by these names
        or any(part != part.rstrip(". ") or part.split(".")[0].upper() in _DEVICES for part in parts)
    )
    if bad:
        raise _Unsafe(f"has a member with the unsafe name {shown}")
    if any(part in LEFT_OUT for part in parts):
        return ()
    if parts[: len(strip)] == strip:
        return parts[len(strip) :]
    if strip[: len(parts)] == parts:  # a leading folder itself
        return ()
    raise _Unsafe(f"has a member {shown} outside {'/'.join(strip)}")


Member = tuple[str, int, "Callable[[], IO[bytes]] | None"]  # name, bytes, how to read it; None for a folder


def _members(archive: Path, bound: int, free: int) -> Iterator[Member]:
    try:
        with open_foreign(archive) as file:
            start = file.read(265)
    except OSError as problem:
        raise _Unsafe(f"cannot be read: {problem.strerror or problem}") from None
    if start[:4] in (b"PK\3\4", b"PK\5\6"):
        return _zip_members(archive, free)
    if start[:2] == b"\x1f\x8b" or start[257:262] == b"ustar":
        return _tar_members(archive, start[:2] == b"\x1f\x8b", bound)
    raise _Unsafe("is neither a zip nor a tar archive")


def _zip_members(archive: Path, free: int) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        _check_space(archive, sum(info.file_size for info in file.infolist()), free)
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _Unsafe(f"has a link or device {info.filename[:200]!r}")
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Unsafe(f"is encrypted or has an unsupported compression ({info.filename[:200]!r})")
            if info.is_dir():
                yield info.filename, 0, None
            else:
                yield info.filename, info.file_size, partial(file.open, info)


def _tar_members(archive: Path, is_packed: bool, bound: int) -> Iterator[Member]:
    with (
        cast(IO[bytes], gzip.open(archive)) if is_packed else archive.open("rb") as raw,
        tarfile.open(fileobj=cast(IO[bytes], _Bounded(raw, bound)), mode="r:") as file,
    ):
        while (member := file.next()) is not None:
            file.members = []  # type: ignore[attr-defined]  # else tarfile keeps all of them in memory
            if member.isdir():
                yield member.name, 0, None
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                yield member.name, member.size, partial(cast(Any, file.extractfile), member)
            else:
                raise _Unsafe(f"has a link or device {member.name[:200]!r}")


class _Bounded:
    """A tar stream that limits the size of each read and of the whole stream."""

    def __init__(self, file: Any, bound: int) -> None:
        self.file, self.bound = file, bound

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:  # a header with a false length
            raise _Unsafe("has a header that is too long")
        return bytes(self.file.read(size))

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or position > self.bound + _MAX_READ_BYTES:
            raise _Unsafe(f"unpacks to more than {MAX_RATIO} times its size")
        return int(self.file.seek(position))

    def tell(self) -> int:
        return int(self.file.tell())


def _move_into(source: Path, target: Path) -> None:
    """Move all entries into ``target``; raise _Unsafe if a file exists with other content."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and place.is_dir():
            _move_into(entry, place)
        elif not os.path.lexists(place):
            entry.rename(place)
        elif not (entry.is_file() and place.is_file() and filecmp.cmp(entry, place, shallow=False)):
            raise _Unsafe(f"would overwrite {place}, which has other content")


def _check_space(archive: Path, need_bytes: int, free_bytes: int) -> None:
    if need_bytes > free_bytes:
        raise StorageError(
            f"{archive.name} unpacks to at least {size_text(need_bytes)}; {size_text(max(0, free_bytes))} are free",
            hint="free some space, or choose another folder",
        )


def _refused_by_disk(problem: OSError, folder: Path) -> StorageError:
    return StorageError(
        f"cannot read or write {problem.filename or folder}: {problem.strerror or problem}",
        hint="check the disk, or choose another folder",
    )
