"""Decoded images at training size, one copy per machine. The first process that decodes an image stores it.

One flat file holds all pixels. The offset of each image follows from the index alone, so processes need not
communicate. Reading returns a view of the mapped file. Writing uses ``pwrite``, because a full disk or /dev/shm is then
an error that can be handled; a write to mapped memory would kill the process with SIGBUS. Every image has a CRC-32,
which is written after its pixels and compared when a process reads the image for the first time. So an incomplete
write is detected, and the image is decoded again. Two processes that write the same image write the same bytes.

``ram``: a file in /dev/shm that is unlinked once every local process has opened it, so a crash leaves nothing behind.
``disk``: a file in the cache folder, kept for the next run. A cache does not change results. If there is none, images
are decoded each time, and ``note`` gives the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import shutil
import struct
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np

from yolofleet.datasets.index import DataIndex
from yolofleet.errors import DataError
from yolofleet.files.caches import cache_root
from yolofleet.images.decode import read_image
from yolofleet.system.cgroup import available_bytes
from yolofleet.text import size_text

try:
    import fcntl
except ImportError:  # Windows: each process keeps its own cache
    fcntl = None  # type: ignore[assignment]

_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
Mode = Literal["none", "ram", "disk", "auto"]
RAM_SHARE = {"auto": 0.5, "ram": 0.8}  # share of the memory that is free now; the rest is for the run itself
OPEN_WAIT_S = 60.0  # timeout for another local process to initialise the file
DISK_SHARE = 0.9
_MAGIC = b"YFIMAGE1"
_HEADER = struct.Struct("<8sqq16s")  # magic, images, images covered, digest of the layout
_HEADER_BYTES = 4096
_PREFIX = "yolofleet-images-"
_STALE_S = 60.0  # an older named file in /dev/shm that no process has open was left by a crash
_UNUSED_S = (
    30 * 86400.0
)  # a file on disk that no run has opened for 30 days most likely belongs to changed data
_FDS = Path("/proc/self/fd")  # if it exists, a process can open an unlinked file of another process


def _temporary_folders() -> list[Path]:
    """Return the system's folder for temporary files; [] if all candidates are full or read-only."""
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:
        return []


MEMORY_FOLDERS = (Path("/dev/shm"), *_temporary_folders())  # the first with room for all images is used


def resized_wh(sizes_wh: np.ndarray, img: int) -> np.ndarray:
    """Return sizes with a longer side of ``img`` and the same aspect, the other side rounded up: int64 [N, 2].

    This is YOLOv5's rule. Both sides are at most ``img``, even if rounding of the ratio would add a pixel.
    """
    sizes = np.asarray(sizes_wh, np.float64)
    ratio = img / sizes.max(axis=1, keepdims=True)
    resized_wh: np.ndarray = np.minimum(np.ceil(sizes * ratio), img).astype(np.int64)
    return resized_wh


def reduction_for(width: int, height: int, img: int) -> int:
    """Return the largest of 1, 2, 4 and 8 by which an image can be divided so that its longer side stays ``img`` or more.

    The sides of a reduced JPEG are rounded up. A factor that would move its last pixels by more than half a pixel of
    the reduced image is not used.
    """

    def fits(factor: int) -> bool:
        moved = max(-width % factor, -height % factor)
        return max(width, height) >= factor * img and 2 * moved <= factor

    return next(factor for factor in (8, 4, 2, 1) if factor == 1 or fits(factor))


