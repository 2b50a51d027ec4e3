"""Micro-batches and validation batches, made in this process or in loader processes.

What is made is decided by keys alone, so nothing depends on the number of loader processes. PyTorch's
DataLoader carries the work; this module adds what it lacks: keys taken lazily from an endless stream, errors
that arrive as ours, processes that end with their parent and never before.

m images of a micro-batch, n labels, H x W pixels.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar, cast

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from yolofleet.data.cache import ImageCache
from yolofleet.data.sample import TrainSamples
from yolofleet.datasets.index import DataIndex
from yolofleet.errors import DataError, YolofleetError
from yolofleet.geometry.letterbox import Letterbox, letterbox

END_WAIT_S = 10.0  # for a loader process to finish the image in hand before it is killed
DEATH_WAIT_S = 1.0  # for an exit code to appear


@dataclass(frozen=True)
class MicroBatchKey:
    """What a micro-batch consists of.

    Attributes:
        step, ordinal: which update, and which micro-batch of it.
        samples: (epoch, position) of each image.
        size: side of the images when it differs from the run's (multi-scale), pixels.
    """

    step: int
    ordinal: int
    samples: tuple[tuple[int, int], ...]
    size: int | None = None


@dataclass
class MicroBatch:
    """Images that pass the network together.

    Attributes:
        images: uint8 [m, 3, H, W] RGB with channels-last strides.
        labels: float32 [n, 6] image (0 .. m - 1), class, cx, cy, w, h as fractions of the image.
        targets: what ``match`` made of the labels.
    """

    step: int
    ordinal: int
    images: Tensor
    labels: np.ndarray
    targets: Any

    def pin_memory(self) -> MicroBatch:
        """Called by DataLoader's pinning thread."""
        return replace(self, images=self.images.pin_memory())


@dataclass(frozen=True)
class ValBatch:
    """Validation images of one shape.

    Attributes:
        image_idx: their numbers in the index, ascending.
        size_hw: padded (height, width), pixels.
    """

    ordinal: int
    image_idx: tuple[int, ...]
    size_hw: tuple[int, int]


Match = Callable[[np.ndarray, int, tuple[int, int]], Any]  # (labels [n, 6], m, (H, W)) -> targets


def train_loader(
    samples: TrainSamples,
    keys: Iterable[MicroBatchKey],
    match: Match,
    *,
    workers: int,
    prefetch: int = 4,
    pin_memory: bool = False,
) -> Loader[MicroBatchKey, MicroBatch]:
    """Micro-batches in the order of ``keys``, which may be endless; close it when done.

    Args:
        match: label-only target assignment (a loss's ``match``), done where the images are made.
        workers: loader processes; 0 = in this process.
        prefetch: micro-batches that each of them prepares ahead.
        pin_memory: copy images to page-locked memory (needs a GPU).
    """
    return Loader(
        _TrainBuilder(samples, match), keys, workers=workers, prefetch=prefetch, pin_memory=pin_memory
    )


def val_batches(index: DataIndex, img: int, batch: int, stride: int, pad: float = 0.5) -> list[ValBatch]:
    """The fixed list of validation batches: images grouped by padded shape, in the order of the index.

    The longer side becomes ``img``, each side is padded to ``ceil(side / stride + pad) * stride`` (YOLOv5's
    shape for a batch of one image). The shape follows from the image alone, so predictions depend neither on
    ``batch`` nor on which rank computes which part of the list.
    """
    sizes_wh = np.asarray(index.sizes_wh, np.float64)  # [N, 2]
    sides = sizes_wh / sizes_wh.max(axis=1, keepdims=True) * img
    padded = np.ceil(sides / stride + pad).astype(np.int64) * stride
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (width, height) in enumerate(padded.tolist()):
        groups[height, width].append(number)
    batches: list[ValBatch] = []
    for shape in sorted(groups):
        members = groups[shape]
        for start in range(0, len(members), batch):
            batches.append(ValBatch(len(batches), tuple(members[start : start + batch]), shape))
    return batches


