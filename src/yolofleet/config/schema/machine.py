"""Settings of the commands that check machines: ``doctor`` and ``selftest``."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.schema.execution import DeviceSettings
from yolofleet.config.schema.fields import (
    DEVICE,
    PRECISION_HELP,
    Frozen,
    Natural,
    Precision,
    json_setting,
    setting,
)


class SelftestConfig(Frozen):
    """Settings of ``yolofleet selftest``."""

    model: str = setting("yolov5n", "model name (yolov5n ... yolov5x)", group="input")
    img: int = setting(128, "image size, pixels", ge=32, group="input")
    steps: int = setting(
        3, "steps (optimizer updates) of each run", ge=2, le=10, group="length and batch size"
    )
    minutes: float = setting(
        0.0,
        "run the list of stages for the first minutes on a GPU: numbers, failures, features and speed, for at most X minutes; "
        "0: only the comparison",
        ge=0,
        le=1440,
        group="length and batch size",
    )
    stages: str = setting(
        "",
        "with --minutes: only these, names of stages and groups separated by commas (numbers, failures, features, speed, tests)",
        group="method",
        pattern=r"^[a-z0-9,-]{0,1000}$",
    )
    again: bool = setting(
        False, "with --minutes: repeat stages that have passed", group="method", in_files=False
    )
    device: str = setting(
        "auto",
        "auto, cpu:N (N processes), or CUDA device numbers such as 0,1 or 0:2; auto: all CUDA devices, else cpu:2",
        group="execution",
        pattern=DEVICE,
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    out: Path | None = setting(
        None,
        "with --minutes: folder of the results; stages that have passed there are not repeated (default runs/selftest)",
        group="saved files",
        in_files=False,
    )
    json_out: str = json_setting("all results")


class DoctorConfig(DeviceSettings):
    """Settings of ``yolofleet doctor``. Those that it shares with ``train`` describe the run to prepare for."""

    hosts: str = setting(
        "",
        "hosts to check, and the network between them: a:8,b:4,c:0+2,d:cpu:2",
        group="input",
        in_files=False,
    )
    fleet: str = setting("", "hosts to check, from a fleet file (YAML)", group="input", in_files=False)
    log: str = setting(
        "",
        "explain the errors in a log of NCCL, gloo or torchrun: a file, a run folder, or - for standard input",
        group="input",
    )
    support: bool = setting(
        False,
        "write yolofleet-support.zip for an issue report: findings, facts and versions, with --log RUN also the "
        "configuration and logs of that run; removes the secrets that it recognises; sends nothing",
        group="saved files",
        in_files=False,
    )
    data: str = setting(
        "", "data set of the run; the doctor checks that it is the same on all hosts", group="input"
    )
    img: int = setting(640, "image size of the run, pixels", ge=32, group="length and batch size")
    batch: Natural = setting(16, "total batch of the run, images", group="length and batch size")
    micro_batch: int = setting(
        0, "images that batch normalisation treats together; 0 = choose a divisor of --batch near 1/8 of a step", ge=0, group="length and batch size"
    )  # fmt: skip
    prefetch: Natural = setting(
        4, "micro-batches that each loader process prepares in advance", group="execution"
    )
    port: int = setting(29500, "port of the rendezvous to check", ge=1, le=65535, group="execution")
    quick: bool = setting(
        False,
        "only quick checks (1 to 2 seconds): no import of torch, no measurements",
        group="length and batch size",
    )
    project: Path | None = setting(
        None, "parent folder of the run folder (default runs/train)", group="execution"
    )
    json_out: str = json_setting("the findings")
