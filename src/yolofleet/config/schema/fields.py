"""Declare one setting: its type, default, unit, help and limits."""

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
TRUST_HELP = "the author of the exported file is trusted: opening it can execute code (TorchScript, TensorRT, ncnn, TFLite)"
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
