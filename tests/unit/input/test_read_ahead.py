"""Files of a store are read before the values that need them: those of the next key while the current value is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from commands import wait_until

from yolofleet.data.input.loader import Loader
from yolofleet.data.input.read_ahead import ReadAhead, with_following
from yolofleet.support.errors import StorageError


class Cache:
    """Files 10 * key .. 10 * key + 2 of each key in memory."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.calls: list[list[int]] = []
        self.before: Callable[[list[int]], None] = lambda images: None

    def download(self, images: Any) -> int:
        images = list(images)
        self.calls.append(images)
        self.before(images)
        absent = {*images} - self.here
        self.here |= absent
        return len(absent)


def images_of(key: int) -> list[int]:
    return [10 * key, 10 * key + 1, 10 * key + 2]


def test_each_key_comes_with_the_next_one_of_its_process():
    assert list(with_following(range(5), 2)) == [(0, 2), (1, 3), (2, 4), (3, None), (4, None)]
    assert list(with_following(range(2), 0)) == [(0, None), (1, None)]
    assert list(with_following(range(1), 3)) == [(0, None)]
    endless = with_following(iter(int, 1), 2)  # type: ignore[call-overload]
    assert next(endless) == (0, 0)


def test_the_files_of_the_next_key_arrive_while_this_value_is_made():
    cache: Any = Cache()
    read = ReadAhead(images_of, cache)
    read(0, 1)
    assert {0, 1, 2} <= cache.here
    wait_until(lambda: {10, 11, 12} <= cache.here)  # nobody has called for key 1


def test_a_call_returns_with_its_own_files_although_the_next_ones_do_not_come():
    cache: Any = Cache()
    go_on = threading.Event()
    cache.before = lambda images: images[0] >= 10 and go_on.wait(900)
    ReadAhead(images_of, cache)(0, 1)
    assert cache.here == {0, 1, 2}
    go_on.set()


def test_a_failure_belongs_to_the_key_whose_files_are_absent():
    def fail(images: list[int]) -> None:
        if images[0] >= 10:
            raise StorageError("the store is down")

    cache: Any = Cache()
    cache.before = fail
    read = ReadAhead(images_of, cache)
    read(0, 1)
    with pytest.raises(StorageError, match="down"):
        read(1, None)
    assert cache.calls.count(images_of(1)) == 1  # each try of a real store lasts as long as an outage may


def test_files_that_are_here_are_seldom_looked_for():
    cache: Any = Cache()
    cache.here = {image for key in range(300) for image in images_of(key)}
    read = ReadAhead(images_of, cache)
    for key in range(200):
        read(key, None)
    few = len(cache.calls)
    assert few < 20
    cache.here.clear()  # evicted
    for key in range(64):
        read(key, None)
    assert len(cache.calls) > few + 5  # noticed at the next look, and looked for at each key from there


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_each_value_in_order_and_with_its_files(workers: int):
    cache: Any = Cache()

    def build(key: int) -> tuple[int, Any]:
        assert {*images_of(key)} <= cache.here
        return key, torch.zeros(1)

    read = ReadAhead(images_of, cache)
    with Loader(build, range(12), workers=workers, prefetch=1, pin_memory=False, read_ahead=read) as loader:
        assert [key for key, _ in loader] == list(range(12))
