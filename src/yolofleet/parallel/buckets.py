"""The one path of gradients: flat buckets, filled by backward, reduced while backward goes on.

Every parameter's ``.grad`` is a view into a bucket for the whole run, so local micro-batches add up in place.
During the last local micro-batch's backward pass, hooks count the parameters whose gradient is final; a full
bucket is reduced at once, in a fixed order, while the rest of the backward pass goes on (the algorithm of
PyTorch DDP, arXiv:2006.15704, over micro-batches instead of ranks). A rank without work contributes zeros.

What a bucket sends is its ``Wire``: the float32 sum itself (``fast``), or integers on a fixed grid whose sum
does not depend on any order (``exact``, see ``exact.py``). Batch-norm statistics of the step travel the same
way in a small buffer of their own, which is complete before the last backward pass begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from yolofleet.parallel.world import World

BUCKET_BYTES = 4 << 20  # small enough to pipeline on slow links; see benchmarks/README.md


class Wire(Protocol):
    """How the values of one flat float32 buffer are summed over micro-batches and ranks."""

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches (of all ranks) starts; the buffer is zero."""

    def absorb(self) -> None:
        """The buffer holds what one more local micro-batch added."""

    def message(self) -> Tensor:
        """What to sum over ranks, in place."""

    def settle(self) -> None:
        """The message holds the sum over ranks: put it into the buffer."""

    def follow(self, leader: Any) -> None:
        """Use the state of the wire of the same buffer on another device."""


class FloatWire:
    """The buffer itself: rounding depends on how many ranks there are, at about 1e-7."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def begin(self, micro_batches: int) -> None:
        self.flat.zero_()

    def absorb(self) -> None:
        pass

    def message(self) -> Tensor:
        return self.flat

    def settle(self) -> None:
        pass

    def follow(self, leader: Any) -> None:
        pass


class Bucket:
    """Gradients of some parameters, one behind the other in ``flat``."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(self.sizes), dtype=torch.float32, device=parameters[0].device)
        at = 0
        for p in parameters:
            # same strides as the parameter: channels-last weights get channels-last gradients
            p.grad = self.flat.as_strided(p.size(), p.stride(), at)
            at += p.numel()
        self.wire: Wire = FloatWire(self.flat)
        self.pending = 0
        self.work: Any = None


class GradientBuckets:
    """Gradients of ``parameters`` (those that require one) and ``statistics`` of one model on one device.

    Args:
        parameters: in order of the forward pass; buckets go backwards, as gradients become ready.
        world: whose ranks are summed.
        statistics: elements of the batch-norm buffer.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: World,
        *,
        statistics: int = 0,
        bytes_each: int = BUCKET_BYTES,
    ) -> None:
        self.world = world
        self.buckets = [Bucket(group) for group in grouped(parameters, bytes_each)]
        device = self.buckets[0].flat.device
        self.statistics = torch.zeros(statistics, dtype=torch.float32, device=device)
        self.statistics_wire: Wire = FloatWire(self.statistics)
        self._statistics_work: Any = None
        self._launched = 0
        self._armed = False
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))

    def wires(self) -> list[Wire]:
        """All that is summed, in the order in which it is sent."""
        return [self.statistics_wire, *(bucket.wire for bucket in self.buckets)]

    def begin(self, micro_batches: int) -> None:
        """Start of a step: nothing of the last one may stay (it would add up silently)."""
        for wire in self.wires():
            wire.begin(micro_batches)
        self._launched, self._armed = 0, False

    def arm(self) -> None:
        """Before the backward pass of the last local micro-batch: reduce buckets as they fill."""
        self._armed = True
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        self._launch_statistics()

    def absorb(self) -> None:
        """After a forward and backward pass that was not the last local one."""
        for wire in self.wires():
            wire.absorb()

    def _launch_statistics(self) -> None:
        self.statistics_wire.absorb()
        self._statistics_work = self.world.all_reduce_async(self.statistics_wire.message())

    def _on_gradient(self, bucket: Bucket) -> None:
        if self._armed:
            bucket.pending -= 1
            self._launch_full()

    def _launch_full(self) -> None:
        # strictly in bucket order: collectives must meet in the same order on every rank
        while self._launched < len(self.buckets) and self.buckets[self._launched].pending <= 0:
            bucket = self.buckets[self._launched]
            bucket.wire.absorb()
            bucket.work = self.world.all_reduce_async(bucket.wire.message())
            self._launched += 1

    def add(self, other: GradientBuckets) -> None:
        """Add what another device of this process has summed (DataParallel), before :meth:`finish`."""
        for mine, theirs in zip(self.wires(), other.wires(), strict=True):
            mine.message().add_(theirs.message().to(mine.message().device))

    def follow(self, leader: GradientBuckets) -> None:
        """Before :meth:`begin`, on the other devices of a process."""
        for mine, its in zip(self.wires(), leader.wires(), strict=True):
            mine.follow(its)

    def finish(self) -> None:
        """End of a step: start what is not started (idle rank, unused parameters), wait for all.

        Collective: every rank, once per step.
        """
        if not self._armed:
            self._launch_statistics()
        for bucket in self.buckets:
            bucket.pending = 0
        self._launch_full()
        self.world.wait(self._statistics_work)
        self.statistics_wire.settle()
        for bucket in self.buckets:
            self.world.wait(bucket.work)
            bucket.wire.settle()
        self._armed = False

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, float32 scalar on the device."""
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(b.flat) for b in self.buckets])
        )
        return norm

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply all gradients in place."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)


def grouped(parameters: Iterable[nn.Parameter], bytes_each: int) -> list[list[nn.Parameter]]:
    """Trainable parameters, last first, cut into groups of about ``bytes_each``."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for p in [p for p in parameters if p.requires_grad][::-1]:
        if not groups or filled + 4 * p.numel() > bytes_each:
            groups.append([])
            filled = 0
        groups[-1].append(p)
        filled += 4 * p.numel()
    return groups
