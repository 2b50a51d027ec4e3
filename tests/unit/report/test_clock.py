import itertools
import json
import math

import pytest

from yolofleet.runs.report.clock import PHASES, Clock, Times, slowest


class Hand:
    """A clock hand that the test moves."""

    def __init__(self):
        self.at = 0.0

    def __call__(self):
        return self.at


def run_steps(clock, hand, steps, images=8, data=1.0, compute=6.0, comm=3.0):
    for _ in range(steps):
        with clock("data"):
            hand.at += data
        hand.at += compute
        with clock("comm"):
            hand.at += comm
        clock.step(images)


def test_every_second_belongs_to_exactly_one_phase():
    hand = Hand()
    clock = Clock(now=hand)
    hand.at += 5  # start-up, until training() says otherwise
    clock.training()
    run_steps(clock, hand, 2)
    with clock("evaluate"):
        hand.at += 4
        with clock("comm"):  # the inner phase alone is charged
            hand.at += 2
        hand.at += 1
    with clock("checkpoint"):
        hand.at += 7
    epoch, times = clock.end_epoch(), clock.run_so_far()
    expected = {"start": 5, "data": 2, "compute": 12, "comm": 8, "evaluate": 5, "checkpoint": 7}
    assert times.seconds == expected and set(expected) == set(PHASES)
    assert times.elapsed_s == hand.at == 39
    assert epoch.seconds == {**expected, "start": 0}  # start-up belongs to no epoch
    assert times.share("data") == 2 / 22 and times.share("comm") == 8 / 22


def test_warm_up_steps_are_left_out_of_the_rate_but_not_of_the_time():
    hand = Hand()
    clock = Clock(warmup_steps=2, now=hand)
    clock.training()
    run_steps(clock, hand, 2, compute=96)  # 100 s each
    run_steps(clock, hand, 3, compute=6)  # 10 s each: 24 images in 30 s
    times = clock.epoch_so_far()
    assert times.rate_img_s == pytest.approx(0.8)
    assert times.images == 40 and times.elapsed_s == 230


def test_validation_and_checkpoints_do_not_lower_the_rate():
    hand = Hand()
    clock = Clock(warmup_steps=0, now=hand)
    clock.training()
    run_steps(clock, hand, 1)
    with clock("evaluate"):
        hand.at += 1000
    assert clock.end_epoch().rate_img_s == 0.8
    run_steps(clock, hand, 1)
    assert clock.end_epoch().rate_img_s == 0.8
    assert clock.run_so_far().rate_img_s == 0.8


def test_a_rate_without_warm_steps_is_unknown_rather_than_wrong():
    clock = Clock(warmup_steps=5)
    clock.training()
    clock.step(8)
    assert math.isnan(clock.epoch_so_far().rate_img_s)


def test_an_epoch_goes_on_after_a_restart():
    hand = Hand()
    first = Clock(warmup_steps=1, now=hand)
    first.training()
    run_steps(first, hand, 3)
    first.end_epoch()
    run_steps(first, hand, 2)
    stored = json.loads(json.dumps(first.to_dict()))

    hand.at += 5000  # the machine was down: not counted
    second = Clock(warmup_steps=1, now=hand)
    hand.at += 30  # start-up of the second process: counted
    second.restore(stored)
    second.training()
    run_steps(second, hand, 2, compute=96)  # its first step is warm-up again: 8 images in 100 s are rated
    epoch = second.end_epoch()
    assert epoch.steps == 4 and epoch.images == 32
    assert epoch.seconds["start"] == 0 and epoch.seconds["compute"] == 12 + 192
    assert second.run_so_far().seconds["start"] == 30
    assert epoch.rate_img_s == pytest.approx(24 / 120)
    assert second.run_so_far().steps == 7


def test_the_slowest_rank_is_the_one_that_waits_least_for_others():
    ranks = [Times({**dict.fromkeys(PHASES, 1.0), "comm": comm}, 1, 8, 1.0) for comm in (5.0, 0.5, 3.0)]
    assert slowest(ranks) is ranks[1]


def test_an_unknown_phase_or_one_inside_itself_is_our_mistake():
    clock = Clock()
    with pytest.raises(KeyError):
        clock("lunch")
    with pytest.raises(AssertionError), clock("data"), clock("data"):
        pass


def test_a_phase_reads_the_time_twice_and_makes_no_object():
    reads = itertools.count()
    clock = Clock(now=lambda: float(next(reads)))
    for _ in range(20):
        with clock("data"):
            pass
    assert next(reads) == 1 + 2 * 20 and clock("data") is clock("data")
