"""Settings of the commands that check machines: ``doctor`` and ``selftest``."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.schema.execution import DeviceSettings
from yolofleet.config.schema.fields import (
    DEVICE,
    PRECISION_HELP,
    Device,
    Frozen,
    Natural,
    Precision,
    execution_setting,
    input_setting,
    json_setting,
    length_setting,
    saved_setting,
)


class SelftestConfig(Frozen):
    """Settings of ``yolofleet selftest``."""

    model: str = input_setting("yolov5n", "model name (yolov5n ... yolov5x)")
    img: int = input_setting(128, "image size, pixels", ge=32)
    steps: int = length_setting(3, "steps (optimizer updates) of each run", ge=2, le=10)
    device: Device = execution_setting(
        "auto",
        "auto, cpu:N (N processes), or CUDA device numbers such as 0,1 or 0:2; auto: all CUDA devices, else cpu:2",
        pattern=DEVICE,
    )
    precision: Precision = execution_setting("auto", PRECISION_HELP)
    json_out: str = json_setting("all results")


class DoctorConfig(DeviceSettings):
    """Settings of ``yolofleet doctor``. Those that it shares with ``train`` describe the run to prepare for."""

    hosts: str = input_setting(
        "", "hosts to check, and the network between them: a:8,b:4,c:0+2,d:cpu:2", in_files=False
    )
    fleet: str = input_setting("", "hosts to check, from a fleet file (YAML)", in_files=False)
    log: str = input_setting(
        "",
        "explain the errors in a log of NCCL, gloo or torchrun: a file, a run folder, or - for standard input",
    )
    support: bool = saved_setting(
        False,
        "write yolofleet-support.zip for an issue report: findings, facts and versions, with --log RUN also the "
        "configuration and logs of that run; removes the secrets that it recognises; sends nothing",
        in_files=False,
    )
    data: str = input_setting("", "data set of the run; the doctor checks that it is the same on all hosts")
    img: int = length_setting(640, "image size of the run, pixels", ge=32)
    batch: Natural = length_setting(16, "total batch of the run, images")
    micro_batch: int = length_setting(
        0, "images that batch normalisation treats together; 0 = choose a divisor of --batch near 1/8 of a step", ge=0
    )  # fmt: skip
    prefetch: Natural = execution_setting(4, "micro-batches that each loader process prepares in advance")
    port: int = execution_setting(29500, "port of the rendezvous to check", ge=1, le=65535)
    quick: bool = length_setting(
        False, "only quick checks (1 to 2 seconds): no import of torch, no measurements"
    )
    project: Path | None = execution_setting(None, "parent folder of the run folder (default runs/train)")
    json_out: str = json_setting("the findings")
