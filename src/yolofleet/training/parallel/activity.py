"""The current activity of this rank as plain variables, which the main thread sets, and the heartbeats made of them.

The thread of the watchdog reads the variables and makes the heartbeats.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from yolofleet.support import devices
from yolofleet.support.system.proc import host_temperature_c, resident_bytes

if TYPE_CHECKING:
    from yolofleet.runs.rank_status import RankStatus
    from yolofleet.runs.report.clock import Clock

MEDIAN_FACTOR = 10  # a phase of a step may last 10 times its median
WINDOW = 30  # steps of that median
FIRST_STEPS = 5  # of this process: slow (allocation, choice of kernels), and there is no median yet
OTHER_FACTOR = 20  # limit of phases and tasks outside of steps, in multiples of stall_s
TASK_FACTORS = {  # downloads ("data set", "weights") and copies have their own deadlines
    "data set": math.inf,
    "weights": math.inf,
    "copying": math.inf,
    "plots": math.inf,  # matplotlib may build its list of fonts first
    "indexing": 60.0,
    "compiling": 60.0,
    "connecting": 10.0,  # so that the report comes before --timeout-s ends the collective
}
SILENCE_FACTOR = 4  # outside of steps, one call may hold the GIL for a while (imports, large files)
SPEED_WINDOW = 20  # heartbeats, about 20 s, over which a rank's speed is measured
TEMPERATURE_EVERY = 10  # heartbeats: asking a driver may take milliseconds


class Activity:
    """Activity of one rank. Ranks with equal numbers of collectives are at the same point of the program.

    Attributes:
        began_at_s: when this process began its work, seconds since 1970.
        clock: of a training run, once it exists.
        seconds: of each task so far, without the tasks inside it; those of "" belong to no task.
        task: the current long task outside of steps ("indexing"), else "".
        ticks: counts finished parts of long tasks.
        collectives: number of collectives started. last: name, shape and dtype of the last one.
        waiting: whether the main thread waits for a collective now.
        stop_requested: a rank got a request to stop: this one, or another one whose heartbeat said so.
        store_s: longest wait for images of a data set in a store.
        ranks: returns what every rank does, as far as this one knows from heartbeats; empty in a run of one process.
        finish_writing: waits until a checkpoint being written is complete; called before the process is ended.
    """

    def __init__(self) -> None:
        self.began_at_s = time.time()
        self.clock: Clock | None = None
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter()
        self.task = ""
        self.ticks = 0
        self.collectives = 0
        self.last: tuple[Any, ...] = ()
        self.waiting = False
        self.stop_requested = False
        self.store_s = 0.0
        self.ranks: Callable[[], Sequence[RankStatus]] = tuple
        self.finish_writing: Callable[[], None] = lambda: None

    @contextmanager
    def doing(self, task: str) -> Iterator[None]:
        """Name the long task of the block."""
        outer = self.task
        self._switch(task)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, task: str) -> None:
        now_s = time.perf_counter()
        self.seconds[self.task] = self.seconds.get(self.task, 0.0) + now_s - self._since_s
        self.task, self._since_s = task, now_s

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


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank, published about once a second.

    Attributes:
        number: of the heartbeat, increasing.
        phase: of the rank's clock, or its task.
        collectives: number of collectives started.
        waiting: whether it waits for the last one; last: the last one as text.
        age_s: seconds without progress.
        limit_s, silence_s: longest permitted time without progress, and without a heartbeat.
        ended: its work is over. failed: by an exception.
        stop_requested: it knows of a request to stop.
        rate_img_s, waits, memory_gib, temperature_c: see ``status.RankStatus``.
    """

    number: int
    phase: str
    step: int
    collectives: int
    waiting: bool
    last: str
    age_s: float
    limit_s: float
    silence_s: float
    ended: bool
    failed: bool = False
    stop_requested: bool = False
    rate_img_s: float = 0.0
    waits: float = 0.0
    memory_gib: float = 0.0
    temperature_c: float = 0.0

    def needs_others(self) -> bool:
        """Return whether the rank waits for others, or will wait for them before its work ends."""
        return self.waiting or self.phase in ("data", "compute", "comm", "evaluate")

    def place_text(self) -> str:
        return f"{self.phase!r}" + (f" after step {self.step}" if self.step else "")


