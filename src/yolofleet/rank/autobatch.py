"""Choose the batch of a new run by its recipe and the memory of its devices (``--batch auto``), before its first step.

Every rank measures the largest pass that its devices can hold, up to the one that a batch needs that trains well
(:func:`useful_batch`). All ranks take the smallest one, so unequal devices get equal passes. The run stores the chosen numbers as if the user had given them, so a resumed run does not measure again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from yolofleet import devices
from yolofleet.config.device import processes_of
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
        used_bytes: its peak, or that of the smallest pass if none fits. With ``--val-overlap`` it includes a validation.
        limit_bytes: what the run may use there.
        where: rank, host and device.
        validation_bytes: that validation batches need.
        by_index: the size of a tensor limits the pass (``models.cost.images_within_index``), not the memory.
    """

    images: int
    used_bytes: int
    limit_bytes: int
    where: str = ""
    validation_bytes: int = 0
    by_index: bool = False

    def text(self) -> str:
        share = self.used_bytes / max(self.limit_bytes, 1)
        return f"{size_text(self.used_bytes)} of {size_text(self.limit_bytes)} ({share:.0%})"


@dataclass(frozen=True)
class PassSizes:
    """The numbers of images that a pass can have.

    Attributes:
        given: micro-batch of the user; 0 or -1: the largest divisor up to 16.
        alone: a pass has one micro-batch.
    """

    given: int
    alone: bool

    @property
    def least(self) -> int:
        return max(self.given, 1)

    def micro_batch(self, images: int) -> int:
        """Return the micro-batch of a pass of ``images`` images."""
        if self.given > 0:
            return self.given
        return images if self.alone else max(d for d in divisors(images) if d <= TARGET_MICRO_BATCH[1])

    def below(self, images: int) -> int:
        """Return the largest size up to ``images``; 0: none."""
        return next((n for n in range(images, 0, -1) if self._is_possible(n)), 0)

    def _is_possible(self, images: int) -> bool:
        if self.given > 0:
            return images == self.given or (images % self.given == 0 and not self.alone)
        return images <= TARGET_MICRO_BATCH[1] or self.micro_batch(images) >= TARGET_MICRO_BATCH[0]


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
        ConfigError: a device holds not even one image, or its memory is unknown.
    """
    on_cpu = devices.is_host(world.device)
    sizes = PassSizes(config.micro_batch, alone=on_cpu or config.reduce == "exact")
    per_process = processes_of(config.device) if config.parallel == "dp" else 1
    given_shares = "" if config.shares == "auto" else config.shares
    shares = Partition.parse(given_shares, world.size * per_process).shares
    useful, limit = useful_batch(config, images)
    # images of one device in a batch; a smaller micro-batch would spoil batch normalisation
    part = max(int(useful * max(shares) / sum(shares)), min(MICRO_BATCHES.start, images), config.micro_batch)
    if on_cpu and part > max(MOST_ON_CPU, config.micro_batch):
        part, limit = max(MOST_ON_CPU, config.micro_batch), f"a pass of {MOST_ON_CPU} images on a CPU"
    # A step accumulates several batches if there are fewer images than --nominal-batch. One pass may have all of them.
    of_step = -(-max(useful, config.nominal_batch) // len(shares))
    most = part if sizes.alone else max(part, of_step)
    meter = host_meter(config, cached_bytes, world) if on_cpu else device_meter(config, world)
    with world.activity.doing("memory probe"):
        mine = _measured(config, build, meter, most, sizes)
        gc.collect()  # hooks of the probe's network refer to it in cycles
        release_heap()
        devices.release_memory(world.device)
    mine = replace(mine, where=f"rank {world.rank} ({world.host}, {world.device})")
    every = [Measured(**theirs) for theirs in world.gather(vars(mine))]
    _check_that_all_fits(config, every)
    least = min(every, key=lambda one: one.images)
    fits = min(least.images, sizes.below(part))
    size = sizes.micro_batch(fits)
    total = min(
        int(every[k // per_process].images * sum(shares) / share) for k, share in enumerate(shares) if share
    )
    batch = max(min(total, useful) // size, 1) * size
    count = f"{len(shares)} device{'s' if len(shares) > 1 else ''}"
    text = f"{least.images} images fit into a pass of each of {count}"
    if fits == sizes.below(part):
        text = f"{limit} limits it, and --batch N sets another one; {least.images} images were tried in a pass of each of {count}"
    elif least.by_index:
        text = f"{text}, in which no tensor may have more than {INDEX_LIMIT:,} elements"
    console.fact(f"batch {batch}: {text}; the least memory is that of {least.where}: {least.text()}")
    passes = {} if sizes.alone else {"micro_batches_per_pass": least.images // size}
    return {"batch": batch, "micro_batch": size, **passes}


def _measured(
    config: TrainConfig,
    build: Callable[[TrainConfig], LargestPass],
    meter: Meter,
    most: int,
    sizes: PassSizes,
) -> Measured:
    """Return the largest pass of this process's devices, on a network of its own that is dropped afterwards."""
    small = {"batch": TARGET_MICRO_BATCH[0], "micro_batch": TARGET_MICRO_BATCH[0]}
    largest = build(config.model_copy(update=small))
    network = largest.state.replicas.lead
    if devices.is_host(network.device):
        weights_bytes = sum(p.numel() * p.element_size() for p in network.model.parameters())
        meter = replace(meter, limit_bytes=max(meter.limit_bytes - KEPT_ON_CPU * weights_bytes, 0))

    def attempt(count: int) -> None:
        if not sizes.alone:
            size = sizes.micro_batch(count)
            largest.state.replicas.pass_together(count // size, size)
        largest.run(count)

    # first, while the process holds no freed memory
    validation_bytes = _validation_bytes(largest, meter)
    if overlaps(config):
        meter = replace(meter, beside_bytes=max(validation_bytes - meter.peak_bytes(lambda: None), 0))
    found = largest_that_fits_below(attempt, meter, min(most, largest.most_images), sizes)
    by_index = largest.most_images < most and found.images == sizes.below(largest.most_images)
    return replace(found, validation_bytes=validation_bytes, by_index=by_index)


def _validation_bytes(largest: LargestPass, meter: Meter) -> int:
    """Return the memory that validation batches need.

    A device tries a whole batch. Where that fails, and on CPUs, whose kernel may kill a process that tries too much, the
    result is that of a line through batches of one and of two images.
    """
    on_cpu = devices.is_host(largest.state.replicas.lead.device)
    validate, batch = largest.validation()
    whole = 0 if on_cpu else meter.peak_bytes(partial(validate, batch))
    if 0 < whole <= meter.limit_bytes:
        return whole
    one, two = (meter.peak_bytes(partial(validate, images)) for images in (1, 2))
    threads = torch.get_num_threads() if on_cpu else 1  # each takes a whole batch
    return max(one + (batch * threads - 1) * max(two - one, 0), whole)


def _check_that_all_fits(config: TrainConfig, every: Sequence[Measured]) -> None:
    """Raise if a device holds not even the smallest pass, or no validation batch."""
    least = min(every, key=lambda one: one.images)
    first = PassSizes(config.micro_batch, alone=True).least
    if not least.images:
        hints = ["a smaller --img or --model"]
        hints += ["a smaller --micro-batch"] if first > 1 else []
        hints += ["a smaller --val-batch, no --val-overlap"] if overlaps(config) else []
        if config.batch_memory < 0.9:
            hints.append(f"or a share of the memory above {config.batch_memory:g}")
        raise ConfigError(
            f"--batch auto: not even {first} image{'s' if first > 1 else ''} of {config.img} px fit{'s' if first == 1 else ''} "
            f"into the memory of {least.where}: {least.text()}",
            source="a trial of the largest forward and backward pass",
            hint=", ".join(hints),
        )
    worst = max(every, key=lambda one: one.validation_bytes - one.limit_bytes)
    if worst.validation_bytes > worst.limit_bytes:
        fits = min(config.val_batch * worst.limit_bytes // worst.validation_bytes, config.val_batch - 1)
        raise ConfigError(
            f"--batch auto: a validation batch of --val-batch {config.val_batch} needs {size_text(worst.validation_bytes)}, "
            f"and the run may use {size_text(worst.limit_bytes)} of the memory of {worst.where}",
            source="a trial of two smaller ones",
            hint=f"--val-batch {fits}: it does not change the figures"
            if fits
            else "a smaller --img or --model",
        )


def largest_that_fits_below(
    attempt: Callable[[int], None], meter: Meter, most: int, sizes: PassSizes
) -> Measured:
    """Return the largest pass up to ``most`` images whose measured peak is within the limit.

    The size is at most doubled (after six trials, quadrupled), and a size is tried only if a straight line through the
    last two peaks stays below the limit. So on a host whose kernel kills processes instead of refusing memory, no trial
    goes far beyond the limit. After a trial that failed, each further trial halves the range that is left.
    """
    fitted = [
        (0, meter.peak_bytes(lambda: None))
    ]  # images and peak; first that of the network without a pass
    size, failed, failed_bytes = sizes.least if sizes.least <= most else 0, 0, 0
    while size:
        peak = meter.peak_bytes(partial(attempt, size))
        if peak <= meter.limit_bytes:
            fitted.append((size, peak))
        else:
            failed, failed_bytes = size, peak
        best = fitted[-1][0]
        most = (best + failed) // 2 if failed else most
        growth = 2 if len(fitted) < 7 else 4
        found = sizes.below(min(_images_on_line(fitted, meter.limit_bytes), growth * best, most))
        size = found if found > best else 0
    images, used_bytes = fitted[-1]
    return Measured(images, used_bytes if images else failed_bytes, meter.limit_bytes)


def _images_on_line(fitted: Sequence[tuple[int, int]], limit_bytes: int) -> int:
    """Return the images at which a straight line through the last two peaks reaches the limit."""
    if len(fitted) < 2:
        return 0
    (before, before_bytes), (size, peak) = fitted[-2:]
    slope = max((peak - before_bytes) / (size - before), 1.0)
    return size + int((limit_bytes - peak) / slope)
