"""Values made of keys in this process or in loader processes: micro-batches, and batches of a validation.

A key alone decides what a value contains, so the number of loader processes changes nothing. The processes are those
of PyTorch's DataLoader. This module adds what it lacks: keys taken one by one from an endless stream, errors that keep
their type, and processes that end with their parent, not before it.

Legend: m images of a micro-batch, n labels, H x W pixels.
"""

from __future__ import annotations

import atexit
import itertools
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from yolofleet.data.input.read_ahead import ReadAhead, with_following
from yolofleet.support.closing import Closing
from yolofleet.support.errors import DataError, YolofleetError

END_WAIT_S = 10.0  # for a loader process to finish the image in hand before it is killed
DEATH_WAIT_S = 1.0  # for an exit code to appear
_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # of signals to the whole process group
_GROUP_SIGNALS = [getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name)]


def image_buffer(images: int, height: int, width: int) -> tuple[Tensor, np.ndarray]:
    """Return an uninitialised buffer as a tensor uint8 [m, 3, H, W] (channels-last) and as an array [m, H, W, 3]."""
    buffer = new_buffer(images, height, width, 3)
    return buffer.permute(0, 3, 1, 2), buffer.numpy()


def new_buffer(*shape: int) -> Tensor:
    """Return an uninitialised tensor uint8, in shared memory if this is a loader process."""
    if _buffers is not None:
        return _buffers.take(math.prod(shape)).view(shape)
    return _allocated(*shape)


