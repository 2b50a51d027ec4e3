"""The attempts of a run, and what follows each of them.

The rules are pure functions. :func:`run_attempts` is the loop of every run of several processes; ``local.py`` runs its
attempts on this machine, ``attempts.py`` on hosts.

Hosts have numbers in the fleet (``host_index``) here, whatever their ranks in an attempt are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import record_event
from yolofleet.support.text import inform

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.endings import Failure

MOST_AT_ONE_STEP = 3  # equal failures without a step between them
HOUR_S = 3600.0
SETTLE_S = 2.0  # after a failure: other ranks may fail as well, and report why
SHORT_SETTLE_S = 0.5  # the same, if another attempt follows
FAILED_GRACE_S = 8.0


@dataclass(frozen=True)
class RestartRules:
    """When a run goes on after a failure."""

    restarts: int = 0  # at most so many within an hour; 0: the first failure ends the run
    min_devices: int = 1  # with fewer, the run waits for hosts to come back


# -- while an attempt runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunningAttempt:
    """What the launcher knows of an attempt that runs."""

    stop_requests: int = 0  # how often someone asked the run to stop
    must_end: bool = False  # this launcher has lost the lease of the run
    failed_for_s: float | None = None  # seconds since the first host failed or was lost; None: none did
    has_lost_host: bool = False  # a host cannot be reached any longer, so it will not report why it failed
    goes_on: bool = False  # another attempt may follow a failure, because ``--restarts`` is not 0
    # a host waits to take part, and the ranks were not asked to save and stop for it yet
    has_host_to_join: bool = False


def stop_grace_s(attempt: RunningAttempt, grace_s: float) -> float | None:
    """Return how long the ranks may take to end, from now; None: the attempt runs on.

    Args:
        grace_s: time to save and stop.
    """
    if attempt.stop_requests > 1 or attempt.must_end:
        return 0.0
    if attempt.stop_requests:
        return grace_s
    if attempt.failed_for_s is not None:
        settle_s = SHORT_SETTLE_S if attempt.goes_on else SETTLE_S
        if not attempt.has_lost_host and attempt.failed_for_s <= settle_s:
            return None
        return 0.0 if attempt.goes_on else FAILED_GRACE_S
    return grace_s if attempt.has_host_to_join else None


# -- after an attempt ----------------------------------------------------------------------------------------


class Why(Enum):
    """Why a host is left out of the next attempt. LOST and CUT_OFF end by themselves, the others by ``yolofleet fleet add``."""

    LOST = "it cannot be reached"
    TAKEN_AWAY = "its machine will be taken away"
    GPU_FAILED = "one of its GPUs failed"
    CUT_OFF = "it and the hosts that go on do not all reach each other"
    COULD_NOT_JOIN = "the run did not reach the next step with it"
    FAILED_AGAIN = "it failed there before, after the same step"


@dataclass(frozen=True)
class EndedAttempt:
    """How an attempt ended."""

    hosts: Mapping[int, str]  # names of its hosts, by host_index
    failure: Failure | None = None  # why it failed; None: it succeeded, or someone asked the run to stop
    # why a host cannot take part any longer, by host_index: LOST, TAKEN_AWAY or GPU_FAILED
    gone: Mapping[int, Why] = field(default_factory=dict)
    joined: Sequence[int] = ()  # host_index of each host that took part for the first time, or again
    steps_before: int = -1  # number of steps that the run had done before this attempt
    made_room: bool = False  # the ranks saved and stopped so that another host can take part
    has_busy_port: bool = False  # it did not begin, because another process took its port
    ports_left: int = 0  # how many further ports may be tried


class Next(Enum):
    """What follows an attempt."""

    END = auto()
    SAME_ATTEMPT = auto()  # on another port
    NEW_ATTEMPT = auto()


@dataclass(frozen=True)
class Action:
    """What the launcher does after an attempt."""

    next: Next
    # why a host does not take part in the next attempt, by host_index
    left_out: Mapping[int, Why] = field(default_factory=dict)
    counts: bool = False  # the failure counts against ``--restarts``
    is_recorded: bool = False  # the report of the run shows the failure
    text: str = ""  # what to tell the user; "" = nothing


def next_action(
    ended: EndedAttempt, earlier: Sequence[tuple[float, Failure]], now_s: float, rules: RestartRules
) -> Action:
    """Return what follows an attempt.

    Args:
        earlier: the failures that counted, with their times; the newest last.
    """
    failure, hosts, gone = ended.failure, ended.hosts, ended.gone
    leaving = [index for index, why in gone.items() if why is not Why.LOST]
    if ended.has_busy_port and ended.ports_left:
        return Action(Next.SAME_ATTEMPT)
    if rules.restarts and 0 < len(leaving) < len(hosts):
        if failure is None or Why.TAKEN_AWAY in gone.values():
            return Action(Next.NEW_ATTEMPT, gone)
        return Action(Next.NEW_ATTEMPT, gone, is_recorded=True, text=failure.text)
    if failure is None:
        return Action(Next.NEW_ATTEMPT if ended.made_room else Next.END)
    if ended.joined and failure.step <= ended.steps_before:
        left_out = dict.fromkeys(ended.joined, Why.COULD_NOT_JOIN) | dict(gone)
        return Action(Next.NEW_ATTEMPT, left_out, text=failure.text)
    failures = [*earlier, (now_s, failure)]
    if not rules.restarts or not failure.may_pass:
        return Action(Next.END, counts=True)
    if repeats(failures) >= MOST_AT_ONE_STEP:
        many = f"{MOST_AT_ONE_STEP} times, each time after {max(failure.step, 0)} steps"
        return Action(Next.END, counts=True, text=f"not started again: it failed in the same way {many}")
    if sum(now_s - at_s < HOUR_S for at_s, _ in failures) > rules.restarts:
        many = f"more than {rules.restarts} times within an hour (--restarts {rules.restarts})"
        return Action(Next.END, counts=True, text=f"not started again: it failed {many}")
    left_out = dict(gone)
    if not gone and len(hosts) > 1 and repeats(failures, same_host=True) > 1:
        left_out = {index: Why.FAILED_AGAIN for index, name in hosts.items() if name == failure.host}
    return Action(Next.NEW_ATTEMPT, left_out, counts=True, is_recorded=True, text=failure.text)


def repeats(failures: Sequence[tuple[float, Failure]], *, same_host: bool = False) -> int:
    """Return how many of the last attempts failed as the very last, one after another, without a step between them."""
    last, count = failures[-1][1], 0
    for _, failure in reversed(failures):
        if (failure.kind, failure.step) != (last.kind, last.step) or (
            same_host and failure.host != last.host
        ):
            break
        count += 1
    return count


# -- the loop ------------------------------------------------------------------------------------------------


class Attempts(Protocol):
    """How to run the attempts of a run."""

    def attempt(self) -> EndedAttempt:
        """Run an attempt to its end."""

    def prepare(self, ended: EndedAttempt, action: Action) -> bool:
        """Prepare the attempt that ``action`` asks for; return False if that is not possible."""


def run_attempts(attempts: Attempts, rules: RestartRules, folder: RunFolder) -> None:
    """Run attempts until none follows. Record failures in the events of the run in ``folder``."""
    failures: list[tuple[float, Failure]] = []
    while True:
        ended, now_s = attempts.attempt(), time.monotonic()
        action = next_action(ended, failures, now_s, rules)
        left_out = {ended.hosts[index]: why for index, why in action.left_out.items()}
        lines = [action.text] if action.text else []
        if ended.failure is not None and action.text == ended.failure.text:
            lines += filter(None, [ended.failure.details])
        lines += [
            f"{name} is left out: {why.value}"
            for name, why in left_out.items()
            if why is not Why.LOST or not action.text.startswith(f"{name} is lost")
        ]
        if lines:
            inform("\n" + "\n".join(lines))
        if ended.failure is not None and action.counts:
            failures.append((now_s, ended.failure))
        if ended.failure is not None and action.is_recorded:
            record_event(folder, "restart", why=ended.failure.text, step=ended.failure.step)
        for name, why in left_out.items():
            record_event(folder, "host_left", host=name, why=why.value)
        if action.next is Next.END or not attempts.prepare(ended, action):
            return
