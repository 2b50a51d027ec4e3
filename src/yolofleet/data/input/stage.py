"""Copies of image files on a local disk, for data sets on a network disk (``--stage``).

All image files of a split are one ``EntryFile``: no file is left half copied under its name, a later start reads one
table instead of the state of each copy, and processes that copy at the same time need no locks. The name of the file is
a hash of the paths, sizes and times of the images. So changed images get a new file, and changed labels do not.

The paths of the index stay those of the data set. An image that cannot be copied is read from there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.input.entryfile import EntryFile, Layout, Unusable, open_shared
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import StorageError
from yolofleet.support.text import listed, size_text

THREADS = 8  # they mostly wait for the network
FREE_SHARE = 0.95  # of the free space may be used
SUFFIX = ".images"


class StagedImages:
    """The copies of the image files of an index.

    Attributes:
        failures: why images could not be copied, by their numbers.
    """

    def __init__(self, index: DataIndex, folder: Path) -> None:
        """Open the file of copies, or create an empty one. Raise StorageError if the folder cannot be written."""
        self.index = index
        self.failures: dict[int, str] = {}
        layout = self._layout()
        self.file = folder / f"{layout.digest.hex()}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = open_shared(self.file, layout, lambda: layout.entries, 0o666)
            self._entries: EntryFile | None = EntryFile(handle, None, layout)
        except (OSError, Unusable) as problem:
            raise _not_staged(folder, problem) from None

    def missing(self) -> np.ndarray:
        """Return the numbers of the images without a copy: int64, ascending."""
        assert self._entries is not None
        return np.flatnonzero(self._entries.states[:, 0] == 0)

    def missing_bytes(self) -> int:
        return int(self.index.stamps[self.missing(), 0].sum())

    def copy(self, image: int) -> None:
        """Copy an image file. Raise StorageError if the copy cannot be written, or its checksum differs."""
        assert self._entries is not None
        path, size = self.index.path(image), int(self.index.stamps[image, 0])
        try:
            content = read_foreign(path, limit_bytes=size)
            if len(content) != size:
                raise OSError(f"it has {len(content)} bytes; the index has {size}")
        except (OSError, ValueError, MemoryError) as problem:
            self.failures[image] = f"{path}: {getattr(problem, 'strerror', None) or problem}"
            return
        try:
            self._entries.write(image, np.frombuffer(content, np.uint8))
        except OSError as problem:
            raise _not_staged(self.file.parent, problem) from None
        if self._entries.read(image) is None:  # compares the checksum
            raise _not_staged(self.file.parent, f"the copy of {path} differs from the original")

    def has(self, image: int) -> bool:
        """Return whether an image file has a copy."""
        return self._entries is not None and bool(self._entries.states[image, 0])

    def read(self, image: int) -> bytes | None:
        """Return the content of an image file, or None if it has no copy. A damaged copy is made again."""
        if self._entries is None or not self.has(image):
            return None
        content = self._entries.read(image)
        if content is None:  # the power failed before the disk had written it
            with suppress(StorageError):
                self.copy(image)
            content = self._entries.read(image)
        return None if content is None else content.tobytes()

    def close(self) -> None:
        if self._entries is not None:
            self._entries.close()
        self._entries = None

    def _layout(self) -> Layout:
        return Layout(self.index.stamps[:, 0], f"{self.index.images_key()} files")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_entries": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._entries = EntryFile.reopen(str(self.file), self._layout())
        except (OSError, Unusable):  # this process reads the originals
            self._entries = None


def check_room(staged: Sequence[StagedImages], folder: Path) -> None:
    """Raise StorageError if the images that are not copied yet need more space than the disk has."""
    needed = sum(images.missing_bytes() for images in staged)
    free = shutil.disk_usage(folder).free
    if needed > free * FREE_SHARE:
        mine = {images.file for images in staged}
        others = [file for file in sorted(folder.glob(f"*{SUFFIX}")) if file not in mine]
        hint = "choose a folder on a larger disk, or leave --stage out"
        if others:
            hint += f"; files of other data sets there, which you may delete: {listed([file.name for file in others])}"
        raise StorageError(
            f"--stage {folder} needs {size_text(needed)} for image files, and its disk has {size_text(free)} free",
            hint=hint,
        )


def copy_for(seconds: float, staged: StagedImages, images: Iterator[int]) -> int:
    """Copy images with ``THREADS`` threads until the time is over; return how many were tried.

    Args:
        images: numbers of images; the iterator of a list, because threads share it.
    Raises:
        StorageError: a copy cannot be stored.
    """
    until_s = time.monotonic() + seconds

    def work() -> int:
        done = 0
        while time.monotonic() < until_s and (image := next(images, None)) is not None:
            staged.copy(image)
            done += 1
        return done

    with ThreadPoolExecutor(THREADS, thread_name_prefix="stage") as pool:
        return sum(future.result() for future in [pool.submit(work) for _ in range(THREADS)])


def _not_staged(folder: Path, problem: Exception | str) -> StorageError:
    reason = getattr(problem, "strerror", None) or str(problem)
    return StorageError(
        f"--stage {folder}: image files cannot be stored there: {reason}",
        hint="choose a folder on a local disk with enough space, or leave --stage out; what was copied stays",
    )
