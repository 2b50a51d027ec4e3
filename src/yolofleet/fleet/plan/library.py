"""Published machines and built-in networks, and the machine of the formula that follows from published figures.

Published figures are peaks. What a training reaches of them is assumed: the constants below, with their sources, and
``PUBLISHED`` says how much they are doubted. A probe replaces all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from yolofleet.families.networks.description import describe
from yolofleet.fleet.plan.inputs import NO_LINK, Doubt, Link, Machine, Network, Workload
from yolofleet.storage.yaml_lines import read_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

FOLDER = Path(__file__).parent
PUBLISHED = Doubt(compute=0.4, load=0.4, link=0.4)
# Operations for each byte of memory bandwidth that a training in 16 bits reaches; half of it in 32 bits. The one constant
# fitted to a run: YOLOv5l at 640 px on one A100, 16 images, needs 0.1676 s a step (docs/plan.md).
OPERATIONS_A_BYTE = 21.5
VECTOR_SHARE = 0.4  # reached share of the peak in fp32, which has no matrix units
LAUNCH_S = 0.01  # launches of a pass: about 1,500 kernels, 7 us each
# memory traffic for each parameter: gradient, momentum, weight, average, each read and written
UPDATE_BYTES = 40
LINK_SHARE = 0.7  # share of the peak that NCCL reaches with buckets of 4 MiB
INSIDE_S, BETWEEN_S = 5e-6, 25e-6  # latency of a message
LOAD_S, CACHED_S = 0.022, 0.004  # seconds of one core for an image of COCO at 640 px: benchmarks/README.md
COCO_IMAGE_BYTES = 163_000
READ_BYTES_S = 500e6  # rate of cloud block storage
SPREAD = 0.1  # of the time of a step; of large trainings at ByteDance 42.5 % lose 10 % or more to stragglers (arXiv:2505.05713)
SAVE_BYTES_S, START_S, VAL_END_S = 5e9, 30.0, 5.0

Amount = Annotated[float, Field(gt=0, le=1e9)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]


class Entry(BaseModel):
    """Base of what a library or a probe holds: numbers are numbers and finite, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Device(Entry):
    """A kind of device: 10^12 operations/s by number format (0 = it has none), memory, and its link inside a machine."""

    fp32: Amount
    tf32: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    fp16: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    bf16: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    memory_gib: Amount
    memory_gb_s: Amount
    link_gb_s: Amount
    source: Text


class CloudMachine(Entry):
    """A kind of machine. ``vcpus``: hardware threads, two to a core. ``price_hour``: US dollars."""

    device: Text
    devices: Annotated[int, Field(ge=1, le=64)]
    vcpus: Annotated[int, Field(ge=1, le=4096)]
    memory_gib: Amount
    network_gbit: Amount
    price_hour: Amount
    source: Text