def val_loader(
    index: DataIndex,
    batches: Sequence[ValBatch],
    img: int,
    *,
    workers: int,
    cache: ImageCache | None = None,
    prefetch: int = 4,
    pin_memory: bool = False,
) -> Loader[ValBatch, tuple[ValBatch, Tensor, list[Letterbox]]]:
    """Batches with their images, uint8 [m, 3, H, W] RGB, channels-last, and the way back to native pixels.

    Args:
        batches: of ``val_batches``, or this rank's part of it.
        cache: decoded images of this index at this size; by default each is read from its file.
    """
    builder = _ValBuilder(index, cache or ImageCache(index, img, "none"))
    workers = min(workers, len(batches))
    return Loader(builder, batches, workers=workers, prefetch=prefetch, pin_memory=pin_memory)


class _TrainBuilder:
    def __init__(self, samples: TrainSamples, match: Match) -> None:
        self.samples = samples
        self.match = match

    def __call__(self, key: MicroBatchKey) -> MicroBatch:
        img = self.samples.img
        side = key.size or img
        images, pixels = _image_buffer(len(key.samples), side, side)
        labels = []
        for i, (epoch, position) in enumerate(key.samples):
            if side == img:
                _, truth = self.samples.sample(epoch, position, out=pixels[i])
            else:
                image, truth = self.samples.sample(epoch, position)
                cv2.resize(image, (side, side), dst=pixels[i], interpolation=cv2.INTER_LINEAR)
            labels.append(np.concatenate([np.full((len(truth), 1), i, np.float32), truth], axis=1))
        none = np.zeros((0, 6), np.float32)  # an idle rank's share of a group is empty
        all_labels = np.concatenate([none, *labels])  # [n, 6]
        targets = self.match(all_labels, len(key.samples), (side, side))
        return MicroBatch(key.step, key.ordinal, images, all_labels, targets)


class _ValBuilder:
    def __init__(self, index: DataIndex, cache: ImageCache) -> None:
        self.index = index
        self.cache = cache

    def __call__(self, batch: ValBatch) -> tuple[ValBatch, Tensor, list[Letterbox]]:
        images, pixels = _image_buffer(len(batch.image_idx), *batch.size_hw)
        ways_back = []
        for i, number in enumerate(batch.image_idx):
            width, height = self.index.sizes_wh[number].tolist()
            image, way_back = letterbox(
                self.cache.get(number), batch.size_hw, enlarge=False, native_hw=(height, width)
            )
            cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=pixels[i])
            ways_back.append(way_back)
        return batch, images, ways_back


