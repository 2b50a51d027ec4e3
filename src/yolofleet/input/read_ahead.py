"""Read the files of a store before the values that need them are made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from yolofleet.errors import StorageError
from yolofleet.input.cache import ImageCache

_SETTLED_AFTER = 4  # keys in a row without an absent file
_SETTLED_EVERY = 32  # from then on, only each 32nd key is checked for absent files

Key = TypeVar("Key")


def with_following(keys: Iterable[Key], distance: int) -> Iterator[tuple[Key, Key | None]]:
    """Yield each key with the one that comes ``distance`` keys later; with None if there is none, or ``distance`` is 0."""
    if not distance:  # a thread of the process that starts others could leave them a lock that stays locked
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
        cache: of these images.
    """

    def __init__(self, images_of: Callable[[Key], Iterable[int]], cache: ImageCache) -> None:
        self.images_of, self.cache = images_of, cache
        self._keys = 0
        self._keys_without_absent = 0  # in a row

    def __call__(self, key: Key, following: Key | None) -> None:
        """Return when the files of ``key`` are on this machine.

        Raises:
            StorageError: the store cannot be read, or the disk cannot be written.
        """
        self._keys += 1
        if self._keys_without_absent >= _SETTLED_AFTER and self._keys % _SETTLED_EVERY:
            return
        self._keys_without_absent += 1
        if following is not None:
            images = list(self.images_of(following))  # here, because it is not made for threads
            threading.Thread(target=self._read, args=(images,), daemon=True).start()
        if self.cache.bring(self.images_of(key)):  # it waits for what the thread of an earlier key is reading
            self._keys_without_absent = 0

    def _read(self, images: list[int]) -> None:
        with suppress(StorageError):  # the call for that key meets it again
            if self.cache.bring(images):
                self._keys_without_absent = 0
