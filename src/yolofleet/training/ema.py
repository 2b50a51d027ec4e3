"""Moving average of weights and batch-norm statistics: the model for validation and for weights files."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from yolofleet.support.devices import is_host


class MovingAverage:
    """Moving average of named float tensors: avg = keep * avg + take * value.

    Every rank keeps its own (equal) copy, so every rank can validate. With ``decay`` 0 the average is the
    value itself.

    Args:
        source: live float32 tensors of one device by name, without gaps in memory; each update reads them.
        rule: of update n. "ramp" (YOLOv5): keep = d and take = 1 - d with d = decay (1 - exp(-n / tau)).
            "threshold" (PP-YOLOE): an average from zero with d = min(decay, n / (9 + n)), divided by 1 - d^n to
            remove the bias of that start. "constant": as "threshold", with d = decay.
    """

    def __init__(self, source: dict[str, Tensor], *, decay: float, tau: float, rule: str = "ramp") -> None:
        self.source = source
        self.decay = decay
        self.tau = tau
        self.rule = rule
        self.updates = 0
        sizes = [t.numel() for t in source.values()]
        device = next(iter(source.values())).device
        self._flat = torch.empty(sum(sizes), device=device)
        # On the CPU `finite` costs nothing to read, so the average can change in place.
        self._next = self._flat if is_host(device) else torch.empty_like(self._flat)
        self.average = dict(zip(source, views_like(source.values(), self._flat), strict=True))
        self._next_views = views_like(source.values(), self._next)
        for name, t in source.items():
            self.average[name].copy_(t.detach())

    def decay_at(self, update: int) -> float:
        """Return d of an update, counted from 1."""
        if self.rule == "threshold":
            return min(self.decay, update / (9 + update))
        if self.rule == "constant":
            return self.decay
        return self.decay * (1 - math.exp(-update / self.tau))

    def factors(self, update: int) -> tuple[float, float]:
        """Return (keep, take) of an update, counted from 1."""
        d = self.decay_at(update)
        if self.rule == "ramp":
            return d, 1 - d
        last = update - 1
        before = 1 - self.decay_at(last) ** last  # divisor of the last average; 0 at first
        after = 1 - d**update
        return d * before / after, (1 - d) / after

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Add the weights of one step, unless ``finite`` (bool, on the device) is False.

        The host does not read ``finite`` from an accelerator, so ``updates`` also counts the steps left out.
        """
        self.updates += 1
        in_place = self._next is self._flat
        if in_place and not finite:
            return
        keep, take = self.factors(self.updates)
        torch.mul(self._flat, keep, out=self._next)
        torch._foreach_add_(self._next_views, [t.detach() for t in self.source.values()], alpha=take)
        if not in_place:
            torch.where(finite, self._next, self._flat, out=self._flat)


def views_like(tensors: Iterable[Tensor], flat: Tensor) -> list[Tensor]:
    """Return consecutive views into ``flat`` with the shapes and strides of ``tensors``."""
    views, at = [], 0
    for t in tensors:
        views.append(flat.as_strided(t.size(), t.stride(), at))
        at += t.numel()
    return views
