"""Settings of ``yolofleet plan``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from yolofleet.config.schema.execution import HostSettings, LengthSettings, SharesSettings
from yolofleet.config.schema.fields import (
    PER_DEVICE_HELP,
    Texts,
    execution_setting,
    failure_setting,
    input_setting,
    length_setting,
)
from yolofleet.config.schema.train import WorkloadSettings


class PlanConfig(HostSettings, LengthSettings, SharesSettings, WorkloadSettings):
    """Settings of ``yolofleet plan``: those that decide the time of a run, and the fleets to predict it on."""

    verb: ClassVar[str] = "plan"

    machine: str = input_setting(
        "",
        "published machine: 8xA100, p4d.24xlarge, or several to choose from: 8xA100,8xV100 (docs/plan.md lists them)",
    )
    machines: str = input_setting(
        "1",
        "numbers of machines of each kind: 1..8, or 1,2,4",
        pattern=r"^[1-9][0-9]{0,3}(\.\.[1-9][0-9]{0,3})?(,[1-9][0-9]{0,3}(\.\.[1-9][0-9]{0,3})?)*$",
    )
    probe: Texts = input_setting(
        (),
        "file of `yolofleet plan probe`; once for each kind of machine; default: the one that was measured last",
        in_files=False,
    )
    network: str = input_setting(
        "",
        "link between machines, in place of the measured or published one: 10gbit, 100mbit",
        pattern=r"^$|^[1-9][0-9]{0,4}(gbit|mbit)$",
    )
    store: str = input_setting(
        "",
        "store from which each machine reads the data set: rate, latency of a request, and US dollars for 1,000 requests: "
        "1gbit,20ms or 10gbit,30ms,0.0004",
        pattern=r"^$|^[1-9][0-9]{0,4}(gbit|mbit),[0-9]{1,5}(\.[0-9]{1,3})?ms(,[0-9]{1,3}(\.[0-9]{1,7})?)?$",
    )
    prices: Path | None = input_setting(
        None, "YAML file with prices and further machines (docs/plan.md)", in_files=False
    )
    images: int = input_setting(0, "training images, in place of those of --data; 0 = count them", ge=0)
    val_images: int = input_setting(0, "validation images, in place of those of --data; 0 = count them", ge=0)
    per_device: bool = length_setting(False, PER_DEVICE_HELP)
    deadline: str = length_setting(
        "",
        "choose the cheapest fleet that ends in time: 6h, 90m, 2d",
        pattern=r"^$|^[0-9]{1,6}(\.[0-9]{1,3})?[mhd]$",
    )
    budget: float = length_setting(
        0.0, "choose the fastest fleet that costs at most this many US dollars; 0 = no limit", ge=0
    )  # fmt: skip
    simulate: bool = execution_setting(
        False, "simulate each rank, loader process, bucket and link; up to 4,096 devices"
    )
    failures_per_hour: float = failure_setting(
        0.0, "failures of one machine per hour, for example of a spot machine", ge=0
    )
    replace_minutes: float = failure_setting(10.0, "mean minutes until a failed machine is replaced", gt=0)
