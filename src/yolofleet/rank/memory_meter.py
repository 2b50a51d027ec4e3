"""Measure the memory that a piece of work takes at most: on the accelerators of a process, or of the host on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from yolofleet import devices
from yolofleet.config.device import gpu_ids
from yolofleet.config.schema import TrainConfig
from yolofleet.errors import ConfigError
from yolofleet.parallel.process import replica_devices
from yolofleet.parallel.world import World
from yolofleet.system.cgroup import below_own_limits, shared_available_bytes
from yolofleet.system.kernel_files import text_of
from yolofleet.system.proc import PROC, map_large_blocks, release_heap

HOST_PASSES = 3  # passes in a trial, because the heap of a process still grows during the first ones
WATCH_S = 0.001


@dataclass(frozen=True)
class Meter:
    """Measures the memory of a device.

    Attributes:
        limit_bytes: what the run may use.
        measure: calls a function and returns the peak of the memory that the run used meanwhile.
        beside_bytes: that the run needs at the same time for something else.
    """

    limit_bytes: int
    measure: Callable[[Callable[[], None]], int]
    beside_bytes: int = 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Call ``work`` and return the peak of the memory; one byte above the limit if the device refused memory."""
        try:
            return self.measure(work) + self.beside_bytes
        except (RuntimeError, MemoryError) as problem:
            if not devices.is_out_of_memory(problem):
                raise
            return self.limit_bytes + 1


def device_meter(config: TrainConfig, world: World) -> Meter:
    """Return the meter of the accelerators of this process: what torch reserves there.

    With several devices (``--parallel dp``), the one with the least room counts.

    Raises:
        ConfigError: torch does not know the memory of this type of device.
    """
    places = replica_devices(config, world)
    limits = [_limit_bytes(config, place) for place in places]
    least = min(limits)

    def measure(work: Callable[[], None]) -> int:
        for place in places:
            devices.release_memory(place)
            devices.reset_peak_memory(place)
        try:
            work()
            for place in places:
                devices.synchronize(place)
            peaks = map(devices.peak_reserved_bytes, places)
            return max(peak - limit for peak, limit in zip(peaks, limits, strict=True)) + least
        finally:
            for place in places:
                devices.release_memory(place)

    return Meter(least, measure)


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
    shared, own = shared_available_bytes(), below_own_limits()
    if own:
        map_large_blocks()
    left = {"VmRSS": 1 << 62 if shared is None else shared, **own}
    half = min(left.values()) // 2
    cached = cached_bytes if cached_bytes <= half else half * (config.cache != "auto")
    if config.cache not in ("auto", "ram", "jpeg"):
        cached = 0  # else input/cache.py takes at most half, and auto all images or none
    limits = {name: int(config.batch_memory * max(value - cached, 0)) for name, value in left.items()}
    limits["VmRSS"] //= world.local_size
    before = _sizes_bytes(limits)
    least = min(limits.values())

    def measure(work: Callable[[], None]) -> int:
        release_heap()
        with suppress(OSError):
            Path(PROC / "self" / "clear_refs").write_text("5")  # resets VmHWM to the present value
        peaks = _peaks_while(work, own)
        peaks["VmRSS"] = _sizes_bytes(["VmHWM"])["VmHWM"]
        return max(least + max(peaks[name] - before[name] - limits[name] for name in limits), 0)

    return Meter(least, measure)


def _peaks_while(work: Callable[[], None], names: Collection[str]) -> dict[str, int]:
    """Call ``work`` ``HOST_PASSES`` times and return the largest value of each size meanwhile.

    The kernel keeps no peak of VmData, and that of VmSize cannot be reset. A thread that looks every millisecond misses only
    the short-lived memory of single operations, for which the share of the memory that no trial may use is enough.
    """
    peaks = _sizes_bytes(names)
    is_over = threading.Event()

    def watch() -> None:
        while peaks and not is_over.wait(WATCH_S):
            peaks.update((name, max(peaks[name], size)) for name, size in _sizes_bytes(names).items())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for _ in range(HOST_PASSES):
            work()
    finally:
        is_over.set()
        watcher.join()
    return peaks


def _sizes_bytes(names: Collection[str]) -> dict[str, int]:
    """Return sizes of this process in /proc/self/status; 0 on systems that have none."""
    lines = (line.partition(":") for line in text_of(PROC / "self" / "status").splitlines())
    return dict.fromkeys(names, 0) | {k: 1024 * int(v.split()[0]) for k, _, v in lines if k in names}
