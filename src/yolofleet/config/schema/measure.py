"""Settings of the commands that measure a training: ``bench train``, ``bench scaling`` and ``plan probe``."""

from __future__ import annotations

from typing import ClassVar

from yolofleet.config.schema.execution import FleetSettings, NameSettings, SharesSettings
from yolofleet.config.schema.fields import PER_DEVICE_HELP, Natural, input_setting, length_setting
from yolofleet.config.schema.train import StepSettings, TrainConfig


class BenchTrainConfig(SharesSettings, StepSettings):
    """Settings of ``yolofleet bench train``."""

    verb: ClassVar[str] = "bench train"

    steps: Natural = length_setting(20, "measured steps of each part, after a few for warm-up")


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
