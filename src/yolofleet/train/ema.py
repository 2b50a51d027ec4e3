"""Moving average of weights and batch-norm statistics, the model that is validated and shipped."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from yolofleet.devices import is_host


class MovingAverage:
    """Average of named float tensors: avg = keep * avg + take * value.

    Every rank keeps its own (equal) copy, so every rank can validate. With ``decay`` 0 the average is the
    value itself.

    Args:
        source: live float32 tensors of one device by name, without gaps in memory; read at each update.
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
        sizes = [t.numel() for t in source.values()]
        device = next(iter(source.values())).device
        self._flat = torch.empty(sum(sizes), device=device)
        # the host knows at once whether a step on the CPU is finite, so there the average changes in place
        self._next = self._flat if is_host(device) else torch.empty_like(self._flat)
        self.average = dict(zip(source, views_like(source.values(), self._flat), strict=True))
        self._next_views = views_like(source.values(), self._next)
        for name, t in source.items():
            self.average[name].copy_(t.detach())

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
    def update(self, finite: Tensor) -> None:
        """Take in the weights of one more step, unless ``finite`` (bool, on the device) is False.

        The host does not read ``finite`` from an accelerator, so a step that is left out counts in ``updates``.
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
    """Return views into ``flat``, one behind the other, with the shapes and strides of ``tensors``."""
    views, at = [], 0
    for t in tensors:
        views.append(flat.as_strided(t.size(), t.stride(), at))
        at += t.numel()
    return views
