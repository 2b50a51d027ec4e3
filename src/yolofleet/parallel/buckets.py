"""The one path of gradients: flat buckets, filled by backward, reduced while backward goes on.

Every parameter's ``.grad`` is a view into a bucket for the whole run, so local micro-batches add up in place.
During the last local micro-batch's backward pass, hooks count the parameters whose gradient is final; a full
bucket is reduced at once, in a fixed order, while the rest of the backward pass goes on (the algorithm of
PyTorch DDP, arXiv:2006.15704, over micro-batches instead of ranks). A rank without work contributes zeros.

Batch-norm statistics of the step ride at the end of the last bucket (``tail``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.parallel.world import World

BUCKET_BYTES = 4 << 20  # small enough to pipeline on slow links; see benchmarks/README.md


class GradientBuckets:
    """Gradients of ``parameters`` (those that require one) as flat float32 buckets.

    Args:
        parameters: in order of the forward pass; buckets go backwards, as gradients become ready.
        world: whose ranks are summed.
        tail: extra float32 elements summed with the last bucket.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: World,
        *,
        tail: int = 0,
        bytes_each: int = BUCKET_BYTES,
    ) -> None:
        self.world = world
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        groups: list[list[nn.Parameter]] = [[]]
        filled = 0
        for p in self.parameters:
            if filled and filled + 4 * p.numel() > bytes_each:
                groups.append([])
                filled = 0
            groups[-1].append(p)
            filled += 4 * p.numel()
        self._flat: list[Tensor] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        device = self.parameters[0].device
        for i, group in enumerate(groups):
            extra = tail if i == len(groups) - 1 else 0
            flat = torch.zeros(sum(p.numel() for p in group) + extra, dtype=torch.float32, device=device)
            at = 0
            for p in group:
                # same strides as the parameter (channels-last weights get channels-last gradients)
                p.grad = flat.as_strided(p.size(), p.stride(), at)
                at += p.numel()
                self._bucket_of[p] = i
            self._flat.append(flat)
        self._sizes = [len(group) for group in groups]
        self.tail = self._flat[-1][len(self._flat[-1]) - tail :]
        self._pending: list[int] = []
        self._works: list[Any] = []
        self._armed = False
        if world.size > 1:
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(self._on_gradient)

    def zero(self) -> None:
        """Start of a step: nothing of the last one may stay (it would add up silently)."""
        for flat in self._flat:
            flat.zero_()

    def arm(self) -> None:
        """Before the backward pass of the last local micro-batch: reduce buckets as they fill."""
        self._pending = list(self._sizes)
        self._works = []
        self._armed = True

    def _on_gradient(self, p: nn.Parameter) -> None:
        if not self._armed:
            return
        self._pending[self._bucket_of[p]] -= 1
        self._launch_full()

    def _launch_full(self) -> None:
        # strictly in bucket order: collectives must meet in the same order on every rank
        while len(self._works) < len(self._flat) and self._pending[len(self._works)] <= 0:
            self._works.append(self.world.all_reduce_async(self._flat[len(self._works)]))

    def finish(self) -> None:
        """End of a step: start what is not started (idle rank, unused parameters), wait for all.

        Collective: every rank, once per step.
        """
        if self.world.size > 1:
            self._pending = [0] * len(self._flat)
            if not self._armed:
                self._works = []
            self._launch_full()
            for work in self._works:
                self.world.wait(work)
        self._armed = False

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, float32 scalar on the device."""
        body = len(self._flat[-1]) - len(self.tail)
        parts = [*self._flat[:-1], self._flat[-1][:body]]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply all gradients (not the tail) in place."""
        body = len(self._flat[-1]) - len(self.tail)
        for part in [*self._flat[:-1], self._flat[-1][:body]]:
            part.mul_(factor)
