"""Values made of keys in this process or in loader processes: micro-batches, and batches of a validation.

A key alone decides what a value contains, so the number of loader processes changes nothing. The processes are those
of PyTorch's DataLoader. This module adds what it lacks: keys taken one by one from an endless stream, errors that keep
their type, and processes that end with their parent, not before it.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from yolofleet.data.images.decode import set_opencv_threads
from yolofleet.data.input.read_ahead import ReadAhead, with_following
from yolofleet.data.input.shared_buffers import Made, ReceivedBuffers, Sent, fill_buffers, pinned
from yolofleet.support.closing import Closing
from yolofleet.support.errors import DataError, YolofleetError
from yolofleet.support.system.signals import deferred

END_WAIT_S = 10.0  # for a loader process to finish the image in hand before it is killed
DEATH_WAIT_S = 1.0  # for an exit code to appear
_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # of signals to the whole process group
_GROUP_SIGNALS = [getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name)]

Key = TypeVar("Key")


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
        """Start the loader processes."""
        self._workers: list[Any] = []
        self._owner = os.getpid()
        self._items: Iterator[Any] = iter(())
        builder = _Builder(build, read_ahead)
        pairs = with_following(keys, workers if read_ahead else 0)
        if workers == 0:
            made = map(builder, pairs)
            self._items = map(pinned, made) if pin_memory else made
            return
        threads = cv2.getNumThreads()
        set_opencv_threads(1)
        _use_opencv()
        # The main process may hold the micro-batches of a step while loader processes prepare others.
        self._buffers = ReceivedBuffers(workers, 2 * prefetch + 2)
        others = set(multiprocessing.active_children())
        previous = None if sys.platform == "win32" else signal.getsignal(signal.SIGCHLD)
        try:
            with deferred(), warnings.catch_warnings(), _signals_blocked():
                # DataLoader warns of more processes than cores; the user has chosen that number.
                warnings.filterwarnings("ignore", "This DataLoader will create")
                self._items = iter(
                    DataLoader(
                        cast(Any, builder),
                        batch_size=None,
                        sampler=cast(Any, pairs),
                        num_workers=workers,
                        prefetch_factor=prefetch,
                        collate_fn=_unchanged,
                        pin_memory=pin_memory,
                        worker_init_fn=partial(_start_worker, self._buffers.in_use, self._buffers.number),
                        multiprocessing_context="fork" if sys.platform == "linux" else None,
                    )
                )
                if previous is not None and threading.current_thread() is threading.main_thread():
                    # When a loader process dies, DataLoader's signal handler raises at any point of the main thread.
                    # Without that handler, ``next`` notices the death within 5 s and can report it.
                    signal.signal(signal.SIGCHLD, previous)
                self._workers = [one for one in multiprocessing.active_children() if one not in others]
                # This runs before the exit handler of multiprocessing, which waits for its children.
                atexit.register(self.close)
        except BaseException:  # a stop signal, which the children ignore: the end of this process would wait
            self.close()
            raise
        finally:
            set_opencv_threads(threads)

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
        return self._buffers.received(made) if isinstance(made, Sent) else cast(Made, made)

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
        self._buffers.close()
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


class _Builder(Generic[Key, Made]):
    """Makes the value of the first of two keys, whose files ``read_ahead`` reads before. A map-style data set.

    As a data set it returns our errors as values, because DataLoader would raise them again with a traceback as the message.
    """

    def __init__(self, build: Callable[[Key], Made], read_ahead: ReadAhead[Key] | None) -> None:
        self.build, self.read_ahead = build, read_ahead

    def __call__(self, pair: tuple[Key, Key | None]) -> Made:
        if self.read_ahead is not None:
            self.read_ahead(*pair)
        return self.build(pair[0])

    def __getitem__(self, pair: tuple[Key, Key | None]) -> Sent[Made] | YolofleetError:
        try:
            return Sent.of(self(pair))
        except YolofleetError as error:
            return error


def _unchanged(made: Made) -> Made:
    return made


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
    encoded = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1]
    image = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR))
    image = cv2.resize(image, (6, 6), interpolation=cv2.INTER_AREA)
    cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    cv2.warpAffine(image, np.eye(2, 3), (4, 4))


def _start_worker(in_use: np.ndarray, loader: int, worker: int) -> None:
    # only loader processes need it
    from yolofleet.support.system.proc import reuse_freed_memory

    if sys.platform == "linux":  # elsewhere processes are not forked, so ``in_use`` is a copy
        fill_buffers(in_use[worker], (loader, worker))
    set_opencv_threads(1)
    torch.set_num_threads(1)
    reuse_freed_memory()
    # The parent handles a signal to the whole group (Ctrl-C, scancel). It may finish the step and write a checkpoint,
    # for which it needs its loader processes.
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    parent = multiprocessing.parent_process()
    if parent is not None and sys.platform != "win32":  # there, DataLoader's own check (every 5 s) is enough
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent ends, even while it is blocked in a write, unlike DataLoader's own check."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