def _image_buffer(images: int, height: int, width: int) -> tuple[Tensor, np.ndarray]:
    """An unset buffer as a tensor uint8 [m, 3, H, W] (channels-last) and as an array [m, H, W, 3]."""
    buffer = torch.empty((images, height, width, 3), dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        # Here and not in the queue's thread, where a full /dev/shm would be a lost item and a hang.
        buffer.share_memory_()
    return buffer.permute(0, 3, 1, 2), buffer.numpy()


Key = TypeVar("Key")
Made = TypeVar("Made")


class Loader(Generic[Key, Made], Iterator[Made]):
    """What ``build`` makes of each key, in order; a context manager.

    Raises (from ``next``):
        YolofleetError: as ``build`` raised it, in whatever process.
        DataError: a loader process died.
    """

    def __init__(
        self,
        build: Callable[[Key], Made],
        keys: Iterable[Key],
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        # Loader processes are the parallelism. And a fork of a process with OpenCV threads could hang.
        cv2.setNumThreads(0)
        self._workers: list[Any] = []
        self._owner = os.getpid()
        self._items: Iterator[Any]
        if workers == 0:
            made = map(build, keys)
            self._items = map(_pinned, made) if pin_memory else made
            return
        others = set(multiprocessing.active_children())
        previous = None if sys.platform == "win32" else signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings(), _signals_held():  # held in the new processes until they ignore them
            # More processes than cores: as asked.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            self._items = iter(
                DataLoader(
                    cast(Any, _AsDataset(build)),
                    batch_size=None,
                    sampler=cast(Any, keys),
                    num_workers=workers,
                    prefetch_factor=prefetch,
                    collate_fn=_unchanged,
                    pin_memory=pin_memory,
                    worker_init_fn=_start_worker,
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                )
            )
        if previous is not None and threading.current_thread() is threading.main_thread():
            # DataLoader's own handler raises wherever the main thread happens to be when a loader process
            # dies. Without it the death is seen within 5 s by ``next``, where it can be told from others.
            signal.signal(signal.SIGCHLD, previous)
        self._workers = [process for process in multiprocessing.active_children() if process not in others]
        atexit.register(self.close)  # before multiprocessing's own exit, which waits for its children

    def __next__(self) -> Made:
        try:
            made = next(self._items)
        except StopIteration:
            self.close()
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self._explain(error)
        if isinstance(made, YolofleetError):
            self.close()
            raise made
        # The pinning thread makes lists of tuples.
        return cast(Made, tuple(made) if isinstance(made, list) else made)

    def __enter__(self) -> Loader[Key, Made]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loader processes; nothing is delivered after. May be called again."""
        if os.getpid() != self._owner:  # a copy in the forked process of a later loader
            return
        items, self._items = self._items, iter(())
        workers, self._workers = self._workers, []
        if not workers:
            return
        atexit.unregister(self.close)
        items._shutdown_workers()  # type: ignore[attr-defined]  # what DataLoader itself does, but now
        deadline_s = time.monotonic() + END_WAIT_S
        for process in workers:
            process.join(max(deadline_s - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()

    def _explain(self, error: RuntimeError | OSError | EOFError) -> NoReturn:
        """Raise what was behind an error of DataLoader; a process that died mid-transfer shows as a broken
        connection, a little before its exit code is known."""
        if not self._workers:
            raise error
        seen_until_s = time.monotonic() + (0.0 if isinstance(error, RuntimeError) else DEATH_WAIT_S)
        while not (codes := [process.exitcode for process in self._workers if process.exitcode]):
            if time.monotonic() >= seen_until_s:
                break
            time.sleep(0.01)
        fewer = f"--workers {len(self._workers) // 2}"
        self.close()
        text = str(error)
        if -getattr(signal, "SIGBUS", 7) in codes or "shared memory" in text or "No space left" in text:
            raise DataError(
                "shared memory (/dev/shm) is too small for the loader processes",
                hint=f"{fewer}, --prefetch 1, or more of it (docker run --shm-size=8g)",
            ) from None
        if -9 in codes:
            raise DataError(
                "a loader process was killed (exit -9): most likely out of memory",
                hint=f"{fewer} or --cache disk",
            ) from None
        if codes:
            raise DataError(
                f"a loader process ended by itself (exit {codes[0]})",
                hint="--workers 0 does its work in the main process, where more can be seen",
            ) from None
        raise error


class _AsDataset(Generic[Key, Made]):
    """``build`` in the shape of a map-style data set. Our errors are handed over as values: DataLoader would
    return them with a traceback for a message."""

    def __init__(self, build: Callable[[Key], Made]) -> None:
        self.build = build

    def __getitem__(self, key: Key) -> Made | YolofleetError:
        try:
            return self.build(key)
        except YolofleetError as error:
            return error


def _unchanged(made: Made) -> Made:
    return made


def _pinned(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(part.pin_memory() if isinstance(part, Tensor) else part for part in made)
    return made.pin_memory()


def _group_signals() -> list[int]:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals to the group wait until the end; processes forked meanwhile inherit that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _group_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    # A signal to the whole group (Ctrl-C, scancel) is the parent's to answer: it may want another step and a
    # checkpoint, for which it needs its loader.
    for number in _group_signals():
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _group_signals())
    parent = multiprocessing.parent_process()
    if parent is not None and sys.platform != "win32":  # there, DataLoader's own check (every 5 s) does
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int) -> None:
    """DataLoader's check of its parent does not run while a loader process is blocked in a write."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
