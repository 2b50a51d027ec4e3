"""Images at training size, one copy per machine. The first process that decodes an image stores it in an ``EntryFile``.

``ram``: a file in /dev/shm that is unlinked once every local process has opened it, so a crash leaves nothing behind.
Runs of one study use memory without a name that the study holds (``shared_memory``), so they decode once together.
``disk``: a file in the cache folder, kept for the next run. Neither changes results. If there is no cache, images are
decoded each time, and ``note`` gives the reason.

``jpeg``: as ``ram``, but each image is kept as a JPEG, which takes about an eighth of the memory and is decoded again
each time. That changes pixels, so it is a setting of the run and no fallback: every image passes through the JPEG on
every host, also where it is not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cv2
import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.images.decode import Seen, decode_image, read_image
from yolofleet.data.input.entryfile import FDS, HAS_LOCKS, EntryFile, Layout, Unusable, open_shared, sweep
from yolofleet.storage.caches import cache_folder, cache_root
from yolofleet.storage.mirrored import download
from yolofleet.support.errors import DataError
from yolofleet.support.system.cgroup import available_bytes
from yolofleet.support.system.proc import network_disk
from yolofleet.support.text import size_text

if TYPE_CHECKING:
    from yolofleet.data.input.stage import StagedImages

Mode = Literal["none", "ram", "disk", "auto", "jpeg"]
# Of the memory that is free now; the rest is for the run itself.
RAM_SHARE = {"auto": 0.5, "ram": 0.8, "jpeg": 0.8}
DISK_SHARE = {"auto": 0.5, "disk": 0.9}  # of the space that is free now
SHM_SHARE = 0.9
# With colours at half resolution: 2.4 of 255 levels away on average (COCO), for 1.06 ms at 640 px.
JPEG_QUALITY = 92
_JPEG_SAMPLES = 16  # images whose size as a JPEG is measured, to estimate the memory that all take
_PREFIX = "yolofleet-images-"
# Environment variable: memory that another process holds, see shared_memory.
SHARED = "YOLOFLEET_IMAGE_MEMORY"
_STALE_S = 60.0  # an older named file in /dev/shm that no process has open was left by a crash
# A file on disk that no run has opened for 30 days most likely belongs to changed data.
_UNUSED_S = 30 * 86400.0


def _temporary_folders() -> list[Path]:
    """Return the system's folder for temporary files; [] if all candidates are full or read-only."""
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:
        return []


MEMORY_FOLDERS = (Path("/dev/shm"), *_temporary_folders())  # the first with room for all images is used


@contextlib.contextmanager
def shared_memory() -> Iterator[dict[str, str]]:
    """Hold memory for the caches of all runs that start inside the block; yield the environment that names it to them.

    The runs have equal data, image size and cache mode. The first one lays the memory out and decides how many images it
    covers, so the free memory is promised once. The memory has no name, so the kernel frees it when this process and the runs
    have ended, however they end. Systems other than Linux have no such memory: there each run has its own.
    """
    if not hasattr(os, "memfd_create") or not FDS.is_dir():
        yield {}
        return
    token = secrets.token_hex(8)
    handles = [os.memfd_create(f"{_PREFIX}{token}-{split}") for split in ("train", "val")]
    try:
        yield {SHARED: f"{token} {os.getpid()} {handles[0]} {handles[1]}"}
    finally:
        for handle in handles:
            os.close(handle)


