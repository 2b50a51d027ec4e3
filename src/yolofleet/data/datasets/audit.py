# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH116
"""Find images that do not decode, and images that occur twice. Labels and image headers do not show either.

OpenCV returns a damaged JPEG half grey and only prints a warning. So child processes decode the images with standard
error redirected to a file, and read that file after each image.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import Problem
from yolofleet.data.images.decode import read_image
from yolofleet.support.errors import DataError
from yolofleet.support.files.foreign import open_foreign
from yolofleet.support.system.children import safe_spawn

_CHUNK = 64
_THREADS = 8  # they mostly wait for the disk
_MOST_PROCESSES = 16
_BLOCK_BYTES = 1 << 20
_DARK = 17  # 12 of 16 bits end at 15 after the division by 256

Progress = Callable[[int, int], None]  # images done, all


def decode_all(index: DataIndex, *, on_progress: Progress = lambda done, total: None) -> list[Problem]:
    """Decode every image in child processes and return a problem for each that is not as it should be.

    An image is a problem if it does not decode, has another size than its header states, or makes the decoder print a
    warning.
    """
    paths = index.paths
    sizes = [tuple(size) for size in index.sizes_wh.tolist()]
    jobs = [(paths[at : at + _CHUNK], sizes[at : at + _CHUNK]) for at in range(0, len(paths), _CHUNK)]
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, max(1, len(jobs)))
    spawn = multiprocessing.get_context("spawn")
    problems: list[Problem] = []
    with (
        safe_spawn(),
        cancelled_early(ProcessPoolExecutor(processes, spawn, initializer=_catch_warnings)) as pool,
    ):
        done = 0
        for job, found in zip(jobs, pool.map(_decode_some, jobs), strict=True):
            problems += found
            done += len(job[0])
            on_progress(done, len(paths))
    return problems


def _catch_warnings() -> None:
    """Redirect standard error of this process to an unnamed file."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)


def _decode_some(job: tuple[Sequence[str], Sequence[tuple[int, ...]]]) -> list[Problem]:
    problems = []
    for path, (width, height) in zip(*job, strict=True):
        try:
            image = read_image(path)
        except DataError as error:
            _warning()
            what = error.what.removeprefix(f"image {path} ")
            problems.append(Problem(path, None, what, "image-undecodable"))
            continue
        warning = _warning()
        if image.shape[:2] != (height, width):
            what = f"has {image.shape[1]} x {image.shape[0]} pixels, but its header states {width} x {height}"
            problems.append(Problem(path, None, what, "image-undecodable"))
        elif warning:
            problems.append(Problem(path, None, f"decoder warning: {warning}", "image-damaged"))
        elif image.max() < _DARK:
            what = f"is nearly black: no pixel is brighter than {image.max()} of 255"
            problems.append(Problem(path, None, what, "image-dark"))
    return problems


def _warning() -> str:
    """Return the first line that was printed to standard error since the last call."""
    if not os.lseek(2, 0, os.SEEK_CUR):
        return ""
    os.lseek(2, 0, os.SEEK_SET)
    text = os.read(2, 4096)
    os.lseek(2, 0, os.SEEK_SET)
    os.ftruncate(2, 0)
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0][:200] if lines else "text that cannot be shown"


def same_images(
    indexes: Sequence[DataIndex], *, on_progress: Progress = lambda done, total: None
) -> list[list[tuple[str, str]]]:
    """Return groups of images with equal file content, [(split, path), ...]; groups in several splits come first.

    Only files of equal length are read. The same image in another encoding is not detected.
    """
    by_length: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for index in indexes:
        for path in index.paths:
            try:
                by_length[os.stat(path).st_size].append((index.split, path))
            except OSError:
                continue
    alike = [item for items in by_length.values() if len(items) > 1 for item in items]
    groups: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    with cancelled_early(ThreadPoolExecutor(_THREADS, thread_name_prefix="hash")) as pool:
        for done, (item, digest) in enumerate(zip(alike, pool.map(_digest, alike), strict=True), 1):
            if digest:
                groups[digest].append(item)
            if done % _CHUNK == 0 or done == len(alike):
                on_progress(done, len(alike))
    found = [items for items in groups.values() if len(items) > 1]
    return sorted(found, key=lambda items: (len({split for split, _ in items}) == 1, items))


def _digest(item: tuple[str, str]) -> bytes | None:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open_foreign(item[1], buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError:
        return None
    return digest.digest()


@contextmanager
def cancelled_early(pool: Executor) -> Iterator[Executor]:
    """Shut a pool down. On an exception such as Ctrl-C, cancel the jobs that have not begun."""
    try:
        yield pool
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
