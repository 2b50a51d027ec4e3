"""Random numbers as functions of a key: seed, purpose, epoch and sample.

No stream of random numbers is continued from one sample to the next. So results do not depend on which process draws,
in which order, or how often a run was restarted. The key is the 128-bit BLAKE2b digest of its parts; the generator is
Philox 4x64, a cipher in counter mode (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Call only ``Generator.random``. It returns the top 53 bits of the next word divided by 2**53 in every version of NumPy.
``integers``, ``beta``, ``shuffle`` and others may change their algorithm between versions (NumPy's NEP 19), and then
two hosts of a run would train on different samples.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """Return the generator of a key, for example ``generator(seed, "augment", epoch, position)``. Takes about 20 us."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, index)))


class ReusedGenerator:
    """One generator that begins again with each key. Takes about 5 us a key."""

    def __init__(self) -> None:
        self._numbers = np.random.Generator(np.random.Philox(key=0))
        self._begin: Any = self._numbers.bit_generator.state

    def restart(self, seed: int, purpose: str, *index: int) -> np.random.Generator:
        """Return what ``generator`` returns for the key, until the next call."""
        key = _key(seed, purpose, index)
        self._begin["state"]["key"][:] = key & (1 << 64) - 1, key >> 64
        self._numbers.bit_generator.state = self._begin
        return self._numbers


def _key(seed: int, purpose: str, index: tuple[int, ...]) -> int:
    name = "/".join((str(int(seed)), purpose, *(str(int(part)) for part in index)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order in which an epoch visits its samples: int32 [length], each of 0 .. length - 1 once.

    It is the stable order of random numbers. They are sorted in ranges of about 2**18, because every loader process
    computes the order: at two million samples, sorting all at once would take 24 MB more for a moment.
    """
    draws = generator(seed, "order", epoch).random(length)
    order, start, ranges = np.empty(length, np.int32), 0, length // 2**18 + 1
    for number in range(ranges):
        members = np.flatnonzero((draws >= number / ranges) & (draws < (number + 1) / ranges))
        order[start : start + len(members)] = members[np.argsort(draws[members], kind="stable")]
        start += len(members)
    return order
