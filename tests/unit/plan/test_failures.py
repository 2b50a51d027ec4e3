"""The expected time of a run with failures against simulated histories, and the best interval of checkpoints."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from failure_histories import daly_interval_s, history_s, young_interval_s

from yolofleet.errors import ConfigError
from yolofleet.plan.failures import (
    LONGEST_S,
    FailureModel,
    best_interval_s,
    efficiency,
    with_failures,
)

RUN_S = 6 * 3600.0
FAILING = FailureModel(0.1, 600, interval_s=600, save_s=5, restart_s=10, start_s=90)


def scaled(machines: int, power: float = 0.9):
    """Return the speed of a fleet that scales with a power of its machines."""
    return lambda there: (there / machines) ** power


# (machines, failures of a machine in an hour, seconds to replace it, seconds between states in memory)
HISTORIES = [
    (1, 0.05, 300, 0),
    (1, 0.5, 600, 5),
    (1, 2.0, 120, 0),
    (2, 1.0, 1200, 5),
    (4, 0.1, 600, 5),
    (4, 0.1, 600, 0),
    (8, 0.5, 1800, 5),
    (8, 0.5, 1800, 0),
    (32, 0.05, 3600, 30),
    (64, 0.2, 600, 0),
]


@pytest.mark.parametrize("machines, per_hour, replacement_s, memory_s", HISTORIES)
def test_the_formula_is_within_5_percent_of_1000_histories(machines, per_hour, replacement_s, memory_s):
    failing = replace(FAILING, failures_per_hour=per_hour, replacement_s=replacement_s, memory_s=memory_s)
    speed = scaled(machines)
    histories = [history_s(RUN_S, machines, speed, failing, seed=0, number=number) for number in range(1000)]
    assert with_failures(RUN_S, machines, speed, failing).expected_s == pytest.approx(
        statistics.mean(histories), rel=0.05
    )


def test_without_failures_a_run_takes_its_work_and_its_saves():
    # 36 checkpoints of 5 s, and a state of 0.05 s after each 5 s
    found = with_failures(RUN_S, 4, scaled(4), replace(FAILING, failures_per_hour=0))
    assert found.expected_s == found.without_s == pytest.approx(RUN_S * (1 + 5 / 600) * 1.01)
    assert found.machines == 4 and found.failures == 0


def test_one_machine_has_the_efficiency_of_dalys_complete_model():
    failing = replace(FAILING, failures_per_hour=1.0, memory_s=0)
    mean_s = 3600.0
    daly = 600 / (mean_s * math.exp(90 / mean_s) * math.expm1(605 / mean_s))
    assert efficiency(1, failing, returning_per_s=0.0) == pytest.approx(daly)


@pytest.mark.parametrize(
    "save_s, per_hour, machines", [(5, 0.1, 1), (30, 1.0, 1), (1, 0.01, 1), (60, 0.5, 8)]
)
def test_the_best_interval_is_that_of_dalys_model(save_s: float, per_hour: float, machines: int):
    """Without returns and states in memory it solves 1 - t / M = exp(-(t + cost) / M)."""
    failing = replace(FAILING, failures_per_hour=per_hour, save_s=save_s, memory_s=0, replacement_s=0)
    found, mean_s = best_interval_s(RUN_S, machines, scaled(machines), failing), 3600 / per_hour / machines
    if found < 0.99 * LONGEST_S:
        assert 1 - found / mean_s == pytest.approx(math.exp(-(found + save_s) / mean_s), rel=0.002)
    # Daly's estimate is close; Young's, of first order, is too long where saves are expensive
    assert found == pytest.approx(min(daly_interval_s(save_s, mean_s), LONGEST_S), rel=0.05)
    assert young_interval_s(save_s, mean_s) >= daly_interval_s(save_s, mean_s)


def test_histories_with_the_best_interval_are_no_slower_than_with_a_third_or_three_times_of_it():
    failing = replace(FAILING, failures_per_hour=1.0, memory_s=0)
    best = best_interval_s(RUN_S, 1, scaled(1), failing)
    assert best == pytest.approx(daly_interval_s(5, 3600), rel=0.05)  # 184.8 s

    def mean(interval_s: float) -> float:
        changed = replace(failing, interval_s=interval_s)
        return statistics.mean(history_s(RUN_S, 1, scaled(1), changed, seed=2, number=n) for n in range(1000))

    assert mean(best) < min(mean(best / 3), mean(3 * best))


def test_states_in_memory_make_checkpoints_rare_where_a_machine_is_left():
    in_memory = replace(FAILING, failures_per_hour=0.5)
    speed = scaled(8)
    assert best_interval_s(RUN_S, 8, speed, in_memory) > best_interval_s(
        RUN_S, 8, speed, replace(in_memory, memory_s=0)
    )
    assert best_interval_s(RUN_S, 8, speed, replace(in_memory, failures_per_hour=0)) == LONGEST_S


def test_daly_saves_once_between_failures_where_a_save_takes_twice_as_long():
    assert daly_interval_s(200, 100) == 100


def test_a_large_fleet_has_numbers():
    found = with_failures(RUN_S, 512, scaled(512), replace(FAILING, failures_per_hour=0.05))
    # 512 x 0.05 / 3600 x 600 s are away on average, of 512
    assert found.machines == pytest.approx(512 / (1 + 0.05 / 6), rel=0.001)


def test_a_run_that_does_not_end_gets_one_message():
    endless = replace(FAILING, failures_per_hour=60, interval_s=3600, memory_s=0, replacement_s=1)
    with pytest.raises(
        ConfigError, match="60 failures an hour of each of 8 machines, the run takes more than 1000 times"
    ):
        with_failures(RUN_S, 8, scaled(8), endless)
    with pytest.raises(ConfigError, match="a simulated run takes more than 1000 times"):
        history_s(600.0, 8, scaled(8), endless, seed=0, number=0)
