"""Gradients through max pooling where two values of a window differ by less than rounding can change.

The whole gradient of a window goes to its greatest value. Where the two greatest values nearly tie, another processor or
another library may take the other one, and every gradient before the pooling changes by a finite amount. Both are
right, so a comparison with another implementation has to try both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

BOUND = 2e-4  # perturbations of 1e-6 before the pooling change differences by up to 1e-4 of the value
Tie = tuple[int, int, float, float]  # image, channel, second greatest value, greatest value
Result = TypeVar("Result")


@contextmanager
def pooling(turned: frozenset[Tie] = frozenset()) -> Iterator[set[Tie]]:
    """Record near ties of every ``F.max_pool2d`` and send gradients of ``turned`` ties to the second greatest value.

    The pooled values stay as they are. Pools in a chain see copies of the same two values, which are one tie.
    """
    original, found = F.max_pool2d, set[Tie]()

    def max_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
        pooled = original(x, kernel_size, stride, padding)
        ties = near_ties(x.detach(), kernel_size, stride or kernel_size, padding)
        found.update(ties)
        exchange = torch.zeros_like(x)
        for tie in ties & turned:
            image, channel, second, first = tie
            plane, change = x[image, channel].detach(), exchange[image, channel]
            change[plane == first] = second - first
            change[plane == second] = first - second
        if not exchange.any():
            return pooled
        exchanged = original(x + exchange, kernel_size, stride, padding)
        return exchanged + (pooled - exchanged).detach()

    F.max_pool2d = max_pool2d  # type: ignore[assignment]  # takes only the arguments that our networks use
    try:
        yield found
    finally:
        F.max_pool2d = original


def near_ties(x: Tensor, kernel: int, stride: int, padding: int) -> set[Tie]:
    """Return the pairs of different values of [N, C, H, W] that are the two greatest of a window, nearer than BOUND."""
    n, c = x.shape[:2]
    padded = F.pad(x, [padding] * 4, value=-torch.inf)
    windows = F.unfold(padded, kernel, stride=stride).view(n, c, kernel * kernel, -1)
    first = windows.amax(2, keepdim=True)
    below = windows.where(windows < first, -torch.inf)
    second = below.amax(2, keepdim=True)
    third = below.where(below < second, -torch.inf).amax(2, keepdim=True)
    bound = BOUND * first.abs()
    assert not (first - third < bound).any(), "three values of a window nearly tie: expected two at most"
    images, channels, _, places = torch.nonzero(first - second < bound, as_tuple=True)
    return {
        (image, channel, second[image, channel, 0, place].item(), first[image, channel, 0, place].item())
        for image, channel, place in zip(images.tolist(), channels.tolist(), places.tolist(), strict=True)
    }


def for_each_order(run: Callable[[], Result]) -> Iterator[Result]:
    """Yield ``run()`` for each admissible order of the near ties that it meets: 2 ** ties results."""
    with pooling() as ties:
        yield run()
    for size in range(1, len(ties) + 1):
        for turned in combinations(sorted(ties), size):
            with pooling(frozenset(turned)):
                yield run()
