"""Choose the batch of a new run by its recipe and the memory of its devices (``--batch auto``), before its first step.

Every rank measures the largest pass that its devices can hold, up to the one that a batch needs that trains well
(:func:`useful_batch`). All ranks take the smallest one, so unequal devices get equal passes. The run stores the chosen
numbers as if the user had given them, so a resumed run does not measure again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from yolofleet.config.schema import MICRO_BATCHES, TARGET_MICRO_BATCH, TrainConfig, divisors
from yolofleet.families.networks.index_limit import INDEX_LIMIT
from yolofleet.runs.report.console import NullConsole
from yolofleet.support import devices
from yolofleet.support.device_names import gpu_ids, processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.cgroup import below_own_limits, shared_available_bytes
from yolofleet.support.system.proc import PROC, map_large_blocks, release_heap, sizes_in
from yolofleet.support.text import size_text
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.process import replica_devices
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.memory_probe import LargestPass, overlaps

# Images of a pass. On one thread, passes of 8, 16 and 32 images took equal times for each image.
MOST_ON_CPU = 16
# Copies of the weights that a run on a CPU has and a trial does not have: slots of the optimizer, the network that validates, and a
# state that is copied to be saved.
KEPT_ON_CPU = 6
HOST_PASSES = 3  # passes in a trial, because the heap of a process still grows during the first ones
LEAST_STEPS = 50  # of an epoch, where the learning rate grows with the batch


@dataclass(frozen=True)
class Measured:
    """The largest pass of one device.

    Attributes:
        images: that fit; 0: none.
        used_bytes: its peak, or that of the smallest pass if none fits.
        limit_bytes: what a pass may use there.
        validates: a validation batch fits, too.
        by_index: the size of a tensor limits the pass (``families.networks.index_limit.images_within_index``), not the memory.
        where: rank, host and device.
    """

    images: int
    used_bytes: int
    limit_bytes: int
    validates: bool = True
    by_index: bool = False
    where: str = ""

    def text(self) -> str:
        share = self.used_bytes / max(self.limit_bytes, 1)
        return f"{size_text(self.used_bytes)} of {size_text(self.limit_bytes)} ({share:.0%})"


@dataclass(frozen=True)
class Meter:
    """Measures the memory of a device: what a pass may use, and the peak of the memory while a function runs."""

    limit_bytes: int
    measure: Callable[[Callable[[], None]], int]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Call ``work`` and return the peak of the memory; one byte above the limit if the device refused memory."""
        try:
            return self.measure(work)
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            return self.limit_bytes + 1


def useful_batch(config: TrainConfig, images: int) -> tuple[int, str]:
    """Return the largest batch that ``auto`` chooses, whatever the memory is, and what limits it.

    The learning rates of a recipe are those for steps of ``--nominal-batch`` images, and larger steps only make fewer updates.
    With ``--lr-scale linear`` or ``sqrt`` the rate grows with the step, so the batch may be larger as long as an epoch has
    ``LEAST_STEPS`` steps. A batch below the nominal one would not make more steps, because a step accumulates batches up to it.
    """
    most, limit = config.nominal_batch, f"--nominal-batch {config.nominal_batch}"
    if config.lr_scale != "none" and images // LEAST_STEPS > most:
        most, limit = images // LEAST_STEPS, f"an epoch of at least {LEAST_STEPS} steps"
    if images < most:
        most, limit = images, f"the training split of {images} images"
    return max(most, config.micro_batch), limit


def pass_sizes(given: int, most: int, *, alone: bool) -> dict[int, int]:
    """Return the micro-batch of each possible pass up to ``most`` images, by its number of images, ascending.

    Args:
        given: micro-batch of the user; 0 or -1: the largest divisor up to 16, from 8 on for larger passes.
        alone: a pass has one micro-batch.
    """
    if given > 0:
        return {n: given for n in range(given, (given if alone else most) + 1, given)}
    low, high = TARGET_MICRO_BATCH
    found = {n: n if alone else max(d for d in divisors(n) if d <= high) for n in range(1, most + 1)}
    return {n: size for n, size in found.items() if size >= min(n, low)}


