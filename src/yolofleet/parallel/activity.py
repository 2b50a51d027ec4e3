"""What this rank is doing, as plain variables: set on the way, read by its watchdog from another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Phases(Protocol):
    """What the watchdog reads of ``report.clock.Clock``."""

    phase: str
    since_s: float

    @property
    def steps(self) -> int: ...
    @property
    def steps_here(self) -> int: ...


class Activity:
    """One rank's; equal numbers of collectives on all ranks mean that they are equally far.

    Attributes:
        clock: of a training run, once there is one.
        task: a long job outside of steps ("indexing"), else "".
        ticks: parts of long jobs that are done, counted.
        collectives: how many have been started. last: name, shape and number format of the last one.
        waiting: for a collective, in this moment.
        settle: finishes what must be finished before the process may be ended (a checkpoint being written).
    """

    def __init__(self) -> None:
        self.clock: Phases | None = None
        self.task = ""
        self.ticks = 0
        self.collectives = 0
        self.last: tuple[Any, ...] = ()
        self.waiting = False
        self.settle: Callable[[], None] = lambda: None

    @contextmanager
    def doing(self, task: str) -> Iterator[None]:
        """A job that may take long."""
        self.task, outer = task, self.task
        try:
            yield
        finally:
            self.task = outer

    def tick(self, *_: object) -> None:
        """Something of a long job is done."""
        self.ticks += 1

    def started(self, name: str, *size: Any) -> None:
        """A collective has been started."""
        self.collectives += 1
        self.last = (name, *size)

    def last_text(self) -> str:
        """``all_reduce float32 [1024]``."""
        if not self.last:
            return "none"
        name, shape, dtype = self.last
        return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
