"""Settings of the machines, of the run folder and of the length of a run, which several commands share."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.schema.fields import (
    DEVICE,
    MAX_THREADS,
    QUIET_HELP,
    Device,
    Frozen,
    Natural,
    display_setting,
    execution_setting,
    input_setting,
    length_setting,
)


class DeviceSettings(Frozen):
    """The devices of a training, and what loads its images."""

    device: Device = execution_setting(
        "auto",
        "auto (the first GPU, else the CPU), all (every GPU), numbers of GPUs such as 0, 0,1, 0-3 or 0:2 (2 processes on GPU 0), "
        "cpu, cpu:N (N processes), or mps",
        pattern=DEVICE,
    )
    workers: int = execution_setting(
        -1,
        "loader processes of each rank; 0 = load in the main process, -1 = choose from the number of cores",
        ge=-1,
        le=MAX_THREADS,
    )


class ProcessSettings(DeviceSettings):
    """Settings of the processes that train, validate or predict."""

    threads: int = execution_setting(
        0, "CPU threads of each process; 0 = cores of the machine / its processes", ge=0, le=MAX_THREADS
    )
    project: Path | None = execution_setting(None, "parent folder of the run folder (default runs/<command>)")
    quiet: bool = display_setting(False, QUIET_HELP, in_files=False)


class NameSettings(Frozen):
    """The name of a new run folder."""

    name: str = execution_setting("exp", "name of the run folder; a number is added if it exists")


class CodeSettings(Frozen):
    """The user's own code."""

    recipe_class: str = input_setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
        in_files=False,
    )


class ExecutionSettings(NameSettings, ProcessSettings):
    """Settings of the machine and the run folder; none of them may change a result."""

    exist_ok: bool = execution_setting(False, "use an existing run folder of that name", in_files=False)


class HostSettings(Frozen):
    """The hosts to run on."""

    hosts: str = execution_setting(
        "",
        "hosts to run on, by ssh: a:8,b:4,c:0+2,d:cpu:2 (docs/several-machines.md); the first host has rank 0",
        in_files=False,
    )
    fleet: str = execution_setting(
        "", "hosts to run on, from a YAML file with folders, network interfaces and variables", in_files=False
    )


class FleetSettings(HostSettings):
    """Settings of verbs that start processes on hosts."""

    sync_code: bool = execution_setting(
        False, "copy this machine's yolofleet to the hosts for this run", in_files=False
    )


class LengthSettings(Frozen):
    """Settings that decide the length of a run."""

    epochs: Natural = length_setting(100, "epochs: passes over the training images")
    val_period: int = display_setting(1, "validate every N epochs; 0 = only after the last", ge=0)


class SharesSettings(Frozen):
    """How ranks share the work."""

    shares: str = execution_setting(
        "", "relative work of each rank, such as 2,1,1; auto: by measured speed; default: equal"
    )
