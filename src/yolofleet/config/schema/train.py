"""Settings of ``yolofleet train``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from yolofleet.config.schema.fields import (
    PRECISION_HELP,
    CodeSettings,
    DeviceSettings,
    ExecutionSettings,
    FleetSettings,
    LengthSettings,
    NameSettings,
    Natural,
    Optimizer,
    OrAuto,
    Precision,
    ProcessSettings,
    SharesSettings,
    Texts,
    Weights,
    display_setting,
    execution_setting,
    failure_setting,
    input_setting,
    length_setting,
    method_setting,
    saved_setting,
)
from yolofleet.support.text import SIZE

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


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

    data: str = input_setting("", "data set: YAML file, folder, COCO JSON, or a built-in name (shapes)")
    model: str = input_setting(
        "",
        "model to train from scratch: yolov5n, yolov3-tiny, darknet-yolov3-spp, ppyoloe-s, ... (docs/models.md)",
    )
    cfg: str = input_setting("", "model description to use instead of --model: YAML file or Darknet .cfg")
    img: int = input_setting(
        640, "side of the square images for training and validation, pixels; rounded up to the stride", ge=32
    )
    fraction: float = input_setting(
        1.0, "share of the training images to use; the seed decides which", gt=0, le=1
    )
    batch: OrAuto = length_setting(
        16,
        "images per batch, in total over all devices, as in YOLOv5; auto: as many as fit into the memory of the devices, "
        "at most --nominal-batch (docs/failures.md); 0.8: into that share of it",
        ge=-1,
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
    )
    seed: int = method_setting(0, "seed of the data order, augmentation and initial weights", ge=0)
    reduce: Literal["fast", "fast16", "exact"] = execution_setting(
        "fast",
        "sum of gradients; fast: in float32, equal up to rounding; fast16: in bfloat16, half the bytes for slow networks; "
        "exact: equal bits on every fleet",
    )
    precision: Precision = execution_setting("auto", PRECISION_HELP)
    cache: Literal["auto", "none", "ram", "disk", "jpeg"] = execution_setting(
        "auto",
        "keep decoded images; ram: one copy in the memory of each machine; disk: in the cache folder; jpeg: training "
        "images as JPEGs in memory, an eighth of ram, pixels change slightly; auto: ram if all fit, else disk if faster",
    )
    micro_batches_per_pass: int = execution_setting(
        0,
        "micro-batches that pass the network together, each with its own batch-norm statistics; 0 = as many as fit into "
        "the memory of a GPU, but one on CPUs and with exact sums",
        ge=0,
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


class StepSettings(CodeSettings, WorkloadSettings, ProcessSettings):
    """Settings of a training that a measurement of its parts has, too."""

    weights: Weights = input_setting(
        "", "start weights: .safetensors, .pt, .weights or .pdparams; nothing in them is executed"
    )
    recipe: str = input_setting(
        "", "hyperparameters: recipe name or file; default: the recipe of the model family"
    )
    set: tuple[str, ...] = input_setting((), "change one value of the recipe: key=value; may be repeated")
    single_cls: bool = input_setting(False, "treat all classes as one")
    optimizer: Optimizer = method_setting("SGD", "optimizer of the weights")
    optimizer_class: str = method_setting(
        "",
        "another optimizer: FILE.py:CLASS or MODULE:CLASS, a subclass of torch.optim.Optimizer (docs/extend.md)",
        in_files=False,
    )
    sampler: Literal["none", "weights", "balanced", "repeat-factor"] = method_setting(
        "none",
        "how often an epoch shows each image; weights: by its classes' accuracy in a validation; balanced: each class equally "
        "often; repeat-factor: images of rare classes more often; none: once",
    )
    rect: bool = method_setting(
        False,
        "rectangular images: each micro-batch has images of similar aspect ratio and one shape, without mosaics",
    )
    freeze: str = method_setting(
        "",
        "layers to freeze: a number N (the first N), a list 0,1,2, or a list of backbone, prefixes and patterns (model.*.bias) of "
        "parameter names",
    )
    autoanchor: bool = method_setting(
        True, "compute new anchors if the anchors match less than 98 % of the labels"
    )
    sync_bn: bool = method_setting(False, "compute batch-norm statistics over --batch images, across devices")
    channels_last: bool = execution_setting(
        True, "use the channels-last memory layout for images and weights"
    )
    deterministic: bool = execution_setting(False, "use deterministic kernels only (slower on GPUs)")
    cudnn_benchmark: Literal["auto", "on", "off"] = execution_setting(
        "auto",
        "let cuDNN choose kernels by timing them; auto: on, unless image sizes vary or kernels are deterministic",
    )
    cuda_graphs: Literal["auto", "on", "off"] = execution_setting(
        "auto",
        "launch the passes of the network as CUDA graphs; auto: in one process, where launching kernels one by one would "
        "take most of the time; on: always, or end with the reason",
    )
    stage: Path | None = execution_setting(
        None,
        "copy the image files into this folder on a local disk of each machine, once, and read them there",
    )
    disk_cache: str = execution_setting(
        "",
        "most disk space on each machine for the files of a data set in a store (s3://, gs://, az://, https://), such as 200GiB; "
        "default: 80 % of what is free (docs/object-storage.md)",
        pattern=f"^$|^{SIZE}$",
    )
    prefetch: Natural = execution_setting(4, "micro-batches that each loader process prepares in advance")
    pin_memory: bool = execution_setting(True, "use page-locked host memory for copies to GPUs")
    compile: bool = execution_setting(
        False,
        "compile the network with torch.compile before the first step, which takes minutes; never run on a GPU (docs/speed.md)",
    )
    checkpoint_activations: bool = execution_setting(
        False,
        "keep only the inputs of each block of the network, and compute the block again in the backward pass: the same weights "
        "with less memory and more time (docs/speed.md)",
    )
    timeout_s: Natural = execution_setting(600, "timeout of a collective operation, seconds")
    stall_s: float = execution_setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs, and restarts or ends; 0 = never",
        ge=0,
    )
    val_batch: Natural = display_setting(
        32, "images per validation batch; the batches are the same on every fleet"
    )
    val_overlap: bool = display_setting(
        False,
        "validate a copy of the weights while training goes on; the figures of an epoch come at the end of the next one",
    )


class RunSettings(FleetSettings, NameSettings, LengthSettings, SharesSettings, StepSettings):
    """Settings of a training that the trials of a study have, too."""

    max_steps: int = length_setting(
        0, "end the run after N steps (optimizer updates); 0 = after --epochs", ge=0
    )
    minutes: float = length_setting(
        0.0,
        "end the run after X minutes of training, validation and saving, over all resumes, with --lr-schedule cooldown; "
        "0 = after --epochs",
        ge=0,
    )
    patience: int = length_setting(
        100, "stop after N epochs without a better fitness (0.1 mAP50 + 0.9 mAP50-95); 0 = never", ge=0
    )
    lr_schedule: Literal["linear", "cosine", "constant", "cooldown"] = method_setting(
        "linear",
        "how the learning rate decays after the warm-up; cooldown: constant, then linear in the last fifth of the steps",
    )
    multi_scale: bool = method_setting(
        False, "change the image size by up to +-50 % in each step; off: as the recipe says"
    )
    lr_scale: Literal["none", "linear", "sqrt"] = method_setting(
        "none",
        "multiply the learning rate by the ratio of images per step to those of the recipe, or by its square root",
    )
    on_nan: str = method_setting(
        "stop",
        "after a gradient that is not finite; stop: end the run; skip:N: leave out up to N such steps in a row; "
        "rollback: go back to the last checkpoint and leave that step out",
        pattern=r"^(stop|skip:[1-9][0-9]{0,5}|rollback)$",
    )
    parallel: Literal["ddp", "dp"] = execution_setting(
        "ddp", "ddp: one process per device; dp: one process with one thread per device"
    )
    check_steps: int = execution_setting(
        50, "compare the weights of all ranks every N steps; 0 = never", ge=0
    )
    preempt_notice: str = execution_setting(
        "",
        "stop and save when this command ends with exit code 0; each host runs it every 5 s, without a shell",
        in_files=False,
    )
    restarts: int = failure_setting(
        10,
        "after a failure, go on with what is left, at most N times within an hour; 0 = end at the first failure",
        ge=0,
    )
    save_period: str = saved_setting(
        "auto",
        "save a checkpoint every N epochs; 0 = only at the end; auto: every epoch, unless saving takes more than 1 % of the time",
        pattern=r"^(auto|[0-9]{1,9})$",
    )
    save_steps: int = saved_setting(0, "save a checkpoint also every N steps; 0 = off", ge=0)
    save_minutes: str = saved_setting(
        "auto",
        "save a checkpoint also every N minutes; 0 = off; auto: by the measured cost of a save and the number of hosts",
        pattern=r"^(auto|[0-9]{1,9}(\.[0-9]{1,9})?)$",
    )
    keep_last: Natural = saved_setting(2, "number of checkpoints to keep")
    checkpoint_copies: Natural = saved_setting(
        2, "on several machines without a common disk: how many of them keep checkpoints, weights and results"
    )
    callbacks: tuple[str, ...] = display_setting(
        (),
        "your own code that watches the training: FILE.py:CLASS or MODULE:CLASS (docs/extend.md); may be repeated",
        in_files=False,
    )
    plots: bool = display_setting(True, "write report.html, curves and example images")
    log: str = display_setting(
        "",
        "store the figures of the run also with tensorboard, wandb, mlflow; several with commas; "
        "sends nothing without --log-server, or a key of W&B (docs/report.md)",
    )
    log_server: Texts = display_setting(
        (),
        "NAME=ADDRESS: a logger of --log sends the figures to this server, instead of writing files; may be repeated",
        in_files=False,
    )
    tensorboard: bool = display_setting(False, "the same as --log tensorboard")
    verbose: bool = display_setting(False, "show metrics of each class")


class TrainConfig(RunSettings, ExecutionSettings):
    """Settings of ``yolofleet train``."""

    verb: ClassVar[str] = "train"
    json_out: ClassVar[str] = ""

    batch_memory: float = length_setting(
        0.9, "with --batch auto: share of the memory of each device to use", gt=0, le=1
    )
    detach: bool = execution_setting(
        False,
        "supervise the run on its hosts, and return when it has begun; `yolofleet fleet attach` shows it",
        in_files=False,
    )
    min_hosts: Natural = failure_setting(
        1, "hosts that a run needs to go on; with fewer it waits for lost hosts", in_files=False
    )
    min_devices: Natural = failure_setting(
        1, "devices that a run needs to go on; with fewer it waits for lost hosts", in_files=False
    )
    spares: str = failure_setting("", "hosts that wait and replace lost hosts, as in --hosts", in_files=False)
    host_timeout: float = failure_setting(
        0.0,
        "give up a host after X seconds without a message; 0 = 20, or silence_s of the fleet file",
        ge=0,
        le=3600,
        in_files=False,
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
    )
    results_to: str = saved_setting("", "the same as --checkpoint-to, without the states", in_files=False)
    accept_changed_data: bool = saved_setting(
        False,
        "with --resume, and at starts after a failure: go on although files of the data set have changed; the run records it",
        in_files=False,
    )
    linked_folders: bool = saved_setting(
        False,
        "with --resume and --exist-ok: follow symbolic links in the run folder and write through them",
        in_files=False,
    )

    @property
    def lr_decay(self) -> str:
        """The decay of the learning rate: ``--lr-schedule``, unless ``--minutes`` decides it."""
        return "cooldown" if self.minutes and self.lr_schedule == "linear" else self.lr_schedule
