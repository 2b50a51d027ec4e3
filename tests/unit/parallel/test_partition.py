import pytest

from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.partition import Partition


def test_ranges_cover_every_micro_batch_once_in_order() -> None:
    for shares in [(1,), (1, 1), (1, 1, 1), (7, 1), (1, 5, 2), (0, 1), (2, 1, 1, 0)]:
        for n in range(0, 17):
            ranges = Partition(tuple(map(float, shares))).ranges(n)
            assert len(ranges) == len(shares)
            assert [v for r in ranges for v in r] == list(range(n))


def test_equal_shares_differ_by_at_most_one() -> None:
    for ranks in range(1, 9):
        for n in range(0, 20):
            sizes = [len(r) for r in Partition.equal(ranks).ranges(n)]
            assert max(sizes) - min(sizes) <= 1


def test_unequal_shares_follow_their_weights() -> None:
    assert [len(r) for r in Partition.parse("7,1", 2).ranges(8)] == [7, 1]
    assert [len(r) for r in Partition.parse("1,5,2", 3).ranges(8)] == [1, 5, 2]


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "0,0", "-1,2", "nan,1", "inf,1"])
def test_bad_shares_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--shares 1,1"):
        Partition.parse(text, 2)
