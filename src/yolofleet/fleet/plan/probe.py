"""A probe: figures of one machine, measured by ``yolofleet plan probe``, in a small JSON file that can be shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from yolofleet.fleet.plan.inputs import NO_LINK, Doubt, Link, Machine, Network, Workload
from yolofleet.fleet.plan.library import Entry
from yolofleet.storage.atomic import write_json
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.errors import ConfigError

VERSION = 1
MAX_BYTES = 1 << 20
AGAIN = "measure again: yolofleet plan probe --data DATA --model MODEL"
MEASURED = Doubt(compute=0.05, load=0.1, link=0.15)  # repeats of a probe on a quiet machine differ less
LOOPBACK = Link(1e-4, 0.6e9)  # gloo between processes of one machine: benchmarks/README.md
PCIE = Link(5e-6, 8e9, tree=True)  # assumed between GPUs of a machine where only one was measured
SCALED = 0.2  # more doubt about a network or a size that was not measured

Seconds = Annotated[float, Field(ge=0, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e18)]
Count = Annotated[int, Field(ge=1, le=1 << 48)]
Text = Annotated[str, Field(max_length=200)]


class PassTime(Entry):
    """Seconds of a forward and backward pass of ``images`` images, and its peak memory on a device; 0: not measured."""

    images: Count
    seconds: Positive
    device_bytes: Annotated[int, Field(ge=0, le=1 << 48)] = 0


class SumTime(Entry):
    """Seconds of a sum of ``bytes`` over ``ranks`` ranks."""

    ranks: Annotated[int, Field(ge=2, le=4096)]
    bytes: Count
    seconds: Positive


class Probe(Entry):
    """The figures of one machine for one network and image size. Seconds are those of one device."""

    version: Literal[1]
    host: Text
    device: Text  # its name
    on_cpu: bool
    devices: Annotated[int, Field(ge=1, le=64)]  # that the machine has
    cores: Positive
    memory_bytes: Positive
    device_bytes: Annotated[float, Field(ge=0)]
    model: Text
    img: Annotated[int, Field(ge=32, le=8192)]
    precision: Literal["fp32", "tf32", "fp16", "bf16"]
    # forward and backward passes of the network, by their images
    passes: Annotated[tuple[PassTime, ...], Field(min_length=1, max_length=100, strict=False)]
    update_s: Seconds  # the rest of a step
    spread: Annotated[float, Field(ge=0, le=10)]  # relative standard deviation of the time of a step
    load_s: Positive  # seconds of one core to read, decode and augment an image
    cached_s: Positive  # the same from the image cache
    image_bytes: Positive
    read_bytes_s: Positive
    # between devices of this machine
    sums_inside: Annotated[tuple[SumTime, ...], Field(max_length=100, strict=False)] = ()
    # between machines, one rank each
    sums_between: Annotated[tuple[SumTime, ...], Field(max_length=100, strict=False)] = ()
    val_image_s: Positive  # time of a validation for each image
    val_end_s: Seconds  # the rest of it
    save_s: Seconds  # pause of the training for a checkpoint
    start_s: Seconds  # from the command to the first step

    def pass_line(self) -> tuple[float, float]:
        """Return (seconds of a pass besides its images, seconds of an image), by least squares."""
        return _line([(p.images, p.seconds) for p in self.passes])

    def write(self, path: Path) -> None:
        """Write the probe as JSON. Raise StorageError if the file cannot be written."""
        write_json(path, self.model_dump())


def probe_of(values: Mapping[str, Any]) -> Probe:
    """Return the probe of measured values. Raise ConfigError if one is not possible, such as a rate of 0."""
    return _checked(lambda: Probe.model_validate(values), "the measurement failed")


def read_probe(path: Path) -> Probe:
    """Read a probe. Raise ConfigError if the file is missing, is no probe, or has a value that no machine can have."""
    try:
        text = read_foreign_text(path, limit_bytes=MAX_BYTES)
    except (OSError, ValueError) as problem:
        missing = isinstance(problem, FileNotFoundError)
        why = "does not exist" if missing else f"cannot be read: {problem}"
        raise ConfigError(f"the probe {path} {why}", hint=AGAIN) from None
    return _checked(lambda: Probe.model_validate_json(text), f"{path} is not a probe that can be used")


def _checked(validate: Callable[[], Probe], what: str) -> Probe:
    """Return the probe; raise ConfigError with ``what`` and the first wrong value."""
    try:
        return validate()
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = f"expected {VERSION}" if where == "version" else first["msg"]
        raise ConfigError(": ".join(filter(None, (what, where, said))), hint=AGAIN) from None


def machine_of(probe: Probe, work: Workload, network: Network, devices: int = 0) -> Machine:
    """Return the machine of a probe for a workload; another network, size or precision is scaled, with more doubt.

    Args:
        network: of the probe. A pass takes time in proportion to its operations, and memory in proportion to the estimate.
        devices: in use; 0 = all. Processes on CPUs share the cores, so fewer of them are faster.
    """
    pass_s, image_s = probe.pass_line()
    devices = devices or probe.devices
    share = devices / probe.devices if probe.on_cpu else 1.0
    area = (work.img / probe.img) ** 2
    load = work.network.gflops / network.gflops * area * share
    doubt = MEASURED
    if (work.network.name, work.img) != (probe.model, probe.img):
        doubt = doubt._replace(compute=doubt.compute + SCALED, load=doubt.load + SCALED)
    unmeasured = LOOPBACK if probe.on_cpu else PCIE
    return Machine(
        name=probe.host,
        devices=devices,
        cores=probe.cores,
        pass_s=pass_s * share,
        image_s=image_s * load,
        update_s=probe.update_s * share,
        load_s=max(probe.load_s - probe.cached_s, 0.0) * work.image_bytes / probe.image_bytes
        + probe.cached_s * area,
        cached_s=probe.cached_s * area,
        read_bytes_s=probe.read_bytes_s,
        inside=link_of(probe.sums_inside, probe.on_cpu) if probe.sums_inside else unmeasured,
        between=link_of(probe.sums_between, probe.on_cpu),
        val_image_s=probe.val_image_s * load,
        val_end_s=probe.val_end_s,
        save_s=probe.save_s,
        start_s=probe.start_s,
        spread=probe.spread,
        memory_bytes=probe.memory_bytes,
        device_bytes=probe.device_bytes,
        needed_bytes=_needed_bytes(probe, work, network),
        on_cpu=probe.on_cpu,
        doubt=doubt,
        source=f"probe of {probe.host}",
    )


def _needed_bytes(probe: Probe, work: Workload, network: Network) -> float:
    """Return the bytes that a device needs for a pass of one micro-batch: measured, or at least."""
    points = [(p.images, p.device_bytes) for p in probe.passes if p.device_bytes]
    if not points:
        return work.device_bytes
    measured = replace(work, network=network, img=probe.img, precision=probe.precision)
    start, image = _line(points)
    return (start + work.micro_batch * image) * work.device_bytes / measured.device_bytes


def link_of(sums: Sequence[SumTime], on_cpu: bool) -> Link:
    """Return the link that explains measured sums; without sums, return a link without limits."""
    if not sums:
        return NO_LINK
    ranks = sums[0].ranks
    start, per_byte = _line([(s.bytes, s.seconds) for s in sums])
    share = 2 * (ranks - 1) / ranks
    unit = Link(1.0, float("inf"), tree=not on_cpu).all_reduce_s(0, ranks)
    return Link(start / unit, share / per_byte, tree=not on_cpu)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (value at 0, slope > 0) of a line through points; relative errors count equally, and neither is negative."""
    x, y = np.array(points, float).T
    if np.ptp(x) > 0:
        slope, start = map(float, np.polyfit(x, y, 1, w=1 / y))
        if start >= 0 and slope > 0:
            return start, slope
    return 0.0, float(np.average(y, weights=1 / y**2) / np.average(x, weights=1 / y**2))
