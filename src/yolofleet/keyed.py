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

import numpy as np


def generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """Return the generator of a key, for example ``generator(seed, "augment", epoch, position)``. Takes about 10 us."""
    name = "/".join((str(int(seed)), purpose, *(str(int(part)) for part in index)))
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order in which an epoch visits its samples: int64 [length], each of 0 .. length - 1 once."""
    return np.argsort(generator(seed, "order", epoch).random(length), kind="stable")
