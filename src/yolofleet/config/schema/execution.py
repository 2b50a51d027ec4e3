"""Settings of the machines, of the run folder and of the length of a run, which several commands share."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.schema.fields import DEVICE, MAX_THREADS, QUIET_HELP, Frozen, Natural, setting


class DeviceSettings(Frozen):
    """The devices of a training, and what loads its images."""

    device: str = setting(
        "auto",
        "auto, cpu, cpu:N (N processes), mps, or CUDA device numbers such as 0, 0,1 or 0:2 (2 processes on GPU 0)",
        group="execution",
        pattern=DEVICE,
    )
    workers: int = setting(
        -1,
        "loader processes of each rank; 0 = load in the main process, -1 = choose from the number of cores",
        ge=-1,
        le=MAX_THREADS,
        group="execution",
    )


class ProcessSettings(DeviceSettings):
    """Settings of the processes that train, validate or predict."""

    threads: int = setting(
        0,
        "CPU threads of each process; 0 = cores of the machine / its processes",
        ge=0,
        le=MAX_THREADS,
        group="execution",
    )
    project: Path | None = setting(
        None, "parent folder of the run folder (default runs/<command>)", group="execution"
    )
    quiet: bool = setting(False, QUIET_HELP, group="reports and display", in_files=False)


class NameSettings(Frozen):
    """The name of a new run folder."""

    name: str = setting("exp", "name of the run folder; a number is added if it exists", group="execution")


class CodeSettings(Frozen):
    """The user's own code."""

    recipe_class: str = setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
        group="input",
        in_files=False,
    )


class ExecutionSettings(NameSettings, ProcessSettings):
    """Settings of the machine and the run folder; none of them may change a result."""

    exist_ok: bool = setting(
        False, "use an existing run folder of that name", group="execution", in_files=False
    )


class HostSettings(Frozen):
    """The hosts to run on."""

    hosts: str = setting(
        "",
        "hosts to run on, by ssh: a:8,b:4,c:0+2,d:cpu:2 (docs/fleet.md); the first host has rank 0",
        group="execution",
        in_files=False,
    )
    fleet: str = setting(
        "",
        "hosts to run on, from a YAML file with folders, network interfaces and variables",
        group="execution",
        in_files=False,
    )


class FleetSettings(HostSettings):
    """Settings of verbs that start processes on hosts."""

    sync_code: bool = setting(
        False,
        "copy this machine's yolofleet to the hosts for this run",
        group="execution",
        in_files=False,
    )


class LengthSettings(Frozen):
    """Settings that decide the length of a run."""

    epochs: Natural = setting(100, "epochs: passes over the training images", group="length and batch size")
    val_period: int = setting(
        1, "validate every N epochs; 0 = only after the last", ge=0, group="reports and display"
    )


class SharesSettings(Frozen):
    """How ranks share the work."""

    shares: str = setting(
        "",
        "relative work of each rank, such as 2,1,1; auto: by measured speed; default: equal",
        group="execution",
    )
