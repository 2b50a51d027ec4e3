"""Declare one setting: its type, default, unit, help and limits; and the settings that several commands share."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from yolofleet.support.device_names import GPUS, plain_device


def setting(
    default: Any, help: str, *, group: str = "run", flag: str = "", in_files: bool = True, **constraints: Any
) -> Any:
    """Declare a field.

    Args:
        group: heading of the setting in ``--help``.
        flag: flag of the setting, if it differs from the name of the field.
        in_files: False: only the command line may set it. Somebody else may have written a configuration file or a
            run folder. Such a file must not choose the hosts to log in to, the program to start there, the run to
            resume or the file to overwrite. ``--resume`` does not keep such a setting, unless
            ``RunFolder.resume_command`` repeats it.
    """
    extra: dict[str, Any] = {"group": group, "flag": flag} if flag else {"group": group}
    if not in_files:
        extra["in_files"] = False
    return Field(default, description=help, json_schema_extra=extra, **constraints)


# one for each heading of ``--help``
input_setting = partial(setting, group="input")
length_setting = partial(setting, group="length and batch size")
method_setting = partial(setting, group="method")
execution_setting = partial(setting, group="execution")
failure_setting = partial(setting, group="after a failure")
saved_setting = partial(setting, group="saved files")
display_setting = partial(setting, group="reports and display")


def json_setting(what: str) -> Any:
    """Declare ``--json``, which writes ``what``."""
    help = f"write {what} as JSON to FILE, or to standard output (-)"
    return saved_setting("", help, flag="--json", in_files=False)


def flag_of(name: str, field: FieldInfo) -> str:
    """Return the flag of a setting: ``--micro-batch`` for ``micro_batch``, unless the schema names another."""
    extra = field.json_schema_extra
    given = str(extra.get("flag", "")) if isinstance(extra, dict) else ""
    return given or "--" + name.replace("_", "-")


def group_of(field: FieldInfo) -> str:
    """Return the heading of a setting in ``--help``."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else "run"


def may_be_in_files(field: FieldInfo) -> bool:
    """Return whether a configuration file may set this; see :func:`setting`."""
    extra = field.json_schema_extra
    return not isinstance(extra, dict) or extra.get("in_files") is not False


def best_weights(run: Path) -> Path:
    """Return the weights of the run's best validation, or the last ones if the run never validated."""
    best = run / "weights" / "best.safetensors"
    return best if os.path.isfile(best) else best.with_name("last.safetensors")  # noqa: PTH113  (Path.is_file raises for a name that is too long)


def file_of_weights(weights: Any) -> Any:
    """Return the weights file of a value of ``--weights`` that is the folder of a run, else the value."""
    if isinstance(weights, (list, tuple)):
        return tuple(map(file_of_weights, weights))
    if isinstance(weights, str) and weights and os.path.isfile(file := best_weights(Path(weights))):  # noqa: PTH113
        return str(file)
    return weights


QUIET_HELP = "print only errors and the result: no header, notes, warnings, tables or progress"
MAX_SIDE_PX = 32_768  # of an image for inference; one of this size has 3 GiB
MAX_THREADS = 1024  # a larger number is a typing error, and each thread costs memory
Natural = Annotated[int, Field(ge=1)]
Weights = Annotated[str, BeforeValidator(file_of_weights)]
AUTO = BeforeValidator(lambda value: -1 if value == "auto" else value)
OrAuto = Annotated[int, AUTO]
Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
PER_DEVICE_HELP = "--batch and --nominal-batch count for each device: more devices train with larger steps"
PRECISION_HELP = (
    "number format; auto: fp16 on CUDA, fp32 elsewhere; tf32: TensorFloat-32 products, NVIDIA GPUs only"
)
TRUST_HELP = (
    "the author of the exported file is trusted: opening it can execute code (TorchScript, ncnn, TFLite)"
)
Optimizer = Literal["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSProp"]
DEVICE = r"^(auto|all|cpu(:[1-9][0-9]{0,2})?|mps|" + GPUS + ")$"
Device = Annotated[str, BeforeValidator(plain_device)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
# one text, as in a file, is a list of one
Texts = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class Frozen(BaseModel):
    """Settings that cannot change, without unknown names, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # a command builds the validators of its own settings only
        coerce_numbers_to_str=True,  # `device: 0` in a YAML file
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
