"""Settings of ``yolofleet train``."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from yolofleet.config.schema.execution import (
    CodeSettings,
    DeviceSettings,
    ExecutionSettings,
    FleetSettings,
    LengthSettings,
    NameSettings,
    ProcessSettings,
    SharesSettings,
)
from yolofleet.config.schema.fields import (
    PRECISION_HELP,
    Natural,
    Optimizer,
    OrAuto,
    Precision,
    Texts,
    Weights,
    setting,
)
from yolofleet.text import SIZE

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


def default_micro_batch(batch: int, nominal_batch: int) -> int:
    """Return the micro-batch for settings, 0 if no divisor of ``batch`` is in ``MICRO_BATCHES``. Every fleet has the same.

    It cuts a full step into about eight micro-batches, enough for eight devices. Its target is an eighth of a full step,
    bounded by ``TARGET_MICRO_BATCH``. It is the divisor of ``batch`` in ``MICRO_BATCHES`` whose ratio to the target is
    nearest to 1; of two equally near divisors the larger.
    """
    low, high = TARGET_MICRO_BATCH
    target = min(max(Fraction(step_images_of(batch, nominal_batch), 8), Fraction(low)), Fraction(high))
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

    data: str = setting(
        "", "data set: YAML file, folder, COCO JSON, or a built-in name (shapes)", group="input"
    )
    model: str = setting(
        "",
        "model to train from scratch: yolov5n, yolov3-tiny, darknet-yolov3-spp, ppyoloe-s, ... (docs/models.md)",
        group="input",
    )
    cfg: str = setting(
        "", "model description to use instead of --model: YAML file or Darknet .cfg", group="input"
    )
    img: int = setting(
        640,
        "side of the square images for training and validation, pixels; rounded up to the stride",
        ge=32,
        group="input",
    )
    fraction: float = setting(
        1.0, "share of the training images to use; the seed decides which", gt=0, le=1, group="input"
    )
    batch: OrAuto = setting(
        16,
        "images per batch, in total over all devices, as in YOLOv5; auto: as many as fit into the memory of the devices, "
        "at most --nominal-batch (docs/faults.md); 0.8: into that share of it",
        ge=-1,
        group="length and batch size",
    )
    nominal_batch: Natural = setting(
        64,
        "images per optimizer update; several batches are accumulated to reach it",
        group="length and batch size",
    )
    micro_batch: OrAuto = setting(
        0,
        "images that batch normalisation treats together; 0 = choose a divisor of --batch near 1/8 of a step; auto or -1 = the "
        "largest that fits into the memory of every GPU",
        ge=-1,
        group="length and batch size",
        validate_default=True,
    )
    seed: int = setting(0, "seed of the data order, augmentation and initial weights", ge=0, group="method")
    reduce: Literal["fast", "fast16", "exact"] = setting(
        "fast",
        "sum of gradients; fast: in float32, equal up to rounding; fast16: in bfloat16, half the bytes for slow networks; "
        "exact: equal bits on every fleet",
        group="execution",
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    cache: Literal["auto", "none", "ram", "disk", "jpeg"] = setting(
        "auto",
        "keep decoded images; ram: one copy in the memory of each machine; disk: in the cache folder; jpeg: training "
        "images as JPEGs in memory, an eighth of ram, pixels change slightly; auto: ram if all fit, else disk if faster",
        group="execution",
    )
    micro_batches_per_pass: int = setting(
        0,
        "micro-batches that pass the network together, each with its own batch-norm statistics; 0 = as many as fit into "
        "the memory of a GPU, but one on CPUs and with exact sums",
        ge=0,
        group="execution",
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

    weights: Weights = setting(
        "",
        "start weights: .safetensors, .pt, .weights or .pdparams; nothing in them is executed",
        group="input",
    )
    recipe: str = setting(
        "", "hyperparameters: recipe name or file; default: the recipe of the model family", group="input"
    )
    set: tuple[str, ...] = setting(
        (), "change one value of the recipe: key=value; may be repeated", group="input"
    )
    single_cls: bool = setting(False, "treat all classes as one", group="input")
    optimizer: Optimizer = setting("SGD", "optimizer of the weights", group="method")
    optimizer_class: str = setting(
        "",
        "another optimizer: FILE.py:CLASS or MODULE:CLASS, a subclass of torch.optim.Optimizer (docs/extend.md)",
        group="method",
        in_files=False,
    )
    sampler: Literal["none", "weights", "balanced", "repeat-factor"] = setting(
        "none",
        "how often an epoch shows each image; weights: by its classes' accuracy in a validation; balanced: each class equally "
        "often; repeat-factor: images of rare classes more often; none: once",
        group="method",
    )
    rect: bool = setting(
        False,
        "rectangular images: each micro-batch has images of similar aspect ratio and one shape, without mosaics",
        group="method",
    )
    freeze: str = setting(
        "",
        "layers to freeze: a number N (the first N), a list 0,1,2, or a list of backbone, prefixes and patterns (model.*.bias) of "
        "parameter names",
        group="method",
    )
    augment_on: Literal["cpu", "device"] = setting(
        "cpu",
        "where training images are augmented; device: on the GPU that trains, for machines with few CPU cores",
        group="method",
    )
    autoanchor: bool = setting(
        True, "compute new anchors if the anchors match less than 98 % of the labels", group="method"
    )
    sync_bn: bool = setting(
        False, "compute batch-norm statistics over --batch images, across devices", group="method"
    )
    channels_last: bool = setting(
        True, "use the channels-last memory layout for images and weights", group="execution"
    )
    deterministic: bool = setting(False, "use deterministic kernels only (slower on GPUs)", group="execution")
    cudnn_benchmark: Literal["auto", "on", "off"] = setting(
        "auto",
        "let cuDNN choose kernels by timing them; auto: on, unless image sizes vary or kernels are deterministic",
        group="execution",
    )
    cuda_graphs: Literal["auto", "on", "off"] = setting(
        "auto",
        "launch the passes of the network as CUDA graphs; auto: in one process, where launching kernels one by one would "
        "take most of the time; on: always, or end with the reason",
        group="execution",
    )
    stage: Path | None = setting(
        None,
        "copy the image files into this folder on a local disk of each machine, once, and read them there",
        group="execution",
    )
    disk_cache: str = setting(
        "",
        "most disk space on each machine for the files of a data set in a store (s3://, gs://, az://, https://), such as 200GiB; "
        "default: 80 % of what is free (docs/object-storage.md)",
        group="execution",
        pattern=f"^$|^{SIZE}$",
    )
    prefetch: Natural = setting(
        4, "micro-batches that each loader process prepares in advance", group="execution"
    )
    pin_memory: bool = setting(True, "use page-locked host memory for copies to GPUs", group="execution")
    compile: bool = setting(
        False,
        "compile the network with torch.compile before the first step, which takes minutes; never run on a GPU (docs/speed.md)",
        group="execution",
    )
    timeout_s: Natural = setting(600, "timeout of a collective operation, seconds", group="execution")
    stall_s: float = setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs, and restarts or ends; 0 = never",
        ge=0,
        group="execution",
    )
    val_batch: Natural = setting(
        32,
        "images per validation batch; the batches are the same on every fleet",
        group="reports and display",
    )
    val_overlap: bool = setting(
        False,
        "validate a copy of the weights while training goes on; the figures of an epoch come at the end of the next one",
        group="reports and display",
    )


class RunSettings(FleetSettings, NameSettings, LengthSettings, SharesSettings, StepSettings):
    """Settings of a training that the trials of a study have, too."""

    max_steps: int = setting(
        0,
        "end the run after N steps (optimizer updates); 0 = after --epochs",
        ge=0,
        group="length and batch size",
    )
    minutes: float = setting(
        0.0,
        "end the run after X minutes of training, validation and saving, over all resumes, with --lr-schedule cooldown; "
        "0 = after --epochs",
        ge=0,
        group="length and batch size",
    )
    patience: int = setting(
        100,
        "stop after N epochs without a better fitness (0.1 mAP50 + 0.9 mAP50-95); 0 = never",
        ge=0,
        group="length and batch size",
    )
    lr_schedule: Literal["linear", "cosine", "constant", "cooldown"] = setting(
        "linear",
        "how the learning rate decays after the warm-up; cooldown: constant, then linear in the last fifth of the steps",
        group="method",
    )
    multi_scale: bool = setting(
        False, "change the image size by up to +-50 % in each step; off: as the recipe says", group="method"
    )
    lr_scale: Literal["none", "linear", "sqrt"] = setting(
        "none",
        "multiply the learning rate by the ratio of images per step to those of the recipe, or by its square root",
        group="method",
    )
    on_nan: str = setting(
        "stop",
        "after a gradient that is not finite; stop: end the run; skip:N: leave out up to N such steps in a row; "
        "rollback: go back to the last checkpoint and leave that step out",
        group="method",
        pattern=r"^(stop|skip:[1-9][0-9]{0,5}|rollback)$",
    )
    parallel: Literal["ddp", "dp"] = setting(
        "ddp", "ddp: one process per device; dp: one process with one thread per device", group="execution"
    )
    check_steps: int = setting(
        50, "compare the weights of all ranks every N steps; 0 = never", ge=0, group="execution"
    )
    preempt_notice: str = setting(
        "",
        "stop and save when this command ends with exit code 0; each host runs it every 5 s, without a shell",
        group="execution",
        in_files=False,
    )
    restarts: int = setting(
        10,
        "after a failure, go on with what is left, at most N times within an hour; 0 = end at the first failure",
        ge=0,
        group="after a failure",
    )
    save_period: str = setting(
        "auto",
        "save a checkpoint every N epochs; 0 = only at the end; auto: every epoch, unless saving takes more than 1 % of the time",
        group="saved files",
        pattern=r"^(auto|[0-9]{1,9})$",
    )
    save_steps: int = setting(0, "save a checkpoint also every N steps; 0 = off", ge=0, group="saved files")
    save_minutes: str = setting(
        "auto",
        "save a checkpoint also every N minutes; 0 = off; auto: by the measured cost of a save and the number of hosts",
        group="saved files",
        pattern=r"^(auto|[0-9]{1,9}(\.[0-9]{1,9})?)$",
    )
    keep_last: Natural = setting(2, "number of checkpoints to keep", group="saved files")
    checkpoint_copies: Natural = setting(
        2,
        "on several machines without a common disk: how many of them keep checkpoints, weights and results",
        group="saved files",
    )
    callbacks: tuple[str, ...] = setting(
        (),
        "your own code that watches the training: FILE.py:CLASS or MODULE:CLASS (docs/extend.md); may be repeated",
        group="reports and display",
        in_files=False,
    )
    plots: bool = setting(True, "write report.html, curves and example images", group="reports and display")
    log: str = setting(
        "",
        "store the figures of the run also with tensorboard, wandb, mlflow, clearml, comet; several with commas; "
        "sends nothing without --log-server (docs/loggers.md)",
        group="reports and display",
    )
    log_server: Texts = setting(
        (),
        "NAME=ADDRESS: a logger of --log sends the figures to this server, instead of writing files; may be repeated",
        group="reports and display",
        in_files=False,
    )
    tensorboard: bool = setting(False, "the same as --log tensorboard", group="reports and display")
    verbose: bool = setting(False, "show metrics of each class", group="reports and display")


class TrainConfig(RunSettings, ExecutionSettings):
    """Settings of ``yolofleet train``."""

    verb: ClassVar[str] = "train"
    json_out: ClassVar[str] = ""

    batch_memory: float = setting(
        0.9,
        "with --batch auto: share of the memory of each device to use",
        gt=0,
        le=1,
        group="length and batch size",
    )
    detach: bool = setting(
        False,
        "supervise the run on its hosts, and return when it has begun; `yolofleet fleet attach` shows it",
        group="execution",
        in_files=False,
    )
    min_hosts: Natural = setting(
        1,
        "hosts that a run needs to go on; with fewer it waits for lost hosts",
        group="after a failure",
        in_files=False,
    )
    min_devices: Natural = setting(
        1,
        "devices that a run needs to go on; with fewer it waits for lost hosts",
        group="after a failure",
        in_files=False,
    )
    spares: str = setting(
        "",
        "hosts that wait and replace lost hosts, as in --hosts",
        group="after a failure",
        in_files=False,
    )
    host_timeout: float = setting(
        0.0,
        "give up a host after X seconds without a message; 0 = 20, or silence_s of the fleet file",
        ge=0,
        le=3600,
        group="after a failure",
        in_files=False,
    )
    resume: str = setting(
        "",
        "resume a run: auto (the newest), a run folder, a checkpoint file, or the address of --checkpoint-to",
        group="saved files",
        in_files=False,
    )
    checkpoint_to: str = setting(
        "",
        "copy states, weights, results and logs to this address while the run goes on: s3://bucket/runs/NAME, gs:// or az:// "
        "(docs/object-storage.md)",
        group="saved files",
        in_files=False,
    )
    results_to: str = setting(
        "",
        "the same as --checkpoint-to, without the states",
        group="saved files",
        in_files=False,
    )
    linked_folders: bool = setting(
        False,
        "with --resume and --exist-ok: follow symbolic links in the run folder and write through them",
        group="saved files",
        in_files=False,
    )

    @property
    def lr_decay(self) -> str:
        """The decay of the learning rate: ``--lr-schedule``, unless ``--minutes`` decides it."""
        return "cooldown" if self.minutes and self.lr_schedule == "linear" else self.lr_schedule