class ActivityMonitor:
    """Measures the progress of this process, and makes its heartbeats.

    Args:
        stall_s: smallest limit.
        least_silence_s: smallest permitted time between two heartbeats.
    """

    def __init__(self, activity: Activity, stall_s: float, least_silence_s: float = 0.0) -> None:
        self.activity, self.stall_s, self.least_silence_s = activity, stall_s, least_silence_s
        self._mark: tuple[Any, ...] = ()
        self._age_s = 0.0
        self._steps = -1
        self._longest: dict[str, float] = {}  # of the current step, by phase
        self._recent: dict[str, deque[float]] = {}
        self._number = 0

    def heartbeat(self, elapsed_s: float, *, ended: bool = False, failed: bool = False) -> Heartbeat:
        """Return the next heartbeat, ``elapsed_s`` of this process's running time after the last one."""
        a, clock = self.activity, self.activity.clock
        phase = clock.phase if clock else "start"
        steps, steps_here = (clock.steps, clock.steps_here) if clock else (0, 0)
        mark = (phase, clock.since_s if clock else 0.0, steps, a.task, a.ticks, a.collectives, a.waiting)
        if mark != self._mark:
            self._mark, self._age_s = mark, 0.0
        else:
            self._age_s += elapsed_s
        if steps != self._steps:
            self._steps = steps
            for name, longest in self._longest.items():
                self._recent.setdefault(name, deque(maxlen=WINDOW)).append(longest)
            self._longest = {}
        self._longest[phase] = max(self._longest.get(phase, 0.0), self._age_s)
        self._number += 1
        steady = not a.task and phase in ("data", "compute", "comm") and steps_here >= FIRST_STEPS
        return Heartbeat(
            number=self._number,
            phase=a.task or phase,
            step=steps,
            collectives=a.collectives,
            waiting=a.waiting,
            last=a.last_text(),
            age_s=self._age_s,
            limit_s=self._limit_s(phase) if steady else self.stall_s * TASK_FACTORS.get(a.task, OTHER_FACTOR),
            silence_s=max(self.stall_s * (1 if steady else SILENCE_FACTOR), self.least_silence_s),
            ended=ended,
            failed=failed,
            stop_requested=a.stop_requested,
        )

    def _limit_s(self, phase: str) -> float:
        recent = self._recent.get(phase)
        store_s = self.activity.store_s if phase == "data" else 0.0
        return max(self.stall_s, store_s, MEDIAN_FACTOR * statistics.median(recent) if recent else 0.0)


class Gauges:
    """Reads the figures of this rank that its heartbeat carries, in the thread of the watchdog."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._past: deque[tuple[int, float, float]] = deque(maxlen=SPEED_WINDOW)
        self._number, self._temperature_c = 0, 0.0

    def read(self, clock: Clock | None) -> dict[str, Any]:
        """Return the fields of a heartbeat from ``rate_img_s`` on."""
        found = {"rate_img_s": 0.0, "waits": 0.0, "memory_gib": 0.0}
        device, is_host = self._device, devices.is_host(self._device)
        # a driver may raise anything, and no figure here is worth the watch over the run
        with suppress(Exception):
            used_bytes = resident_bytes() if is_host else devices.peak_memory_bytes(device)
            found["memory_gib"] = round(used_bytes / 2**30, 2)
            if self._number == 0 or (self._temperature_c and self._number % TEMPERATURE_EVERY == 0):
                temperature_c = host_temperature_c() if is_host else devices.temperature_c(device)
                self._temperature_c = round(temperature_c, 0)
        self._number += 1
        found["temperature_c"] = self._temperature_c
        if clock is not None:
            self._past.append(clock.spent())
            (images, busy_s, comm_s), (images_then, busy_then_s, comm_then_s) = self._past[-1], self._past[0]
            busy_s, comm_s = max(busy_s - busy_then_s, 0.0), max(comm_s - comm_then_s, 0.0)
            if busy_s > 0:
                found["rate_img_s"] = round(max(images - images_then, 0) / busy_s, 3)
                found["waits"] = round(comm_s / (busy_s + comm_s), 3)
        return found
