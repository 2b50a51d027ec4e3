"""Declare one setting: its type, default, unit, help and limits; and the settings that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from yolofleet.support.device_names import GPUS, plain_device


@dataclass(frozen=True)
class Clash:
    """Another setting that a setting cannot be used with.

    Attributes:
        other: its name.
        why, hint: for the message.
        mine, theirs: the values of the two settings that clash, or functions that say of a value whether it does.
        if_given: the clash counts only if the user has set this one of the two: its default is not meant.
    """

    other: str
    why: str
    hint: str = "leave one out"
    mine: Any = bool
    theirs: Any = bool
    if_given: str = ""

    def applies(self, mine: Any, theirs: Any) -> bool:
        """Return whether two values clash."""
        both = ((mine, self.mine), (theirs, self.theirs))
        return all(wanted(value) if callable(wanted) else value == wanted for value, wanted in both)


@dataclass(frozen=True)
class Rules:
    """What a setting is apart from its type, its default and its help; the arguments of :func:`setting`."""

    group: str = "run"
    flag: str = ""
    in_files: bool | Callable[[str], bool] = True
    fixed: bool | Callable[[Any, Any, Any], bool] = False
    again: bool = False
    rare: bool = False
    clashes: tuple[Clash, ...] = ()

    def __call__(self, _: dict[str, Any]) -> None:
        """Add nothing to the JSON schema: pydantic takes what a field has beside it as a function of its schema."""


def setting(default: Any, help: str, *, rules: Rules = Rules(), **more: Any) -> Any:
    """Declare a field.

    Args:
        rules: defaults of the arguments below, as the functions of the headings have them.
        group: heading of the setting in ``--help``.
        flag: flag of the setting, if it differs from the name of the field.
        in_files: False: only the command line may set it; or a function that says whether a file may set a value. Somebody
            else may have written a configuration file or a run folder. Such a file must not choose the hosts to log in to,
            the program to start there, the run to resume or the file to overwrite. ``--resume`` does not keep such a value.
        fixed: a resumed run cannot change it. Or a function of the settings of the run, the former value and the new one that
            says whether this change is not possible.
        again: the command that resumes a run repeats it, if a file may not set it.
        rare: only ``--help-all`` shows it.
        clashes: settings that it cannot be used with.
        more: constraints, as for pydantic.
    """
    known = {name: more.pop(name) for name in Rules.__dataclass_fields__ if name in more}
    return Field(default, description=help, json_schema_extra=replace(rules, **known), **more)


# one for each heading of ``--help``, in their order
input_setting = partial(setting, rules=Rules("input", fixed=True))
code_setting = partial(setting, rules=Rules("your own code", in_files=False, again=True, rare=True))
length_setting = partial(setting, rules=Rules("length and batch size", fixed=True))
method_setting = partial(setting, rules=Rules("method", fixed=True))
validation_setting = partial(setting, rules=Rules("validation"))
execution_setting = partial(setting, rules=Rules("execution"))
hosts_setting = partial(setting, rules=Rules("hosts", in_files=False))
failure_setting = partial(setting, rules=Rules("after a failure"))
saved_setting = partial(setting, rules=Rules("saved files"))
display_setting = partial(setting, rules=Rules("reports and display"))
HEADINGS = (
    *("input", "your own code", "length and batch size", "method", "validation", "execution", "hosts"),
    *("after a failure", "saved files", "reports and display", "general"),
)


def json_setting(what: str) -> Any:
    """Declare ``--json``, which writes ``what``."""
    help = f"write {what} as JSON to FILE, or to standard output (-)"
    return saved_setting("", help, flag="--json", in_files=False)


def rules_of(field: FieldInfo) -> Rules:
    """Return the rules of a setting."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, Rules) else Rules()


def flag_of(name: str, field: FieldInfo) -> str:
    """Return the flag of a setting: ``--micro-batch`` for ``micro_batch``, unless the schema names another."""
    return rules_of(field).flag or "--" + name.replace("_", "-")


def group_of(field: FieldInfo) -> str:
    """Return the heading of a setting in ``--help``."""
    return rules_of(field).group


def may_be_in_files(field: FieldInfo, value: Any = "") -> bool:
    """Return whether a configuration file may set this to ``value``; see :func:`setting`."""
    allowed = rules_of(field).in_files
    if isinstance(allowed, bool):
        return allowed
    return all(map(allowed, map(str, value if isinstance(value, (list, tuple)) else [value])))


