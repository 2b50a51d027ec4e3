"""The training step: one optimizer update from a list of micro-batches. Read this first.

Everything that could depend on the fleet is decided outside (which rank computes which micro-batch) or summed
here over all ranks: loss counts before the forward pass; gradients, batch-norm statistics and divisors that
depend on predictions after the last backward pass. Shapes: m images of a micro-batch, T loss terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from yolofleet.data.loader import MicroBatch
from yolofleet.devices import HostCopy, is_host, to_device
from yolofleet.errors import NumericsError
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.precision import LossScaler, autocast
from yolofleet.parallel.replicas import Replica
from yolofleet.parallel.world import World
from yolofleet.report.clock import Clock
from yolofleet.train.optimiser import set_rates, update_if_finite
from yolofleet.train.schedule import StepPlan
from yolofleet.train.state import TrainState

LATE_UNIT = 2.0**-20  # of divisors that depend on predictions: whole numbers add up to the same in any order
UNSEEN_NORMS = 2  # of the last steps on accelerators: reading them would make the host wait for the device
FP16_PATIENCE = 100  # skipped fp16 steps in a row; a good scale is found within about 20


@dataclass(frozen=True)
class StepReport:
    """What one rank knows after a step.

    Attributes:
        terms: [T] this rank's part of the loss terms, gain x sum / count; the parts of all ranks add up to
            the step's. On the device; reading it waits for the step.
        requests: what any rank asked for (see ``train_step``), summed over ranks.
    """

    terms: Tensor
    requests: tuple[int, ...]


def train_step(
    state: TrainState,
    plan: StepPlan,
    shares: Sequence[Sequence[MicroBatch]],
    loss: DetectionLoss,
    world: World,
    clock: Clock,
    *,
    total_micro_batches: int,
    precision: str,
    clip_norm: float,
    requests: Sequence[int] = (),
) -> StepReport:
    """Do one update of ``state`` from this rank's share of the step.

    Args:
        shares: this rank's micro-batches, in order, for each of its devices; may be empty.
        total_micro_batches: of all ranks: V of the batch-norm average.
        requests: small numbers of this rank (stop? save?) that ride on the reduction of the counts.

    Collective: every rank, once per step: one sum of T + len(requests) integers, one sum per gradient bucket;
    with a divisor that depends on predictions, one integer more.

    Raises:
        NumericsError: the gradient is not finite.
    """
    device = world.device
    local_counts = torch.zeros(len(loss.terms), dtype=torch.int64)
    for mb in (mb for share in shares for mb in share):
        local_counts += torch.from_numpy(mb.targets.counts)
    shared = torch.cat([local_counts, torch.tensor(requests, dtype=torch.int64)])
    with clock("comm"):
        world.all_reduce_(shared)
    counts, requests = shared[: len(local_counts)], shared[len(local_counts) :].tolist()

    # YOLOv5's step is its mean loss x its images: mean x batch, summed over accumulated batches
    scale = plan.images if loss.times_images else 1
    weights = loss.gains / counts.clamp(min=1)  # [T]

    def passes(replica: Replica, number: int) -> Passed:
        return pass_micro_batches(
            replica,
            shares[number],
            loss,
            to_device(weights, replica.device),
            scale=scale,
            total_micro_batches=total_micro_batches,
            precision=precision,
            scaler=state.scaler,
            is_alone=len(state.replicas.all) == 1,
        )

    state.replicas.begin(total_micro_batches)
    passed = state.replicas.each(passes)
    terms = sum((part.terms.to(device) for part in passed), torch.zeros(len(loss.terms), device=device))
    with clock("comm"):
        state.replicas.finish()

    set_rates(state.optimizer, plan)
    if state.scaler.enabled:
        state.buckets.scale_(state.scaler.factor())
    if loss.late_divisor:  # so far all was divided by the number of labels
        divisor = sum((part.divisor.to(device) for part in passed), torch.zeros_like(passed[0].divisor))
        with clock("comm"):
            world.all_reduce_(divisor)
        labels = to_device(counts[0].clamp(min=1).float(), device)
        correction = labels / (divisor * LATE_UNIT).clamp(min=1)
        terms *= correction
        state.buckets.scale_(correction)
    norm = state.buckets.norm()
    state.unseen_norms.append((plan.step, HostCopy(norm)))
    watch_numerics(state, precision, unseen=0 if is_host(device) else UNSEEN_NORMS)
    # The host does not know yet whether the norm is finite, so the device leaves a bad step out of all state.
    finite = torch.isfinite(norm)
    if clip_norm:
        state.buckets.scale_((clip_norm / (norm + 1e-6)).clamp(max=1.0))
    update_if_finite(state.optimizer, finite)
    state.scaler.update(finite)
    state.replicas.spread()
    state.statistics.merge(state.buckets.statistics, total_micro_batches, finite)
    state.average.update(finite)
    state.step = plan.step + 1
    state.images_seen = plan.end_image
    return StepReport(terms, tuple(requests))


class Passed(NamedTuple):
    """What the passes of one device add to the step.

    Attributes:
        terms: [T] part of the loss terms, as divided before the pass.
        divisor: int64 part of the divisor that depends on predictions, in ``LATE_UNIT``; else 0.
    """

    terms: Tensor
    divisor: Tensor


def pass_micro_batches(
    replica: Replica,
    micro_batches: Sequence[MicroBatch],
    loss: DetectionLoss,
    weights: Tensor,
    *,
    scale: int,
    total_micro_batches: int,
    precision: str,
    scaler: LossScaler,
    is_alone: bool,
) -> Passed:
    """Forward and backward of one device's micro-batches, into its buckets; runs in the device's own thread.

    Args:
        weights: [T] gain / count of the whole step.
        scale: of the whole gradient.
        is_alone: no other device of this process: the last backward pass sends buckets as they fill.
    """
    terms = torch.zeros_like(weights)
    divisor = torch.zeros((), dtype=torch.int64, device=replica.device)
    for mb in micro_batches:
        images = mb.images.to(replica.device, non_blocking=True).float().div_(255)  # [m, 3, H, W] in 0..1
        with autocast(precision, replica.device):
            raws = replica.model(images)
        sums = loss.sums(raws, mb.targets)  # [T], and perhaps a divisor
        if loss.late_divisor:
            divisor += (sums[-1].detach() / LATE_UNIT).round().long()
            sums = sums[:-1]
        replica.statistics.collect(replica.buckets.statistics, mb.ordinal, total_micro_batches)
        is_last = mb is micro_batches[-1]
        if is_last and is_alone:
            replica.buckets.arm()
        scaler.scale((sums * weights).sum() * scale).backward()
        if not (is_last and is_alone):
            replica.buckets.absorb()
        terms += sums.detach() * weights
    return Passed(terms, divisor)


def watch_numerics(state: TrainState, precision: str, *, unseen: int = 0) -> None:
    """Stop on NaN or infinity in the norms of all steps but the last ``unseen``, which stay for later.

    Norms are equal on every rank, so every rank stops. All are read before a state is validated or saved. Such
    steps have changed no state; in fp16 they are part of the search for a good loss scale.
    """
    while len(state.unseen_norms) > unseen:
        step, norm = state.unseen_norms.pop(0)
        finite = math.isfinite(
            float(norm.read())
        )  # waits for a step that is over, unless a state is to be saved
        state.overflows = 0 if finite else state.overflows + 1
        if not finite and (precision != "fp16" or state.overflows > FP16_PATIENCE):
            raise NumericsError(
                f"the gradient of step {step} is not finite (NaN or infinity)",
                hint="lower lr0 (--set lr0=0.005), use --precision fp32, or check the labels "
                "(yolofleet data check); --resume continues from the last checkpoint",
            )
