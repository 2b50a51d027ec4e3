"""The current activity of this rank, as plain variables: the main thread sets them, the watchdog's thread reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from yolofleet.parallel.status import RankStatus


class Phases(Protocol):
    """The part of ``report.clock.Clock`` that the watchdog reads."""

    phase: str
    since_s: float

    @property
    def steps(self) -> int: ...
    @property
    def steps_here(self) -> int: ...
    def spent(self) -> tuple[int, float, float]: ...


class Activity:
    """Activity of one rank. Ranks with equal numbers of collectives are at the same point of the program.

    Attributes:
        clock: of a training run, once it exists.
        task: the current long task outside of steps ("indexing"), else "".
        ticks: counts finished parts of long tasks.
        collectives: number of collectives started. last: name, shape and dtype of the last one.
        waiting: whether the main thread waits for a collective now.
        stop_requested: a rank got a request to stop: this one, or another one whose heartbeat said so.
        ranks: returns what every rank does, as far as this one knows from heartbeats; empty in a run of one process.
        finish_writing: waits until a checkpoint being written is complete; called before the process is ended.
    """

    def __init__(self) -> None:
        self.clock: Phases | None = None
        self.task = ""
        self.ticks = 0
        self.collectives = 0
        self.last: tuple[Any, ...] = ()
        self.waiting = False
        self.stop_requested = False
        self.ranks: Callable[[], Sequence[RankStatus]] = tuple
        self.finish_writing: Callable[[], None] = lambda: None

    @contextmanager
    def doing(self, task: str) -> Iterator[None]:
        """Name the long task of the block."""
        self.task, outer = task, self.task
        try:
            yield
        finally:
            self.task = outer

    def tick(self, *_: object) -> None:
        """Record progress of a long task."""
        self.ticks += 1

    def started(self, name: str, *size: Any) -> None:
        """Record the start of a collective."""
        self.collectives += 1
        self.last = (name, *size)

    def last_text(self) -> str:
        """Return the last collective as text: ``all_reduce float32 [1024]``."""
        if not self.last:
            return "none"
        name, shape, dtype = self.last
        return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