def choices_of(field: FieldInfo) -> list[str]:
    """Return the words that a setting may have; [] unless it is one of a few, or a list of them."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


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
PREFETCH = 4  # micro-batches that each loader process prepares ahead
MOST_LOADERS = 32  # loader processes of a rank with a GPU, by default
MAX_THREADS = 1024  # a larger number is a typing error, and each thread costs memory
Natural = Annotated[int, Field(ge=1)]
Weights = Annotated[str, BeforeValidator(file_of_weights)]
AUTO = BeforeValidator(lambda value: -1 if value == "auto" else value)
OrAuto = Annotated[int, AUTO]


def _share_of_memory(batch: Any) -> Any:
    """Return -80 for 0.8, a share of the memory, so that a batch is a whole number."""
    is_share = re.fullmatch(r"0?\.[0-9]+", str(batch))
    return -round(100 * float(batch)) if is_share else batch


def _check_share(batch: int) -> int:
    if batch < -99 or -10 < batch < -1:
        raise ValueError("is neither a number of images nor auto nor a share of the memory from 0.1 to 0.99")
    return batch


OrShare = Annotated[int, AUTO, BeforeValidator(_share_of_memory), AfterValidator(_check_share)]
Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
PER_DEVICE_HELP = "--batch and --nominal-batch count for each device: more devices train with larger steps"
PRECISION_HELP = (
    "number format; auto: fp16 on CUDA, fp32 elsewhere; tf32: TensorFloat-32 products, NVIDIA GPUs only"
)
TRUST_HELP = (
    "the author of the exported file is trusted: opening it can execute code (TorchScript, ncnn, TFLite)"
)
PRECISION_CLASHES = tuple(
    Clash(
        "device",
        f"CPUs do not compute in {name}",
        "--precision fp32, or bf16",
        mine=name,
        theirs=lambda device: device.startswith("cpu"),
    )
    for name in ("fp16", "tf32")
)
Optimizer = Literal["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSProp"]
NamedCode = Annotated[str, Field(pattern=r"^[^:]+:.+$")]  # FILE.py:CLASS or MODULE:CLASS
DEVICE = r"^(auto|all|cpu(:[1-9][0-9]{0,2})?|mps|" + GPUS + ")$"
Device = Annotated[str, BeforeValidator(plain_device)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
# one text, as in a file, is a list of one
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (str(value),) if isinstance(value, (str, int, float)) else value),
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


def draws_follow_validation(run: Any, _: Any, __: Any) -> bool:
    """Return whether the images of a run depend on the figures of its validations."""
    return bool(run.sampler == "weights")


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
        0,
        "CPU threads of each process; 0 = cores of the machine / its processes",
        ge=0,
        le=MAX_THREADS,
        rare=True,
    )
    project: Path | None = saved_setting(None, "parent folder of the run folder (default runs/<command>)")
    quiet: bool = display_setting(False, QUIET_HELP, in_files=False, rare=True)


class NameSettings(Frozen):
    """The name of a new run folder."""

    name: str = saved_setting("exp", "name of the run folder; a number is added if it exists")


class CodeSettings(Frozen):
    """The user's own code."""

    recipe_class: str = code_setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
    )


class ExecutionSettings(NameSettings, ProcessSettings):
    """Settings of the machine and the run folder; none of them may change a result."""

    exist_ok: bool = saved_setting(False, "use an existing run folder of that name", in_files=False)


class HostSettings(Frozen):
    """The hosts to run on."""

    hosts: str = hosts_setting(
        "",
        "hosts to run on, by ssh: a:8,b:4,c:0+2,d:cpu:2 (docs/several-machines.md); the first host has rank 0; e:8:spare waits and "
        "replaces a lost host",
    )
    fleet: str = hosts_setting(
        "", "hosts to run on, from a YAML file with folders, network interfaces and variables"
    )


class FleetSettings(HostSettings):
    """Settings of verbs that start processes on hosts."""

    sync_code: bool = hosts_setting(
        False, "copy this machine's yolofleet to the hosts for this run", rare=True
    )


class LengthSettings(Frozen):
    """Settings that decide the length of a run."""

    epochs: Natural = length_setting(100, "epochs: passes over the training images", fixed=False)
    val_period: int = validation_setting(
        1, "validate every N epochs; 0 = only after the last", ge=0, fixed=draws_follow_validation
    )


class SharesSettings(Frozen):
    """How ranks share the work."""

    shares: str = execution_setting(
        "",
        "relative work of each rank, such as 2,1,1; auto: by measured speed, which they follow; default: equal",
        rare=True,
    )
