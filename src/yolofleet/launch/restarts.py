"""Decide whether a run that failed is started again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from yolofleet.report.events import EventLog
from yolofleet.report.folder import RunFolder

MOST_AT_ONE_STEP = 3  # equal failures without a step between them
HOUR_S = 3600.0


@dataclass(frozen=True)
class RestartRules:
    """When a run goes on after a failure.

    Attributes:
        restarts: at most so many within an hour; 0: the first failure ends the run.
        min_hosts, min_devices: with fewer, the run waits for hosts to come back.
    """

    restarts: int = 0
    min_hosts: int = 1
    min_devices: int = 1


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        text: what failed, in one line.
        kind: the same text for the same fault, whatever the rank.
        step: number of steps done; -1: none.
        may_pass: another attempt may succeed.
        host: where it failed.
    """

    text: str
    kind: str
    step: int
    may_pass: bool
    host: str = ""


def record_restart(folder: RunFolder, failure: Failure) -> None:
    """Append the reason for a restart to the launcher's events, for the report. Print a warning if the disk is full."""
    with EventLog(folder.launcher_events, rank=-1) as events:
        events.write("restart", why=failure.text, step=failure.step)


@dataclass
class Restarts:
    """The failures of a run so far.

    Attributes:
        count: how often the run was started again.
        why_not: why :meth:`allow` refused; "" if the failure itself says enough.
    """

    rules: RestartRules
    count: int = 0
    why_not: str = ""
    _failures: list[tuple[float, Failure]] = field(default_factory=list)

    def allow(self, failure: Failure) -> bool:
        """Record a failure, and return whether the run may be started again."""
        now, most = time.monotonic(), self.rules.restarts
        self._failures.append((now, failure))
        if not most or not failure.may_pass:
            return False
        if self.repeated(failure) >= MOST_AT_ONE_STEP:
            steps = max(failure.step, 0)
            self.why_not = (
                f"it failed in the same way {MOST_AT_ONE_STEP} times, each time after {steps} steps"
            )
        elif sum(now - at_s < HOUR_S for at_s, _ in self._failures) > most:
            self.why_not = f"it failed more than {most} times within an hour (--restarts {most})"
        return not self.why_not

    def repeated(self, failure: Failure, *, same_host: bool = False) -> int:
        """Return how many of the last attempts failed in the same way, one after another, without a step between them."""
        count = 0
        for _, earlier in reversed(self._failures):
            if (earlier.kind, earlier.step) != (failure.kind, failure.step):
                break
            if same_host and earlier.host != failure.host:
                break
            count += 1
        return count