class ImageCache:
    """The images of an index at training size, from the cache or decoded.

    Attributes:
        mode: what is in use: none, ram or disk.
        covered: images 0..covered-1 are cached; the others are decoded each time.
        note: a line for the user: what is in use and why.
    """

    def __init__(
        self, index: DataIndex, img: int, mode: Mode, *, token: str = "", quick: bool = False
    ) -> None:
        """Open or create the cache. If that fails, ``mode`` is none and ``note`` gives the reason.

        Args:
            index: the images.
            img: longer side in pixels.
            mode: ``ram`` covers a part of the images if not all fit; ``auto`` is ``ram`` if all fit into half of the
                free memory, else none.
            token: text that is equal in all processes of a machine that share a ``ram`` cache; one of them calls
                ``unlink`` after all have been constructed. '': only this process and those it starts share it.
            quick: for training. JPEGs are decoded at a half, a quarter or an eighth of their size if that is still
                ``img`` or more, and images up to twice too large are shrunk linearly (YOLOv5's rule for training)
                and not by areas. It takes about half the time, for pixels that differ slightly.
        """
        self.index = index
        self.img = img
        self.quick = quick
        self.mode: Literal["none", "ram", "disk"] = "none"
        self.covered = 0
        self.note = "cache: none, images are decoded each time"
        self._file: _PixelFile | None = None
        if mode == "none" or not len(index):
            return
        layout = _Layout(index, img, quick)
        try:
            self._file = _disk_file(layout) if mode == "disk" else _ram_file(layout, mode, token)
        except (OSError, ValueError, _NoCache) as error:
            self.note = f"cache: none ({error})"
            return
        self.mode = "disk" if mode == "disk" else "ram"
        self.covered = self._file.covered
        self.note = f"cache: {self.mode}, {self.covered} of {len(index)} images at {img} px, {size_text(self._file.size)}"
        if self.covered < len(index):
            self.note += f"; all would need {size_text(layout.size_of(len(index)))}"

    def get(self, image: int) -> np.ndarray:
        """Return an image whose longer side is ``img``: uint8 [h, w, 3] BGR, read-only.

        Raises:
            DataError: the image cannot be read, or its size has changed since it was indexed.
        """
        if self._file is not None and image < self.covered:
            kept = self._file.read(image)
            if kept is not None:
                return kept
        pixels = self._decode(image)
        pixels.flags.writeable = False
        if self._file is not None and image < self.covered:
            self._file.write(image, pixels)
        return pixels

    def unlink(self) -> None:
        """Unlink the file of a ``ram`` cache; processes that have it open, and those they start, can still use it.

        Any local process may call this after all have been constructed. On systems other than Linux, where an
        unlinked file cannot be opened again, ``close`` unlinks it.
        """
        if self._file is not None and _FDS.is_dir():
            self._file.unlink()

    def close(self) -> None:
        """Close the cache; images that ``get`` returned stay valid."""
        if self._file is not None:
            self._file.close()
        self._file, self.mode, self.covered = None, "none", 0

    def _decode(self, image: int) -> np.ndarray:
        path = self.index.path(image)
        width, height = self.index.sizes_wh[image].tolist()
        reduction = reduction_for(width, height, self.img) if self.quick else 1
        pixels = read_image(path, reduction=reduction)
        if pixels.shape[:2] not in ((height, width), (-(-height // reduction), -(-width // reduction))):
            raise DataError(
                f"image {path} has {pixels.shape[1]} x {pixels.shape[0]} pixels; the index has {width} x {height}",
                hint="the file changed during the run: start again",
            )
        new_wh = resized_wh(self.index.sizes_wh[image : image + 1], self.img)[0].tolist()
        if [*pixels.shape[1::-1]] == new_wh:
            return pixels
        shrunk = max(pixels.shape) / self.img
        by_areas = shrunk >= 2 or (shrunk > 1 and not self.quick)
        return cv2.resize(pixels, new_wh, interpolation=cv2.INTER_AREA if by_areas else cv2.INTER_LINEAR)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_file"] = self._file and self._file.address()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = None
        if state["_file"] is not None:
            try:
                handle = os.open(state["_file"], os.O_RDWR | _OPEN_FLAGS)
                self._file = _PixelFile(handle, None, _Layout(self.index, self.img, self.quick))
            except (OSError, ValueError, _NoCache) as error:
                self.mode, self.covered, self.note = "none", 0, f"cache: none ({error})"


class _NoCache(Exception):
    """Why there is no cache."""


class _Layout:
    """The offsets within the file: header, a CRC-32 per image, the pixels of one image after the other."""

    def __init__(self, index: DataIndex, img: int, quick: bool) -> None:
        self.sizes_wh = resized_wh(index.sizes_wh, img)
        self.images = len(index)
        start = -(-(_HEADER_BYTES + 4 * self.images) // 4096) * 4096
        self.ends = start + np.cumsum(self.sizes_wh.prod(axis=1) * 3)  # int64 [N]
        text = f"{index.key} {img} {quick} {cv2.__version__}"  # versions of OpenCV may decode to different pixels
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()

    def size_of(self, covered: int) -> int:
        """Return the size of a file that holds the first ``covered`` images, at least one."""
        return int(self.ends[covered - 1])

    def covered_by(self, size: float) -> int:
        """Return how many images fit into ``size`` bytes."""
        return int(np.searchsorted(self.ends, size, side="right"))


class _PixelFile:
    """An initialised file of pixels. Owns ``handle``, and unlinks ``path`` when it is closed unless that is None."""

    def __init__(self, handle: int, path: Path | None, layout: _Layout) -> None:
        """Map the file. Raises OSError, or _NoCache if it has another layout; the handle is then closed."""
        self.handle, self._path, self._layout = handle, path, layout
        self._close = weakref.finalize(self, _close, handle, path, os.getpid())
        try:
            self.covered = _covered(handle, layout)
            if not self.covered:
                raise _NoCache("the cache of another process cannot be used")
            self.size = layout.size_of(self.covered)
            self._mapped = mmap.mmap(handle, self.size, access=mmap.ACCESS_READ)
        except BaseException:
            self._close()
            raise
        self._crcs = np.frombuffer(self._mapped, np.uint32, layout.images, _HEADER_BYTES)
        self._compared = np.zeros(layout.images, bool)

    def read(self, image: int) -> np.ndarray | None:
        """Return a view of the file, or None if the image is not stored."""
        crc = int(self._crcs[image])
        if crc == 0:
            return None
        width, height = self._layout.sizes_wh[image].tolist()
        count = width * height * 3
        pixels = np.frombuffer(self._mapped, np.uint8, count, int(self._layout.ends[image]) - count)
        if not self._compared[image]:
            if _crc(pixels) != crc:
                return None
            self._compared[image] = True
        return pixels.reshape(height, width, 3)

    def write(self, image: int, pixels: np.ndarray) -> None:
        """Store an image; do nothing if the disk or memory is full."""
        flat = np.ascontiguousarray(pixels).reshape(-1)
        try:
            _write_at(self.handle, flat.data, int(self._layout.ends[image]) - flat.nbytes)
            _write_at(self.handle, memoryview(struct.pack("=I", _crc(flat))), _HEADER_BYTES + 4 * image)
        except OSError:
            pass

    def address(self) -> str:
        """Return a path that opens this file while this process lives, even after it was unlinked."""
        return f"/proc/{os.getpid()}/fd/{self.handle}" if _FDS.is_dir() else str(self._path)

    def unlink(self) -> None:
        _unlink(self._path)

    def close(self) -> None:
        del self._crcs, self._mapped
        _promised.pop(self, None)
        self._close()


def _close(handle: int, path: Path | None, owner: int) -> None:
    os.close(handle)
    if os.getpid() == owner:  # a forked child that ends must not unlink the parent's file
        _unlink(path)


def _unlink(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _crc(pixels: np.ndarray) -> int:
    return zlib.crc32(pixels.data) or 1  # 0 means that the image is not stored


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, data)
        data, offset = data[written:], offset + written


def _covered(handle: int, layout: _Layout) -> int:
    """Return how many images an initialised file covers; 0 for any other file."""
    os.lseek(handle, 0, os.SEEK_SET)
    head = os.read(handle, _HEADER.size)
    if len(head) < _HEADER.size:
        return 0
    magic, images, covered, digest = _HEADER.unpack(head)
    ours = (magic, images, digest) == (_MAGIC, layout.images, layout.digest) and 0 < covered <= images
    return covered if ours and os.fstat(handle).st_size >= layout.size_of(covered) else 0


def _lay_out(handle: int, layout: _Layout, covered: int) -> None:
    """Initialise a file. It is sparse: at first, only the checksums take space.

    The header is written last, so a file that is not finished has none.
    """
    os.ftruncate(handle, 0)
    os.ftruncate(handle, layout.size_of(covered))
    _write_at(handle, memoryview(bytes(4 * layout.images)), _HEADER_BYTES)
    _write_at(handle, memoryview(_HEADER.pack(_MAGIC, layout.images, covered, layout.digest)), 0)


def _shared_file(path: Path, layout: _Layout, cover: Callable[[], int], mode: int) -> int:
    """Open a file that other processes may open at the same time; the first one initialises it.

    A shared lock is held while the file is open, here or in a forked child. It marks the file as in use.

    Args:
        cover: returns how many images to cover; only the process that initialises the file calls it. May raise
            _NoCache.
        mode: permissions of a new file, before the umask.
    """
    deadline_s = time.monotonic() + OPEN_WAIT_S
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, mode)
        try:
            if _lock(handle, exclusive=True):
                if os.fstat(handle).st_nlink or not fcntl:  # else it was unlinked between open and lock
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
            raise _NoCache(f"another process has been preparing {path} for {OPEN_WAIT_S:.0f} s")
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


def _disk_file(layout: _Layout) -> _PixelFile:
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder.glob("*.pixels"), _UNUSED_S)

    def cover() -> int:
        free = shutil.disk_usage(folder).free
        covered = layout.covered_by(free * DISK_SHARE)
        if not covered:
            raise _NoCache(f"{folder} has only {size_text(free)} free")
        return covered

    path = folder / f"{layout.digest.hex()}.pixels"
    handle = _shared_file(path, layout, cover, 0o666)
    os.utime(path)  # so that _sweep does not take it for unused
    return _PixelFile(handle, None, layout)


def _ram_file(layout: _Layout, mode: Mode, token: str) -> _PixelFile:
    """Open or create the file of a ``ram`` cache. Raises OSError or _NoCache."""
    folders = [folder for folder in MEMORY_FOLDERS if folder.is_dir()]
    if not folders:
        raise _NoCache("neither /dev/shm nor the folder for temporary files can be written")
    _sweep((path for folder in folders for path in folder.glob(f"{_PREFIX}*")), _STALE_S)
    shared = token if fcntl else ""
    secret = f"{shared or secrets.token_hex(16)} {layout.digest.hex()} {os.getuid() if fcntl else 0}"
    name = _PREFIX + hashlib.blake2b(secret.encode(), digest_size=16).hexdigest()
    whole = layout.size_of(layout.images)
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    there = [folder for folder in folders if (folder / name).exists()]
    roomy = [folder for folder in folders if whole <= free[folder] * DISK_SHARE]
    folder = (there or roomy or sorted(folders, key=lambda item: -free[item]))[0]

    def cover() -> int:
        memory = available_bytes()
        if memory is None and mode == "auto":
            raise _NoCache("the amount of free memory is unknown on this system; --cache ram ignores that")
        budget = free[folder] * DISK_SHARE
        if memory is not None:
            budget = min(budget, memory * RAM_SHARE[mode] - sum(_promised.values()))
        covered = layout.covered_by(budget)
        if not covered or (mode == "auto" and covered < layout.images):
            raise _NoCache(
                f"all images need {size_text(whole)}, but only {size_text(max(0.0, budget))} may be used"
            )
        return covered

    path = folder / name
    # Every user of the machine can list this folder, so the file is readable by its owner only.
    file = _PixelFile(_shared_file(path, layout, cover, 0o600), path, layout)
    _promised[file] = file.size
    if not shared and _FDS.is_dir():
        file.unlink()
    return file


# Sizes of the open files in memory. They fill up later, so the amount of free memory does not include them yet.
_promised: weakref.WeakKeyDictionary[_PixelFile, int] = weakref.WeakKeyDictionary()


def _sweep(paths: Iterable[Path], older_s: float) -> None:
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
