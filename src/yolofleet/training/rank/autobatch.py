"""Choose the batch of a new run by its recipe and the memory of its devices (``--batch auto``), before its first step.

Every rank measures the largest pass that its accelerators can hold, up to the one that a batch needs that trains well
(:func:`useful_batch`). A CPU is not measured, because its kernel would kill a process that tries too much. All ranks take the
smallest pass, so unequal devices get equal passes. The run stores the chosen numbers as if the user had given them, so a resumed
run does not measure again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from yolofleet.config.schema import MICRO_BATCHES, TARGET_MICRO_BATCH, TrainConfig, divisors
from yolofleet.support import devices
from yolofleet.support.device_names import gpu_ids
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import size_text
from yolofleet.training.parallel.process import replica_devices
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.memory_probe import LargestPass, memory_of_validation, overlaps, reserved_peaks

# Images of a pass. On one thread, passes of 8, 16 and 32 images took equal times for each image.
MOST_ON_CPU = 16
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
        memory: the rank, its device, and the memory of that pass; of a CPU "".
    """

    images: int
    memory: str = ""


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
        shares: of the batch, for each device.
        measure: returns what each rank found. It takes the micro-batch of each pass to try, by its images, ascending.

    Raises:
        ConfigError: a device holds not even one image.
    """
    useful, limit = useful_batch(config, images)
    alone = on_cpu or config.reduce == "exact"
    # images of one device in a batch; a smaller micro-batch would spoil batch normalisation
    part = max(int(useful * max(shares) / sum(shares)), min(MICRO_BATCHES.start, images), config.micro_batch)
    if on_cpu and part > max(MOST_ON_CPU, config.micro_batch):
        part, limit = max(MOST_ON_CPU, config.micro_batch), f"a pass of {MOST_ON_CPU} images on a CPU"
    sizes = pass_sizes(config.micro_batch, part, alone=alone)
    every = measure(sizes)
    least = min(every, key=lambda one: one.images)
    if not least.images:
        first, many = min(sizes), min(sizes) > 1
        raise ConfigError(
            f"--batch auto: not even {first} image{'s' if many else ''} of {config.img} px fit{'' if many else 's'} "
            f"into the memory of {least.memory}",
            source="a trial of the largest forward and backward pass",
            hint=f"a smaller --img, --model{' or --micro-batch' if many else ''}, "
            f"{'no --val-overlap, ' if overlaps(config) else ''}or a share above --batch {config.batch_memory:g}",
        )
    size = sizes[least.images]
    per_process = len(shares) // len(every)
    of_shares = [int(every[k // per_process].images * sum(shares) / s) for k, s in enumerate(shares) if s]
    batch = max(min(*of_shares, useful) // size, 1) * size
    passes = f"a pass of each of {len(shares)} device{'s' if len(shares) > 1 else ''}"
    reason = f"{least.images} images fit into {passes}"
    if least.images == max(sizes):
        reason = f"{limit} limits it, and --batch N sets another one; {reason}"
    if least.memory:
        reason += f"; the least memory is that of {least.memory}"
    together = {} if alone else {"micro_batches_per_pass": least.images // size}
    return {"batch": batch, "micro_batch": size, **together}, reason


def measured(
    config: TrainConfig, largest: LargestPass, limits: Sequence[int], sizes: dict[int, int], world: World
) -> Measured:
    """Return the largest pass of ``sizes`` (see :func:`chosen_settings`) on the devices of this process. No collective.

    A bisection tries passes, beside a validation that goes on meanwhile.

    Args:
        limits: see :func:`memory_limits`; from before the network of ``largest`` was there.

    Raises:
        RuntimeError: the network or the validation alone needs more memory than there is.
    """
    if devices.is_host(world.device):
        return Measured(max(sizes))
    places, beside = replica_devices(config, world), memory_of_validation(config, largest, world)
    used_of = {0: 0}  # bytes, by the images of a pass; of the device with the least left

    def is_too_large(images: int) -> bool:
        together = 0 if config.reduce == "exact" else sizes[images]
        try:
            peaks = reserved_peaks(places, partial(largest.run, images, together))
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            return True
        least_left = min(limit - peak for limit, peak in zip(limits, peaks, strict=True))
        used_of[images] = min(limits) - least_left
        return least_left < 0

    tried = [images for images in sizes if images <= largest.most_images]
    fitting = bisect_left(tried, True, key=is_too_large)
    images = tried[fitting - 1] if fitting else 0
    del beside
    used, limit = used_of[images], max(min(limits), 1)
    where = f"rank {world.rank} ({world.host}, {world.device})"
    return Measured(images, f"{where}: {size_text(used)} of {size_text(limit)} ({used / limit:.0%})")


def memory_limits(config: TrainConfig, world: World) -> list[int]:
    """Return the bytes that torch may reserve on each accelerator of this process.

    Raises:
        ConfigError: torch does not know the memory of this type of device.
    """
    limits: list[int] = []
    for place in replica_devices(config, world):
        if devices.is_host(place):
            return limits
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
    return limits
