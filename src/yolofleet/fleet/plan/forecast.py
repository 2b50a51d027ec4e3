"""The fleets that the settings of ``yolofleet plan`` name, as machines of the formula."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import step_images_of
from yolofleet.config.schema.measure import PlanConfig
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.fleet.hosts.fleet import given_fleet
from yolofleet.fleet.plan.formula import Prediction, cached_share, predict, rank_shares, store_limit
from yolofleet.fleet.plan.inputs import NO_LINK, Link, Machine, Store, Workload, bytes_s_of, reads
from yolofleet.fleet.plan.library import COCO_IMAGE_BYTES, Library, network_of
from yolofleet.fleet.plan.probe import Probe, machine_of, read_probe
from yolofleet.storage.caches import cache_folder
from yolofleet.support.device_names import processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import duration
from yolofleet.support.text import listed, size_text
from yolofleet.training.parallel.partition import Partition

MOST_FLEETS = 64
SIZED_FILES = 200  # image files whose size gives the mean
TCP_SHARE = 0.94  # share of a link's rate that is left for data
LATENCY_S = 1e-4  # latency of a message over TCP


def probes_folder() -> Path:
    """Return the folder of the probes that were measured from this machine."""
    return cache_folder("probes")


def probe_path(host: str) -> Path:
    """Return the file of a host's probe. A host reports its name, so characters that lead to another folder are replaced."""
    name = re.sub(r"[^\w.:-]", "_", host.rpartition("@")[2])
    return probes_folder() / f"{name}.json"


