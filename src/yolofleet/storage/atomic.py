"""Write files atomically (temporary name, fsync, check, rename), and lock files: one process at a time.

The locks are not the filelock library, for three reasons. It falls back to lock files that outlive a killed process. It keeps
or deletes the file depending on its version. Versions before 4 truncate the target of a symbolic link with the lock's name.
The library would save 40 lines and cost 22 ms of CPU time at each start.

A lock that another process has taken over is a fence: the process that had it writes nothing more in that folder. It may have
been paused at any instruction, so two things hold it back: each write looks at the lock right before its rename, and who
takes the lock over then removes the temporary files, without which a rename that comes too late fails.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from yolofleet.storage.caches import ANOTHER_CACHE, is_cached
from yolofleet.support.errors import ClusterError, StorageError
from yolofleet.support.text import echo

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:
    msvcrt = None  # type: ignore[assignment]

_HINTS = {
    errno.ENOSPC: "free some space, or choose {place}; no incomplete file remains",
    getattr(errno, "EDQUOT", -1): "your quota is used up: free some space, or choose {place}",
    errno.EROFS: "the file system is read-only: choose {place}",
    errno.EACCES: "no permission to write there, or another program has it open: choose {place}",
    errno.EPERM: "no permission to write there: choose {place}",
    errno.ELOOP: "a symbolic link is there: remove it",
    errno.EMFILE: "this process may open no more files: raise its limit, such as with ulimit -n 4096",
    errno.ENFILE: "all programs together have too many open files: end some of them",
}

_LEFTOVER = re.compile(r"\..+-[a-z0-9_]{8}\.tmp")  # of `_replacement`


def storage_error(problem: OSError, path: Path, hint: str = "") -> StorageError:
    """Return the error for a failed write of ``path``, with a hint: by default that for the cause."""
    if not hint:
        place = ANOTHER_CACHE if is_cached(path) else "another --project folder"
        hint = _HINTS.get(problem.errno or 0, "check the disk, or choose {place}").format(place=place)
    return StorageError(f"cannot write {path}: {problem.strerror or problem}", hint=hint)


def is_deleted(path: Path) -> bool:
    """Return whether nothing is at ``path``; False if the disk does not say."""
    try:
        path.lstat()
    except OSError as problem:
        return isinstance(problem, FileNotFoundError)
    return False


@contextmanager
def writing(path: Path, hint: str = "") -> Iterator[None]:
    """Raise :func:`storage_error` for an OSError in the block, which writes ``path``."""
    try:
        yield
    except OSError as problem:
        raise storage_error(problem, path, hint) from None


def make_folder(path: Path) -> Path:
    """Create the folder ``path`` if it is missing, and return it. Raise StorageError if that fails."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomically(
    path: Path,
    write: Callable[[Path], object],
    check: Callable[[Path], object] | None = None,
    *,
    into_special: bool = False,
    private: bool = False,
) -> None:
    """Run ``write`` on a temporary file beside ``path``, flush it, ``check`` it, and rename it to ``path``.

    The new file replaces a symbolic link or a named pipe, because in an untrusted folder they could change another file
    or block the run. A device is an error. The mode of the file follows the user's umask.

    Args:
        write: gets the name of an existing empty file.
        check: gets the same name after ``write``; raises if the content is wrong.
        into_special: the user named ``path`` on the command line. Then ``write`` gets ``path`` itself if it is a device,
            a named pipe or a stream such as ``/dev/stdout``.
        private: only the user may read the file, whatever the umask.
    Raises:
        StorageError: the file cannot be written; ``path`` is unchanged and no temporary file remains.
    """
    with writing(path):
        if into_special and _is_special(path):
            write(path)
            return
        with _replacement(path) as temporary:
            if private:
                temporary.chmod(0o600)
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if check is not None:
                try:
                    check(temporary)
                finally:
                    temporary.stat()  # somebody may have deleted it: that is the error then
        sync_folder(path.parent)


def _is_special(path: Path) -> bool:
    """Return whether ``path`` is not a regular file, or is a system link to a stream of this process.

    Such a stream may be a regular file (``--json /dev/stdout > FILE``), but replacing the link would harm every program.
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
    """Create a folder beside ``path`` for the block, then rename it to ``path``; remove it if the block raises.

    Args:
        path: must not exist, or must be an empty folder.
    Raises:
        OSError: the disk failed, or ``path`` is not empty; no temporary folder remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:32]}-"))
    try:
        if os.name == "posix":
            temporary.chmod(0o777 & ~_umask())
        yield temporary
        with suppress(OSError):  # if it is not empty, the rename raises
            path.rmdir()
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for the block, flush it, and rename it to ``path``; remove it if the block raises.

    Args:
        durable: False: do not wait for the disk, because the file is of no use after a power failure.
    Raises:
        OSError: the disk failed; ``path`` is unchanged and no temporary file remains.
    """
    with _replacement(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())


@contextmanager
def _replacement(path: Path) -> Iterator[Path]:
    """Create an empty file beside ``path`` for the block, then rename it to ``path``; remove it if the block raises.

    The mode of the file follows the user's umask.

    Raises:
        OSError: the disk failed, or ``path`` is a device.
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
        check_fence(path)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the folder itself may be unusable
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that killed processes have left in ``folder``; ignore errors.

    No process may write there now: the caller holds the lock of the run.
    """
    with suppress(OSError):
        for path in folder.glob(".*"):
            if _LEFTOVER.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


def open_append(path: Path) -> BinaryIO:
    """Open ``path`` for appending; create it if it is missing.

    Do not follow a symbolic link or wait for a named pipe, because the folder of a run may be untrusted.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
        flags |= getattr(os, name, 0)
    if path.is_symlink():  # a clearer message than ELOOP's; also works without O_NOFOLLOW
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "ab")


