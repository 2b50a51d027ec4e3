"""The formula: seconds of a step, an epoch and a run on a fleet. docs/plan.md has it on one page, with its assumptions.

A step ends when the slowest rank has computed and the last gradient bucket is summed:

    step   = compute + loader + stragglers + all-reduce
    epoch  = steps x step + validation + checkpoint
    run    = start + first epoch (which fills the cache) + other epochs

Each part counts only the time that it adds to the parts before it: the loader adds nothing while its processes keep up with the
network, and the all-reduce adds what the backward pass does not hide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from yolofleet.config.schema import MOST_LOADERS
from yolofleet.fleet.plan.inputs import AUTO_SHARE, RAM_SHARE, Link, Machine, Workload
from yolofleet.training.parallel.partition import Partition

BACKWARD = 2 / 3  # share of a pass: the backward pass has two products where the forward pass has one
SMALL_BYTES = 64  # message of the loss counts
GLOO_HOP_S = 5e-5  # latency of a message of gloo, assumed; benchmarks/README.md has measured ones


class StepTime(NamedTuple):
    """Seconds that each part adds to a step. The names are those of ``yolofleet bench train``."""

    network: float  # compute of the rank that takes longest
    loader: float  # wait of that rank for images
    storage: float  # the part of this wait that the disk causes
    stragglers: float  # time by which the slowest of all ranks exceeds one rank's mean
    all_reduce: float  # part of the all-reduce that the backward pass does not hide

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Prediction:
    """The times of a run, in seconds."""

    step: StepTime  # a step of every epoch but the first
    first: StepTime  # a step of the first epoch, in which the image cache is empty
    epoch: float  # with validation and checkpoint
    run: float  # the whole run
    rate_img_s: float  # images/s of training, as ``images_per_s`` of results.csv
    devices: int  # number of devices of the fleet
    price_hour: float  # US dollars for the fleet, NaN = unknown
    store_price: float  # US dollars for all requests to the store
    # seconds of the run that each part adds; "start" is from the command to the first step
    parts: dict[str, float]
    busy: float  # mean compute of all ranks in a step, as a share of the longest one

    @property
    def cost(self) -> float:
        return self.price_hour * self.run / 3600 + self.store_price

    @property
    def device_hours(self) -> float:
        return self.devices * self.run / 3600

    @property
    def wasted_share(self) -> float:
        """Return the share of the device hours in which the devices do not compute steps."""
        return 1 - self.busy * self.parts["network"] / self.run

    @property
    def binds(self) -> str:
        """Return the part that limits the run.

        It is the loader or the storage if the network waits for them, for at least a tenth of a step. Else it is the part
        that takes most of the time.
        """
        waits = {"loader": self.step.loader, "storage": self.step.storage}
        slowest = max(waits, key=lambda name: waits[name])
        if waits[slowest] >= 0.1 * self.step.total:
            return slowest
        return max(self.parts, key=lambda name: self.parts[name])


def predict(work: Workload, fleet: Sequence[Machine]) -> Prediction:
    """Return the times of ``work`` on the machines of ``fleet``; the first one has rank 0."""
    step, first = step_time(work, fleet), step_time(work, fleet, first_epoch=True)
    validation, shares = validation_s(work, fleet), rank_shares(work, fleet)
    parts = {
        name.replace("_", "-"): work.steps * (once + (work.epochs - 1) * then)
        for name, once, then in zip(StepTime._fields, first, step, strict=True)
    }
    parts |= {
        "validation": work.validations * validation,
        "checkpoint": work.epochs * fleet[0].save_s,
        "start": max(machine.start_s for machine in fleet),
    }
    return Prediction(
        step=step,
        first=first,
        epoch=work.steps * step.total + (parts["validation"] + parts["checkpoint"]) / work.epochs,
        run=sum(parts.values()),
        rate_img_s=work.step_images / step.total,
        devices=sum(machine.devices for machine in fleet),
        price_hour=sum(machine.price_hour for machine in fleet),
        store_price=sum(
            work.images / len(fleet) * machine.store_reads * machine.store.price / 1000
            for machine in fleet
            if machine.store is not None
        ),
        parts=parts,
        busy=statistics.mean(s.compute_s if s.images else 0.0 for s in shares) / step.network,
    )


@dataclass(frozen=True)
class RankShare:
    """A rank's part of a step."""

    machine: Machine
    images: int  # images of the step
    passes: int  # forward and backward passes
    last: int  # images of the last pass

    @property
    def compute_s(self) -> float:
        machine = self.machine
        return machine.update_s + self.passes * machine.pass_s + self.images * machine.image_s

    @property
    def backward_s(self) -> float:
        """Seconds of the last backward pass in which its process runs: buckets fill, and sums go on.

        A quota of less than a core stops the whole process for the rest of the time, sums included.
        """
        machine = self.machine
        running = min(machine.rank_cores, 1.0) if machine.on_cpu else 1.0
        return BACKWARD * running * (machine.pass_s + self.last * machine.image_s) if self.passes else 0.0


