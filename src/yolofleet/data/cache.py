"""Decoded images at training size, one copy per machine, filled by whoever decodes an image first.

One flat file holds all pixels; where each image lies follows from the index alone, so processes agree without
talking. Reading is a view of the mapped file. Writing goes through ``pwrite``: a full disk or /dev/shm is then
an error that is noticed, where writing to mapped memory would kill the process. Every image has a CRC-32,
written after its pixels and compared when a process reads the image for the first time: a torn write is
noticed and the image decoded again. Two processes that write the same image write the same bytes.

``ram``: a file in /dev/shm without a name once every local process has it open, so nothing is left after a
crash. ``disk``: a file under the cache folder, kept for the next run. A cache changes no result: where it
cannot be had, images are decoded each time and ``note`` says why.
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

try:
    import fcntl
except ImportError:  # Windows: each process keeps its own cache
    fcntl = None  # type: ignore[assignment]

_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
Mode = Literal["none", "ram", "disk", "auto"]
RAM_SHARE = {"auto": 0.5, "ram": 0.8}  # of the memory that is free now; the rest is for the run itself
OPEN_WAIT_S = 60.0  # for another local process to lay out the file
DISK_SHARE = 0.9
_MAGIC = b"YFIMAGE1"
_HEADER = struct.Struct("<8sqq16s")  # magic, images, images covered, digest of the layout
_HEADER_BYTES = 4096
_PREFIX = "yolofleet-images-"
_STALE_S = 60.0  # a named file in memory that is older and that nobody has open was left by a crash
_UNUSED_S = 30 * 86400.0  # a file on disk that no run has opened for so long belongs to data that changed
_FDS = Path("/proc/self/fd")  # where it exists, a file without a name can be opened again


def _temporary_folders() -> list[Path]:
    """Return the system's folder for temporary files; none where all of its choices are full or read-only."""
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:
        return []


MEMORY_FOLDERS = (Path("/dev/shm"), *_temporary_folders())  # the first where all images fit


def resized_wh(sizes_wh: np.ndarray, img: int) -> np.ndarray:
    """int64 [N, 2]: sizes whose longer side is ``img``, the aspect kept, the other side rounded up.

    YOLOv5's rule; both sides are at most ``img``, also where rounding of the ratio would add a pixel.
    """
    sizes = np.asarray(sizes_wh, np.float64)
    ratio = img / sizes.max(axis=1, keepdims=True)
    resized_wh: np.ndarray = np.minimum(np.ceil(sizes * ratio), img).astype(np.int64)
    return resized_wh


