"""A rank that has become much slower than it was is told once."""

from __future__ import annotations

from yolofleet.training.slow_ranks import SlowRanks


def told(costs: list[tuple[float, float]], images: tuple[int, int] = (30, 10)) -> list[dict[int, int]]:
    """Return what is told after each epoch, whose ranks take so many seconds for an image."""
    ranks, spent = SlowRanks(), [(0, 0.0), (0, 0.0)]
    found = []
    for epoch in costs:
        spent = [(n + more, s + more * cost) for (n, s), more, cost in zip(spent, images, epoch, strict=True)]
        found.append({rank: round(slower) for rank, slower in ranks.told(spent).items()})
    return found


def test_a_rank_that_is_cut_to_a_twentieth_is_told_once_after_two_epochs() -> None:
    # the first epoch is warm-up, the second is the measure, and the ranks may be unequal
    fast, slow = (1.0, 3.0), (1.0, 60.0)
    assert told([(9.0, 9.0), fast, fast, slow, slow, slow]) == [{}, {}, {}, {}, {1: 20}, {}]


def test_it_is_told_again_only_after_it_was_fast_again() -> None:
    fast, slow, between = (1.0, 1.0), (1.0, 4.0), (1.0, 2.0)
    calm = [fast, fast, slow, slow, between, slow, slow]
    assert [bool(one) for one in told(calm)] == [False, False, False, True, False, False, False]
    again = told([fast, fast, slow, slow, fast, slow, slow])
    assert [bool(one) for one in again] == [False, False, False, True, False, False, True]


def test_ranks_that_all_become_slower_are_no_finding() -> None:
    """As with larger images or a validation beside the training."""
    assert not any(told([(1.0, 1.0), (1.0, 2.0), (5.0, 10.0), (5.0, 10.0), (5.0, 11.0)]))


def test_one_slow_epoch_is_no_finding() -> None:
    assert not any(told([(1.0, 1.0)] * 2 + [(1.0, 9.0), (1.0, 1.0)] * 3))


def test_one_rank_alone_is_never_slow() -> None:
    ranks = SlowRanks()
    assert not any(ranks.told([(10 * n, 10.0 * n * n)]) for n in range(1, 9))