def rank_shares(work: Workload, fleet: Sequence[Machine]) -> list[RankShare]:
    """Return the share of each rank in a step, in rank order."""
    machines = [machine for machine in fleet for _ in range(machine.devices)]
    shares = work.shares or tuple(1 / m.image_s if work.auto_shares else 1.0 for m in machines)
    found = []
    for machine, mine in zip(
        machines, Partition(shares).ranges(work.step_images // work.micro_batch), strict=True
    ):
        passes = math.ceil(len(mine) / work.per_pass)
        last = len(mine) - (passes - 1) * work.per_pass if passes else 0
        found.append(RankShare(machine, len(mine) * work.micro_batch, passes, last * work.micro_batch))
    return found


def step_time(work: Workload, fleet: Sequence[Machine], *, first_epoch: bool = False) -> StepTime:
    """Return the seconds of a step, by what causes them."""
    ranks = rank_shares(work, fleet)
    times = [(part, *input_waits(work, part, first_epoch=first_epoch)) for part in ranks]
    slowest, loader, storage = max(times, key=lambda row: row[0].compute_s + row[1] + row[2])
    alone = slowest.compute_s + loader + storage
    late = alone * slowest.machine.spread * largest_of(len(ranks))
    return StepTime(slowest.compute_s, loader, storage, late, exposed_sum_s(work, fleet, slowest.backward_s))


def input_waits(work: Workload, part: RankShare, *, first_epoch: bool) -> tuple[float, float]:
    """Return the seconds that a rank waits for its loader and, beyond that, for the storage of its host, in a step."""
    machine, compute = part.machine, part.compute_s
    core_s, read_s = (part.images * each for each in image_costs(work, machine, first_epoch=first_epoch))
    workers = loader_count(work, machine)
    if workers == 0:  # loads and computes one after the other
        return core_s, max(machine.devices * read_s - core_s, 0.0)
    loader = max(core_s / min(workers, machine.rank_cores) - compute, 0.0)
    if machine.on_cpu:  # the network uses all cores
        loader = max(loader, core_s / machine.rank_cores)
    return loader, max(machine.devices * read_s - compute - loader, 0.0)


def image_costs(work: Workload, machine: Machine, *, first_epoch: bool) -> tuple[float, float]:
    """Return the seconds of a core to load an image, and those of the host's storage to read it: means over all images."""
    cached = 0.0 if first_epoch else cached_share(work, machine)
    in_memory = not first_epoch and work.images * work.image_bytes <= RAM_SHARE * machine.memory_bytes
    read_bytes = 0.0 if in_memory else (1 - cached) * work.image_bytes
    read_s = read_bytes / machine.read_bytes_s
    if machine.store is not None and first_epoch:
        read_s = max(read_s, machine.store_reads * store_limit(work, machine)[0])
    return cached * machine.cached_s + (1 - cached) * machine.load_s, read_s


def store_limit(work: Workload, machine: Machine) -> tuple[float, str]:
    """Return the seconds of a host to read an image from its store, and which limit binds."""
    assert machine.store is not None
    processes = machine.devices * max(loader_count(work, machine), 1)
    return machine.store.image_s(work.image_bytes, processes)


def loader_count(work: Workload, machine: Machine) -> int:
    """Return the loader processes of a rank on this machine."""
    if work.workers >= 0:
        return work.workers
    return 0 if machine.on_cpu else max(1, min(MOST_LOADERS, int(machine.rank_cores) - 1))


def cached_share(work: Workload, machine: Machine) -> float:
    """Return the share of the images that the image cache of a host holds, 0..1."""
    if work.cache == "none":
        return 0.0
    if work.cache == "disk":
        return 1.0
    if work.cache == "auto":
        return float(work.cached_bytes <= AUTO_SHARE * machine.memory_bytes)
    return min(RAM_SHARE * machine.memory_bytes / work.cached_bytes, 1.0)


def largest_of(ranks: int) -> float:
    """Return the expected maximum of ``ranks`` standard normal numbers.

    Source: G. Blom, "Statistical Estimates and Transformed Beta-Variables" (1958); 4 % too large for two, less for more.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def exposed_sum_s(work: Workload, fleet: Sequence[Machine], backward_s: float) -> float:
    """Return the seconds that the sums over ranks add to a step.

    Each bucket starts when it is full and the one before it is summed. Sums in stages overlap bucket by bucket.

    Args:
        backward_s: of the slowest rank's last pass.
    """
    ranks = sum(machine.devices for machine in fleet)
    if ranks == 1:
        return 0.0
    stages = sum_stages(fleet)
    ended = [0.0] * len(stages)
    for count_bytes, ready in work.buckets:
        at = ready * backward_s
        for number, (link, members, share) in enumerate(stages):
            at = ended[number] = max(ended[number], at) + share * link.all_reduce_s(count_bytes, members)
    return count_exchange_s(fleet) + adding_s(work, fleet) + max(ended[-1] - backward_s, 0.0)


def adding_s(work: Workload, fleet: Sequence[Machine]) -> float:
    """Return the seconds by which gloo slows a step, because it adds on the cores that compute."""
    if not any(machine.on_cpu for machine in fleet):
        return 0.0
    return sum(count_bytes for count_bytes, _ in work.buckets) / min(m.inside.bytes_s for m in fleet)


def count_exchange_s(fleet: Sequence[Machine]) -> float:
    """Return the seconds of the sum of the loss counts: gloo's ring over all ranks, because the counts are on the CPU."""
    ranks = sum(machine.devices for machine in fleet)
    links = [machine.between for machine in fleet] if len(fleet) > 1 else [fleet[0].inside]
    hop = max(GLOO_HOP_S if link.tree else link.latency_s for link in links)  # a tree is NCCL's
    return Link(hop, min(link.bytes_s for link in links)).all_reduce_s(SMALL_BYTES, ranks)


def sum_stages(fleet: Sequence[Machine]) -> list[tuple[Link, int, float]]:
    """Return (link, ranks, share of an all-reduce) of each stage of a sum.

    NCCL sums inside each host first, then between the hosts, then back; gloo's ring goes over all ranks.
    """
    between = min((machine.between for machine in fleet), key=lambda link: link.bytes_s)
    most = max(fleet, key=lambda machine: machine.devices)
    if len(fleet) == 1:
        return [(most.inside, most.devices, 1.0)]
    if most.devices == 1:
        return [(between, len(fleet), 1.0)]
    if not between.tree:
        return [(between, sum(machine.devices for machine in fleet), 1.0)]
    return [(most.inside, most.devices, 0.5), (between, len(fleet), 1.0), (most.inside, most.devices, 0.5)]


def validation_s(work: Workload, fleet: Sequence[Machine]) -> float:
    """Return the seconds of a validation, in which all ranks have equal numbers of images."""
    ranks = sum(machine.devices for machine in fleet)
    slowest = max(machine.val_image_s for machine in fleet)
    return math.ceil(work.val_images / ranks) * slowest + fleet[0].val_end_s
