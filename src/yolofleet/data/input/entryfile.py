"""One flat file with an entry for each image of an index. All processes of a machine map it, and any of them fills it.

The offset of each entry follows from the index alone, so processes need not communicate. Reading returns a view of the
mapped file. Writing uses ``pwrite``, because a full disk or /dev/shm is then an error that can be handled; a write to
mapped memory would kill the process with SIGBUS. Every entry has a CRC-32, which is written after its content and
compared when a process reads the entry for the first time. So an incomplete write is detected, and the entry is made
again. Two processes that write the same entry write the same bytes.

The file is sparse: an entry takes space from the moment it is written, and only for the bytes that it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: each process keeps its own file
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
OPEN_WAIT_S = 60.0  # timeout for another local process to initialise the file
FDS = Path("/proc/self/fd")  # if it exists, a process can open an unlinked file of another process
_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MAGIC = b"YFIMAGE2"
_HEADER = struct.Struct("<8sqq16s")  # magic, entries, entries covered, digest of the layout
_HEADER_BYTES = 4096
_STATE = struct.Struct("=II")  # CRC-32 and bytes of an entry; 0 and 0 if it is not stored


class Unusable(Exception):
    """Why there is no file."""


class Layout:
    """The offsets within the file: header, a CRC-32 and a length per entry, one entry after the other."""

    def __init__(self, lengths: np.ndarray, identity: str) -> None:
        """
        Args:
            lengths: int64 [N], the largest number of bytes that each entry may have.
            identity: text that decides lengths and content; a file with another text is not used.
        """
        self.entries = len(lengths)
        start = -(-(_HEADER_BYTES + _STATE.size * self.entries) // 4096) * 4096
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]) + start  # int64 [N + 1]
        self.digest = hashlib.blake2b(identity.encode(), digest_size=16).digest()

    def size_of(self, covered: int) -> int:
        """Return the size of a file that holds the first ``covered`` entries, at least one."""
        return int(self.offsets[covered])

    def covered_by(self, size: float) -> int:
        """Return how many entries fit into ``size`` bytes."""
        return int(np.searchsorted(self.offsets[1:], size, side="right"))

    def span(self, entry: int) -> tuple[int, int]:
        """Return the offset of an entry, and the largest number of bytes that it may have."""
        start, end = self.offsets[entry : entry + 2].tolist()
        return start, end - start


class EntryFile:
    """An initialised file. Owns ``handle``, and unlinks ``path`` when it is closed unless that is None."""

    def __init__(self, handle: int, path: Path | None, layout: Layout) -> None:
        """Map the file. Raise OSError, or Unusable if it has another layout; the handle is then closed."""
        self.handle, self._path, self.layout = handle, path, layout
        self._close = weakref.finalize(self, _close, handle, path, os.getpid())
        try:
            self.covered = _covered(handle, layout)
            if not self.covered:
                raise Unusable("the file of another process cannot be used")
            self.size = layout.size_of(self.covered)
            self._mapped = mmap.mmap(handle, self.size, access=mmap.ACCESS_READ)
        except BaseException:
            self._close()
            raise
        states = np.frombuffer(self._mapped, np.uint32, 2 * layout.entries, _HEADER_BYTES)
        self.states = states.reshape(-1, 2)  # [N, 2] CRC-32 and bytes
        self._compared = np.zeros(layout.entries, bool)

    @classmethod
    def reopen(cls, address: str, layout: Layout) -> EntryFile:
        """Open a file by its ``address``. Raises OSError or Unusable."""
        return cls(os.open(address, os.O_RDWR | _OPEN_FLAGS), None, layout)

    def read(self, entry: int) -> np.ndarray | None:
        """Return an entry as a view of the file, uint8 [bytes], or None if it is not stored."""
        crc, length = self.states[entry].tolist()
        start, most = self.layout.span(entry)
        if crc == 0 or length > most:
            return None
        content = np.frombuffer(self._mapped, np.uint8, length, start)
        if not self._compared[entry]:
            if _crc(content) != crc:
                return None
            self._compared[entry] = True
        return content

    def write(self, entry: int, content: np.ndarray) -> None:
        """Store an entry: uint8 [bytes], contiguous. Raise OSError if the disk or memory is full."""
        _write_at(self.handle, content.data, self.layout.span(entry)[0])
        state = _STATE.pack(_crc(content), content.nbytes)
        _write_at(self.handle, memoryview(state), _HEADER_BYTES + _STATE.size * entry)

    def address(self) -> str:
        """Return a path that opens this file while this process lives, even after it was unlinked."""
        return f"/proc/{os.getpid()}/fd/{self.handle}" if FDS.is_dir() else str(self._path)

    def unlink(self) -> None:
        _unlink(self._path)

    def close(self) -> None:
        del self.states, self._mapped
        self._close()


def _close(handle: int, path: Path | None, owner: int) -> None:
    os.close(handle)
    if os.getpid() == owner:  # a forked child that ends must not unlink the parent's file
        _unlink(path)


def _unlink(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _crc(content: np.ndarray) -> int:
    return zlib.crc32(content.data) or 1  # 0 means that the entry is not stored


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, data)
        data, offset = data[written:], offset + written


def _covered(handle: int, layout: Layout) -> int:
    """Return how many entries an initialised file covers; 0 for any other file."""
    os.lseek(handle, 0, os.SEEK_SET)
    head = os.read(handle, _HEADER.size)
    if len(head) < _HEADER.size:
        return 0
    magic, entries, covered, digest = _HEADER.unpack(head)
    ours = (magic, entries, digest) == (_MAGIC, layout.entries, layout.digest) and 0 < covered <= entries
    return covered if ours and os.fstat(handle).st_size >= layout.size_of(covered) else 0


def _lay_out(handle: int, layout: Layout, covered: int) -> None:
    """Initialise a file. At first, only the checksums take space.

    The header is written last, so a file that is not finished has none.
    """
    os.ftruncate(handle, 0)
    os.ftruncate(handle, layout.size_of(covered))
    _write_at(handle, memoryview(bytes(_STATE.size * layout.entries)), _HEADER_BYTES)
    _write_at(handle, memoryview(_HEADER.pack(_MAGIC, layout.entries, covered, layout.digest)), 0)


def open_shared(
    path: Path, layout: Layout, cover: Callable[[], int], mode: int, *, nameless: bool = False
) -> int:
    """Open a file that other processes may open at the same time, and return its handle; the first initialises it.

    A shared lock is held while the file is open, here or in a forked child. It marks the file as in use. A symbolic link
    is an error, because another user of the folder could have made it to have its target overwritten.

    Args:
        cover: returns how many entries to cover; only the process that initialises the file calls it. May raise
            Unusable.
        mode: permissions of a new file, before the umask.
        nameless: ``path`` is the link in /proc to a file without a name, which another process holds.
    """
    deadline_s = time.monotonic() + OPEN_WAIT_S
    flags = os.O_RDWR | _OPEN_FLAGS | (0 if nameless else os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    while True:
        handle = os.open(path, flags, mode)
        try:
            if _lock(handle, exclusive=True):
                # else it was unlinked between open and lock
                if nameless or os.fstat(handle).st_nlink or not fcntl:
                    if not _covered(handle, layout):
                        try:
                            _lay_out(handle, layout, cover())
                        except BaseException:
                            _unlink(path)
                            raise
                    _lock(handle, exclusive=False)
                    return handle
            elif _lock(handle, exclusive=False) and _covered(handle, layout):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > deadline_s:
            raise Unusable(f"another process has been preparing {path} for {OPEN_WAIT_S:.0f} s")
        time.sleep(0.02)


def _lock(handle: int, *, exclusive: bool) -> bool:
    """Lock a file without waiting; return whether that succeeded."""
    if not fcntl:
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(paths: Iterable[Path], older_s: float) -> None:
    """Remove this user's files that no process has open and that were not used for ``older_s`` seconds."""
    for path in paths if fcntl else ():
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < older_s:
                continue
            handle = os.open(path, os.O_RDWR | _OPEN_FLAGS)
            try:
                if _lock(handle, exclusive=True):
                    path.unlink()
            finally:
                os.close(handle)