def shared_file(environment: Mapping[str, str], split: str) -> Path | None:
    """Return the file of ``split`` in the memory that ``environment`` names; None without it.

    The process may have ended and its number may be another's, so the link must have the name that ``shared_memory`` gave.
    """
    with contextlib.suppress(ValueError, OSError, KeyError):
        token, pid, train, val = environment[SHARED].split()
        file = Path(f"/proc/{int(pid)}/fd/{int(train if split == 'train' else val)}")
        if str(file.readlink()) == f"/memfd:{_PREFIX}{token}-{split} (deleted)":
            return file
    return None


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
        mode: what is in use: none, ram, disk or jpeg.
        covered: images 0..covered-1 are cached; the others are decoded each time.
        note: a line for the user: what is in use and why.
    """

    def __init__(
        self,
        index: DataIndex,
        img: int,
        mode: Mode,
        *,
        token: str = "",
        quick: bool = False,
        staged: StagedImages | None = None,
        shared: Path | None = None,
    ) -> None:
        """Open or create the cache. If that fails, ``mode`` is none and ``note`` gives the reason.

        Args:
            img: longer side in pixels.
            mode: ``ram``, ``jpeg`` and ``disk`` cover a part of the images if not all fit. ``auto`` is ``ram`` if all
                fit into half of the free memory; else ``disk`` if the files have more bytes than the pixels, the cache
                folder is on a local disk, and all fit into half of its free space; else none.
            token: text that is equal in all processes of a machine that share a cache in memory; one of them calls
                ``unlink`` after all have been constructed. '': only this process and those it starts share it.
            quick: for training. JPEGs are decoded at a half, a quarter or an eighth of their size if that is still
                ``img`` or more, and images up to twice too large are shrunk linearly (YOLOv5's rule for training)
                and not by areas. It takes about half the time, for pixels that differ slightly.
            staged: copies of the image files, which are read instead.
            shared: of ``shared_file``: a cache in memory is there.
        """
        self.index = index
        self.img = img
        self.quick = quick
        self.is_jpeg = mode == "jpeg"
        self.mode: Literal["none", "ram", "disk", "jpeg"] = "none"
        self.covered = 0
        self.note = "cache: none, images are decoded each time"
        self._staged = staged
        self._file: EntryFile | None = None
        if mode == "none" or not len(index):
            return
        self._sizes_wh = resized_wh(index.sizes_wh, img)
        layout = self._layout()
        try:
            share = self._jpeg_share() if self.is_jpeg else 1.0
            if mode == "auto":
                self.mode, self._file, why = _chosen_file(
                    layout, token, int(index.stamps[:, 0].sum()), shared
                )
            else:
                self._file = (
                    _disk_file(layout, mode)
                    if mode == "disk"
                    else _ram_file(layout, mode, token, share, shared)
                )
                self.mode, why = mode, ""
        except (OSError, ValueError, Unusable) as error:
            self.note = f"cache: none ({error})" + ("; images are changed by a JPEG" if self.is_jpeg else "")
            return
        self.covered = self._file.covered
        if shared is not None and self.mode != "disk":
            why += ", shared by the runs of a study"
        size = size_text(self._file.size * share)
        self.note = f"cache: {self.mode}, {self.covered} of {len(index)} images at {img} px, {size}{why}"
        if self.covered < len(index):
            needed = size_text(layout.size_of(len(index)) * share)
            others = "" if mode == "disk" else "; --cache disk holds what its disk has room for"
            self.note += f", all would need {needed}{others}"

    def get(self, image: int, seen: Seen | None = None) -> np.ndarray:
        """Return an image whose longer side is ``img``: uint8 [h, w, 3] BGR, read-only.

        Args:
            seen: returns the part that the caller needs, if not all. An image that is not kept is decoded only there,
                and its other pixels are unspecified.
        Raises:
            DataError: the image cannot be read, or its size has changed since it was indexed.
        """
        file = self._file if image < self.covered else None
        content = file.read(image) if file is not None else None
        if content is None:
            pixels = self._decode(image, seen if file is None and not self.is_jpeg else None)
            content = _as_jpeg(pixels) if self.is_jpeg else np.ascontiguousarray(pixels).reshape(-1)
            if file is not None and content.nbytes <= file.layout.span(image)[1]:
                with contextlib.suppress(OSError):  # the disk or memory is full
                    file.write(image, content)
            if not self.is_jpeg:
                pixels.flags.writeable = False
                return pixels
        if self.is_jpeg:
            pixels = np.asarray(cv2.imdecode(content, cv2.IMREAD_COLOR))
            pixels.flags.writeable = False
            return pixels
        width, height = self._sizes_wh[image].tolist()
        return content.reshape(height, width, 3)

    def download(self, images: Iterable[int]) -> int:
        """Download the files of images of a store that are not on this machine, many at a time; return how many there were.

        Only files are downloaded that :meth:`get` needs: neither the cache nor a copy has the image.

        Raises:
            StorageError: the store cannot be read, or the disk cannot be written.
        """
        if not self.index.is_mirrored:
            return 0
        file, staged = self._file, self._staged
        needed = [
            self.index.path(image)
            for image in images
            if not (file is not None and image < self.covered and file.states[image, 0])
            and not (staged is not None and staged.has(image))
        ]
        return download(needed)

    def unlink(self) -> None:
        """Unlink the file of a cache in memory; processes that have it open, and those they start, can still use it.

        Any local process may call this after all have been constructed. On systems other than Linux, where an
        unlinked file cannot be opened again, ``close`` unlinks it.
        """
        if self._file is not None and FDS.is_dir():
            self._file.unlink()

    def close(self) -> None:
        """Close the cache; images that ``get`` returned stay valid."""
        if self._file is not None:
            _promised.pop(self._file, None)
            self._file.close()
        self._file, self.mode, self.covered = None, "none", 0

    def _decode(self, image: int, seen: Seen | None = None) -> np.ndarray:
        path = self.index.path(image)
        width, height = self.index.sizes_wh[image].tolist()
        reduction = reduction_for(width, height, self.img) if self.quick else 1
        new_wh = resized_wh(self.index.sizes_wh[image : image + 1], self.img)[0].tolist()
        part = None
        if seen is not None:  # a pixel of the resized image follows from pixels that are less than 2 away
            to_x, to_y = (
                -(-old // reduction) / new for old, new in zip((width, height), new_wh, strict=True)
            )
            x1, y1, x2, y2 = seen(*new_wh)
            part = int(x1 * to_x) - 2, int(y1 * to_y) - 2, int(x2 * to_x) + 3, int(y2 * to_y) + 3
        staged = self._staged.read(image) if self._staged is not None else None
        if staged is None:
            pixels = read_image(path, reduction=reduction, seen=part)
        else:
            pixels = decode_image(staged, path, reduction=reduction, seen=part)
        if pixels.shape[:2] not in ((height, width), (-(-height // reduction), -(-width // reduction))):
            raise DataError(
                f"image {path} has {pixels.shape[1]} x {pixels.shape[0]} pixels; the index has {width} x {height}",
                hint="the file changed during the run: start again",
            )
        if [*pixels.shape[1::-1]] == new_wh:
            return pixels
        shrunk = max(pixels.shape) / self.img
        by_areas = shrunk >= 2 or (shrunk > 1 and not self.quick)
        return cv2.resize(pixels, new_wh, interpolation=cv2.INTER_AREA if by_areas else cv2.INTER_LINEAR)

    def _layout(self) -> Layout:
        # versions of OpenCV may decode to different pixels
        identity = f"{self.index.images_key()} {self.img} {self.quick} {cv2.__version__}"
        identity += f" jpeg {JPEG_QUALITY}" if self.is_jpeg else ""
        return Layout(self._sizes_wh.prod(axis=1) * 3, identity)

    def _jpeg_share(self) -> float:
        """Return the size of the images as JPEGs as a fraction of that of their pixels, estimated from a few."""
        jpegs = pixels = 0
        for image in np.linspace(0, len(self.index) - 1, _JPEG_SAMPLES).astype(int).tolist():
            with contextlib.suppress(DataError):
                decoded = self._decode(image)
                jpegs += _as_jpeg(decoded).nbytes + 4096  # memory is taken in pages
                pixels += decoded.nbytes
        return min(jpegs / pixels, 1.0) if pixels else 1.0

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_file"] = self._file and self._file.address()
        state.pop("_sizes_wh", None)  # larger than all the rest
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = None
        if state["_file"] is not None:
            self._sizes_wh = resized_wh(self.index.sizes_wh, self.img)
            try:
                self._file = EntryFile.reopen(state["_file"], self._layout())
            except (OSError, ValueError, Unusable) as error:
                self.mode, self.covered, self.note = "none", 0, f"cache: none ({error})"


def _as_jpeg(pixels: np.ndarray) -> np.ndarray:
    """Return pixels [h, w, 3] BGR as a JPEG: uint8 [bytes]."""
    _, jpeg = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return np.asarray(jpeg).reshape(-1)


def _chosen_file(
    layout: Layout, token: str, files_bytes: int, shared: Path | None
) -> tuple[Literal["ram", "disk"], EntryFile, str]:
    """Open the cache of ``auto``; return its mode, its file, and why it was chosen. Raises OSError or Unusable."""
    try:
        return "ram", _ram_file(layout, "auto", token, 1.0, shared), ", all fit into half of the free memory"
    except Unusable as full:
        # With fewer bytes than the files, a cache on disk is faster than any of them, and takes less space than the data.
        if layout.size_of(layout.entries) >= files_bytes:
            other = (
                "JPEGs take an eighth with --cache jpeg; --cache disk would be larger than the image files"
            )
            raise Unusable(f"{full}; {other}") from None
        if kind := network_disk(cache_root()):
            raise Unusable(
                f"{full}, and the cache folder {cache_root()} is on a network disk ({kind})"
            ) from None
        try:
            file = _disk_file(layout, "auto")
        except (OSError, Unusable) as problem:
            raise Unusable(f"{full}; disk: {problem}") from None
        return "disk", file, f", smaller than the image files ({full})"


def _disk_file(layout: Layout, mode: Mode) -> EntryFile:
    folder = cache_folder("images")
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder.glob("*.pixels"), _UNUSED_S)

    def cover() -> int:
        free = shutil.disk_usage(folder).free
        covered = layout.covered_by(free * DISK_SHARE[mode])
        if not covered or (mode == "auto" and covered < layout.entries):
            raise Unusable(f"{folder} has only {size_text(free)} free")
        return covered

    path = folder / f"{layout.digest.hex()}.pixels"
    handle = open_shared(path, layout, cover, 0o666)
    os.utime(path)  # so that sweep does not take it for unused
    return EntryFile(handle, None, layout)


def _ram_file(layout: Layout, mode: Mode, token: str, share: float, shared: Path | None) -> EntryFile:
    """Open or create the file of a cache in memory. Raises OSError or Unusable.

    Args:
        share: of the bytes of an entry in the layout, how many it takes on average.
    """
    is_own = token == "" or not HAS_LOCKS
    path, room = (shared, math.inf) if shared else _memory_path(layout, "" if is_own else token, share)

    def cover() -> int:
        memory = available_bytes()
        if memory is None and mode == "auto":
            raise Unusable("the amount of free memory is unknown on this system; --cache ram ignores that")
        budget = room
        if memory is not None:
            budget = min(budget, memory * RAM_SHARE[mode] - sum(_promised.values()))
        covered = layout.covered_by(budget / share)
        if not covered or (mode == "auto" and covered < layout.entries):
            raise Unusable(
                f"in memory all images need {size_text(layout.size_of(layout.entries) * share)}, but only "
                f"{size_text(max(0.0, budget))} may be used"
            )
        return covered

    # Every user of the machine can list the folder of a file, so the file is readable by its owner only.
    handle = open_shared(path, layout, cover, 0o600, nameless=shared is not None)
    file = EntryFile(handle, None if shared else path, layout)
    _promised[file] = int(file.size * share)
    if is_own and FDS.is_dir():
        file.unlink()
    return file


def _memory_path(layout: Layout, token: str, share: float) -> tuple[Path, float]:
    """Return where a cache in memory is or will be, and the bytes that may be used there. Raises Unusable."""
    folders = [folder for folder in MEMORY_FOLDERS if os.access(folder, os.W_OK)]
    if not folders:
        raise Unusable("neither /dev/shm nor the folder for temporary files can be written")
    sweep((path for folder in folders for path in folder.glob(f"{_PREFIX}*")), _STALE_S)
    secret = f"{token or secrets.token_hex(16)} {layout.digest.hex()} {os.getuid() if HAS_LOCKS else 0}"
    name = _PREFIX + hashlib.blake2b(secret.encode(), digest_size=16).hexdigest()
    whole = layout.size_of(layout.entries) * share
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    there = [folder for folder in folders if (folder / name).exists()]
    roomy = [folder for folder in folders if whole <= free[folder] * SHM_SHARE]
    folder = (there or roomy or sorted(folders, key=lambda item: -free[item]))[0]
    return folder / name, free[folder] * SHM_SHARE


# Sizes of the open files in memory. They fill up later, so the amount of free memory does not include them yet.
_promised: weakref.WeakKeyDictionary[EntryFile, int] = weakref.WeakKeyDictionary()
