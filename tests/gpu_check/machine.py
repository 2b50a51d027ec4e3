"""The machine that a selftest runs on, and what a stage of the selftest returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolofleet.measure.selftest.checks import fleet_of, lone_devices
from yolofleet.storage.atomic import write_json
from yolofleet.support import devices
from yolofleet.support.device_names import processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.process import usable_cores, versions

KINDS = ("cuda", "xpu", "mps")  # devices that get images and networks of a real size
TOY_NETWORK = """
nc: 80
depth_multiple: 1.0
width_multiple: 0.125
anchors: [[10,14, 23,27, 37,58], [81,82, 135,169, 344,319]]
backbone:
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, Conv, [512, 3, 2]]
head:
  - [-1, 1, Conv, [512, 3, 2]]
  - [[3, 4], 1, Detect, [nc, anchors]]
"""


class StageFailed(Exception):
    """A stage found a fault; the text says which."""


@dataclass(frozen=True)
class Machine:
    """What stages know about where they run.

    Attributes:
        folder: of the results. work: of the running stage, deleted when it has passed.
        device: as ``--device``; all devices of the check.
        kind: cuda | cpu | ...
        name: of the first device.
        memory_gib: of the first device; 0 if torch does not know it.
        minutes: in total.
        has_processes: several processes can sum gradients of this kind of device.
    """

    folder: Path
    device: str
    kind: str
    name: str
    memory_gib: float = 0.0
    has_tf32: bool = False
    has_bfloat16: bool = True
    has_processes: bool = True
    minutes: float = 10.0
    work: Path = Path()

    @property
    def is_toy(self) -> bool:
        """Whether sizes are as small as possible: on a CPU, and on devices that PyTorch itself does not know."""
        return self.kind not in KINDS

    @property
    def one(self) -> str:
        """The first device, for one process."""
        return lone_devices(self.device)[0]

    @property
    def devices(self) -> int:
        """How many devices are compared in speed: processes on a CPU, else devices."""
        return processes_of(self.device) if self.kind == "cpu" else len(lone_devices(self.device))

    @property
    def pair(self) -> str:
        """Two processes: on two devices, or on one that they share."""
        ids = lone_devices(self.device)
        return f"{ids[0]},{ids[1]}" if len(ids) > 1 else self.shared_by(2)

    def shared_by(self, processes: int) -> str:
        """So many processes on the first device."""
        return f"{lone_devices(self.device)[0]}:{processes}"

    def first(self, count: int) -> str:
        """The first ``count`` devices."""
        if self.kind == "cpu":
            return f"cpu:{count}" if count > 1 else "cpu"
        return ",".join(lone_devices(self.device)[:count])

    @property
    def precision(self) -> str:
        return "fp32" if self.is_toy else "fp16"

    @property
    def data(self) -> Path:
        return self.folder / "data" / "data.yaml"

    @property
    def network(self) -> str:
        """The network of short trainings."""
        return str(self.folder / "data" / "network.yaml") if self.is_toy else "yolov5n"


@dataclass(frozen=True)
class Found:
    """The result of a stage that passed.

    Attributes:
        text: one line. figures: for JSON. missed: goals that were missed.
    """

    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    missed: Sequence[str] = ()


def write_facts(device: str, target: Path) -> int:
    """Write the attributes of the machine and the facts, or the error, as JSON."""
    try:
        spec = fleet_of(device)
        first = devices.device_of(spec, 0)
    except ConfigError as problem:
        write_json(target, {"problem": {name: getattr(problem, name) for name in ("what", "source", "hint")}})
        return problem.exit_code
    _, total = devices.memory_info(first) or (0, 0)
    machine = {
        "device": spec,
        "kind": first.type,
        "name": devices.name_of(first),
        "memory_gib": total / 2**30,
        "has_tf32": devices.has_tf32(first),
        "has_bfloat16": devices.has_bfloat16(first),
        "has_processes": devices.is_host(first) or devices.collective_backend(first) != "gloo",
    }
    facts = {
        "device": f"{machine['name']}, --device {spec}",
        "memory of a device": f"{total / 2**30:.0f} GiB" if total else "unknown",
        "cores": usable_cores(),
        **versions(),
    }
    write_json(target, {"machine": machine, "facts": facts})
    return 0
