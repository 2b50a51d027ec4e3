"""Settings of ``yolofleet train``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import not_
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from yolofleet.config.schema.fields import (
    MAX_SIDE_PX,
    PRECISION_CLASHES,
    PRECISION_HELP,
    Clash,
    CodeSettings,
    DeviceSettings,
    ExecutionSettings,
    FleetSettings,
    LengthSettings,
    NamedCode,
    NameSettings,
    Natural,
    Optimizer,
    OrAuto,
    OrShare,
    Precision,
    ProcessSettings,
    SharesSettings,
    Texts,
    Weights,
    code_setting,
    display_setting,
    draws_follow_validation,
    execution_setting,
    failure_setting,
    hosts_setting,
    input_setting,
    length_setting,
    method_setting,
    saved_setting,
    validation_setting,
)
from yolofleet.support.text import shown

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


BY_MEMORY = 0.9  # share of the memory of a device that --batch auto uses
SAVE_UNITS = {"epoch": "epochs", "epochs": "epochs", "step": "steps", "steps": "steps", "min": "min"}
AllowedAnyway = Literal["changed-data", "linked-folders"]
ONE_BY_ONE = "a pass with --sync-bn needs all devices, so no device can measure its memory alone"
ONE_PASS = "leave out --micro-batches-per-pass"


def negative(value: int) -> bool:
    return value < 0


def several(value: int) -> bool:
    return value > 1


def _compiled(other: str, why: str, theirs: Any = bool) -> Clash:
    return Clash(other, why, "leave out --passes", "compiled", theirs)


def default_micro_batch(batch: int, nominal_batch: int) -> int:
    """Return the micro-batch for settings, 0 if no divisor of ``batch`` is in ``MICRO_BATCHES``. Every fleet has the same.

    It cuts a full step into about eight micro-batches, enough for eight devices. Its target is an eighth of a full step,
    bounded by ``TARGET_MICRO_BATCH``, but at most half a step, so that two devices have work. It is the divisor of
    ``batch`` in ``MICRO_BATCHES`` whose ratio to the target is
    nearest to 1; of two equally near divisors the larger.
    """
    low, high = TARGET_MICRO_BATCH
    step = step_images_of(batch, nominal_batch)
    target = min(max(Fraction(step, 8), Fraction(low)), Fraction(high), max(Fraction(step, 2), Fraction(1)))
    sizes = [d for d in MICRO_BATCHES if batch % d == 0]
    return min(sizes, key=lambda d: (max(d / target, target / d), -d), default=0)


def step_images_of(batch: int, nominal_batch: int) -> int:
    """Return the multiple of ``batch`` nearest to ``nominal_batch``."""
    return batch * max(round(nominal_batch / batch), 1)


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n`` >= 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


class WorkloadSettings(DeviceSettings):
    """Settings that decide the time of a step."""

    verb: ClassVar[str]
    # A default that follows from other settings is stored in config.yaml; a change of one of them makes it obsolete.
    derived_defaults: ClassVar[Mapping[str, Sequence[str]]] = {"micro_batch": ("batch", "nominal_batch")}

    data: str = input_setting(
        "", "data set: YAML file, folder, COCO JSON, or a built-in name (shapes)", fixed=False
    )
    model: str = input_setting(
        "",
        "model to train from scratch: yolov5n, yolov3-tiny, darknet-yolov3-spp, ppyoloe-s, ... (docs/models.md)",
        clashes=(Clash("cfg", "both choose the network"),),
    )
    cfg: str = input_setting("", "model description to use instead of --model: YAML file or Darknet .cfg")
    img: int = input_setting(
        640,
        "side of the square images for training and validation, pixels; rounded up to the stride",
        ge=32,
        le=MAX_SIDE_PX,
    )
    fraction: float = input_setting(
        1.0, "share of the training images to use; the seed decides which", gt=0, le=1, rare=True
    )
    batch: OrShare = length_setting(
        16,
        "images per batch, in total over all devices, as in YOLOv5; at most the training images; auto: as many as fit into 90 % of the memory of the devices, "
        "at most --nominal-batch (docs/failures.md); 0.8: into 80 % of it",
        clashes=(
            Clash("micro_batches_per_pass", "auto chooses both", ONE_PASS, mine=negative),
            Clash("sync_bn", ONE_BY_ONE, "choose --batch yourself", mine=negative),
        ),
    )
    nominal_batch: Natural = length_setting(
        64, "images per optimizer update; several batches are accumulated to reach it"
    )
    micro_batch: OrAuto = length_setting(
        0,
        "images that batch normalisation treats together; 0 = choose a divisor of --batch near 1/8 of a step; auto or -1 = the "
        "largest that fits into the memory of every GPU",
        ge=-1,
        validate_default=True,
        rare=True,
    )
    seed: int = method_setting(0, "seed of the data order, augmentation and initial weights", ge=0, rare=True)
    reduce: Literal["fast", "fast16", "exact"] = execution_setting(
        "fast",
        "sum of gradients; fast: in float32, equal up to rounding; fast16: in bfloat16, half the bytes for slow networks; "
        "exact: equal bits on every fleet",
        rare=True,
    )
    precision: Precision = execution_setting("auto", PRECISION_HELP, clashes=PRECISION_CLASHES)
    cache: Literal["auto", "none", "ram", "disk", "jpeg"] = execution_setting(
        "auto",
        "keep decoded images; ram: one copy in the memory of each machine; disk: in the cache folder; jpeg: training "
        "images as JPEGs in memory, an eighth of ram, pixels change slightly; auto: ram if all fit, else disk if faster",
        fixed=lambda _, was, now: "jpeg" in (was, now),  # which changes pixels
    )
    micro_batches_per_pass: int = execution_setting(
        0,
        "micro-batches that pass the network together, each with its own batch-norm statistics; 0 = as many as fit into "
        "the memory of a GPU, but one on CPUs and with exact sums",
        ge=0,
        rare=True,
        clashes=(
            Clash("sync_bn", "a pass already spans the batch of a device", ONE_PASS, mine=several),
            Clash(
                "reduce", "the rounding of a sum over a pass depends on it", ONE_PASS, several, theirs="exact"
            ),
        ),
    )

    @field_validator("micro_batch")
    @classmethod
    def _with_default(cls, micro_batch: int, info: ValidationInfo) -> int:
        batch, nominal_batch = info.data.get("batch", 0), info.data.get("nominal_batch", 0)
        return micro_batch or (
            default_micro_batch(batch, nominal_batch) if min(batch, nominal_batch) > 0 else 0
        )

    @property
    def likely_micro_batch(self) -> int:
        """``micro_batch``, or an estimate until the ranks have measured it."""
        if self.micro_batch > 0:
            return self.micro_batch
        return (
            default_micro_batch(self.batch, self.nominal_batch) if self.batch > 0 else TARGET_MICRO_BATCH[0]
        )

    @property
    def batch_memory(self) -> float:
        """The share of the memory of a device that ``--batch auto`` uses."""
        return -self.batch / 100 if self.batch < -1 else BY_MEMORY


class StepSettings(CodeSettings, WorkloadSettings, ProcessSettings):
    """Settings of a training that a measurement of its parts has, too."""

    weights: Weights = input_setting(
        "",
        "start weights: a file .safetensors, .pt, .weights or .pdparams (nothing in it is executed), the folder of a run, a "
        "published name, or hf:USER/NAME",
    )
    recipe: str = input_setting(
        "", "hyperparameters: recipe name or file; default: the recipe of the model family"
    )
    set: tuple[str, ...] = input_setting((), "change one value of the recipe: key=value; may be repeated")
    single_cls: bool = input_setting(False, "treat all classes as one", rare=True)
    optimizer: Optimizer | NamedCode = method_setting(
        "SGD",
        "optimizer of the weights; another one: FILE.py:CLASS or MODULE:CLASS, a subclass of torch.optim.Optimizer "
        "(docs/extend.md)",
        in_files=lambda name: ":" not in name,
        again=True,
        # the checkpoint knows the source of the code
        fixed=lambda _, was, now: not (":" in was and ":" in now),
    )
    sampler: Literal["none", "weights", "balanced", "repeat-factor"] = method_setting(
        "none",
        "how often an epoch shows each image; weights: by its classes' accuracy in a validation; balanced: each class equally "
        "often; repeat-factor: images of rare classes more often; none: once",
        clashes=(
            Clash(
                "val_period",
                "it follows the accuracy in validations",
                "--val-period 1",
                mine="weights",
                theirs=not_,
            ),
        ),
        rare=True,
    )
    rect: bool = method_setting(
        False,
        "rectangular images: each micro-batch has images of similar aspect ratio and one shape, without mosaics",
        clashes=(
            Clash("sync_bn", "statistics across devices need images of one shape", "leave out --sync-bn"),
            Clash("micro_batches_per_pass", "each micro-batch has its own shape", ONE_PASS, theirs=several),
        ),
        rare=True,
    )
    freeze: str = method_setting(
        "",
        "layers to freeze: a number N (the first N), a list 0,1,2, or a list of backbone, prefixes and patterns (model.*.bias) of "
        "parameter names",
        rare=True,
    )
    autoanchor: bool = method_setting(
        True, "compute new anchors if the anchors match less than 98 % of the labels", rare=True
    )
    sync_bn: bool = method_setting(
        False,
        "compute batch-norm statistics over --batch images, across devices",
        clashes=(
            Clash("micro_batch", ONE_BY_ONE, "choose --micro-batch yourself", theirs=negative),
            Clash(
                "reduce",
                "statistics across devices are equal only up to rounding",
                "leave out --sync-bn and raise --micro-batch; statistics of one micro-batch are equal on every fleet",
                theirs="exact",
            ),
        ),
    )
    deterministic: bool = execution_setting(
        False, "use deterministic kernels only (slower on GPUs)", rare=True
    )
    passes: Literal["auto", "graphs", "compiled", "plain"] = execution_setting(
        "auto",
        "how the passes of the network run; graphs: as CUDA graphs, or end with the reason; compiled: by torch.compile, after "
        "minutes before the first step, never run on a GPU; plain: kernel by kernel; auto: graphs in one process where launching "
        "kernels one by one would take most of the time, else plain (docs/speed.md)",
        rare=True,
        clashes=(
            _compiled("reduce", "compiled kernels add in another order on each type of machine", "exact"),
            _compiled("rect", "each image size would be compiled"),
            _compiled("sync_bn", "a compiled network cannot wait for other ranks"),
            _compiled("checkpoint_activations", "the compiler decides itself what it computes again"),
            _compiled("parallel", "the compiler does not run in several threads", "dp"),
            _compiled("batch", "a trial of each size would compile it, which takes minutes", negative),
        ),
    )
    stage: Path | None = execution_setting(
        None,
        "copy the image files into this folder on a local disk of each machine, once, and read them there",
        rare=True,
    )
    checkpoint_activations: bool = execution_setting(
        False,
        "keep only the inputs of each block of the network, and compute the block again in the backward pass: the same weights "
        "with less memory and more time (docs/speed.md)",
        rare=True,
        clashes=(
            Clash(
                "sync_bn",
                "a backward pass would wait for the statistics of other ranks",
                "leave out --checkpoint-activations",
            ),
        ),
    )
    timeout_s: Natural = failure_setting(600, "timeout of a collective operation, seconds", rare=True)
    stall_s: float = failure_setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs, and restarts or ends; 0 = never",
        ge=0,
        rare=True,
    )
    val_batch: Natural = validation_setting(
        32,
        "images per validation batch; the batches are the same on every fleet",
        fixed=draws_follow_validation,
        rare=True,
    )
    val_overlap: bool = validation_setting(
        False,
        "validate a copy of the weights while training goes on; the figures of an epoch come at the end of the next one",
        rare=True,
    )

    @property
    def optimizer_class(self) -> str:
        """``--optimizer`` if it names code, else ""."""
        return self.optimizer if ":" in self.optimizer else ""


class RunSettings(FleetSettings, NameSettings, LengthSettings, SharesSettings, StepSettings):
    """Settings of a training that the trials of a study have, too."""

    max_steps: int = length_setting(
        0, "end the run after N steps (optimizer updates); 0 = after --epochs", ge=0, fixed=False, rare=True
    )
    minutes: float = length_setting(
        0.0,
        "end the run after X minutes of training, validation and saving, over all resumes, with --lr-schedule cooldown; "
        "0 = after --epochs",
        ge=0,
        fixed=False,
        rare=True,
        clashes=(
            Clash(
                "lr_schedule",
                "such a decay needs the length of the run from the start",
                "leave out --lr-schedule; the rate is constant, and falls in the last fifth of the time",
                theirs=lambda name: name not in ("cooldown", "constant"),
                if_given="lr_schedule",
            ),
        ),
    )
    patience: int = length_setting(
        100,
        "stop after N epochs without a better fitness (0.1 mAP50 + 0.9 mAP50-95); 0 = never",
        ge=0,
        fixed=False,
        clashes=(
            Clash(
                "val_period",
                "early stopping needs validation",
                "--val-period 1",
                theirs=not_,
                if_given="patience",
            ),
        ),
    )
    lr_schedule: Literal["linear", "cosine", "constant", "cooldown"] = method_setting(
        "linear",
        "how the learning rate decays after the warm-up; cooldown: constant, then linear in the last fifth of the steps",
        rare=True,
    )
    lr_scale: Literal["none", "linear", "sqrt"] = method_setting(
        "none",
        "multiply the learning rate by the ratio of images per step to those of the recipe, or by its square root",
        rare=True,
    )
    on_nan: str = method_setting(
        "stop",
        "after a gradient that is not finite; stop: end the run; skip:N: leave out up to N such steps in a row; "
        "rollback: go back to the last checkpoint and leave that step out",
        pattern=r"^(stop|skip:[1-9][0-9]{0,5}|rollback)$",
        fixed=False,
        rare=True,
    )
    parallel: Literal["ddp", "dp"] = execution_setting(
        "ddp", "ddp: one process per device; dp: one process with one thread per device", rare=True
    )
    preempt_notice: str = failure_setting(
        "",
        "stop and save when this command ends with exit code 0; each host runs it every 5 s, without a shell",
        in_files=False,
        again=True,
        rare=True,
    )
    restarts: int = failure_setting(
        10,
        "after a failure, go on with what is left, at most N times within an hour; 0 = end at the first failure",
        ge=0,
    )
    save_every: Texts = saved_setting(
        (),
        "save a checkpoint every 500steps, 1epochs or 10min, or several of these with commas; 0epochs, 0min: not at ends of epochs "
        "or by time; 0: only at the end of the run; default: as often as it takes at most 1 % of the time",
    )
    checkpoint_copies: Natural = saved_setting(
        2,
        "on several machines without a common disk: how many of them keep checkpoints, weights and results",
        rare=True,
    )
    keep_last: Natural = saved_setting(2, "number of checkpoints to keep", rare=True)
    callbacks: tuple[str, ...] = code_setting(
        (),
        "your own code that watches the training: FILE.py:CLASS or MODULE:CLASS (docs/extend.md); may be repeated",
    )
    plots: bool = display_setting(True, "write report.html, curves and example images")
    log: Texts = display_setting(
        (),
        "store the figures of the run also with tensorboard, wandb or mlflow, into files of the run folder; NAME=ADDRESS sends "
        "them to that server, and so does wandb with a key of W&B (docs/report.md); may be repeated",
        in_files=lambda text: "=" not in text,
        again=True,
    )

    @field_validator("save_every")
    @classmethod
    def _check_save_every(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        _periods(values)
        return values

    @property
    def save_period(self) -> int | None:
        """Epochs between checkpoints, 0 = only at the end; None: as saving costs."""
        return _whole(_periods(self.save_every).get("epochs"))

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints; 0 = not by steps."""
        return _whole(_periods(self.save_every).get("steps")) or 0

    @property
    def save_minutes(self) -> float | None:
        """Minutes between checkpoints, 0 = not by time; None: as saving costs."""
        return _periods(self.save_every).get("min")


