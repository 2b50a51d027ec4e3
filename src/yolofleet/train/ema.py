"""Moving average of weights and batch-norm statistics, the model that is validated and shipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class MovingAverage:
    """Average of named float tensors: avg = d * avg + (1 - d) * value, d = decay * (1 - exp(-updates / tau)).

    Every rank keeps its own (equal) copy, so every rank can validate. With ``decay`` 0 the average is the
    value itself.

    Args:
        source: live tensors by name; read at each update.
    """

    def __init__(self, source: dict[str, Tensor], *, decay: float, tau: float) -> None:
        self.source = source
        self.decay = decay
        self.tau = tau
        self.updates = 0
        self.average = {name: t.detach().clone() for name, t in source.items()}

    def decay_at(self, updates: int) -> float:
        return self.decay * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        d = self.decay_at(self.updates)
        average, source = list(self.average.values()), [t.detach() for t in self.source.values()]
        torch._foreach_mul_(average, d)
        torch._foreach_add_(average, source, alpha=1 - d)
