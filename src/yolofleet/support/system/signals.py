"""Turn stop signals into the exception :class:`Stopped`; let another thread request a stop as a signal would."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from yolofleet.support.errors import Stopped

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]

_requested_by = ""  # the source of a request_stop that no handler has got yet


def request_stop(source: str) -> None:
    """Run the main thread's handler of SIGTERM, from any thread; its message names ``source`` instead of the signal.

    Nothing happens if the process has no such handler, outside of :func:`stoppable` and of training.
    """
    global _requested_by
    _requested_by = source
    _thread.interrupt_main(signal.SIGTERM)


def stop_source(number: int) -> str:
    """Return the source of the request that a handler got as the signal ``number``."""
    global _requested_by
    requested_by, _requested_by = _requested_by, ""
    return requested_by or signal.Signals(number).name


def request_name(number: int) -> str:
    """Return ``Ctrl-C``, or the name of a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], Any], numbers: Sequence[int] = (signal.SIGINT, *STOP_SIGNALS)
) -> Iterator[None]:
    """Let ``handler`` take Ctrl-C and the stop signals inside the block; SIGHUP stays ignored if it is (``nohup``).

    Outside of the main thread nothing changes, because Python allows handlers only there.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, handler) for number in numbers if not _is_ignored(number)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Let stop signals wait until the end of the block. Python drops an exception of a handler inside a hook of ``os.fork``."""
    came: list[int] = []
    try:
        with handling(lambda number, _: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def _is_ignored(number: int) -> bool:
    """Return whether this process must outlive its terminal, and ``number`` is the signal of a closed terminal."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def stoppable() -> Iterator[None]:
    """Make Ctrl-C and the stop signals end the block with :class:`Stopped`.

    The training loop and a launcher with running processes save state first, so they install their own handlers. Inside
    the block the signals raise KeyboardInterrupt, which ``except Exception`` does not catch.
    """
    try:
        with handling(interrupt, STOP_SIGNALS):
            yield
    except KeyboardInterrupt as problem:
        raise Stopped(
            "stopped on request, outside of training: there was nothing to save",
            source=str(problem) or "Ctrl-C",
            hint="run the same command again",
        ) from None


class StopSignal(KeyboardInterrupt):
    """A stop signal. After a plain KeyboardInterrupt that passed through ``exec``, as modules use it while they are
    imported, Python ends the process by SIGINT although it was caught, so the exit code of :class:`Stopped` was lost."""


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Raise StopSignal with the source of the request: a handler for :func:`signal.signal`."""
    raise StopSignal(stop_source(number))


def interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Raise StopSignal, and ignore more stop signals: a closed terminal sends several, which would end the removal of files."""
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    interrupt(number, frame)