class TrainConfig(RunSettings, ExecutionSettings):
    """Settings of ``yolofleet train``."""

    verb: ClassVar[str] = "train"
    json_out: ClassVar[str] = ""

    detach: bool = hosts_setting(
        False,
        "supervise the run on its hosts or this machine, and return when it has begun; `yolofleet fleet attach` shows it",
        rare=True,
    )
    min_devices: Natural = failure_setting(
        1, "devices that a run needs to go on; with fewer it waits for lost hosts", in_files=False, rare=True
    )
    resume: str = saved_setting(
        "",
        "resume a run: auto (the newest), a run folder, a checkpoint file, or the address of --checkpoint-to",
        in_files=False,
    )
    checkpoint_to: str = saved_setting(
        "",
        "copy states, weights, results and logs to this address while the run goes on: s3://bucket/runs/NAME, gs:// or az:// "
        "(docs/object-storage.md)",
        in_files=False,
        again=True,
        rare=True,
    )
    allow: tuple[AllowedAnyway, ...] = saved_setting(
        (),
        "go on anyway; changed-data: with --resume, and at starts after a failure, although files of the data set have changed, "
        "which the run records; linked-folders: with --resume and --exist-ok, follow symbolic links in the run folder and write "
        "through them; may be repeated",
        in_files=False,
        rare=True,
    )

    @property
    def lr_decay(self) -> str:
        """The decay of the learning rate: ``--lr-schedule``, unless ``--minutes`` decides it."""
        return "cooldown" if self.minutes and self.lr_schedule == "linear" else self.lr_schedule

    @property
    def accept_changed_data(self) -> bool:
        """Whether a run goes on although files of its data set have changed."""
        return "changed-data" in self.allow

    @property
    def linked_folders(self) -> bool:
        """Whether the launcher follows symbolic links in the run folder."""
        return "linked-folders" in self.allow


def _periods(values: Sequence[str]) -> dict[str, float]:
    """Return the numbers of ``--save-every`` by their unit; a later one replaces an earlier one.

    Raises:
        ValueError: a part is no number of epochs, steps or minutes.
    """
    found: dict[str, float] = {}
    for part in (part.strip() for text in values for part in text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([a-z]*)", part)
        number, unit = (float(match[1]), SAVE_UNITS.get(match[2])) if match else (-1.0, None)
        if part == "0":
            found |= {"epochs": 0.0, "steps": 0.0, "min": 0.0}
        elif unit is None or (unit != "min" and number % 1):
            raise ValueError(
                f"has {shown(part)}, which is no whole number of epochs or steps, and no number of min"
            )
        else:
            found[unit] = number
    return found


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
