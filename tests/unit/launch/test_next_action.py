"""What the launcher does next: while an attempt runs, and after one has ended."""

from __future__ import annotations

from typing import Any

import pytest

from yolofleet.hosts.endings import Failure
from yolofleet.launch.next_action import (
    HOUR_S,
    MOST_AT_ONE_STEP,
    Action,
    EndedAttempt,
    Next,
    RestartRules,
    RunningAttempt,
    next_action,
    stop_grace_s,
)

GRACE_S = 300.0
HOSTS = {0: "a", 2: "b", 3: "c"}  # host 1 is lost, so ranks and host numbers differ


def killed(step: int, host: str = "a", kind: str = "was killed", *, may_pass: bool = True) -> Failure:
    return Failure(f"rank 0 on {host} {kind}", kind, step, may_pass, host)


@pytest.mark.parametrize(
    ("attempt", "expected_s"),
    [
        ({}, None),
        ({"stop_requests": 1}, GRACE_S),
        ({"stop_requests": 2}, 0.0),
        ({"stop_requests": 1, "must_end": True}, 0.0),
        ({"must_end": True}, 0.0),
        # other ranks may report why they fail, so the launcher waits for 2 s, or 0.5 s if another attempt follows
        ({"failed_for_s": 1.9}, None),
        ({"failed_for_s": 2.1}, 8.0),
        ({"failed_for_s": 0.4, "goes_on": True}, None),
        ({"failed_for_s": 0.6, "goes_on": True}, 0.0),
        ({"failed_for_s": 0.0, "has_lost_host": True}, 8.0),
        ({"failed_for_s": 0.0, "has_lost_host": True, "goes_on": True}, 0.0),
        ({"failed_for_s": 0.0, "stop_requests": 1}, GRACE_S),
        ({"has_host_to_join": True, "goes_on": True}, GRACE_S),
        ({"has_host_to_join": True, "goes_on": True, "failed_for_s": 0.1}, None),
    ],
)
def test_a_running_attempt_is_stopped(attempt: dict[str, Any], expected_s: float | None) -> None:
    assert stop_grace_s(RunningAttempt(**attempt), GRACE_S) == expected_s


END, AGAIN = Next.END, Next.NEW_ATTEMPT
DEVICE = Failure("GPU 1 failed", "DeviceError", 5, False, "c")


@pytest.mark.parametrize(
    ("ended", "restarts", "expected"),
    [
        # it succeeded, or someone asked it to stop; it made room for a host
        ({}, 9, Action(END)),
        ({"made_room": True}, 9, Action(AGAIN)),
        # a port is taken: the same attempt on another port, as long as there are ports
        ({"failure": killed(-1), "has_busy_port": True, "ports_left": 1}, 0, Action(Next.SAME_ATTEMPT)),
        ({"failure": killed(-1), "has_busy_port": True}, 0, Action(END, counts=True)),
        # a failure
        ({"failure": killed(5)}, 0, Action(END, counts=True)),
        ({"failure": killed(5, may_pass=False)}, 9, Action(END, counts=True)),
        ({"failure": killed(5)}, 1, Action(AGAIN, counts=True, is_recorded=True, text="rank 0 on a was killed")),
        # a machine is taken away, or has a GPU that failed: the others go on, and this is no failure that counts
        ({"leaving": [2]}, 9, Action(AGAIN, (2,), are_away=True, text="b will be taken away")),
        ({"leaving": [2, 3]}, 9, Action(AGAIN, (2, 3), are_away=True, text="b, c will be taken away")),
        ({"leaving": [2]}, 0, Action(END)),
        ({"leaving": [0, 2, 3]}, 9, Action(END)),
        (
            {"leaving": [3], "failure": DEVICE},
            9,
            Action(AGAIN, (3,), are_away=True, is_recorded=True, text="GPU 1 failed\nc is left out"),
        ),
        ({"leaving": [0, 2, 3], "failure": DEVICE}, 9, Action(END, counts=True)),
        # a host that has just joined prevents the first step
        (
            {"failure": killed(5), "joined": [3], "steps_before": 5},
            9,
            Action(AGAIN, (3,), are_away=True, text="c cannot take part: rank 0 on a was killed"),
        ),
        (
            {"failure": killed(6), "joined": [3], "steps_before": 5},
            9,
            Action(AGAIN, counts=True, is_recorded=True, text="rank 0 on a was killed"),
        ),
    ],
)  # fmt: skip
def test_what_follows_the_first_attempt(ended: dict[str, Any], restarts: int, expected: Action) -> None:
    assert next_action(EndedAttempt(HOSTS, **ended), [], 0.0, RestartRules(restarts)) == expected


def after(*failures: Failure, restarts: int = 10, apart_s: float = 1.0, **ended: Any) -> Action:
    """What follows the last of several failures."""
    *earlier, last = failures
    known = [(apart_s * number, failure) for number, failure in enumerate(earlier)]
    attempt = EndedAttempt(HOSTS, last, **ended)
    return next_action(attempt, known, apart_s * len(earlier), RestartRules(restarts))


def test_failures_after_different_steps_may_pass() -> None:
    for many in range(1, 11):
        assert after(*map(killed, range(many))).next is AGAIN


@pytest.mark.parametrize("restarts", [1, 2, 5])
def test_more_failures_within_an_hour_than_allowed_end_the_run(restarts: int) -> None:
    steps = range(restarts + 1)
    assert after(*map(killed, steps[:-1]), restarts=restarts).next is AGAIN
    action = after(*map(killed, steps), restarts=restarts)
    assert (
        action.next is END
        and f"more than {restarts} times within an hour (--restarts {restarts})" in action.text
    )


@pytest.mark.parametrize(
    ("since_first_s", "follows"), [(HOUR_S - 1, END), (HOUR_S, AGAIN), (HOUR_S + 1, AGAIN)]
)
def test_failures_of_more_than_an_hour_ago_do_not_count(since_first_s: float, follows: Next) -> None:
    assert after(killed(1), killed(2), restarts=1, apart_s=since_first_s).next is follows


def test_the_same_fault_after_the_same_step_ends_the_run_also_on_another_host() -> None:
    failures = [killed(5, host) for host in ("a", "a", "b")]
    assert [after(*failures[:many]).next for many in (1, 2, 3)] == [AGAIN] * (MOST_AT_ONE_STEP - 1) + [END]
    assert "3 times, each time after 5 steps" in after(*failures).text


def test_another_fault_or_a_step_in_between_is_no_repetition() -> None:
    failures = [killed(5), killed(5), killed(5, kind="aborted"), killed(5), killed(6), killed(6)]
    assert all(after(*failures[:many]).next is AGAIN for many in range(1, 7))


def test_a_host_that_fails_twice_in_the_same_way_is_left_out() -> None:
    assert after(killed(5, "b"), killed(5, "b")).without == (2,)
    assert "b is left out: it failed there before" in after(killed(5, "b"), killed(5, "b")).text
    assert after(killed(5, "a"), killed(5, "b")).without == ()
    assert after(killed(5, "b"), killed(6, "b")).without == ()
    assert after(killed(5, "b"), killed(5, "b"), lost=[3]).without == (), "a lost host may be the cause"


def test_the_only_host_is_never_left_out() -> None:
    ended = EndedAttempt({0: "a"}, killed(5, "a"))
    assert next_action(ended, [(0.0, killed(5, "a"))], 1.0, RestartRules(9)).without == ()
