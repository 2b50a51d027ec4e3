"""The replicas of the network in one process, one for each of its devices. Usually one; several are DataParallel.

With several, each replica processes its micro-batches in its own thread, computes the loss on its own device (no device
gathers outputs) and fills its own buckets. Then the buckets are added in replica order. Replicas on the same device share
the storage of their parameters but have their own leaf tensors, so that threads do not race for a gradient. Other
devices get a copy of the parameters after each update.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from yolofleet.support.devices import untimed_kernels, wait_for
from yolofleet.training.parallel.batchnorm import RunningStatistics
from yolofleet.training.parallel.buckets import GradientBuckets, make_half
from yolofleet.training.parallel.world import World

Part = TypeVar("Part")
Done = TypeVar("Done")
Reduce = Literal["fast", "fast16", "exact"]


@dataclass
class Replica:
    """The network on one device, with its gradients and batch-norm statistics.

    Attributes:
        usual_pass: calls the network for passes of ``usual_images`` images: compiled by the first of them (``--passes compiled``),
            or as CUDA graphs. It shares the parameters of ``model``, whose names stay as they are. None: ``model`` does it.
        timed_images: of the passes whose convolutions cuDNN may time; 0: of all.
        synced: batch norm is synchronised over ranks.
    """

    device: torch.device
    model: nn.Module
    statistics: RunningStatistics
    buckets: GradientBuckets
    usual_pass: Callable[..., Any] | None = None
    usual_images: int = 0
    timed_images: int = 0
    synced: bool = False

    @classmethod
    def build(
        cls, model: nn.Module, device: torch.device, world: World, *, reduce: Reduce = "fast", synced: bool
    ) -> Replica:
        """Build a replica of ``model``, which is on ``device``.

        Args:
            reduce: number format of the sum of gradients over ranks (``--reduce``).
        """
        statistics = RunningStatistics(model, counts_here=world.is_main or not synced)
        buckets = GradientBuckets(model.parameters(), world, statistics=statistics.size)
        if reduce == "exact":
            from yolofleet.training.parallel.exact import make_exact  # only with --reduce exact

            make_exact(buckets)
        elif reduce == "fast16" and world.size > 1:
            make_half(buckets)
        return cls(device, model, statistics, buckets, synced=synced)

    def forward(self, images: Tensor, targets: Any) -> Any:
        """Return the raw predictions of a pass in training; its batch-norm statistics replace those of the last one.

        Args:
            targets: of the loss, for a network that reads them.
        """
        self.statistics.begin_pass()
        # compiling every other number of images, such as the rest of a step, would take minutes
        is_usual = self.usual_pass is not None and len(images) == self.usual_images
        network: Any = self.usual_pass if is_usual else self.model
        return network(images, targets) if getattr(self.model, "reads_targets", False) else network(images)

    @property
    def image_part(self) -> nn.Module:
        """The part of the network that reads images alone: usually all of it."""
        reads_targets = getattr(self.model, "reads_targets", False)
        return getattr(self.model, "image_part", self.model) if reads_targets else self.model

    def replace_usual(self, call: Callable[..., Any], images: int) -> None:
        """Let ``call`` compute what ``image_part`` computes in passes of ``images`` images."""
        model, self.usual_images = self.model, images
        self.usual_pass = call
        if self.image_part is not model:
            self.usual_pass = lambda pixels, targets: model(pixels, targets, call(pixels))

    def kernels(self, images: int) -> AbstractContextManager[None]:
        """Choose kernels by measured time inside the block only if that pays for such a pass.

        Warm-up has a pass of each size up to the full one. For each new size cuDNN would time about 180 problems of yolov5s.
        """
        return nullcontext() if images == (self.timed_images or images) else untimed_kernels()


class Replicas:
    """All replicas of this process. The optimizer updates the parameters of the first one (``lead``).

    Attributes:
        timed: wait for the devices before and after the passes of a step, to measure them; this costs some overlap.
        passes_s: seconds of the passes of the last step that was timed.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.timed, self.passes_s = False, 0.0
        self.all = list(replicas)
        self.lead = self.all[0]
        self._pool: ThreadPoolExecutor | None = None
        if len(self.all) > 1:
            threads = max(1, torch.get_num_threads() // len(self.all))
            self._pool = ThreadPoolExecutor(len(self.all), "replica", torch.set_num_threads, (threads,))

    @classmethod
    def build(
        cls,
        model: nn.Module,
        devices: Sequence[torch.device],
        world: World,
        *,
        reduce: Reduce = "fast",
        synced: bool,
    ) -> Replicas:
        """Copy ``model``, which is on the first device, to the others."""
        models = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
        for copied in models[1:]:
            for theirs, mine in zip(copied.parameters(), model.parameters(), strict=True):
                if theirs.device == mine.device:
                    theirs.data = mine.data
        pairs = zip(models, devices, strict=True)
        return cls([Replica.build(m, device, world, reduce=reduce, synced=synced) for m, device in pairs])

    def pass_together(self, micro_batches: int, images: int) -> None:
        """Prepare for passes of up to ``micro_batches`` micro-batches of ``images`` images."""
        for replica in self.all:
            replica.statistics.pass_together(micro_batches, images)

    def compile(self, images: int) -> None:
        """Let the next pass of ``images`` images compile the network."""
        for replica in self.all:
            replica.replace_usual(torch.compile(replica.image_part, dynamic=False), images)

    def time_kernels_of(self, images: int) -> None:
        """Let cuDNN time the convolutions of passes of ``images`` images only.

        The switch is one for the process, so the threads of several devices do not use it.
        """
        if len(self.all) == 1:
            self.lead.timed_images = images

    def begin(self, micro_batches: int) -> None:
        """Start a step of ``micro_batches`` micro-batches (on all ranks)."""
        for replica in self.all:
            replica.buckets.copy_grid(self.lead.buckets)
            replica.buckets.begin(micro_batches)

    def each(self, work: Callable[[Replica, Part], Done], parts: Iterable[Part]) -> list[Done]:
        """Run ``work(replica, part)`` on all replicas in parallel; return the results in replica order."""
        if self.timed:
            self._wait()
        began_s = time.perf_counter()
        done = list((self._pool.map if self._pool else map)(work, self.all, parts))
        if self.timed:
            self._wait()
            self.passes_s = time.perf_counter() - began_s
        return done

    def _wait(self) -> None:
        for replica in self.all:
            wait_for(replica.device)

    def finish(self) -> None:
        """Sum over replicas, then over ranks. Collective: every rank, once per step."""
        for replica in self.all[1:]:
            self.lead.buckets.add(replica.buckets)
        self.lead.buckets.finish()

    @torch.no_grad()
    def copy_to_devices(self) -> None:
        """Copy the first replica's parameters to those on other devices, in one piece. Call after each update."""
        others = [replica for replica in self.all[1:] if replica.device != self.lead.device]
        if not others:
            return
        mine = _memory(self.lead.model)
        joined = torch.cat(mine)
        for replica in others:
            there = joined.to(replica.device, non_blocking=True)
            torch._foreach_copy_(_memory(replica.model), there.split([t.numel() for t in mine]))


def _memory(model: nn.Module) -> list[Tensor]:
    """Return each parameter as a flat view in the order of its memory, which is equal in all copies of a network."""
    return [p.detach().as_strided((p.numel(),), (1,)) for p in model.parameters()]