def measured_batch(
    config: TrainConfig,
    build: Callable[[TrainConfig], LargestPass],
    images: int,
    cached_bytes: int,
    world: World,
    console: NullConsole,
) -> dict[str, int]:
    """Return the settings that the memory of all devices decides, by name. Collective: every rank.

    Args:
        build: returns the :class:`LargestPass` of a run with these settings, on new memory of the devices.
        images: of the training split.
        cached_bytes: of all decoded images, which a run may keep in the memory of each machine.

    Raises:
        ConfigError: a device holds not even one image or no validation batch, or its memory is unknown.
    """
    on_cpu = devices.is_host(world.device)
    alone = on_cpu or config.reduce == "exact"
    per_process = processes_of(config.device) if config.parallel == "dp" else 1
    given_shares = "" if config.shares == "auto" else config.shares
    shares = Partition.parse(given_shares, world.size * per_process).shares
    useful, limit = useful_batch(config, images)
    # images of one device in a batch; a smaller micro-batch would spoil batch normalisation
    part = max(int(useful * max(shares) / sum(shares)), min(MICRO_BATCHES.start, images), config.micro_batch)
    if on_cpu and part > max(MOST_ON_CPU, config.micro_batch):
        part, limit = max(MOST_ON_CPU, config.micro_batch), f"a pass of {MOST_ON_CPU} images on a CPU"
    # A step accumulates several batches if there are fewer images than --nominal-batch. One pass may have all of them.
    of_step = 0 if alone else -(-max(useful, config.nominal_batch) // len(shares))
    sizes = pass_sizes(config.micro_batch, max(part, of_step), alone=alone)
    meter = host_meter(config, cached_bytes, world) if on_cpu else device_meter(config, world)
    with world.activity.doing("memory probe"):
        mine = _measured(config, build, meter, sizes)
        gc.collect()  # hooks of the probe's network refer to it in cycles
        release_heap()
        devices.release_memory(world.device)
    mine = replace(mine, where=f"rank {world.rank} ({world.host}, {world.device})")
    every = [Measured(**theirs) for theirs in world.gather(vars(mine))]
    least = min(every, key=lambda one: one.images)
    _check_that_all_fits(config, every, least, first=min(sizes))
    most = max(n for n in sizes if n <= part)
    size = sizes[min(least.images, most)]
    of_shares = [int(every[k // per_process].images * sum(shares) / s) for k, s in enumerate(shares) if s]
    batch = max(min(*of_shares, useful) // size, 1) * size
    passes = f"a pass of each of {len(shares)} device{'s' if len(shares) > 1 else ''}"
    text = f"{least.images} images fit into {passes}"
    if least.images >= most:
        text = (
            f"{limit} limits it, and --batch N sets another one; {least.images} images were tried in {passes}"
        )
    elif least.by_index:
        text = f"{text}, in which no tensor may have more than {INDEX_LIMIT:,} elements"
    console.fact(f"batch {batch}: {text}; the least memory is that of {least.where}: {least.text()}")
    together = {} if alone else {"micro_batches_per_pass": least.images // size}
    return {"batch": batch, "micro_batch": size, **together}


def _measured(
    config: TrainConfig, build: Callable[[TrainConfig], LargestPass], meter: Meter, sizes: dict[int, int]
) -> Measured:
    """Return the largest pass of this process's devices, on a network of its own that is dropped afterwards."""
    largest = build(config.model_copy(update=dict.fromkeys(("batch", "micro_batch"), TARGET_MICRO_BATCH[0])))
    replicas = largest.state.replicas
    if devices.is_host(replicas.lead.device):
        weights_bytes = sum(p.numel() * p.element_size() for p in replicas.lead.model.parameters())
        meter = replace(meter, limit_bytes=max(meter.limit_bytes - KEPT_ON_CPU * weights_bytes, 0))
    validation_bytes = _validation_bytes(largest, meter)  # first, while the process holds no freed memory
    validates = validation_bytes <= meter.limit_bytes
    if overlaps(config):
        beside_bytes = max(validation_bytes - meter.peak_bytes(lambda: None), 0)
        meter = replace(meter, limit_bytes=max(meter.limit_bytes - beside_bytes, 0))

    def pass_of(images: int) -> None:
        if not devices.is_host(replicas.lead.device) and config.reduce != "exact":
            replicas.pass_together(images // sizes[images], sizes[images])
        largest.run(images)

    indexed = [images for images in sizes if images <= largest.most_images]
    found = largest_that_fits_below(pass_of, meter, indexed)
    by_index = len(indexed) < len(sizes) and found.images == max(indexed, default=0)
    return replace(found, validates=validates, by_index=by_index)


def _validation_bytes(largest: LargestPass, meter: Meter) -> int:
    """Return the memory that validation batches need.

    On CPUs, whose kernel may kill a process that tries too much, that of a line through batches of one and of two images.
    """
    validate, batch = largest.validation()
    if not devices.is_host(largest.state.replicas.lead.device):
        return meter.peak_bytes(partial(validate, batch))
    one, two = (meter.peak_bytes(partial(validate, images)) for images in (1, 2))
    return one + (batch * torch.get_num_threads() - 1) * max(two - one, 0)  # each thread takes a batch


def largest_that_fits_below(pass_of: Callable[[int], None], meter: Meter, sizes: Sequence[int]) -> Measured:
    """Return the largest pass of ``sizes`` (images, ascending) whose measured peak is within the limit.

    The size is at most doubled, and a size is tried only if a straight line through the last two peaks stays below the limit.
    So on a host whose kernel kills processes instead of refusing memory, no trial goes far beyond the limit. After a trial
    that failed, each further trial halves the range that is left.
    """
    # images and peak; first that of the network without a pass
    fitted = [(0, meter.peak_bytes(lambda: None))]
    size, failed, failed_bytes = min(sizes, default=0), 0, 0
    while size:
        peak = meter.peak_bytes(partial(pass_of, size))
        if peak <= meter.limit_bytes:
            fitted.append((size, peak))
        else:
            failed, failed_bytes = size, peak
        if len(fitted) < 2:
            break
        (before, before_bytes), (best, best_bytes) = fitted[-2:]
        slope = max((best_bytes - before_bytes) / (best - before), 1.0)
        on_line = best + int((meter.limit_bytes - best_bytes) / slope)
        most = min(on_line, 2 * best, (best + failed) // 2 if failed else sizes[-1])
        size = max((n for n in sizes if best < n <= most), default=0)
    images, used_bytes = fitted[-1]
    return Measured(images, used_bytes if images else failed_bytes, meter.limit_bytes)


def _check_that_all_fits(
    config: TrainConfig, every: Sequence[Measured], least: Measured, *, first: int
) -> None:
    """Raise if a device holds not even a pass of ``first`` images, or no validation batch."""
    if not least.images:
        raise ConfigError(
            f"--batch auto: not even {first} image{'s' if first > 1 else ''} of {config.img} px fit{'s' if first == 1 else ''} "
            f"into the memory of {least.where}: {least.text()}",
            source="a trial of the largest forward and backward pass",
            hint=f"a smaller --img, --model{' or --micro-batch' if first > 1 else ''}, "
            f"{'no --val-overlap, ' if overlaps(config) else ''}or a --batch-memory above {config.batch_memory:g}",
        )
    for one in every:
        if not one.validates:
            raise ConfigError(
                f"--batch auto: a validation batch of --val-batch {config.val_batch} needs more than the "
                f"{size_text(one.limit_bytes)} that the run may use of the memory of {one.where}",
                source="a trial of a validation",
                hint="a smaller --val-batch, which does not change the figures",
            )


def device_meter(config: TrainConfig, world: World) -> Meter:
    """Return the meter of the accelerators of this process: what torch reserves there.

    With several devices (``--parallel dp``), the one with the least room counts.

    Raises:
        ConfigError: torch does not know the memory of this type of device.
    """
    places = replica_devices(config, world)
    limits = [_limit_bytes(config, place) for place in places]

    def measure(work: Callable[[], None]) -> int:
        for place in places:
            devices.release_memory(place)
            devices.reset_peak_memory(place)
        try:
            work()
            for place in places:
                devices.synchronize(place)
            peaks = map(devices.peak_reserved_bytes, places)
            return max(peak - limit for peak, limit in zip(peaks, limits, strict=True)) + min(limits)
        finally:
            for place in places:
                devices.release_memory(place)

    return Meter(min(limits), measure)


def _limit_bytes(config: TrainConfig, place: torch.device) -> int:
    devices.release_memory(place)
    info = devices.memory_info(place)
    if info is None:
        raise ConfigError(
            f"--batch auto: torch does not tell the memory of {place}",
            hint="--batch 16, or another number of images",
        )
    free, total = info
    # processes that share a device get equal parts of it; else what others hold there is not free
    together = gpu_ids(config.device).count(place.index or 0) if ":" in config.device else 1
    elsewhere = total - free if together == 1 else 0
    return int(config.batch_memory * total / together) - elsewhere


def host_meter(config: TrainConfig, cached_bytes: int, world: World) -> Meter:
    """Return the meter of a CPU: memory that this process takes in addition to what it has now.

    Its resident memory has its part of what the machine and the control groups leave. Its address space and its data
    have what its own limits (ulimit) leave, which it shares with no other process. Each is less the cache of images. Where
    the system does not tell that, only ``MOST_ON_CPU`` limits a pass.
    """
    status, shared, own = PROC / "self" / "status", shared_available_bytes(), below_own_limits()
    if own:
        map_large_blocks()
    left = {"VmRSS": 1 << 62 if shared is None else shared, **own}
    half = min(left.values()) // 2  # that data/input/cache.py takes at most; auto keeps all images or none
    keeps = config.cache in ("ram", "jpeg") or (config.cache == "auto" and cached_bytes <= half)
    cached = min(cached_bytes, half) if keeps else 0
    limits = {name: int(config.batch_memory * max(value - cached, 0)) for name, value in left.items()}
    limits["VmRSS"] //= world.local_size
    before, least = sizes_in(status), min(limits.values())

    def measure(work: Callable[[], None]) -> int:
        release_heap()
        with suppress(OSError):
            Path(PROC / "self" / "clear_refs").write_text("5")  # resets VmHWM to the present value
        peaks, is_over = {name: sizes_in(status).get(name, 0) for name in own}, threading.Event()

        def watch() -> None:
            # The kernel keeps no peak of VmData, and that of VmSize cannot be reset. A look each millisecond misses only the
            # short-lived memory of single operations, for which the share of the memory that no trial may use is enough.
            while own and not is_over.wait(0.001):
                now = sizes_in(status)
                peaks.update((name, max(peak, now.get(name, 0))) for name, peak in peaks.items())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for _ in range(HOST_PASSES):
                work()
        finally:
            is_over.set()
            watcher.join()
        peaks["VmRSS"] = sizes_in(status).get("VmHWM", 0)
        return max(least + max(peaks[name] - before.get(name, 0) - limits[name] for name in limits), 0)

    return Meter(least, measure)
