"""Turn stop signals into the exception :class:`Stopped`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from yolofleet.errors import Stopped

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@contextmanager
def stoppable() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGUSR1 end the block with :class:`Stopped`.

    The training loop and a launcher with running processes save state first, so they install their own handlers. Inside
    the block the signals raise KeyboardInterrupt, which ``except Exception`` does not catch.
    """
    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
        yield
    except KeyboardInterrupt as problem:
        raise Stopped(
            "stopped on request, outside of training: there was nothing to save",
            source=str(problem) or "Ctrl-C",
            hint="run the same command again",
        ) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt with the name of the signal: a handler for :func:`signal.signal`."""
    raise KeyboardInterrupt(signal.Signals(number).name)
