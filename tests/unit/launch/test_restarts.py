"""When a run that failed is started again."""

from __future__ import annotations

from yolofleet.launch.restarts import MOST_AT_ONE_STEP, Failure, RestartRules, Restarts


def killed(step: int, host: str = "a", kind: str = "was killed") -> Failure:
    return Failure(f"rank 0 on {host} {kind}", kind, step, True, host)


def test_failures_after_different_steps_may_pass() -> None:
    restarts = Restarts(RestartRules(restarts=10))
    assert all(restarts.allow(killed(step)) for step in range(10))


def test_more_failures_within_an_hour_than_allowed_end_the_run() -> None:
    restarts = Restarts(RestartRules(restarts=2))
    assert [restarts.allow(killed(step)) for step in range(3)] == [True, True, False]
    assert "--restarts 2" in restarts.why_not


def test_the_same_fault_after_the_same_step_ends_the_run_also_on_another_host() -> None:
    restarts = Restarts(RestartRules(restarts=10))
    allowed = [restarts.allow(killed(5, host)) for host in ("a", "a", "b")]
    assert allowed == [True] * (MOST_AT_ONE_STEP - 1) + [False]
    assert "3 times, each time after 5 steps" in restarts.why_not


def test_another_fault_or_a_step_in_between_is_no_repetition() -> None:
    restarts = Restarts(RestartRules(restarts=10))
    failures = [killed(5), killed(5), killed(5, kind="aborted"), killed(5), killed(6), killed(6)]
    assert all(map(restarts.allow, failures))


def test_a_host_is_to_blame_if_it_failed_twice() -> None:
    restarts = Restarts(RestartRules(restarts=10))
    restarts.allow(killed(5, "a"))
    restarts.allow(killed(5, "b"))
    assert restarts.repeated(killed(5, "b"), same_host=True) == 1
    restarts.allow(killed(5, "b"))
    assert restarts.repeated(killed(5, "b"), same_host=True) == 2


def test_a_fault_of_the_user_and_a_run_without_restarts_end_at_once() -> None:
    wrong = Failure("DataError: x.jpg", "DataError", 5, False, "a")
    assert not Restarts(RestartRules(restarts=10)).allow(wrong)
    assert not Restarts(RestartRules()).allow(killed(5))
