"""Open untrusted files: only regular files of bounded size.

A named pipe would block for ever, a device such as /dev/zero would fill the memory, and a link could print a private file
in a message. A file of the mirror of a store is downloaded when it is first opened. Errors are OSErrors with a text in
``strerror``, so code that handles a missing file handles them too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from yolofleet.storage.caches import ABSENT, PRESENT
from yolofleet.storage.mirrored import with_content
from yolofleet.support.errors import ConfigError, YolofleetError
from yolofleet.support.text import size_text

_FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOCTTY"):
    _FLAGS |= getattr(os, _name, 0)
_MOST_AT_ONCE = 0x7FFFF000  # bytes that one read of Linux returns; joining pieces needs twice the memory
_PIECE_BYTES = 64 << 20  # of a file without a known size: os.read allocates the whole requested size
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "it is a folder"),
    (stat.S_ISFIFO, errno.EINVAL, "it is a named pipe, not a regular file"),
    (stat.S_ISCHR, errno.EINVAL, "it is a device, not a regular file"),
    (stat.S_ISBLK, errno.EINVAL, "it is a device, not a regular file"),
    (stat.S_ISSOCK, errno.EINVAL, "it is a socket, not a regular file"),
)


def open_foreign(path: str | os.PathLike[str], *, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file of any size for reading; never block on a named pipe.

    Args:
        follow: False: raise if the last part of ``path`` is a symbolic link.
        buffering: 0: unbuffered, as in :func:`open`.
    Raises:
        OSError: missing, unreadable, or not a regular file; or ``path`` holds a NUL character.
    """
    handle, _ = open_downloaded(path, follow=follow)
    try:
        return os.fdopen(handle, "rb", buffering=buffering)
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def reading(path: Path, error: type[YolofleetError], hint: str | None = None) -> Iterator[None]:
    """Raise ``error`` for an OSError in the block, which reads ``path``."""
    try:
        yield
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}", hint=hint) from None


def read_foreign(path: str | os.PathLike[str], *, limit_bytes: int, follow: bool = True) -> bytes:
    """Return the content of a regular file; see :func:`open_foreign`. Raise OSError above ``limit_bytes``.

    The limit also holds for a file that gives more than its stated size (some of /proc, a growing file). This is faster
    than ``open`` and ``read``, which matters for data sets of millions of small files.
    """
    handle, size_bytes = open_downloaded(path, limit_bytes, follow)
    try:
        content = os.read(handle, min(size_bytes + 1, _MOST_AT_ONCE))
        if len(content) != size_bytes:  # it grows, shrinks, or is larger than one read
            content = _rest(handle, content, limit_bytes, path)
    finally:
        os.close(handle)
    return content


def read_foreign_text(
    path: str | os.PathLike[str],
    *,
    limit_bytes: int,
    follow: bool = True,
    encoding: str = "utf-8-sig",
) -> str:
    """Return the text of a regular file; see :func:`read_foreign`. Raise UnicodeDecodeError if it is not of ``encoding``."""
    return read_foreign(path, limit_bytes=limit_bytes, follow=follow).decode(encoding)


def open_downloaded(
    path: str | os.PathLike[str], limit_bytes: int | None = None, follow: bool = True
) -> tuple[int, int]:
    """Download the content of a file of a store that is not on this machine (``mirrored.py``), and open the file.

    Returns:
        a file descriptor, which the caller must close, and the size of the file; see :func:`open_foreign`.
    Raises:
        StorageError: the content cannot be downloaded.
    """
    flags = _FLAGS
    if not follow:
        if os.path.islink(path):  # noqa: PTH114  (systems without O_NOFOLLOW)
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags)
    except ValueError as problem:  # a NUL character
        raise OSError(errno.EINVAL, str(problem), os.fspath(path)) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            code, what = next(
                ((code, what) for is_kind, code, what in _KINDS if is_kind(found.st_mode)),
                (errno.EINVAL, "it is not a regular file"),
            )
            raise OSError(code, what, os.fspath(path))
        if limit_bytes is not None and found.st_size > limit_bytes:
            raise OSError(
                errno.EFBIG,
                f"it has {size_text(found.st_size)}, the limit is {size_text(limit_bytes)}",
                os.fspath(path),
            )
        if stat.S_IMODE(found.st_mode) in (PRESENT, ABSENT):
            handle, found = with_content(os.fspath(path), handle, found)
    except BaseException:
        os.close(handle)
        raise
    return handle, found.st_size


def copy_foreign(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy the content and the time of a regular file. Raises OSError."""
    with open_foreign(source) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)
        modified_ns = os.fstat(file.fileno()).st_mtime_ns
    os.utime(target, ns=(modified_ns, modified_ns))


def digest_of(path: Path, kind: str = "sha256") -> str:
    """Return the hexadecimal digest of a regular file; read 1 MiB at a time.

    Raises:
        OSError: it cannot be read, or is not a regular file: a device may never end.
    """
    found = hashlib.new(kind, usedforsecurity=False)
    with open_foreign(path) as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def check_links(folder: Path) -> None:
    """Raise ConfigError if a symbolic link in ``folder`` leads out of it, because a run would write or delete there.

    Every command that writes into an existing folder calls this first. Links inside the folder are harmless: W&B makes
    some. ``folder`` itself may be a link, because the user names it.
    """
    try:
        link = link_out_of(folder)
    except OSError as problem:
        raise ConfigError(f"{folder} cannot be read: {problem.strerror}") from None
    if link:
        raise links_refused(link, str(folder))


def link_out_of(folder: Path) -> str:
    """Return which symbolic link in ``folder``, at any depth, leads out of it, and to where; "" if none does.

    Raises:
        OSError: ``folder`` or a folder in it cannot be read.
    """
    root = os.path.realpath(folder)
    waiting = [os.fspath(folder)]
    while waiting:
        entries: list[os.DirEntry[str]] = []
        with suppress(FileNotFoundError), os.scandir(waiting.pop()) as found:  # another process may remove it
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if not Path(target).is_relative_to(root):
                    return f"{entry.path} is a symbolic link to {target}"
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
    return ""


def links_refused(link: str, folder: str) -> ConfigError:
    """Return the error for a folder, here or on a host, with a link that :func:`link_out_of` has found."""
    return ConfigError(
        f"{link}; a run in this folder would write there",
        source=f"the folder {folder}",
        hint="remove the link; if you made it yourself, a training accepts it with --allow linked-folders",
    )


def read_at(handle: int, offset: int, count: int) -> bytes:
    """Return ``count`` bytes of an open file, fewer at its end."""
    if hasattr(os, "pread"):
        return os.pread(handle, count, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, count)


def _rest(handle: int, content: bytes, limit_bytes: int, path: str | os.PathLike[str]) -> bytes:
    """Return ``content`` and the rest of the file, up to the limit."""
    pieces, length = [content], len(content)
    while length <= limit_bytes and pieces[-1]:
        pieces.append(os.read(handle, min(limit_bytes + 1 - length, _PIECE_BYTES)))
        length += len(pieces[-1])
    if length > limit_bytes:
        raise OSError(
            errno.EFBIG, f"it gives more than the limit of {size_text(limit_bytes)}", os.fspath(path)
        )
    return b"".join(pieces)
