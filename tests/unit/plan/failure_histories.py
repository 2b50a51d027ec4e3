"""Simulated runs with failures, and the estimates of Young and Daly: what the formula of failures is compared with.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974, doi 10.1145/361147.361115);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import heapq
import math

from yolofleet.errors import ConfigError
from yolofleet.plan.failures import MOST_TIMES, FailureModel, Speed
from yolofleet.random_numbers import generator


def young_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return sqrt(2 x cost x mean time between failures). Source: Young 1974."""
    return math.sqrt(2 * save_s * between_failures_s)


def daly_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return the higher order estimate. Source: Daly 2006, equation 37."""
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    x = save_s / (2 * between_failures_s)
    return young_interval_s(save_s, between_failures_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def history_s(
    work_s: float, machines: int, speed: Speed, failing: FailureModel, *, seed: int, number: int
) -> float:
    """Simulate one run, failure by failure, and return its seconds. It includes what the formula leaves out.

    A replacement takes an exponential time. Draws are functions of (seed, number).

    Raises:
        ConfigError: the run takes ``MOST_TIMES`` times as long as without failures.
    """
    rng = generator(seed, "plan failures", number)

    def after(rate: float) -> float:
        return -math.log(1 - rng.random()) / rate if rate else math.inf

    available, returns, now = machines, list[float](), 0.0
    run = _Progress(failing)
    while True:
        event_s = after(available * failing.rate_s)
        is_failure = not returns or now + event_s < returns[0]
        until = now + event_s if is_failure else returns[0]
        begin = min(now + run.pause_s, until)
        if available:
            run.pause_s -= begin - now
            ended = run.train(until - begin, speed(available), work_s)
            if ended is not None:
                return begin + ended
        now = until
        if now > MOST_TIMES * work_s:
            raise ConfigError(
                f"a simulated run takes more than {MOST_TIMES} times as long as without failures"
            )
        if is_failure:
            available -= 1
            heapq.heappush(returns, now + failing.replacement_s * after(1.0))
            run.lose(from_memory=bool(failing.memory_s) and available > 0)
        else:
            heapq.heappop(returns)
            available += 1
            run.keep()
        if is_failure:
            run.pause_s = failing.restart_s
        elif available == 1:
            run.pause_s = failing.start_s
        else:
            run.pause_s = max(run.pause_s, failing.return_s + failing.return_save_s)


class _Progress:
    """What a run has done, in seconds of all machines, and what of it is in a checkpoint and in memory."""

    def __init__(self, failing: FailureModel) -> None:
        self.failing = failing
        self.done = self.saved = self.in_memory = 0.0
        self.since_save = self.since_memory = 0.0  # seconds of training
        self.pause_s = 0.0

    def train(self, seconds: float, speed: float, work_s: float) -> float | None:
        """Train for ``seconds`` with states and checkpoints; return when the work was done, or None."""
        failing, used = self.failing, 0.0
        while seconds - used > 0:
            to_save = failing.interval_s - self.since_save
            to_memory = failing.memory_s - self.since_memory if failing.memory_s else math.inf
            to_end = (work_s - self.done) / speed if speed else math.inf
            span = min(to_save, to_memory, to_end, seconds - used)
            cycle_s = failing.memory_s + failing.memory_save_s
            if failing.memory_s and not self.since_memory:
                cycles = int(min(min(to_save, to_end) / failing.memory_s, (seconds - used) / cycle_s)) - 1
                if cycles > 0:  # many at once
                    self.done += cycles * failing.memory_s * speed
                    self.in_memory = self.done
                    self.since_save += cycles * failing.memory_s
                    used += cycles * cycle_s
                    continue
            self.done += span * speed
            self.since_save += span
            self.since_memory += span
            used += span
            if span == to_end:
                return used
            if span == to_memory:
                used += failing.memory_save_s
                self.since_memory = 0.0
                if used <= seconds:
                    self.in_memory = self.done
            if span == to_save:
                used += failing.save_s
                self.since_save = 0.0
                if used <= seconds:
                    self.saved = self.done
        return None

    def lose(self, *, from_memory: bool) -> None:
        """Go back to the newest state that is left."""
        self.done = max(self.in_memory, self.saved) if from_memory else self.saved
        self.in_memory = self.done
        self.since_memory = 0.0
        if not from_memory:
            self.since_save = 0.0

    def keep(self) -> None:
        """Save before all machines restart with one more machine."""
        self.in_memory = self.done
        self.since_memory = 0.0
        if not self.failing.memory_s:
            self.saved, self.since_save = self.done, 0.0
