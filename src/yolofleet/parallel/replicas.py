"""The devices of one process: one replica each. One replica is the rule; several are DataParallel.

With several, each takes micro-batches in a thread of its own, computes the loss where the predictions are (no
device gathers outputs) and adds to its own buckets; what they summed is added up in replica order, or in exact
mode as integers. Parameters of replicas on the same device are views of the same storage, but leaf tensors of
their own, so that threads do not race for a gradient; other devices get a copy after each update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from yolofleet.devices import wait_for
from yolofleet.parallel.batchnorm import RunningStatistics
from yolofleet.parallel.buckets import GradientBuckets
from yolofleet.parallel.exact import make_exact
from yolofleet.parallel.world import World

Done = TypeVar("Done")


@dataclass
class Replica:
    """One device with what its passes fill: gradients and batch-norm statistics."""

    device: torch.device
    model: nn.Module
    statistics: RunningStatistics
    buckets: GradientBuckets

    @classmethod
    def build(
        cls, model: nn.Module, device: torch.device, world: World, *, exact: bool, synced: bool
    ) -> Replica:
        """``model`` is on ``device``; ``synced``: its batch norm is synchronised over ranks."""
        statistics = RunningStatistics(model, counts_here=world.is_main or not synced)
        buckets = GradientBuckets(model.parameters(), world, statistics=statistics.size)
        if exact:
            make_exact(buckets)
        return cls(device, model, statistics, buckets)


class Replicas:
    """All replicas of this process; the first one leads: the optimizer works on its parameters.

    Attributes:
        timed: wait for the devices after their passes and after the sums, so that the host's clock tells
            computing from waiting for others; costs some overlap.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.timed = False
        self.all = list(replicas)
        self.lead = self.all[0]
        self._pool: ThreadPoolExecutor | None = None
        if len(self.all) > 1:
            threads = max(1, torch.get_num_threads() // len(self.all))
            self._pool = ThreadPoolExecutor(len(self.all), "replica", torch.set_num_threads, (threads,))

    @classmethod
    def build(
        cls, model: nn.Module, devices: Sequence[torch.device], world: World, *, exact: bool, synced: bool
    ) -> Replicas:
        """``model`` is on the first device."""
        models = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
        for copied in models[1:]:
            for theirs, mine in zip(copied.parameters(), model.parameters(), strict=True):
                if theirs.device == mine.device:
                    theirs.data = mine.data
        pairs = zip(models, devices, strict=True)
        return cls([Replica.build(m, device, world, exact=exact, synced=synced) for m, device in pairs])

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches (of all ranks) starts."""
        for replica in self.all:
            replica.buckets.follow(self.lead.buckets)
            replica.buckets.begin(micro_batches)

    def each(self, work: Callable[[Replica, int], Done]) -> list[Done]:
        """``work(replica, number)`` on every replica, side by side; results in replica order."""
        numbers = range(len(self.all))
        done = list(self._pool.map(work, self.all, numbers) if self._pool else map(work, self.all, numbers))
        if self.timed:
            for replica in self.all:
                wait_for(replica.device)
        return done

    def finish(self) -> None:
        """Sum over replicas, then over ranks. Collective: every rank, once per step."""
        for replica in self.all[1:]:
            self.lead.buckets.add(replica.buckets)
        self.lead.buckets.finish()
        if self.timed:
            wait_for(self.lead.device)

    @torch.no_grad()
    def spread(self) -> None:
        """After an update: the lead's parameters to replicas on other devices."""
        for replica in self.all[1:]:
            if replica.device != self.lead.device:
                for theirs, mine in zip(
                    replica.model.parameters(), self.lead.model.parameters(), strict=True
                ):
                    theirs.copy_(mine, non_blocking=True)
