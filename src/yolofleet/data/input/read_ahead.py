"""Read the files of a store before the values that need them are made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from yolofleet.data.input.cache import ImageCache

_SETTLED_AFTER = 4  # keys in a row without an absent file
_SETTLED_EVERY = 32  # from then on, only each 32nd key is checked for absent files

Key = TypeVar("Key")


def with_following(keys: Iterable[Key], distance: int) -> Iterator[tuple[Key, Key | None]]:
    """Yield each key with the key that comes ``distance`` keys later, or with None near the end.

    With ``distance`` 0, each key comes with None: nothing is read ahead in the process that forks others, because a thread
    there could leave them a lock that stays locked.
    """
    if not distance:
        yield from ((key, None) for key in keys)
        return
    waiting = deque[Key]()
    for key in keys:
        waiting.append(key)
        if len(waiting) > distance:
            yield waiting.popleft(), key
    while waiting:
        yield waiting.popleft(), None


class ReadAhead(Generic[Key]):
    """Reads the absent files of a key, and meanwhile in a thread those of the next key of this process.

    A file that is evicted later is still read, but alone.

    Args:
        images_of: returns the numbers of the images that the value of a key needs.
    """

    def __init__(self, images_of: Callable[[Key], Iterable[int]], cache: ImageCache) -> None:
        self.images_of, self.cache = images_of, cache
        self._keys = 0
        self._keys_without_absent = 0  # in a row
        self._reading: Future[int] | None = None  # of the files of the next key

    def __call__(self, key: Key, following: Key | None) -> None:
        """Return when the files of ``key`` are on this machine. Raise StorageError if the store or the disk fails."""
        self._keys += 1
        if self._keys_without_absent >= _SETTLED_AFTER and self._keys % _SETTLED_EVERY:
            return
        self._keys_without_absent += 1
        mine, self._reading = self._reading, None
        if following is not None:
            images = list(self.images_of(following))  # here, because ``images_of`` is not thread-safe
            self._reading = Future()
            threading.Thread(target=self._read, args=(images, self._reading), daemon=True).start()
        absent = mine.result() if mine is not None else 0
        if self.cache.download(self.images_of(key)) + absent:
            self._keys_without_absent = 0

    def _read(self, images: list[int], answer: Future[int]) -> None:
        try:
            answer.set_result(self.cache.download(images))
        except BaseException as problem:
            answer.set_exception(problem)  # the call for that key raises it
