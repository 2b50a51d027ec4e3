"""Settings of the commands that measure a training: ``bench train``, ``bench scaling`` and ``plan probe``."""

from __future__ import annotations

from typing import ClassVar

from yolofleet.config.schema.fields import PER_DEVICE_HELP, Natural, setting
from yolofleet.config.schema.train import TrainConfig


class BenchTrainConfig(TrainConfig):
    """Settings of ``yolofleet bench train``: those of the run to measure, of which the command line offers a part."""

    verb: ClassVar[str] = "bench"

    steps: Natural = setting(
        20, "measured steps of each part, after a few for warm-up", group="length and batch size"
    )


class BenchScalingConfig(TrainConfig):
    """Settings of ``yolofleet bench scaling``: those of its runs, of which the command line offers a part."""

    verb: ClassVar[str] = "bench"

    devices: str = setting(
        "1,2,4,8",
        "numbers of devices to train on, one run each; the first of those that --device names",
        group="input",
        pattern=r"^[1-9][0-9]{0,2}(,[1-9][0-9]{0,2})*$",
    )
    per_device: bool = setting(False, PER_DEVICE_HELP, group="length and batch size")
    epochs: Natural = setting(
        3, "epochs of each run; the first one is for warm-up", group="length and batch size"
    )


class PlanProbeConfig(BenchTrainConfig):
    """Settings of ``yolofleet plan probe``: those of the run whose parts it measures."""

    steps: Natural = setting(8, "measured steps of each part", group="length and batch size")
