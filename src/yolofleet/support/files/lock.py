"""Lock files: one process at a time.

This is not the filelock library, for three reasons. It falls back to lock files that outlive a killed process. It keeps or
deletes the file depending on its version. Versions before 4 truncate the target of a symbolic link with the lock's name.
The library would save 40 lines and cost 22 ms of CPU time at each start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:
    msvcrt = None  # type: ignore[assignment]


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Try to lock the file ``path`` for the block, without waiting; yield whether this process holds the lock.

    The operating system releases the lock when the process ends for any reason.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    is_mine = False
    try:  # the file may have been removed between open and lock
        is_mine = _try_lock(handle) and (not fcntl or _is_same(handle, path))
        yield is_mine
    finally:
        if not fcntl:  # Windows cannot delete an open file
            os.close(handle)
        if is_mine:
            with contextlib.suppress(OSError):  # another process has it open, or it is gone
                path.unlink()
        if fcntl:  # after unlink: the lock must not be free while the file still has its name
            os.close(handle)


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait for the lock file ``path`` and hold it inside the block; run without a lock if the file cannot be made."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a read-only folder: duplicate work is wasteful, not wrong
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
