"""What the launcher does next: while an attempt runs, and after one has ended."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from yolofleet.fleet.hosts.endings import Failure
from yolofleet.fleet.launch.next_action import (
    HOUR_S,
    MOST_AT_ONE_STEP,
    Action,
    EndedAttempt,
    Next,
    RestartRules,
    RunningAttempt,
    Why,
    next_action,
    run_attempts,
    stop_grace_s,
)
from yolofleet.fleet.launch.ways import reaching_each_other
from yolofleet.runs.report.folder import RunFolder

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
        # a host is lost
        (
            {"failure": killed(5, "b"), "gone": {2: Why.LOST}},
            9,
            Action(AGAIN, {2: Why.LOST}, counts=True, is_recorded=True, text="rank 0 on b was killed"),
        ),
        # a machine is taken away, or has a GPU that failed: the others go on, and this is no failure that counts
        ({"gone": {2: Why.TAKEN_AWAY}}, 9, Action(AGAIN, {2: Why.TAKEN_AWAY})),
        ({"gone": {2: Why.TAKEN_AWAY, 3: Why.TAKEN_AWAY}}, 9, Action(AGAIN, {2: Why.TAKEN_AWAY, 3: Why.TAKEN_AWAY})),
        ({"gone": {2: Why.TAKEN_AWAY}}, 0, Action(END)),
        ({"gone": dict.fromkeys(HOSTS, Why.TAKEN_AWAY)}, 9, Action(END)),
        (
            {"gone": {3: Why.GPU_FAILED}, "failure": DEVICE},
            9,
            Action(AGAIN, {3: Why.GPU_FAILED}, is_recorded=True, text="GPU 1 failed"),
        ),
        ({"gone": dict.fromkeys(HOSTS, Why.GPU_FAILED), "failure": DEVICE}, 9, Action(END, counts=True)),
        # both at once
        (
            {"gone": {0: Why.LOST, 2: Why.TAKEN_AWAY}, "failure": killed(5)},
            9,
            Action(AGAIN, {0: Why.LOST, 2: Why.TAKEN_AWAY}),
        ),
        # a host that has just joined prevents the first step
        (
            {"failure": killed(5), "joined": [3], "steps_before": 5},
            9,
            Action(AGAIN, {3: Why.COULD_NOT_JOIN}, text="rank 0 on a was killed"),
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
    assert action.next is END
    assert f"more than {restarts} times within an hour (--restarts {restarts})" in action.text


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
    assert after(killed(5, "b"), killed(5, "b")).left_out == {2: Why.FAILED_AGAIN}
    assert after(killed(5, "a"), killed(5, "b")).left_out == {}
    assert after(killed(5, "b"), killed(6, "b")).left_out == {}
    lost = {3: Why.LOST}
    assert after(killed(5, "b"), killed(5, "b"), gone=lost).left_out == lost, "a lost host may be the cause"


def test_the_only_host_is_never_left_out() -> None:
    ended = EndedAttempt({0: "a"}, killed(5, "a"))
    assert next_action(ended, [(0.0, killed(5, "a"))], 1.0, RestartRules(9)).left_out == {}


def both(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return [way for a, b in pairs for way in ((a, b), (b, a))]


ONE_EACH = dict.fromkeys((0, 1, 2, 3), 1)


@pytest.mark.parametrize(
    ("devices", "broken", "kept"),
    [
        (ONE_EACH, [], [0, 1, 2, 3]),
        ({0: 1}, [], [0]),
        ({}, [], []),
        # one direction is as bad as both; of equally large sets that with the first hosts goes on
        (ONE_EACH, [(2, 3)], [0, 1, 2]),
        (ONE_EACH, [(3, 2)], [0, 1, 2]),
        (ONE_EACH, both((2, 3)), [0, 1, 2]),
        (ONE_EACH, [(0, 1)], [0, 2, 3]),
        # but more devices count more, and the number of hosts most
        ({0: 1, 1: 1, 2: 1, 3: 2}, [(2, 3)], [0, 1, 3]),
        ({0: 8, 1: 1, 2: 1}, both((0, 1), (0, 2)), [1, 2]),
        # the order of the ranks decides, not the numbers of the hosts
        ({3: 1, 2: 1, 1: 1, 0: 1}, [(0, 1)], [3, 2, 1]),
        # a star: only host 0 reaches everybody
        (ONE_EACH, both((1, 2), (2, 3), (1, 3)), [0, 1]),
        ({0: 1, 1: 1, 2: 1, 3: 4}, both((1, 2), (2, 3), (1, 3)), [0, 3]),
        # a chain: each host reaches its neighbours
        (ONE_EACH, both((0, 2), (0, 3), (1, 3)), [0, 1]),
        ({0: 1, 1: 1, 2: 2, 3: 1}, both((0, 2), (0, 3), (1, 3)), [1, 2]),
        # two networks
        (dict.fromkeys(range(5), 1), both(*((a, b) for a in (0, 1) for b in (2, 3, 4))), [2, 3, 4]),
        # the host with the most broken ways may belong to the largest set
        (dict.fromkeys(range(7), 1), both((0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6)), [0, 4, 5, 6]),
        # all ways are broken, and ways of hosts that do not take part
        (ONE_EACH, both((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)), [0]),
        ({0: 1, 1: 1, 2: 2}, both((0, 1), (0, 2), (1, 2)), [2]),
        (ONE_EACH, [(0, 9), (9, 1), (8, 8)], [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_the_most_hosts_that_all_reach_each_other_go_on(
    devices: dict[int, int], broken: list[tuple[int, int]], kept: list[int]
) -> None:
    assert reaching_each_other(devices, broken) == kept
    assert reaching_each_other(devices, [*reversed(broken)]) == kept
    assert reaching_each_other(devices, frozenset(broken)) == kept


def test_the_set_that_goes_on_is_the_best_of_all_sets() -> None:
    """Beside a search through all of them, for every way to break links between five hosts."""
    hosts = {4: 1, 0: 2, 3: 1, 1: 1, 2: 1}
    place = {host: n for n, host in enumerate(hosts)}
    pairs = list(itertools.combinations(hosts, 2))
    sets = [one for many in range(6) for one in itertools.combinations(hosts, many)]
    best_first = sorted(sets, key=lambda s: (-len(s), -sum(hosts[h] for h in s), [place[h] for h in s]))
    for bits in range(1 << len(pairs)):
        broken = [pair for n, pair in enumerate(pairs) if bits >> n & 1]
        expected = next(one for one in best_first if not any({*pair} <= {*one} for pair in broken))
        assert reaching_each_other(hosts, broken) == list(expected), broken


def test_hundreds_of_hosts_on_two_switches_are_divided_at_once() -> None:
    left = reaching_each_other(
        dict.fromkeys(range(200), 1), [(a, b) for a in range(90) for b in range(90, 200)]
    )
    assert left == list(range(90, 200))


class Scripted:
    """Attempts that end as told, and then succeed."""

    def __init__(self, *ends: EndedAttempt) -> None:
        self.ends = [*ends, EndedAttempt(HOSTS)]

    def attempt(self) -> EndedAttempt:
        return self.ends.pop(0)

    def prepare(self, ended: EndedAttempt, action: Action) -> bool:
        return action.next is AGAIN


def test_every_host_that_is_left_out_is_told_and_recorded_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.launcher_events.parent.mkdir(parents=True)
    gone = {0: Why.LOST, 2: Why.TAKEN_AWAY, 3: Why.LOST}
    lost = Failure("a is lost, with rank 0: no message", "a is lost", 5, True, "a", "  try  : ssh a")
    run_attempts(
        Scripted(EndedAttempt(HOSTS, lost, {0: Why.LOST}), EndedAttempt(HOSTS, lost, gone)),
        RestartRules(9),
        folder,
    )
    taken = "b is left out: its machine will be taken away"
    assert capsys.readouterr().err.split("\n") == [
        *("", "a is lost, with rank 0: no message", "  try  : ssh a"),
        *("", "a is left out: it cannot be reached", taken, "c is left out: it cannot be reached", ""),
    ]
    events = [json.loads(line) for line in folder.launcher_events.read_text().splitlines()]
    assert [event["host"] for event in events if event["kind"] == "host_left"] == ["a", "a", "b", "c"]
    assert [event["why"] for event in events if event["kind"] == "restart"] == [lost.text]
