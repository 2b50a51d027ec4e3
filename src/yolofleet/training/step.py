"""The training step: one optimizer update from a list of micro-batches. Read this first.

The result does not depend on the number of ranks. The caller decides which rank computes which micro-batch. The ranks
sum, in this order: loss counts before the first forward pass; batch-norm statistics and gradient buckets during the last
backward pass (after it, if a process has several devices or no micro-batch); divisors that depend on predictions.
DistributedDataParallel divides the sum of gradients by the number of ranks. Here nothing does: each loss is divided by
the counts of the whole step before its backward pass. Shapes: m images of a micro-batch, T loss terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.precision import LossScaler, autocast
from yolofleet.runs.report.clock import Clock
from yolofleet.support.devices import HostCopy, is_host, to_device
from yolofleet.support.errors import NumericsError
from yolofleet.training.optimiser import set_rates, update_if_finite
from yolofleet.training.parallel.replicas import Replica
from yolofleet.training.parallel.world import World
from yolofleet.training.requests import NOTHING, Asked
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState, UnreadNorm

# Divisors that depend on predictions are integers in this unit, because a sum of integers does not depend on its order.
DIVISOR_UNIT = 2.0**-20
UNREAD_NORMS = 2  # of the last steps on accelerators: the host would wait for the device to read them
MOST_FP16_SKIPS = 100  # in a row; the search for a loss scale needs about 20


@dataclass(frozen=True)
class NanRule:
    """What a run does after a gradient that is not finite (``--on-nan``).

    Attributes:
        skips: number of such steps in a row that the run leaves out before it ends.
        rolls_back: the run then goes back to its newest checkpoint, and leaves the step out.
    """

    skips: int = 0
    rolls_back: bool = False

    @classmethod
    def parse(cls, text: str) -> NanRule:
        """Return the rule of a valid value of ``--on-nan``: ``stop``, ``skip:N`` or ``rollback``."""
        _, _, skips = text.partition(":")
        return cls(int(skips or 0), text == "rollback")


class StepAbandoned(Exception):
    """A rank was asked to stop before or, in a run of one process, during this step, which has changed nothing."""


@dataclass(frozen=True)
class StepReport:
    """Results of a step on one rank.

    Attributes:
        terms: [T] this rank's part of the loss terms, gain x sum / count; 0 if the gradient is not finite. The sum over
            ranks is the loss of the step. On the device: reading it waits for the step.
        asked: what any rank asked for.
        left_out: the result of :func:`watch_numerics`: this step, or earlier ones.
    """

    terms: Tensor
    asked: Asked
    left_out: tuple[StepPlan, ...]


def train_step(
    state: TrainState,
    plan: StepPlan,
    micro_batches: Sequence[Sequence[MicroBatch]],
    loss: DetectionLoss,
    world: World,
    clock: Clock,
    *,
    total_micro_batches: int,
    precision: str,
    clip_norm: float,
    asked: Asked = NOTHING,
    nan_rule: NanRule = NanRule(),
    stop: Callable[[], object] = lambda: False,
) -> StepReport:
    """Do one update of ``state`` from this rank's share of the step.

    Args:
        micro_batches: of this rank, in order, for each of its devices; may be empty.
        total_micro_batches: number of micro-batches on all ranks.
        asked: by this rank; reduced together with the counts.
        stop: whether this rank was asked to stop.

    Collective: every rank, once per step. One sum of T + len(Asked) integers, one of batch-norm statistics, one per
    gradient bucket, and one more integer if the divisor depends on predictions; two per layer with ``--sync-bn``.

    Raises:
        NumericsError: see :func:`watch_numerics`.
        StepAbandoned: a rank was asked to stop; every rank raises it.
    """
    assert total_micro_batches > 0, f"step {plan.step} has no micro-batch"
    local_counts = torch.zeros(len(loss.terms), dtype=torch.int64)
    for mb in (mb for device_batches in micro_batches for mb in device_batches):
        local_counts += torch.from_numpy(mb.targets.counts)
    with clock("comm"):
        packed = torch.tensor(list(map(int, asked._replace(stop=bool(stop())))))
        shared = world.all_reduce_(torch.cat([local_counts, packed]))
    counts, sums = shared.split([len(local_counts), len(packed)])
    asked = Asked(*map(bool, sums.tolist()))  # what any rank asks for
    if asked.stop:
        raise StepAbandoned

    state.replicas.begin(total_micro_batches)
    passes = partial(
        pass_micro_batches,
        loss=loss,
        loss_factors=loss.gains / counts.clamp(min=1),
        # YOLOv5 multiplies the mean loss of each batch by the batch size and accumulates the gradients of batches
        image_factor=plan.images if loss.times_images else 1,
        total_micro_batches=total_micro_batches,
        precision=precision,
        scaler=state.scaler,
        overlaps=len(state.replicas.all) == 1 and not state.replicas.lead.synced,
        stop=stop if world.size == 1 else lambda: False,  # other ranks would wait for this one's sums
    )
    local_sums = state.replicas.each(passes, micro_batches)
    none = torch.zeros(len(loss.terms), device=world.device)
    terms = sum((part.terms.to(world.device) for part in local_sums), none)
    with clock("comm"):
        state.replicas.finish()

    set_rates(state.optimizer, plan)
    if state.scaler.enabled:
        state.buckets.scale_(state.scaler.factor())
    if loss.predicted_divisor:  # the backward passes divided by the number of labels; correct that
        with clock("comm"):
            correction = divisor_correction(local_sums, counts[0], world)
        terms *= correction
        state.buckets.scale_(correction)
    norm = state.buckets.norm()
    state.unread_norms.append(UnreadNorm(plan, HostCopy(norm), any(counts.tolist())))
    # All ranks must roll back at the same step, also where some of them compute on the CPU.
    reads_late = nan_rule.rolls_back or not is_host(world.device)
    left_out = watch_numerics(state, precision, nan_rule, unread=UNREAD_NORMS if reads_late else 0)
    # The host has not read the norm yet, so the device itself skips the changes of a step that is not finite.
    finite = torch.isfinite(norm)
    if clip_norm:
        state.buckets.scale_((clip_norm / (norm + 1e-6)).clamp(max=1.0))
    update_if_finite(state.optimizer, finite)
    state.scaler.update(finite)
    state.replicas.copy_to_devices()
    state.statistics.merge(state.buckets.statistics, total_micro_batches, finite)
    state.average.update(finite)
    state.step, state.images_seen = plan.step + 1, plan.end_image
    return StepReport(torch.where(finite, terms, none), asked, tuple(left_out))


class LocalSums(NamedTuple):
    """Sums over the micro-batches of one device.

    Attributes:
        terms: [T] part of the loss terms, already divided by the counts.
        divisor: int64 [1], in ``DIVISOR_UNIT``: part of the divisor that depends on predictions; [0] without one.
    """

    terms: Tensor
    divisor: Tensor


def divisor_correction(local_sums: Sequence[LocalSums], labels: Tensor, world: World) -> Tensor:
    """Return the labels of a step divided by its divisor, which depends on predictions. Collective: every rank.

    Args:
        local_sums: of the devices of this process.
        labels: int64, their number in the whole step.
    """
    divisor = torch.cat([part.divisor.to(world.device) for part in local_sums]).sum()
    world.all_reduce_(divisor)
    return to_device(labels.clamp(min=1).float(), world.device) / (divisor * DIVISOR_UNIT).clamp(min=1)


def pass_micro_batches(
    replica: Replica,
    micro_batches: Sequence[MicroBatch],
    *,
    loss: DetectionLoss,
    loss_factors: Tensor,
    image_factor: int,
    total_micro_batches: int,
    precision: str,
    scaler: LossScaler,
    overlaps: bool,
    stop: Callable[[], object] = lambda: False,
) -> LocalSums:
    """Run the forward and backward passes of one device and add the gradients to its buckets.

    Each device of a process runs this in its own thread.

    Args:
        loss_factors: [T] gain / count of the whole step, on any device.
        image_factor: images of the step, or 1 where the loss is a mean.
        overlaps: the last backward pass reduces each bucket once its gradients are final. Not for several devices in a
            process; not with --sync-bn, whose own reductions in the backward pass would need one order with those of
            the buckets on every rank, although a rank without labels leaves out some parameters.
        stop: asked before each micro-batch.

    Raises:
        StepAbandoned: ``stop()`` was true.
    """
    factors = to_device(loss_factors, replica.device)
    terms = torch.zeros_like(factors)
    divisor = torch.zeros(int(loss.predicted_divisor), dtype=torch.int64, device=replica.device)
    for mb in micro_batches:
        if stop():
            raise StepAbandoned
        images = mb.images_on(replica.device).float().div_(255)  # [m, 3, H, W] in 0..1
        with replica.kernels(len(images)):
            with autocast(precision, replica.device):
                raws = replica.forward(images, mb.targets)
            sums = loss.sums(raws, mb.targets)  # [T], or [T + 1] with a predicted divisor
            if len(divisor):
                divisor += (sums[-1].detach() / DIVISOR_UNIT).round().long()
                sums = sums[:-1]
            replica.statistics.collect(
                replica.buckets.statistics, mb.ordinal, total_micro_batches, len(images)
            )
            is_last = mb is micro_batches[-1]
            if is_last and overlaps:
                replica.buckets.start_reducing()
            scaler.scale((sums * factors).sum() * image_factor).backward()
            if not (is_last and overlaps):
                replica.buckets.accumulate()
        terms += sums.detach() * factors
    return LocalSums(terms, divisor)


def watch_numerics(
    state: TrainState, precision: str, rule: NanRule = NanRule(), *, unread: int = 0
) -> list[StepPlan]:
    """Return the steps whose gradient norm is NaN or infinite; leave the last ``unread`` norms for a later call.

    Norms are equal on every rank, so every rank returns the same steps. Callers read all norms before they validate or
    save a state. A step with such a norm has changed no weight, momentum, average or statistic; its counters have advanced.
    In fp16 such steps belong to the search for a loss scale.

    Raises:
        NumericsError: more than ``rule.skips`` such norms in a row, in fp16 also more than ``MOST_FP16_SKIPS``; or the gradient
            of a step with labels is exactly 0.
    """
    most = max(rule.skips, MOST_FP16_SKIPS if precision == "fp16" else 0)
    left_out = []
    while len(state.unread_norms) > unread:
        plan, copied, has_labels = state.unread_norms.pop(0)
        norm = float(copied.read())  # waits until the device has finished that step
        if norm == 0 and has_labels:
            raise NumericsError(
                f"the gradient of step {plan.step} is exactly 0 for all weights: the labels of its images teach the network nothing",
                hint="gains of the loss that are not 0 (--set), a loss of --recipe-class that depends on the predictions, or a "
                "smaller --freeze",
            )
        finite = math.isfinite(norm)
        state.overflows = 0 if finite else state.overflows + 1
        if not finite:
            left_out.append(plan)
        if state.overflows > most:
            in_a_row = f", as in the {most} steps before it" if most else ""
            error = NumericsError(
                f"the gradient of step {plan.step} is not finite (NaN or infinity){in_a_row}",
                hint="lower lr0 (--set lr0=0.005), use --precision fp32, or check the labels "
                "(yolofleet data check)",
            )
            error.first_image = plan.first_image
            raise error
    return left_out
