"""Choose the batch of a new run by its recipe and the memory of its devices (``--batch auto``), before its first step.

Every rank measures the largest pass that its devices can hold, up to the one that a batch needs that trains well
(:func:`useful_batch`). All ranks take the smallest one, so unequal devices get equal passes. The run stores the chosen numbers as if the user had given them, so a resumed run does not measure again.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from yolofleet import devices
from yolofleet.checkpoint.store import Snapshot
from yolofleet.config.checks import MEASURED
from yolofleet.config.device import processes_of
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import MICRO_BATCHES, TARGET_MICRO_BATCH, TrainConfig, divisors
from yolofleet.errors import ConfigError
from yolofleet.models.cost import INDEX_LIMIT
from yolofleet.parallel.partition import Partition
from yolofleet.parallel.world import World
from yolofleet.rank.memory_meter import Meter, device_meter, host_meter
from yolofleet.rank.memory_probe import LargestPass, overlaps
from yolofleet.report.console import NullConsole
from yolofleet.system.proc import release_heap
from yolofleet.text import size_text

# Images of a pass. On one thread, passes of 8, 16 and 32 images took equal times for each image.
MOST_ON_CPU = 16
# Copies of the weights that a run on a CPU has and a trial does not have: slots of the optimizer, the network that validates, and a
# state that is copied to be saved.
KEPT_ON_CPU = 6
LEAST_STEPS = 50  # of an epoch, where the learning rate grows with the batch


@dataclass(frozen=True)
class Measured:
    """The largest pass of one device.

    Attributes:
        images: that fit; 0: none.
        used_bytes: its peak, or that of one image if none fits. With ``--val-overlap`` it includes a validation.
        limit_bytes: what the run may use there.
        where: rank, host and device.
        validation_bytes: that validation batches need.
        indexed: images that a pass may have by ``models.cost.images_within_index``.
    """

    images: int
    used_bytes: int
    limit_bytes: int
    where: str
    validation_bytes: int = 0
    indexed: int = sys.maxsize

    def text(self) -> str:
        share = self.used_bytes / max(self.limit_bytes, 1)
        return f"{size_text(self.used_bytes)} of {size_text(self.limit_bytes)} ({share:.0%})"


def useful_batch(config: TrainConfig, images: int) -> tuple[int, str]:
    """Return the largest batch that ``auto`` chooses, whatever the memory is, and what limits it.

    A batch that fills a large GPU trains badly: 205 images in one step are 300 updates in 300 epochs, where steps of 64
    images are 960. The learning rates of a recipe are those for steps of ``--nominal-batch`` images. With ``--lr-scale none``
    a larger step has the same rates, so it only makes fewer updates. With ``linear`` or ``sqrt`` the rate grows with the step,
    so the batch may be larger as long as an epoch has ``LEAST_STEPS`` steps. A batch below the nominal one would not make more
    steps, because a step accumulates batches up to it.
    """
    most, limit = config.nominal_batch, f"--nominal-batch {config.nominal_batch}"
    if config.lr_scale != "none" and images // LEAST_STEPS > most:
        most, limit = images // LEAST_STEPS, f"an epoch of at least {LEAST_STEPS} steps"
    if images < most:
        most, limit = images, f"the training split of {images} images"
    return max(most, config.micro_batch), limit


def with_measured_batch(
    resolved: Resolved[TrainConfig],
    build: Callable[[TrainConfig], LargestPass],
    images: int,
    cached_bytes: int,
    snapshot: Snapshot | None,
    world: World,
    console: NullConsole,
) -> Resolved[TrainConfig]:
    """Return the settings with the batch that was measured, or that a snapshot of the run stores.

    Args:
        build: returns the :class:`LargestPass` of a run with these settings, on new memory of the devices.
        images: of the training split.
        cached_bytes: of all decoded images, which a run may keep in the memory of each machine.

    Collective: every rank.

    Raises:
        ConfigError: a device holds not even one image, or its memory is unknown.
    """
    config = resolved.value
    if snapshot is not None:  # the launcher started the run again
        stored = snapshot.values["fingerprint"]["settings"]
        chosen = {"batch": stored["batch"], "micro_batch": stored["micro_batch"]}
    else:
        chosen = _measure(config, build, images, cached_bytes, world, console)
    sources = {**resolved.sources, **dict.fromkeys(chosen, MEASURED)}
    return replace(resolved, value=config.model_copy(update=chosen), sources=sources)


def _measure(
    config: TrainConfig,
    build: Callable[[TrainConfig], LargestPass],
    images: int,
    cached_bytes: int,
    world: World,
    console: NullConsole,
) -> dict[str, int]:
    on_cpu = devices.is_host(world.device)
    alone = on_cpu or config.reduce == "exact"  # one micro-batch in a pass
    per_process = processes_of(config.device) if config.parallel == "dp" else 1
    shares = Partition.parse(
        "" if config.shares == "auto" else config.shares, world.size * per_process
    ).shares
    useful, limit = useful_batch(config, images)
    # images of one device in a batch; a smaller micro-batch would spoil batch normalisation
    part = max(int(useful * max(shares) / sum(shares)), min(MICRO_BATCHES.start, images), config.micro_batch)
    if on_cpu and part > max(MOST_ON_CPU, config.micro_batch):
        part, limit = max(MOST_ON_CPU, config.micro_batch), f"a pass of {MOST_ON_CPU} images on a CPU"
    # A step accumulates several batches if there are fewer images than --nominal-batch. One pass may have all of them.
    of_step = -(-max(useful, config.nominal_batch) // len(shares))
    most = part if alone else max(part, of_step)
    meter = host_meter(config, cached_bytes, world) if on_cpu else device_meter(config, world)
    with world.activity.doing("memory probe"):
        mine = _measured(config, build, meter, most, alone)
        gc.collect()  # hooks of the probe's network refer to it in cycles
        release_heap()
        devices.release_memory(world.device)
    where = f"rank {world.rank} ({world.host}, {world.device})"
    mine = replace(mine, where=where)
    every = [Measured(**theirs) for theirs in world.gather(vars(mine))]
    least = min(every, key=lambda one: one.images)
    if not least.images:
        first = _micro_batch(config, 1) if config.micro_batch > 0 else 1
        raise ConfigError(
            f"--batch auto: not even {first} image{'s' if first > 1 else ''} of {config.img} px fit{'s' if first == 1 else ''} "
            f"into the memory of {least.where}: {least.text()}",
            source="a trial of the largest forward and backward pass",
            hint="a smaller --img or --model"
            + (", a smaller --micro-batch" if first > 1 else "")
            + (", a smaller --val-batch, no --val-overlap" if overlaps(config) else "")
            + (
                ""
                if config.batch_memory >= 0.9
                else f", or a share of the memory above {config.batch_memory:g}"
            ),
        )
    worst = max(every, key=lambda one: one.validation_bytes - one.limit_bytes)
    if worst.validation_bytes > worst.limit_bytes:
        raise _too_large_validation(config, worst)
    rounded = _splits(config, alone)
    fits = min(least.images, rounded(part))
    size = _micro_batch(config, fits) if not alone or config.micro_batch > 0 else fits
    limits = [one.images for one in every for _ in range(per_process)]
    total = min(int(n * sum(shares) / share) for n, share in zip(limits, shares, strict=True) if share)
    batch = max(min(total, useful) // size, 1) * size
    count = f"{len(shares)} device{'s' if len(shares) > 1 else ''}"
    text = f"{least.images} images fit into a pass of each of {count}"
    if fits == rounded(part):
        text = f"{limit} limits it, and --batch N sets another one; {least.images} images were tried in a pass of each of {count}"
    elif least.indexed < most and least.images == rounded(least.indexed):
        text = f"{text}, in which no tensor may have more than {INDEX_LIMIT:,} elements"
    console.fact(f"batch {batch}: {text}; the least memory is that of {least.where}: {least.text()}")
    passes = {} if alone else {"micro_batches_per_pass": least.images // size}
    return {"batch": batch, "micro_batch": size, **passes}


def _measured(
    config: TrainConfig, build: Callable[[TrainConfig], LargestPass], meter: Meter, most: int, alone: bool
) -> Measured:
    """Return the largest pass of this process's devices, on a network of its own that is dropped afterwards."""
    largest = build(
        config.model_copy(update={"batch": TARGET_MICRO_BATCH[0], "micro_batch": TARGET_MICRO_BATCH[0]})
    )
    network = largest.state.replicas.lead
    if devices.is_host(network.device):
        weights_bytes = sum(p.numel() * p.element_size() for p in network.model.parameters())
        meter = replace(meter, limit_bytes=max(meter.limit_bytes - KEPT_ON_CPU * weights_bytes, 0))

    def attempt(count: int) -> None:
        if not alone:
            size = _micro_batch(config, count)
            largest.state.replicas.pass_together(count // size, size)
        largest.run(count)

    # first, while the process holds no freed memory
    validation_bytes = _validation_bytes(largest, meter)
    if overlaps(config):
        beside_bytes = max(validation_bytes - meter.peak_bytes(lambda: None), 0)
        peak_bytes = meter.peak_bytes
        meter = replace(meter, peak_bytes=lambda work: peak_bytes(work) + beside_bytes)
    found = _largest(attempt, meter, min(most, largest.most_images), _splits(config, alone))
    return replace(found, validation_bytes=validation_bytes, indexed=largest.most_images)


def _validation_bytes(largest: LargestPass, meter: Meter) -> int:
    """Return the memory that validation batches need.

    A device tries a whole batch. Where that fails, and on CPUs, whose kernel may kill a process that tries too much, the
    result is that of a line through batches of one and of two images.
    """
    device = largest.state.replicas.lead.device
    validate, batch = largest.validation()

    def peak(images: int) -> int:
        try:
            return meter.peak_bytes(partial(validate, images))
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            return meter.limit_bytes + 1

    whole = 0
    if not devices.is_host(device):
        whole = peak(batch)
        if whole <= meter.limit_bytes:
            return whole
    one, two = peak(1), peak(2)
    threads = torch.get_num_threads() if devices.is_host(device) else 1  # each takes a whole batch
    return max(one + (batch * threads - 1) * max(two - one, 0), whole)


def _too_large_validation(config: TrainConfig, one: Measured) -> ConfigError:
    fits = min(config.val_batch * one.limit_bytes // one.validation_bytes, config.val_batch - 1)
    return ConfigError(
        f"--batch auto: a validation batch of --val-batch {config.val_batch} needs {size_text(one.validation_bytes)}, and the "
        f"run may use {size_text(one.limit_bytes)} of the memory of {one.where}",
        source="a trial of two smaller ones",
        hint=f"--val-batch {fits}: it does not change the figures" if fits else "a smaller --img or --model",
    )


def _splits(config: TrainConfig, alone: bool) -> Callable[[int], int]:
    """Return the function that rounds a number of images down to one that a pass can have."""

    def rounded(count: int) -> int:
        if config.micro_batch > 0:
            if alone:
                return config.micro_batch if count >= config.micro_batch else 0
            return count - count % config.micro_batch
        if alone:
            return count
        while count > TARGET_MICRO_BATCH[1] and _micro_batch(config, count) < TARGET_MICRO_BATCH[0]:
            count -= 1
        return count

    return rounded


def _micro_batch(config: TrainConfig, count: int) -> int:
    """Return the micro-batch of a pass of ``count`` images: the user's, or the largest divisor up to 16."""
    if config.micro_batch > 0:
        return config.micro_batch
    return max(d for d in divisors(count) if d <= TARGET_MICRO_BATCH[1])


def _largest(
    attempt: Callable[[int], None], meter: Meter, most: int, rounded: Callable[[int], int]
) -> Measured:
    """Return the largest pass whose measured peak is within the limit.

    The size is at most doubled (after six trials, quadrupled), and a size is tried only if a straight line through the
    last two peaks stays below the limit. So on a host whose kernel kills processes instead of refusing memory, no trial
    goes far beyond the limit. After a trial that failed, each further trial halves the range that is left.
    """
    best = Measured(0, 0, meter.limit_bytes, "")
    seen = [(0, meter.peak_bytes(lambda: None))]  # what the network takes without a pass
    low = next((n for n in range(1, most + 1) if rounded(n)), 0)
    size, failed = rounded(low), 0
    while size:
        try:
            peak = meter.peak_bytes(partial(attempt, size))
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            peak = meter.limit_bytes + 1
        if peak > meter.limit_bytes:
            best = best if best.images else replace(best, used_bytes=peak)
            failed = size
        else:
            best = replace(best, images=size, used_bytes=peak)
            seen.append((size, peak))
        most = (best.images + failed) // 2 if failed else most
        size = _next(seen, most, meter.limit_bytes, rounded)
    return best


def _next(seen: list[tuple[int, int]], most: int, limit_bytes: int, rounded: Callable[[int], int]) -> int:
    """Return the next size to try, above those that fitted and at most ``most``; 0: none."""
    if len(seen) < 2:
        return 0
    before, (size, peak) = seen[-2:]
    slope = max((peak - before[1]) / (size - before[0]), 1.0)
    fits = size + int((limit_bytes - peak) / slope)
    found = rounded(min(fits, 2 * size if len(seen) < 7 else 4 * size, most))
    return found if found > size else 0
