"""Choose the batch of a new run by its recipe and the memory of its devices (``--batch auto``), before its first step.

Every rank measures the largest pass that its devices can hold, up to the one that a batch needs that trains well
(:func:`useful_batch`). All ranks take the smallest one, so unequal devices get equal passes. The run stores the chosen
numbers as if the user had given them, so a resumed run does not measure again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from yolofleet.config.schema import MICRO_BATCHES, TARGET_MICRO_BATCH, TrainConfig, divisors
from yolofleet.families.networks.index_limit import INDEX_LIMIT
from yolofleet.support import devices
from yolofleet.support.device_names import gpu_ids
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.cgroup import below_own_limits, shared_available_bytes
from yolofleet.support.system.proc import PROC, map_large_blocks, sizes_in
from yolofleet.support.text import size_text
from yolofleet.training.parallel.process import replica_devices
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.memory_probe import LargestPass, overlaps, reserved_peaks

# Images of a pass. On one thread, passes of 8, 16 and 32 images took equal times for each image.
MOST_ON_CPU = 16
# Copies of the weights that a run on a CPU has and a trial does not have: slots of the optimizer, the network that validates, and a
# state that is copied to be saved.
KEPT_ON_CPU = 6
HOST_PASSES = 3  # passes in a trial, because the heap of a process still grows during the first ones
LEAST_STEPS = 50  # of an epoch, where the learning rate grows with the batch


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


class Measured(NamedTuple):
    """What the trials on the devices of one rank found.

    Attributes:
        images: of the largest pass that fits; 0: none.
        memory: the rank, its device, and the memory of that pass, or of the smallest one if none fits.
        lacking: the memory that a validation batch exceeds, else "".
        by_index: the size of a tensor limits the pass (``families.networks.index_limit.images_within_index``), not the memory.
    """

    images: int
    memory: str
    lacking: str = ""
    by_index: bool = False


def chosen_settings(
    config: TrainConfig,
    images: int,
    shares: Sequence[float],
    measure: Callable[[dict[int, int]], Sequence[Measured]],
    *,
    on_cpu: bool,
) -> tuple[dict[str, int], str]:
    """Return the settings by name, and why the batch is not larger.

    Args:
        images: of the training split.
        shares: of the batch, for each device.
        measure: returns what each rank found. It takes the micro-batch of each pass to try, by its images, ascending.

    Raises:
        ConfigError: a device holds not even one image, or no validation batch.
    """
    useful, limit = useful_batch(config, images)
    alone = on_cpu or config.reduce == "exact"
    # images of one device in a batch; a smaller micro-batch would spoil batch normalisation
    part = max(int(useful * max(shares) / sum(shares)), min(MICRO_BATCHES.start, images), config.micro_batch)
    if on_cpu and part > max(MOST_ON_CPU, config.micro_batch):
        part, limit = max(MOST_ON_CPU, config.micro_batch), f"a pass of {MOST_ON_CPU} images on a CPU"
    # A step accumulates several batches if there are fewer images than --nominal-batch. One pass may have all of them.
    of_step = 0 if alone else -(-max(useful, config.nominal_batch) // len(shares))
    sizes = pass_sizes(config.micro_batch, max(part, of_step), alone=alone)
    every = measure(sizes)
    least = min(every, key=lambda one: one.images)
    if not least.images:
        first, many = min(sizes), min(sizes) > 1
        raise ConfigError(
            f"--batch auto: not even {first} image{'s' if many else ''} of {config.img} px fit{'' if many else 's'} "
            f"into the memory of {least.memory}",
            source="a trial of the largest forward and backward pass",
            hint=f"a smaller --img, --model{' or --micro-batch' if many else ''}, "
            f"{'no --val-overlap, ' if overlaps(config) else ''}or a --batch-memory above {config.batch_memory:g}",
        )
    if lacking := next(filter(None, (one.lacking for one in every)), ""):
        raise ConfigError(
            f"--batch auto: a validation batch of --val-batch {config.val_batch} needs more than {lacking}",
            source="a trial of a validation",
            hint="a smaller --val-batch, which does not change the figures",
        )
    most = max(n for n in sizes if n <= part)
    size = sizes[min(least.images, most)]
    per_process = len(shares) // len(every)
    of_shares = [int(every[k // per_process].images * sum(shares) / s) for k, s in enumerate(shares) if s]
    batch = max(min(*of_shares, useful) // size, 1) * size
    passes = f"a pass of each of {len(shares)} device{'s' if len(shares) > 1 else ''}"
    reason = f"{least.images} images fit into {passes}"
    if least.images >= most:
        reason = (
            f"{limit} limits it, and --batch N sets another one; {least.images} images were tried in {passes}"
        )
    elif least.by_index:
        reason += f", in which no tensor may have more than {INDEX_LIMIT:,} elements"
    chosen = {"batch": batch, "micro_batch": size}
    if not alone:
        chosen["micro_batches_per_pass"] = least.images // size
    return chosen, f"{reason}; the least memory is that of {least.memory}"


def largest_that_fits_below(left_by: Callable[[int], int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the largest pass of ``sizes`` (images, ascending) that leaves memory, and the bytes that it leaves.

    If none does, they are 0 and those of the smallest pass. The size is at most doubled, and a size is tried only if a
    straight line through the last two measurements stays below the limit. So on a host whose kernel kills processes instead
    of refusing memory, no trial goes far beyond the limit. After a trial that failed, each further trial halves the range
    that is left.

    Args:
        left_by: makes a pass of so many images, or none, and returns the bytes that are left at its peak, negative if it
            exceeds the limit.
    """
    fitted, failed = [(0, left_by(0))], 0
    size = min(sizes, default=0)
    while size:
        left = left_by(size)
        if left >= 0:
            fitted.append((size, left))
        elif len(fitted) < 2:
            return 0, left
        else:
            failed = size
        (before, before_left), (best, best_left) = fitted[-2:]
        slope = max((before_left - best_left) / (best - before), 1.0)
        most = min(best + int(best_left / slope), 2 * best, (best + failed) // 2 if failed else sizes[-1])
        size = max((n for n in sizes if best < n <= most), default=0)
    return fitted[-1]


def measured(
    config: TrainConfig, largest: LargestPass, meter: Meter, sizes: dict[int, int], world: World
) -> Measured:
    """Try a validation, then passes on the devices of this process. No collective.

    Args:
        meter: from before the network of ``largest`` was there.
        sizes: see :func:`chosen_settings`.
    """
    on_cpu, taken_bytes = devices.is_host(world.device), 0
    # first the validation, while the process holds no freed memory
    if on_cpu:
        parameters = largest.state.model.parameters()
        taken_bytes = KEPT_ON_CPU * sum(p.numel() * p.element_size() for p in parameters)
        # Each thread takes a batch. The kernel may kill a process that tries too much, so a line through two small ones counts.
        one, two = (meter.left_bytes(partial(largest.validate, n)) for n in (1, 2))
        left = one - (config.val_batch * torch.get_num_threads() - 1) * max(one - two, 0)
    else:
        left = meter.left_bytes(largest.validate)
    validates = left >= taken_bytes
    if overlaps(config):
        taken_bytes += max(meter.left_bytes(lambda: None) - left, 0)

    def left_by(images: int) -> int:
        together = 0 if on_cpu or config.reduce == "exact" else sizes.get(images, 0)
        work = partial(largest.run, images, together) if images else lambda: None
        return meter.left_bytes(work, taken_bytes)

    indexed = [images for images in sizes if images <= largest.most_images]
    images, left = largest_that_fits_below(left_by, indexed)
    where = f"rank {world.rank} ({world.host}, {world.device})"
    limit = max(min(meter.limits) - taken_bytes, 0)
    used = max(limit - left, 0)
    return Measured(
        images,
        f"{where}: {size_text(used)} of {size_text(limit)} ({used / max(limit, 1):.0%})",
        "" if validates else f"the {size_text(limit)} that the run may use of the memory of {where}",
        len(indexed) < len(sizes) and images == max(indexed, default=0),
    )


@dataclass(frozen=True)
class Meter:
    """Measures the memory of a process against limits: of each of its devices, or on a CPU of each size of the process.

    Attributes:
        limits: bytes that a pass may use.
        peaks: calls a function, and returns the peak below each limit meanwhile, bytes.
    """

    limits: Sequence[int]
    peaks: Callable[[Callable[[], object]], Sequence[int]]

    def left_bytes(self, work: Callable[[], object], taken_bytes: int = 0) -> int:
        """Call ``work`` and return what its peak and ``taken_bytes`` leave below the nearest limit; -1 if it got no memory."""
        try:
            return (
                min(limit - peak for limit, peak in zip(self.limits, self.peaks(work), strict=True))
                - taken_bytes
            )
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            return -1


def meter_of(config: TrainConfig, cached_bytes: int, world: World) -> Meter:
    """Return the meter of this process. On accelerators, it measures what torch reserves there.

    Args:
        cached_bytes: of all decoded images, which a run may keep in the memory of each machine.

    Raises:
        ConfigError: torch does not know the memory of this type of device.
    """
    if devices.is_host(world.device):
        return host_meter(config, cached_bytes, world)
    places, limits = replica_devices(config, world), []
    for place in places:
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
        limits.append(int(config.batch_memory * total / together) - elsewhere)
    return Meter(limits, partial(reserved_peaks, places))


def host_meter(config: TrainConfig, cached_bytes: int, world: World) -> Meter:
    """Return the meter of a CPU: memory that this process takes in addition to what it has now.

    Its resident memory has its part of what the machine and the control groups leave. Its address space and its data
    have what its own limits (ulimit) leave, which it shares with no other process. Each is less the cache of images. Where
    the system does not tell that, only ``MOST_ON_CPU`` limits a pass.
    """
    status, shared, own = PROC / "self" / "status", shared_available_bytes(), below_own_limits()
    if own:
        map_large_blocks()
    left = {"VmHWM": 1 << 62 if shared is None else shared, **own}
    half = min(left.values()) // 2  # that data/input/cache.py takes at most; auto keeps all images or none
    keeps = config.cache in ("ram", "jpeg") or (config.cache == "auto" and cached_bytes <= half)
    cached = min(cached_bytes, half) if keeps else 0
    limits = {name: int(config.batch_memory * max(value - cached, 0)) for name, value in left.items()}
    limits["VmHWM"] //= world.local_size
    before = sizes_in(status)
    before["VmHWM"] = before.get("VmRSS", 0)

    def peaks(work: Callable[[], object]) -> list[int]:
        devices.release_memory(world.device)
        with suppress(OSError):
            Path(PROC / "self" / "clear_refs").write_text("5")  # resets VmHWM to the present value
        highest, is_over = dict.fromkeys(limits, 0), threading.Event()

        def look() -> None:
            now = sizes_in(status)
            highest.update((name, max(peak, now.get(name, 0))) for name, peak in highest.items())

        def watch() -> None:
            # The kernel keeps no peak of VmData, and that of VmSize cannot be reset. A look each millisecond misses only the
            # short-lived memory of single operations, for which the share of the memory that no trial may use is enough.
            while own and not is_over.wait(0.001):
                look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for _ in range(HOST_PASSES):
                work()
        finally:
            is_over.set()
            watcher.join()
        look()
        return [peak - before.get(name, 0) for name, peak in highest.items()]

    return Meter(list(limits.values()), peaks)