def _allocated(*shape: int) -> Tensor:
    buffer = torch.empty(shape, dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        # Take shared memory here and not in the queue's thread: there, a full /dev/shm loses the batch and the run hangs.
        buffer.share_memory_()
    return buffer


class _SharedBuffers:
    """Buffers in shared memory that a loader process fills again once the main process has released them.

    A new one costs more than its content, because the kernel clears each of its pages: half of the CPU time of an image.

    Args:
        in_use: uint8 [n], shared with the main process: 1 for each buffer that it may still read. It sets zeros.
        owner: numbers of the loader and of this process.
    """

    def __init__(self, in_use: np.ndarray, owner: tuple[int, int]) -> None:
        self.in_use = in_use
        self.owner = owner
        self.buffers: list[Tensor] = [_allocated(0)] * len(in_use)
        self.taken: int | None = None  # for the value that is being made
        self.sent: dict[int, Tensor] = {}  # buffers that the main process has

    def take(self, size: int) -> Tensor:
        """Return an uninitialised tensor uint8 [size]; a value has at most one."""
        free = np.flatnonzero(self.in_use == 0).tolist()
        if not free:
            return _allocated(size)
        self.taken = slot = max(free, key=lambda slot: len(self.buffers[slot]))
        self.in_use[slot] = 1
        if len(self.buffers[slot]) < size:
            self.buffers[slot] = _allocated(size)
        part: Tensor = self.buffers[slot][:size]
        return part

    def place(self, made: Any) -> _Place | None:
        """Return where the images of ``made`` are, if they are in the buffer that was taken since the last call."""
        slot, self.taken = self.taken, None
        if slot is None:
            return None
        images = _images_of(made)
        buffer = self.buffers[slot]
        is_known = self.sent.get(slot) is buffer
        self.sent[slot] = buffer
        return _Place((*self.owner, slot), images.size(), images.stride(), None if is_known else buffer)


@dataclass(frozen=True)
class _Place:
    """Images in a shared buffer.

    Attributes:
        address: numbers of the loader, of its process and of the buffer.
        size, stride: of the images; they begin where the buffer does.
        buffer: uint8 [bytes], the first time; from then on the main process has it mapped. Sending it costs both
            processes more time than all else that is sent.
    """

    address: tuple[int, int, int]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    buffer: Tensor | None

    def images(self) -> Tensor:
        """Return the images, in a storage of their own that shares the buffer."""
        if self.buffer is not None:
            _mapped[self.address] = self.buffer
        return torch.from_numpy(_mapped[self.address].numpy()).as_strided(self.size, self.stride)


_loaders = itertools.count()  # the numbers of the loaders of this process
_mapped: dict[tuple[int, int, int], Tensor] = {}  # buffers of the loaders of this process, by their addresses
_buffers: _SharedBuffers | None = None  # of this loader process

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class _Sent(Generic[Made]):
    """What a loader process sends.

    Attributes:
        made: a micro-batch or a validation batch; without images if there is a place.
        place: of its images in a shared buffer.
        is_copied: ``made`` has the images, and they are no longer there.
    """

    made: Made
    place: _Place | None
    is_copied: bool = False

    def whole(self) -> Made:
        """Return ``made`` with its images."""
        place = self.place
        if place is None or self.is_copied:
            return self.made
        return cast(Made, _with_images(self.made, lambda _: place.images()))

    def pin_memory(self) -> _Sent[Made]:
        return replace(self, made=_pinned(self.whole()), is_copied=True)


class Loader(Closing, Generic[Key, Made], Iterator[Made]):
    """Iterate over ``build(key)`` for each key, in order, computed by loader processes. A context manager.

    Raises (from ``next``):
        YolofleetError: the error that ``build`` raised in any process.
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
        read_ahead: ReadAhead[Key] | None = None,
    ) -> None:
        """Start the loader processes.

        Args:
            read_ahead: reads the files of a key before ``build`` needs them.
        """
        # Loader processes already use the cores, and a fork of a process with OpenCV threads could deadlock.
        cv2.setNumThreads(0)
        self._workers: list[Any] = []
        self._owner, self._number = os.getpid(), next(_loaders)
        self._items: Iterator[Any]
        if read_ahead is not None:
            build = cast(Any, _ReadFirst(read_ahead, build))
            keys = cast(Any, with_following(keys, workers))
        if workers == 0:
            made = map(build, keys)
            self._items = map(_pinned, made) if pin_memory else made
            return
        _use_opencv()
        # The main process may hold the micro-batches of a step while loader processes prepare others.
        most = 2 * prefetch + 2
        self._in_use = np.frombuffer(mmap.mmap(-1, workers * most), np.uint8).reshape(workers, most)
        others = set(multiprocessing.active_children())
        previous = None if sys.platform == "win32" else signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings(), _signals_blocked():
            # DataLoader warns of more processes than cores; the user has chosen that number.
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
                    worker_init_fn=partial(_start_worker, in_use=self._in_use, loader=self._number),
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                )
            )
        if previous is not None and threading.current_thread() is threading.main_thread():
            # When a loader process dies, DataLoader's signal handler raises at any point of the main thread. Without
            # that handler, ``next`` notices the death within 5 s and can report it.
            signal.signal(signal.SIGCHLD, previous)
        self._workers = [process for process in multiprocessing.active_children() if process not in others]
        # This runs before the exit handler of multiprocessing, which waits for its children.
        atexit.register(self.close)

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
        return self._received(made) if isinstance(made, _Sent) else cast(Made, made)

    def _received(self, sent: _Sent[Made]) -> Made:
        """Return the value; its loader process may use the buffer again once the memory is released here."""
        made = sent.whole()
        if sent.place is not None:
            release = partial(_release, self._in_use, sent.place.address[1:], self._owner)
            if sent.is_copied:
                release()
            else:  # a copy of pageable memory to a GPU has read it when it returns
                weakref.finalize(_images_of(made).untyped_storage(), release).atexit = False
        return made

    def close(self) -> None:
        """End the loader processes and the iteration. A second call does nothing."""
        if os.getpid() != self._owner:  # this is a copy in a process that a later loader forked
            return
        items, self._items = self._items, iter(())
        workers, self._workers = self._workers, []
        if not workers:
            return
        atexit.unregister(self.close)
        items._shutdown_workers()  # type: ignore[attr-defined]  # DataLoader itself calls it only when collected
        for address in [address for address in _mapped if address[0] == self._number]:
            del _mapped[address]
        deadline_s = time.monotonic() + END_WAIT_S
        for process in workers:
            process.join(max(deadline_s - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()

    def _explain(self, error: RuntimeError | OSError | EOFError) -> NoReturn:
        """Raise the cause of an error of DataLoader.

        A process that dies during a transfer breaks its connection a moment before its exit code is known.
        """
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
                hint=f"{fewer}, or more of it (docker run --shm-size=8g)",
            ) from None
        if -9 in codes:
            raise DataError(
                "a loader process was killed (exit -9): most likely out of memory",
                hint=f"{fewer} or --cache disk",
            ) from None
        if codes:
            raise DataError(
                f"a loader process ended by itself (exit {codes[0]})",
                hint="--workers 0 loads images in the main process and shows the cause",
            ) from None
        raise error


class _AsDataset(Generic[Key, Made]):
    """A map-style data set that calls ``build``.

    Our errors are returned as values, because DataLoader would raise them again with a traceback as the message.
    """

    def __init__(self, build: Callable[[Key], Made]) -> None:
        self.build = build

    def __getitem__(self, key: Key) -> _Sent[Made] | YolofleetError:
        try:
            made = self.build(key)
        except YolofleetError as error:
            return error
        place = _buffers.place(made) if _buffers is not None else None
        return _Sent(made, None) if place is None else _Sent(_with_images(made, lambda _: None), place)


class _ReadFirst(Generic[Key, Made]):
    """Makes the value of the first of two keys once its files are here, and begins to read those of the second."""

    def __init__(self, read: ReadAhead[Key], build: Callable[[Key], Made]) -> None:
        self.read, self.build = read, build

    def __call__(self, pair: tuple[Key, Key | None]) -> Made:
        self.read(*pair)
        return self.build(pair[0])


def _images_of(made: Any) -> Tensor:
    """Return the tensor of the images of a micro-batch or of a validation batch."""
    images = made[1] if isinstance(made, tuple) else made.images
    return cast(Tensor, getattr(images, "buffer", images))  # of PackedImages


def _with_images(made: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a copy of a micro-batch or of a validation batch with another tensor of images, or with none."""
    images: Any = change(_images_of(made))
    if isinstance(made, tuple):
        return (made[0], images, *made[2:])
    if hasattr(made.images, "buffer"):  # PackedImages
        images = replace(made.images, buffer=images)
    return replace(made, images=images)


def _release(in_use: np.ndarray, buffer: tuple[int, int], owner: int) -> None:
    if os.getpid() == owner:  # a forked process has copies of the values
        in_use[buffer] = 0


def _unchanged(made: Made) -> Made:
    return made


def _pinned(made: Any) -> Any:
    return _with_images(made, Tensor.pin_memory)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals to the process group. Processes forked meanwhile inherit the mask, and unblock what they ignore."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _use_opencv() -> None:
    """Use OpenCV in this thread as loader processes do.

    A thread that has used OpenCV locks a mutex while it ends, after Python's ``join``, and a process that is forked then has it
    locked for ever. OpenCV locks it again only where a thread uses one of its functions for the first time. A loader process
    is a copy of this thread, so it has the thread's values.
    """
    _, encoded = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))
    image = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR))
    image = cv2.resize(image, (6, 6), interpolation=cv2.INTER_AREA)
    cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    cv2.warpAffine(image, np.eye(2, 3), (4, 4))


def _start_worker(worker: int, in_use: np.ndarray, loader: int) -> None:
    # only loader processes need it
    from yolofleet.support.system.proc import reuse_freed_memory

    global _buffers
    # Elsewhere processes are not forked, so ``in_use`` is a copy.
    _buffers = _SharedBuffers(in_use[worker], (loader, worker)) if sys.platform == "linux" else None
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    reuse_freed_memory()
    # The parent handles a signal to the whole group (Ctrl-C, scancel). It may finish the step and write a checkpoint,
    # for which it needs its loader processes.
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    parent = multiprocessing.parent_process()
    # On Windows, DataLoader's own check (every 5 s) is enough.
    if parent is not None and sys.platform != "win32":
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent ends, even while it is blocked in a write, unlike DataLoader's own check."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
