"""When a run saves by itself: intervals worked out by hand, on a clock that the test moves."""

from __future__ import annotations

import math

import pytest

from yolofleet.training.requests import FIRST_SAVE_S, SaveTimer


class Run:
    """A run whose saves take ``cost_s``."""

    def __init__(
        self, cost_s: float, *, minutes: float | None = None, period: int | None = None, hosts: int = 1
    ) -> None:
        self.now_s, self.cost_s = 0.0, cost_s
        self.timer = SaveTimer(minutes, period, hosts, now=lambda: self.now_s)

    def save(self, *, ends_epoch: bool = False) -> None:
        with self.timer.spending():
            self.now_s += self.cost_s
        self.timer.saved(ends_epoch=ends_epoch)

    def epochs_saved(self, epoch_s: float, epochs: int) -> list[int]:
        """Train epochs of one step each; return those at whose end a save was due."""
        found = []
        for epoch in range(1, epochs + 1):
            self.now_s += epoch_s
            if self.timer.is_due(ends_epoch=True):
                found.append(epoch)
                self.save(ends_epoch=True)
        return found


@pytest.mark.parametrize(
    ("cost_s", "hosts", "interval_s"),
    [
        (1.0, 1, 1099.8),  # sqrt(2 * 1 * 7 * 86400 s)
        (1.0, 4, 549.9),  # four times the failures: half the interval
        (0.01, 1, 110.0),
        (1.0, 1000, 100.0),  # Young: 34.8 s, but then saves would take 3 % of the time
        (30.0, 1, 6023.95),
    ],
)
def test_the_interval_follows_from_the_cost_and_the_number_of_hosts(
    cost_s: float, hosts: int, interval_s: float
) -> None:
    run = Run(cost_s, hosts=hosts)
    assert run.timer.interval_s == FIRST_SAVE_S
    run.save()
    assert run.timer.interval_s == pytest.approx(interval_s, abs=0.05)
    run.now_s += 0.999 * interval_s
    assert not run.timer.is_due(ends_epoch=False)
    run.now_s += 0.002 * interval_s
    assert run.timer.is_due(ends_epoch=False)


def test_the_ends_of_short_epochs_are_saved_for_1_percent_of_the_time() -> None:
    # 100 s after the save that ended at 12 s: ten epochs of 11 s each time
    assert Run(1.0).epochs_saved(11.0, 32) == [1, 11, 21, 31]


def test_the_ends_of_epochs_are_saved_where_that_is_cheap() -> None:
    assert Run(0.1).epochs_saved(11.0, 5) == [1, 2, 3, 4, 5]


def test_a_save_in_mid_epoch_does_not_put_off_that_of_a_long_epoch() -> None:
    run = Run(1.0)
    run.save(ends_epoch=True)
    run.now_s += 3600
    run.save()
    run.now_s += 5
    assert run.timer.is_due(ends_epoch=True) and not run.timer.is_due(ends_epoch=False)


@pytest.mark.parametrize(("minutes", "interval_s"), [(10, 600.0), (0.5, 30.0), (0, math.inf)])
def test_a_number_of_minutes_is_that_whatever_a_save_costs(minutes: float, interval_s: float) -> None:
    run = Run(100.0, minutes=minutes, period=1)
    assert run.timer.interval_s == interval_s
    run.save()
    assert run.timer.interval_s == interval_s
    run.now_s += 0.99 * min(interval_s, 1e9)
    assert not run.timer.is_due(ends_epoch=True), "--save-every 1epochs saves there, without the timer"