def data_facts(config: PlanConfig) -> tuple[int, int, float]:
    """Return the images of training and of validation, and the mean bytes of an image file.

    ``--images`` and ``--val-images`` replace the counts of ``--data``: with both of them, the data need not be here, and without
    ``--data`` a missing ``--val-images`` is 0.

    Raises:
        ConfigError, DataError: the data set cannot be read.
    """
    if config.images and (config.val_images or not config.data):
        return config.images, config.val_images, COCO_IMAGE_BYTES
    spec = load_dataset(config.data)
    files = [Path(path) for reader in spec.readers("train") for path in reader.images]
    some = files[:: max(len(files) // SIZED_FILES, 1)]
    sizes = [path.stat().st_size for path in some if path.is_file()]
    val_readers = spec.readers("val") if spec.has_val and not config.val_images else ()
    val_images = config.val_images or sum(len(reader.images) for reader in val_readers)
    return config.images or len(files), val_images, float(np.mean(sizes or COCO_IMAGE_BYTES))


def counts_of(text: str) -> list[int]:
    """Return the numbers of ``--machines``, ascending: ``1..4,8`` is 1, 2, 3, 4, 8. Raise ConfigError for none, or too many."""
    counts: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("..")
        counts.update(range(int(low), int(high or low) + 1))
    if not 0 < len(counts) <= MOST_FLEETS:
        raise ConfigError(
            f"--machines {text} has {len(counts)} numbers; the most are {MOST_FLEETS}",
            hint="--machines 1,2,4,8",
        )
    return sorted(counts)


def forecasts(config: Resolved[PlanConfig]) -> list[Forecast]:
    """Return the forecast of each fleet that the settings name.

    Raises:
        ConfigError: no probe, no such machine, or settings that contradict each other.
    """
    c = config.value
    if c.machine and (c.hosts or c.fleet or c.probe):
        raise ConfigError(
            f"--machine {c.machine} names published machines, but --hosts, --fleet and --probe name measured ones",
            hint="leave out one of them",
        )
    planned = Planned(c)
    if c.machine:
        library, counts = Library.read(c.prices), counts_of(c.machines)
        return [planned.published(library, name, count) for name in c.machine.split(",") for count in counts]
    probes = [read_probe(Path(path)) for path in c.probe]
    hosts = given_fleet(config)
    if hosts is not None:
        measured = [(probe_of_host(host.name, probes), host.processes) for host in hosts.active]
        return [planned.measured(listed([host.name for host in hosts.active], most=2), measured)]
    devices = processes_of(c.device) if config.is_given("device") and c.device != "auto" else 0
    return [
        planned.measured(f"{count} x {probe.host}", [(probe, devices or probe.devices)] * count)
        for probe in probes or [newest_probe()]
        for count in counts_of(c.machines)
    ]


class Planned:
    """A training on measured or published machines.

    Raises:
        ConfigError, DataError: the data set or the network cannot be read.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.config = config
        self.images, self.val_images, self.image_bytes = data_facts(config)
        self.network = network_of(config.cfg or config.model)

    def workload(self, ranks: int, *, on_cpu: bool) -> Workload:
        """Return the workload on ``ranks`` ranks. Devices that are CPU cores have other defaults of precision and passes.

        Raises:
            ConfigError: ``--shares`` does not fit the ranks.
        """
        c = self.config
        step_images = step_images_of(c.batch, c.nominal_batch) * (ranks if c.per_device else 1)
        micro_batch, is_one_by_one = c.likely_micro_batch, on_cpu or c.reduce == "exact"
        return Workload(
            network=self.network,
            img=c.img,
            images=max(round(self.images * c.fraction), 1),
            val_images=self.val_images,
            image_bytes=self.image_bytes,
            epochs=c.epochs,
            step_images=step_images,
            micro_batch=micro_batch,
            # a GPU takes as many as fit into its memory, which is taken to be all of a rank's
            per_pass=c.micro_batches_per_pass or (1 if is_one_by_one else step_images // micro_batch),
            workers=c.workers,
            cache="ram" if c.cache == "jpeg" else c.cache,
            reduce=c.reduce,
            precision=("fp32" if on_cpu else "fp16") if c.precision == "auto" else c.precision,
            shares=() if c.shares in ("", "auto") else Partition.parse(c.shares, ranks).shares,
            auto_shares=c.shares == "auto",
            val_period=c.val_period,
        )

    def linked(self, machine: Machine, machines: int) -> Machine:
        """Return one of so many machines with the link of ``--network`` and the store of ``--store``, if they are set."""
        network, store = self.config.network, self.config.store
        if network:
            link = Link(LATENCY_S, bytes_s_of(network, TCP_SHARE), tree=not machine.on_cpu)
            machine = replace(machine, between=link)
        return replace(machine, store=Store.parse(store), store_reads=reads(machines)) if store else machine

    def published(self, library: Library, name: str, count: int) -> Forecast:
        """Return the forecast of ``count`` machines of the library."""
        work = self.workload(library.find(name)[1].devices * count, on_cpu=False)
        return forecast(f"{count} x {name}", work, [self.linked(library.machine(name, work), count)] * count)

    def measured(self, name: str, measured: Sequence[tuple[Probe, int]]) -> Forecast:
        """Return the forecast of probed machines with their numbers of devices.

        Raises:
            ConfigError: there are several machines, and nobody measured or named the link between them.
        """
        work = self.workload(sum(devices for _, devices in measured), on_cpu=measured[0][0].on_cpu)
        machines = []
        for probe, devices in measured:
            # the network of a file has no name that network_of knows
            network = self.network if probe.model == self.network.name else network_of(probe.model)
            machines.append(self.linked(machine_of(probe, work, network, devices), len(measured)))
        if len(machines) > 1 and all(machine.between == NO_LINK for machine in machines):
            raise ConfigError(
                f"no probe has the link between these {len(machines)} machines",
                source=f"probe of {measured[0][0].host}",
                hint="--network 10gbit, or yolofleet plan probe --hosts A,B",
            )
        return forecast(name, work, machines)


def probe_of_host(host: str, probes: Sequence[Probe]) -> Probe:
    """Return the probe of a host: one of ``probes`` with its name, the only one of ``probes``, or the stored one.

    Raises:
        ConfigError: no probe of the host is stored.
    """
    name = host.rpartition("@")[2]
    for probe in probes:
        if probe.host == name or len(probes) == 1:
            return probe
    path = probe_path(host)
    if not path.is_file():
        raise ConfigError(
            f"there is no probe of host {name}",
            source=str(path),
            hint="yolofleet plan probe --hosts A,B --data DATA --model MODEL, or --probe FILE",
        )
    return read_probe(path)


def newest_probe() -> Probe:
    """Return the stored probe that was written last. Raise ConfigError if no probe is stored."""
    folder = probes_folder()
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            "there is no probe of this machine, and --machine names no published one",
            source=str(folder),
            hint="yolofleet plan probe --data DATA --model MODEL takes a minute; or --machine 8xA100",
        )
    return read_probe(files[-1])


Fleet = Sequence[Machine]
COLUMNS = ("fleet", "ranks", "images/s", "gain", "epoch", "run", "$", "binds")


@dataclass(frozen=True)
class Forecast:
    """The predicted figures of a fleet."""

    name: str  # short name of the fleet
    work: Workload
    fleet: Fleet
    likely: Prediction  # with the figures as they are
    # fast, slow: if all doubts come true
    fast: Prediction
    slow: Prediction

    @property
    def fits(self) -> bool:
        """Return whether a micro-batch may fit into the memory of each device."""
        return all(machine.fits for machine in self.fleet)

    @property
    def binds(self) -> str:
        return self.likely.binds if self.fits else "memory"

    def memory_text(self) -> str:
        """Return what a micro-batch needs, and what the first device that is too small has."""
        worst = next(machine for machine in self.fleet if not machine.fits)
        return (
            f"a micro-batch of {self.work.micro_batch} images of {self.work.img} px needs at least "
            f"{size_text(worst.needed_bytes)}, and a device of {worst.name} has {size_text(worst.device_bytes)}"
        )

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        if not self.fits:
            return [f"{self.name} is too small: {self.memory_text()}"]
        found = []
        idle = [part for part in rank_shares(self.work, self.fleet) if not part.images]
        if idle:
            found.append(
                f"{len(idle)} of {self.likely.devices} devices have nothing to do: a step has "
                f"{self.work.step_images // self.work.micro_batch} micro-batches; --per-device, or a larger --nominal-batch"
            )
        if self.work.cache != "none" and (share := min(cached_share(self.work, m) for m in self.fleet)) < 1:
            found.append(f"the image cache of a machine holds {share:.0%} of the images")
        return found + self._store_notes()

    def _store_notes(self) -> list[str]:
        """Return what the store costs and which of its limits binds in the first epoch, in which all files are read."""
        slowest = max(self.fleet, key=lambda m: store_limit(self.work, m)[0] if m.store is not None else 0.0)
        if slowest.store is None:
            return []
        image_s, limit = store_limit(self.work, slowest)
        first, waits_s = self.likely.first, self.work.steps * self.likely.first.storage
        found = f"a machine reads {1 / image_s:,.0f} images/s from the store, limited by its {limit}"
        if first.storage >= 0.1 * first.total:
            found += f": it binds in the first epoch, which waits {duration(waits_s)} for it"
        else:
            found += ": the first epoch waits less than a tenth of its time for it"
        price = self.likely.store_price
        return [found + (f"; the requests cost ${price:,.2f}" if price else "")]

    def header(self) -> dict[str, str]:
        """Return what was predicted, for which machine, by name."""
        work, machine = self.work, self.fleet[0]
        return {
            "training": f"{work.network.name}, {work.img} px, {work.images:,} images, {work.epochs} epochs",
            "step": f"{work.step_images} images as micro-batches of {work.micro_batch}, {work.precision}, {work.reduce} sums",
            "machine": f"{machine.name}: {machine.devices} device{'s' if machine.devices > 1 else ''}, "
            f"{machine.cores:g} cores, {size_text(machine.memory_bytes)}",
            "figures": machine.source,
        }

    def row(self, first: Forecast) -> list[str]:
        """Return the cells under ``COLUMNS``; the gain is the speed-up over ``first``."""
        likely, priced = self.likely, not math.isnan(self.likely.price_hour)
        if not self.fits:
            return [self.name, str(likely.devices), "too small", "-", "-", "-", "-", self.binds]
        return [
            self.name,
            str(likely.devices),
            span(self.slow.rate_img_s, self.fast.rate_img_s),
            f"{likely.rate_img_s / first.likely.rate_img_s:.2f}",
            duration_span(self.fast.epoch, self.slow.epoch),
            duration_span(self.fast.run, self.slow.run),
            span(self.fast.cost, self.slow.cost) if priced else "-",
            self.binds,
        ]

    def figures(self) -> dict[str, Any]:
        """Return values for JSON."""
        names = ("images_per_s", "epoch_s", "run_s", "cost")

        def of(one: Prediction) -> dict[str, Any]:
            values = (one.rate_img_s, one.epoch, one.run, one.cost)
            return dict(
                zip(names, (v if self.fits and not math.isnan(v) else None for v in values), strict=True)
            )

        likely = self.likely
        return {
            "fleet": self.name,
            "machines": len(self.fleet),
            "devices": likely.devices,
            **of(likely),
            "fast": of(self.fast),
            "slow": of(self.slow),
            "store_price": likely.store_price,
            "binds": self.binds,
            "fits": self.fits,
            "device_hours": likely.device_hours if self.fits else None,
            "wasted_share": likely.wasted_share if self.fits else None,
            "seconds": likely.parts if self.fits else {},
        }


def forecast(name: str, work: Workload, fleet: Fleet) -> Forecast:
    """Return the forecast of ``fleet``, with its plausible range."""
    fast, slow = ([machine.changed(direction) for machine in fleet] for direction in (-1, 1))
    return Forecast(name, work, fleet, predict(work, fleet), predict(work, fast), predict(work, slow))


def rounded(value: float) -> str:
    """Return a number with two significant digits, three from 100 on."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = (2 if abs(value) < 100 else 3) - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def span(low: float, high: float) -> str:
    """Return a range such as ``410-600``."""
    one, other = rounded(low), rounded(high)
    return one if one == other else f"{one}-{other}"


def duration_span(low_s: float, high_s: float) -> str:
    """Return a range of durations in one unit, such as ``5.1-7.4 h``."""
    unit, name = next(
        (u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")) if high_s >= 2 * u or u == 1
    )
    return f"{span(low_s / unit, high_s / unit)} {name}"