class Library(Entry):
    """All known devices and machines, and where their figures come from."""

    devices: dict[str, Device]
    machines: dict[str, CloudMachine]
    sources: dict[str, str]

    @classmethod
    def read(cls, prices: Path | None = None) -> Library:
        """Return the library of this package. The single values of ``prices``, a file of the same form, replace its values.

        Raises:
            ConfigError: names the first wrong value and the line of its entry.
        """
        merged: dict[str, dict[str, Any]] = {name: {} for name in cls.model_fields}
        lines: dict[tuple[Any, ...], str] = {}
        hint = "numbers without units or quotes, as in machines: {p4d.24xlarge: {price_hour: 21.96}}"
        for path in (FOLDER / "machines.yaml", *([prices] if prices else [])):
            for section, entries in read_yaml(path).items():
                if section not in merged or not isinstance(entries.value, Mapping):
                    what = f"{shown(section)} is not a section of a machine library"
                    raise ConfigError(what, source=f"{path}:{entries.line}", hint=hint)
                for name, (value, line) in entries.value.items():
                    lines[section, name] = f"{path}:{line}"
                    if isinstance(value, Mapping):
                        value = merged[section].get(name, {}) | {k: inner.value for k, inner in value.items()}
                    merged[section][name] = value
        try:
            found = cls.model_validate(merged)
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            value = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
            what = f"{': '.join(map(str, first['loc']))}: {first['msg'].lower()}{value}"
            raise ConfigError(what, source=lines[first["loc"][:2]], hint=hint) from None
        for name, machine in found.machines.items():
            if machine.device not in found.devices:
                raise ConfigError(
                    f"the machine {name} has the unknown device {shown(machine.device)}",
                    source=lines["machines", name],
                    hint=did_you_mean(machine.device, found.devices),
                )
        return found

    def find(self, text: str) -> tuple[str, CloudMachine]:
        """Return the machine that ``8xA100``, ``A100`` or ``p4d.24xlarge`` names, or the part of a larger machine.

        Raises:
            ConfigError: no such machine, or none with that many devices.
        """
        if text in self.machines:
            return text, self.machines[text]
        number, _, name = text.partition("x")
        if not (number.isdecimal() and len(number) < 5):
            number, name = "1", text
        count = int(number)
        of_kind = [(m.devices, n) for n, m in self.machines.items() if m.device == name]
        kind = sorted(of_kind, key=lambda one: one[0])  # of equal ones, the first of the library
        most = max((devices for devices, _ in kind), default=0)
        if name not in self.devices or not 0 < count <= most:
            known = [*self.devices, *self.machines]
            what = (
                f"the largest machine with {name} has {most}"
                if most and count
                else "not in the library of machines"
            )
            near = f"{most}x{name}, and more machines" if most and count else did_you_mean(name, known)
            raise ConfigError(
                f"--machine {shown(text)}: {what}",
                hint=near or f"known: {', '.join(known)}; or 4xA100; or a file with --prices",
            )
        devices, larger_name = next((devices, n) for devices, n in kind if devices >= count)
        larger, part = self.machines[larger_name], count / devices
        shared = {key: getattr(larger, key) * part for key in ("memory_gib", "price_hour")}
        vcpus = max(round(larger.vcpus * part), 1)
        return larger_name, larger.model_copy(update={"devices": count, "vcpus": vcpus, **shared})

    def machine(self, text: str, work: Workload) -> Machine:
        """Return the machine of the formula that ``text`` names, for a workload.

        Raises:
            ConfigError: see :meth:`find`; the device cannot compute in that precision.
        """
        name, found = self.find(text)
        device = self.devices[found.device]
        peak = getattr(device, work.precision)
        if not peak:
            raise ConfigError(f"{found.device} cannot compute in {work.precision}", hint="--precision fp16")
        bytes_s = device.memory_gb_s * 1e9
        in_16_bits = work.precision in ("fp16", "bf16")
        reached = OPERATIONS_A_BYTE * bytes_s / (1 if in_16_bits else 2)
        if work.precision == "fp32":
            reached = min(reached, VECTOR_SHARE * peak * 1e12)
        area = (work.img / 640) ** 2
        image_s = 3 * (work.network.gflops * area) * 1e9 / min(reached, peak * 1e12)
        inside = (
            Link(INSIDE_S, LINK_SHARE * device.link_gb_s * 1e9, tree=True) if found.devices > 1 else NO_LINK
        )
        return Machine(
            name=text if text in (name, found.device) else f"{text} ({name})",
            devices=found.devices,
            cores=found.vcpus / 2,
            pass_s=LAUNCH_S,
            image_s=image_s,
            update_s=UPDATE_BYTES * work.network.parameters / bytes_s,
            load_s=(LOAD_S - CACHED_S) * work.image_bytes / COCO_IMAGE_BYTES + CACHED_S * area,
            cached_s=CACHED_S * area,
            read_bytes_s=READ_BYTES_S,
            inside=inside,
            between=Link(BETWEEN_S, LINK_SHARE * found.network_gbit * 1e9 / 8, tree=True),
            val_image_s=image_s,  # forward pass, suppression and matching take about as long as a training pass
            val_end_s=VAL_END_S,
            save_s=12 * work.network.parameters / SAVE_BYTES_S,  # weights, momentum and average
            start_s=START_S,
            spread=SPREAD,
            memory_bytes=found.memory_gib * 2**30,
            device_bytes=device.memory_gib * 2**30,
            needed_bytes=work.device_bytes,
            on_cpu=False,
            doubt=PUBLISHED,
            price_hour=found.price_hour,
            source=self.sources.get(found.source, found.source),
        )


@cache
def networks() -> dict[str, Network]:
    """Return the built-in networks by name."""
    rows = read_yaml(FOLDER / "networks.yaml")
    return {
        name: Network(name, **{key: located.value for key, located in row.value.items()})
        for name, row in rows.items()
    }


def network_of(name: str) -> Network:
    """Return a network by its name, or by the file of its description, which needs torch.

    Raises:
        ConfigError: the name is unknown, or the file is not valid.
    """
    if not name:
        raise ConfigError(
            "no network: expected --model or --cfg, and --weights alone does not name it",
            hint="plan with the --model or --cfg of the weights",
        )
    description = describe(name)
    known = networks().get(description.name)
    if known is not None and not Path(name).is_file():
        return known
    from yolofleet.families.build import build_model
    from yolofleet.families.networks.cost import gflops, ready_shares, saved_bytes

    model = build_model(description, 80)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Network(description.name, trained, gflops(model), ready_shares(model), saved_bytes(model))