class ImageCache:
    """
    Attributes:
        mode: what is in use: none, ram or disk.
        covered: images 0..covered-1 are kept; the others are decoded each time.
        note: for a person: what is in use and why.
    """

    def __init__(self, index: DataIndex, img: int, mode: Mode, *, token: str = "") -> None:
        """
        Args:
            index: whose images.
            img: longer side, pixels.
            mode: ``ram`` that does not fit covers a part; ``auto`` is ``ram`` if it all fits well, else none.
            token: the same text for all processes of a machine that share a ``ram`` cache; one of them calls
                ``unlink`` after all have been constructed. '' is for this process and those it starts.
        """
        self.index = index
        self.img = img
        self.mode: Literal["none", "ram", "disk"] = "none"
        self.covered = 0
        self.note = "cache: none, images are decoded each time"
        self._file: _PixelFile | None = None
        if mode == "none" or not len(index):
            return
        layout = _Layout(index, img)
        try:
            self._file = _disk_file(layout) if mode == "disk" else _ram_file(layout, mode, token)
        except (OSError, ValueError, _NoCache) as error:
            self.note = f"cache: none ({error})"
            return
        self.mode = "disk" if mode == "disk" else "ram"
        self.covered = self._file.covered
        self.note = (
            f"cache: {self.mode}, {self.covered} of {len(index)} images at {img} px, {_gib(self._file.size)}"
        )
        if self.covered < len(index):
            self.note += f"; all would need {_gib(layout.size_of(len(index)))}"

    def get(self, image: int) -> np.ndarray:
        """uint8 [h, w, 3] BGR whose longer side is ``img``; read-only.

        Raises:
            DataError: the image cannot be read, or is not as large as when it was indexed.
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
        """Takes the name of a ``ram`` cache away; processes that have it open, and those they start, keep it.

        Any local process may call it, once all have been constructed. Where files without a name cannot be
        opened again (not Linux) the name goes with ``close``.
        """
        if self._file is not None and _FDS.is_dir():
            self._file.unlink()

    def close(self) -> None:
        """Images that were given out stay valid."""
        if self._file is not None:
            self._file.close()
        self._file, self.mode, self.covered = None, "none", 0

    def _decode(self, image: int) -> np.ndarray:
        path = self.index.path(image)
        pixels = read_image(path)
        width, height = self.index.sizes_wh[image].tolist()
        if pixels.shape[:2] != (height, width):
            raise DataError(
                f"image {path} is {pixels.shape[1]} x {pixels.shape[0]} pixels, it was {width} x {height}",
                hint="it changed since the run began; start again",
            )
        if max(width, height) == self.img:
            return pixels
        new_wh = resized_wh(self.index.sizes_wh[image : image + 1], self.img)[0].tolist()
        smaller = self.img < max(width, height)
        return cv2.resize(pixels, new_wh, interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR)

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
                self._file = _PixelFile(handle, None, _Layout(self.index, self.img))
            except (OSError, ValueError, _NoCache) as error:
                self.mode, self.covered, self.note = "none", 0, f"cache: none ({error})"


class _NoCache(Exception):
    """Why there is none."""


class _Layout:
    """Where each image's pixels lie: header, a CRC-32 per image, images one after the other."""

    def __init__(self, index: DataIndex, img: int) -> None:
        self.sizes_wh = resized_wh(index.sizes_wh, img)
        self.images = len(index)
        start = -(-(_HEADER_BYTES + 4 * self.images) // 4096) * 4096
        self.ends = start + np.cumsum(self.sizes_wh.prod(axis=1) * 3)  # int64 [N]
        text = f"{index.key} {img} {cv2.__version__}"  # another OpenCV may decode other bits
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()

    def size_of(self, covered: int) -> int:
        """Bytes of a file that holds the first ``covered`` images, at least one."""
        return int(self.ends[covered - 1])

    def covered_by(self, size: float) -> int:
        """How many images fit into so many bytes."""
        return int(np.searchsorted(self.ends, size, side="right"))


class _PixelFile:
    """A file that is laid out. Owns ``handle``, and the name if there is one."""

    def __init__(self, handle: int, path: Path | None, layout: _Layout) -> None:
        """Raises OSError, or _NoCache when the file is not of this layout; the handle is then closed."""
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
        """A view of the file, or None when the image is not there."""
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
        """Does nothing when the disk or memory is full."""
        flat = np.ascontiguousarray(pixels).reshape(-1)
        try:
            _write_at(self.handle, flat.data, int(self._layout.ends[image]) - flat.nbytes)
            _write_at(self.handle, memoryview(struct.pack("=I", _crc(flat))), _HEADER_BYTES + 4 * image)
        except OSError:
            pass

    def address(self) -> str:
        """A path that opens this file while this process lives, also when it has no name any more."""
        return f"/proc/{os.getpid()}/fd/{self.handle}" if _FDS.is_dir() else str(self._path)

    def unlink(self) -> None:
        _unlink(self._path)

    def close(self) -> None:
        del self._crcs, self._mapped
        _promised.pop(self, None)
        self._close()


def _close(handle: int, path: Path | None, owner: int) -> None:
    os.close(handle)
    if os.getpid() == owner:  # not in a forked child that merely ends
        _unlink(path)


def _unlink(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _crc(pixels: np.ndarray) -> int:
    return zlib.crc32(pixels.data) or 1  # 0 stands for an image that is not there


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, data)
        data, offset = data[written:], offset + written


def _covered(handle: int, layout: _Layout) -> int:
    """Images that a laid out file covers; 0 for any other file."""
    os.lseek(handle, 0, os.SEEK_SET)
    head = os.read(handle, _HEADER.size)
    if len(head) < _HEADER.size:
        return 0
    magic, images, covered, digest = _HEADER.unpack(head)
    ours = (magic, images, digest) == (_MAGIC, layout.images, layout.digest) and 0 < covered <= images
    return covered if ours and os.fstat(handle).st_size >= layout.size_of(covered) else 0


def _lay_out(handle: int, layout: _Layout, covered: int) -> None:
    """Nothing is reserved yet, except for the checksums: the file has holes. The header comes last."""
    os.ftruncate(handle, 0)
    os.ftruncate(handle, layout.size_of(covered))
    _write_at(handle, memoryview(bytes(4 * layout.images)), _HEADER_BYTES)
    _write_at(handle, memoryview(_HEADER.pack(_MAGIC, layout.images, covered, layout.digest)), 0)


def _shared_file(path: Path, layout: _Layout, cover: Callable[[], int], mode: int) -> int:
    """Opens a file that other processes may open at this moment; the first lays it out.

    A shared lock is held as long as the file is open, here or in a forked child: it says "in use".

    Args:
        cover: how many images to cover; called by the one that lays out. May raise _NoCache.
        mode: of a new file, before the umask.
    """
    deadline_s = time.monotonic() + OPEN_WAIT_S
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, mode)
        try:
            if _lock(handle, exclusive=True):
                if os.fstat(handle).st_nlink or not fcntl:  # else it was removed between open and lock
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
            raise _NoCache(f"{folder} has only {_gib(free)} free")
        return covered

    path = folder / f"{layout.digest.hex()}.pixels"
    handle = _shared_file(path, layout, cover, 0o666)
    os.utime(path)  # in use
    return _PixelFile(handle, None, layout)


def _ram_file(layout: _Layout, mode: Mode, token: str) -> _PixelFile:
    """Raises OSError or _NoCache."""
    folders = [folder for folder in MEMORY_FOLDERS if folder.is_dir()]
    if not folders:
        raise _NoCache("no folder for temporary files can be written")
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
            raise _NoCache("this system does not say how much memory is free; --cache ram takes it")
        budget = free[folder] * DISK_SHARE
        if memory is not None:
            budget = min(budget, memory * RAM_SHARE[mode] - sum(_promised.values()))
        covered = layout.covered_by(budget)
        if not covered or (mode == "auto" and covered < layout.images):
            raise _NoCache(f"all images need {_gib(whole)}, {_gib(max(0.0, budget))} can be spared")
        return covered

    path = folder / name
    # every user of the machine can look into this folder
    file = _PixelFile(_shared_file(path, layout, cover, 0o600), path, layout)
    _promised[file] = file.size
    if not shared and _FDS.is_dir():
        file.unlink()
    return file


# Bytes of the open files in memory: they fill up later, so free memory does not tell of them yet.
_promised: weakref.WeakKeyDictionary[_PixelFile, int] = weakref.WeakKeyDictionary()


def _sweep(paths: Iterable[Path], older_s: float) -> None:
    """Removes this user's files that nobody has open and that were not touched for so long."""
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


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 or not size else f"{size / 2**20:.1f} MiB"
