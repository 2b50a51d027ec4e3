"""Moving average of weights and batch-norm statistics, the model that is validated and shipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class MovingAverage:
    """Average of named float tensors: avg = keep * avg + take * value.

    Every rank keeps its own (equal) copy, so every rank can validate. With ``decay`` 0 the average is the
    value itself.

    Args:
        source: live tensors by name; read at each update.
        rule: "ramp", YOLOv5's: keep = d and take = 1 - d, d = decay (1 - exp(-n / tau)) in update n; or
            "threshold", PP-YOLOE's: an average that starts at zero with d = min(decay, n / (9 + n)) and is divided
            by 1 - d^n when it is used (here: at once); or "constant", the same with d = decay.
    """

    def __init__(self, source: dict[str, Tensor], *, decay: float, tau: float, rule: str = "ramp") -> None:
        self.source = source
        self.decay = decay
        self.tau = tau
        self.rule = rule
        self.updates = 0
        self.average = {name: t.detach().clone() for name, t in source.items()}

    def decay_at(self, update: int) -> float:
        """d of an update, counted from 1."""
        if self.rule == "threshold":
            return min(self.decay, update / (9 + update))
        if self.rule == "constant":
            return self.decay
        return self.decay * (1 - math.exp(-update / self.tau))

    def factors(self, update: int) -> tuple[float, float]:
        """(keep, take) of an update, counted from 1."""
        d = self.decay_at(update)
        if self.rule == "ramp":
            return d, 1 - d
        before = 1 - self.decay_at(update - 1) ** (
            update - 1
        )  # what the last average was divided by; 0 at first
        after = 1 - d**update
        return d * before / after, (1 - d) / after

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        keep, take = self.factors(self.updates)
        average, source = list(self.average.values()), [t.detach() for t in self.source.values()]
        torch._foreach_mul_(average, keep)
        torch._foreach_add_(average, source, alpha=take)
