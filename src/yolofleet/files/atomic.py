"""Write a file whole or not at all: temporary name, fsync, check, rename."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from yolofleet.errors import StorageError
from yolofleet.text import echo

_HINTS = {
    errno.ENOSPC: "free some space, or choose another --project folder; nothing half-written was left",
    getattr(
        errno, "EDQUOT", -1
    ): "your quota is used up: free some space, or choose another --project folder",
    errno.EROFS: "the file system is read-only: choose another --project folder",
    errno.EACCES: "no permission to write there, or another program has it open: choose another --project folder",
    errno.EPERM: "no permission to write there: choose another --project folder",
}


def storage_error(problem: OSError, path: Path) -> StorageError:
    """Return the disk's refusal to write ``path`` in words, with what to do about it."""
    hint = _HINTS.get(problem.errno or 0, "check the disk, or choose another --project folder")
    return StorageError(f"cannot write {path}: {problem.strerror or problem}", hint=hint)


def make_folder(path: Path) -> Path:
    """Make the folder ``path`` where it is missing, and return it.

    Raises:
        StorageError: the disk refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise storage_error(problem, path) from None
    return path


def write_atomically(
    path: Path,
    write: Callable[[Path], None],
    check: Callable[[Path], None] | None = None,
    *,
    into_special: bool = False,
) -> None:
    """Run ``write`` on a temporary name beside ``path``, flush it, ``check`` it, and rename it to ``path``.

    The new file takes the place of a link, whatever it points to, or of a named pipe: in the folder of a stranger one
    would block the run or change another file. A device is refused. The file gets the mode that the user's umask gives
    to new files.

    Args:
        write: gets the name of an empty file that exists.
        check: gets the same name after ``write``; raises if the file does not hold what it should.
        into_special: a person named ``path`` on the command line: a device, a named pipe or a stream such as
            ``/dev/stdout`` stays, and ``write`` gets ``path`` itself.
    Raises:
        StorageError: the disk refused; ``path`` is as it was and nothing temporary is left.
    """
    try:
        if into_special and _is_special(path):
            write(path)
            return
        with _replacement(path) as temporary:
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            temporary.chmod(mode)  # safetensors writes a file of its own, which only its owner can read
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if check is not None:
                check(temporary)
        sync_folder(path.parent)
    except OSError as problem:
        raise storage_error(problem, path) from None


def _is_special(path: Path) -> bool:
    """Whether ``path`` exists and is no regular file, or is a link of the system to a stream of this process.

    Such a stream may be a regular file (``--json /dev/stdout > FILE``), and to replace the link would harm every program.
    """
    try:
        streams = ("/dev/", "/proc/")
        return not stat.S_ISREG(path.stat().st_mode) or (
            path.is_symlink() and str(path.absolute()).startswith(streams)
        )
    except FileNotFoundError:
        return False


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Make a new folder beside ``path`` for the block, then rename it to ``path``; remove it if the block raises.

    Args:
        path: must not exist, or be an empty folder.
    Raises:
        OSError: the disk refused, or ``path`` holds something; nothing temporary is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:32]}-"))
    try:
        if os.name == "posix":
            temporary.chmod(0o777 & ~_umask())
        yield temporary
        with suppress(OSError):  # it is not empty: the rename raises
            path.rmdir()
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for the block, flush it, and rename it to ``path``; remove it if the block raises.

    Raises:
        OSError: the disk refused; ``path`` is as it was and nothing temporary is left.
    """
    with _replacement(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacement(path: Path) -> Iterator[Path]:
    """Make an empty file beside ``path`` for the block, then rename it to ``path``; remove it if the block raises.

    The file has the mode that the user's umask gives to new files.

    Raises:
        OSError: the disk refused, or ``path`` is a device.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "it is a device, not a regular file", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:32]}-", suffix=".tmp")
    temporary = Path(name)
    try:
        try:
            if os.name == "posix":
                os.fchmod(handle, 0o666 & ~_umask())
        finally:
            os.close(handle)
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the folder itself may be unusable
            temporary.unlink(missing_ok=True)


def open_append(path: Path) -> BinaryIO:
    """Open ``path`` to append to it, and make it where it is missing.

    Never follow a symbolic link or wait for a named pipe: the folder of a run may come from somebody else.

    Raises:
        OSError: the disk refused, or ``path`` is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
        flags |= getattr(os, name, 0)
    if path.is_symlink():  # a clearer message than ELOOP's, and for systems without O_NOFOLLOW
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "ab")


def _umask() -> int:
    """The umask of this process. Reading it elsewhere than in /proc means setting it, which other threads would see."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Write the entries of the folder ``path`` to disk, so that a rename survives a power cut. Nothing on Windows.

    Raises:
        OSError: the disk refused.
    """
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_bytes(path: Path, content: bytes, *, into_special: bool = False) -> None:
    """Replace ``path`` by ``content``; see :func:`write_atomically`.

    Raises:
        StorageError: the disk refused; ``path`` is as it was and nothing temporary is left.
    """

    def write(target: Path) -> None:
        with target.open("wb") as file:
            file.write(content)

    write_atomically(path, write, into_special=into_special)


def write_text(path: Path, text: str, *, into_special: bool = False) -> None:
    """:func:`write_bytes` of UTF-8; line ends stay \\n on every system."""
    write_bytes(path, text.encode(), into_special=into_special)


def write_json(path: Path, value: Any, *, into_special: bool = False) -> None:
    """Like :func:`write_text`, indented JSON; see :func:`jsonable`."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n"
    write_text(path, text, into_special=into_special)


def emit_json(value: Any, target: str, *, indent: int | None = None) -> None:
    """Write ``value`` as ``--json`` asks: to standard output for ``-``, nowhere for an empty text, else to that file,
    device or pipe.

    Args:
        indent: of the text on standard output; None = one line.
    Raises:
        StorageError: the disk refused.
    """
    if target == "-":
        echo(json.dumps(jsonable(value), indent=indent))
    elif target:
        write_json(Path(target), value, into_special=True)


def jsonable(value: Any) -> Any:
    """``value`` with NumPy arrays, tensors, tuples and paths as JSON knows them, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)
