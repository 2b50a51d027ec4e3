"""Settings of the commands that measure, predict or search trainings: ``bench``, ``plan`` and ``tune``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from yolofleet.config.schema.fields import (
    PER_DEVICE_HELP,
    Clash,
    FleetSettings,
    HostSettings,
    LengthSettings,
    NameSettings,
    Natural,
    SharesSettings,
    Texts,
    display_setting,
    execution_setting,
    input_setting,
    length_setting,
    method_setting,
    saved_setting,
)
from yolofleet.config.schema.train import RunSettings, StepSettings, TrainConfig, WorkloadSettings, several


class BenchTrainConfig(SharesSettings, StepSettings):
    """Settings of ``yolofleet bench train``."""

    verb: ClassVar[str] = "bench train"

    steps: Natural = length_setting(20, "measured steps of each part, after a few for warm-up")


class BenchStartConfig(SharesSettings, StepSettings):
    """Settings of ``yolofleet bench start``."""

    verb: ClassVar[str] = "bench start"

    runs: Natural = length_setting(2, "trainings in turn; later ones find what the first one has compiled")


class PlanProbeConfig(FleetSettings, BenchTrainConfig):
    """Settings of ``yolofleet plan probe``."""

    verb: ClassVar[str] = "plan probe"

    steps: Natural = length_setting(8, "measured steps of each part")


class BenchRun(TrainConfig):
    """The training whose parts the ranks of ``bench train`` measure, with ``steps`` of each part."""

    verb: ClassVar[str] = "bench"

    steps: Natural = 20


class ProbeRun(BenchRun):
    """The training whose parts the ranks of ``plan probe`` measure."""


class BenchScalingConfig(NameSettings, StepSettings):
    """Settings of ``yolofleet bench scaling``."""

    verb: ClassVar[str] = "bench scaling"

    devices: str = input_setting(
        "1,2,4,8",
        "numbers of devices to train on, one run each; the first of those that --device names",
        pattern=r"^[1-9][0-9]{0,2}(,[1-9][0-9]{0,2})*$",
    )
    per_device: bool = length_setting(False, PER_DEVICE_HELP)
    epochs: Natural = length_setting(3, "epochs of each run; the first one is for warm-up")
    max_steps: int = length_setting(
        0, "end each run after N steps (optimizer updates); 0 = after --epochs", ge=0
    )  # fmt: skip


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
    simulate: bool = execution_setting(
        False, "simulate each rank, loader process, bucket and link; up to 4,096 devices"
    )


class TuneConfig(RunSettings):
    """Settings of ``yolofleet tune``: those of its trials, and of the search."""

    verb: ClassVar[str] = "tune"

    space: str = input_setting(
        "",
        "recipe values to search, with their ranges: a YAML file, or one value as in lr0=[0.001,0.1,log]; default: the space of "
        "the model family",
    )
    trials: Natural = length_setting(
        30, "trials: trainings with recipe values of their own; the first has those of the recipe"
    )
    failures: Natural = length_setting(3, "end the study after N failed trials in a row")
    generation: Natural = method_setting(
        8,
        "trials whose values are chosen together, from the results of earlier generations only; the devices do not change it",
    )
    prune: bool = method_setting(
        True,
        "stop a trial whose fitness is below the median of the trials of earlier generations in the same epoch",
    )
    devices_per_trial: Natural = execution_setting(
        1,
        "devices of each trial; the number of devices must be a multiple of N",
        clashes=tuple(
            Clash(name, "a trial trains on all hosts", mine=several) for name in ("hosts", "fleet")
        ),
    )
    # other defaults than those of a training
    reduce: Literal["fast", "fast16", "exact"] = execution_setting(
        "exact",
        "sum of gradients; exact: the result of a trial does not depend on its devices; fast and fast16: as for train",
    )
    resume: str = saved_setting("", "go on with a study: auto (the newest) or its folder", in_files=False)
    plots: bool = display_setting(False, "each trial writes report.html, curves and example images")