def _umask() -> int:
    """Return the umask of this process, from /proc if possible: ``os.umask`` changes it for a moment in all threads."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder, so that a rename survives a power failure; not on Windows. Raises OSError."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_bytes(path: Path, content: bytes, *, into_special: bool = False, private: bool = False) -> None:
    """Write ``content`` to ``path`` atomically. Arguments and errors are those of :func:`write_atomically`."""
    write_atomically(
        path, lambda target: target.write_bytes(content), into_special=into_special, private=private
    )


def write_text(path: Path, text: str, *, into_special: bool = False) -> None:
    """Write ``text`` as UTF-8, as :func:`write_bytes`; line ends stay \\n on every system."""
    # a file name that is not UTF-8 holds surrogates; they become \udcXX, which JSON reads back
    write_bytes(path, text.encode("utf-8", "backslashreplace"), into_special=into_special)


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write ``rows`` as comma-separated values, as :func:`write_text`."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def write_unsynced(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` as :func:`whole_file`, without waiting for the disk: a power failure may lose it."""
    with whole_file(path, durable=False) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, into_special: bool = False) -> None:
    """Write ``value`` as indented JSON, as :func:`write_text`; see :func:`jsonable`."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n"
    write_text(path, text, into_special=into_special)


def emit_json(value: Any, target: str, *, indent: int | None = None) -> None:
    """Write ``value`` to the target of ``--json``: ``-`` is standard output, "" is nothing, else a file, device or pipe.

    Args:
        indent: of the text on standard output; None: one line.
    Raises:
        StorageError: the file cannot be written.
    """
    if target == "-":
        echo(json.dumps(jsonable(value), indent=indent))
    elif target:
        write_json(Path(target), value, into_special=True)


def jsonable(value: Any) -> Any:
    """Convert NumPy arrays, tensors, tuples and paths in ``value`` to JSON types; NaN and infinity become null."""
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


MOST_RECORD_BYTES = 4096
STAYS = b"\n"  # ends a record whose file stays when its process ends: the process that had the lock before may wake then
_fences: dict[Path, bytes] = {}  # the records that this process has written, by the path of the lock file


def lock_record(path: Path) -> bytes:
    """Return what the holder of the lock file ``path`` has written into it; b"" if that is unknown.

    Opening the file, instead of reading an open one, makes a network disk ask its server.
    """
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            return os.read(handle, MOST_RECORD_BYTES) if os.fstat(handle).st_nlink else b"replaced"
        finally:
            os.close(handle)
    return b""


def check_fence(path: Path) -> None:
    """Raise ClusterError if another process has taken over a lock, which this process had, of a folder around ``path``."""
    for lock, mine in list(_fences.items()) if _fences else ():
        if lock.parent in path.absolute().parents and lock_record(lock) not in (mine, b""):
            raise ClusterError(
                f"this process was paused or cut off, and another one has taken over {lock.parent}: it writes nothing more",
                hint="nothing: the other process goes on with the run",
            )


@contextmanager
def exclusive(
    path: Path, record: bytes = b"", takes_over: Callable[[bytes], bool] = lambda _: False
) -> Iterator[bool]:
    """Try to lock the file ``path`` for the block, without waiting; yield whether this process holds the lock.

    The operating system releases the lock when the process ends for any reason. On a network disk that can take minutes.

    Args:
        record: who this process is, for :func:`lock_record`. It also fences the folder: see the text of this module.
        takes_over: gets the record of the process that holds the lock; returns whether this process replaces it.
    """
    path = path.absolute()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    is_mine = False
    try:  # the file may have been removed between open and lock
        is_mine, before = _try_lock(handle) and (not fcntl or _is_same(handle, path)), lock_record(path)
        if is_mine and record:
            record += STAYS if before.endswith(STAYS) else b""
            with suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, record)
        elif not is_mine and takes_over(before) and fcntl:
            record += STAYS
            with _replacement(path) as temporary:
                temporary.write_bytes(record)
                os.close(handle)
                handle = os.open(temporary, os.O_RDWR)
                is_mine = _try_lock(handle)
        if is_mine and record:
            _fences[path] = record
        yield is_mine
    finally:
        if is_mine and lock_record(path) in (record, b""):  # else it stays a fence
            _fences.pop(path, None)
        if not fcntl:  # Windows cannot delete an open file
            os.close(handle)
        if is_mine and not record.endswith(STAYS) and (not fcntl or _is_same(handle, path)):
            with suppress(OSError):  # another process has it open, or it is gone
                path.unlink()
        if fcntl:  # after unlink: the lock must not be free while the file still has its name
            os.close(handle)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait for the lock file ``path`` and hold it inside the block; run without a lock if the file cannot be made."""
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only folder: duplicate work is wasteful, not wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            while not stack.enter_context(exclusive(path)):
                stack.close()
                time.sleep(0.05)
        yield


def _try_lock(handle: int) -> bool:
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: duplicate work is wasteful, not wrong
        return True
    return True


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
