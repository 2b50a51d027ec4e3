"""Declare every setting of every command once: name, type, default, unit and help.

``cli/`` generates the command line from these models. ``load.py`` merges the values, freezes and stores them.
``aliases.py`` has the flags of other programs. This module does not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from yolofleet.config.device import GPUS


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


def _file_of(weights: Any) -> Any:
    """Return the weights file of a value of ``--weights`` that is the folder of a run, else the value."""
    if isinstance(weights, (list, tuple)):
        return tuple(map(_file_of, weights))
    if isinstance(weights, str) and weights and os.path.isfile(file := best_weights(Path(weights))):  # noqa: PTH113
        return str(file)
    return weights


QUIET_HELP = "print only errors and the result: no header, notes, warnings, tables or progress"
MAX_THREADS = 1024  # a larger number is a typing error, and each thread costs memory
Natural = Annotated[int, Field(ge=1)]
Weights = Annotated[str, BeforeValidator(_file_of)]
OrAuto = Annotated[int, BeforeValidator(lambda value: -1 if value == "auto" else value)]
Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
PER_DEVICE_HELP = "--batch and --nominal-batch count for each device: more devices train with larger steps"
PRECISION_HELP = (
    "number format; auto: fp16 on CUDA, fp32 elsewhere; tf32: TensorFloat-32 products, NVIDIA GPUs only"
)
Optimizer = Literal["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSProp"]
DEVICE = r"^(auto|cpu(:[1-9][0-9]{0,2})?|mps|" + GPUS + ")$"
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
        coerce_numbers_to_str=True,  # `device: 0` in a YAML file
    )


class ExecutionSettings(Frozen):
    """Settings of the machine and the run folder; none of them may change a result."""

    device: str = setting(
        "auto",
        "auto, cpu, cpu:N (N processes), mps, or CUDA device numbers such as 0, 0,1 or 0:2 (2 processes on GPU 0)",
        group="execution",
        pattern=DEVICE,
    )
    threads: int = setting(
        0,
        "CPU threads of each process; 0 = cores of the machine / its processes",
        ge=0,
        le=MAX_THREADS,
        group="execution",
    )
    workers: int = setting(
        -1,
        "loader processes of each rank; 0 = load in the main process, -1 = choose from the number of cores",
        ge=-1,
        le=MAX_THREADS,
        group="execution",
    )
    project: Path | None = setting(
        None, "parent folder of the run folder (default runs/<command>)", group="execution"
    )
    name: str = setting("exp", "name of the run folder; a number is added if it exists", group="execution")
    exist_ok: bool = setting(
        False, "use an existing run folder of that name", group="execution", in_files=False
    )
    quiet: bool = setting(False, QUIET_HELP, group="reports and display", in_files=False)
    recipe_class: str = setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
        group="input",
        in_files=False,
    )


class FleetSettings(ExecutionSettings):
    """Execution settings of commands that can run on several hosts."""

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
    sync_code: bool = setting(
        False,
        "copy this machine's yolofleet to the hosts for this run",
        group="execution",
        in_files=False,
    )


class TrainConfig(FleetSettings):
    """Settings of ``yolofleet train``."""

    verb: ClassVar[str] = "train"
    json_out: ClassVar[str] = ""

    # input
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
    img: int = setting(
        640,
        "side of the square images for training and validation, pixels; rounded up to the stride",
        ge=32,
        group="input",
    )
    single_cls: bool = setting(False, "treat all classes as one", group="input")
    fraction: float = setting(
        1.0, "share of the training images to use; the seed decides which", gt=0, le=1, group="input"
    )

    # length and batch size
    epochs: Natural = setting(100, "epochs: passes over the training images", group="length and batch size")
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
    batch: OrAuto = setting(
        16,
        "images per batch, in total over all devices, as in YOLOv5; auto: as many as fit into the memory of the devices, "
        "at most --nominal-batch (docs/faults.md); 0.8: into that share of it",
        ge=-1,
        group="length and batch size",
    )
    batch_memory: float = setting(
        0.9,
        "with --batch auto: share of the memory of each device to use",
        gt=0,
        le=1,
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
    )
    patience: int = setting(
        100,
        "stop after N epochs without a better fitness (0.1 mAP50 + 0.9 mAP50-95); 0 = never",
        ge=0,
        group="length and batch size",
    )

    # method
    optimizer: Optimizer = setting("SGD", "optimizer of the weights", group="method")
    optimizer_class: str = setting(
        "",
        "another optimizer: FILE.py:CLASS or MODULE:CLASS, a subclass of torch.optim.Optimizer (docs/extend.md)",
        group="method",
        in_files=False,
    )
    lr_schedule: Literal["linear", "cosine", "constant", "cooldown"] = setting(
        "linear",
        "how the learning rate decays after the warm-up; cooldown: constant, then linear in the last fifth of the steps",
        group="method",
    )
    multi_scale: bool = setting(
        False, "change the image size by up to +-50 % in each step; off: as the recipe says", group="method"
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
    lr_scale: Literal["none", "linear", "sqrt"] = setting(
        "none",
        "multiply the learning rate by the ratio of images per step to those of the recipe, or by its square root",
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
    seed: int = setting(0, "seed of the data order, augmentation and initial weights", ge=0, group="method")
    autoanchor: bool = setting(
        True, "compute new anchors if the anchors match less than 98 % of the labels", group="method"
    )
    sync_bn: bool = setting(
        False, "compute batch-norm statistics over --batch images, across devices", group="method"
    )
    on_nan: str = setting(
        "stop",
        "after a gradient that is not finite; stop: end the run; skip:N: leave out up to N such steps in a row; "
        "rollback: go back to the last checkpoint and leave that step out",
        group="method",
        pattern=r"^(stop|skip:[1-9][0-9]{0,5}|rollback)$",
    )

    # execution
    parallel: Literal["ddp", "dp"] = setting(
        "ddp", "ddp: one process per device; dp: one process with one thread per device", group="execution"
    )
    reduce: Literal["fast", "fast16", "exact"] = setting(
        "fast",
        "sum of gradients; fast: in float32, equal up to rounding; fast16: in bfloat16, half the bytes for slow networks; "
        "exact: equal bits on every fleet",
        group="execution",
    )
    shares: str = setting(
        "",
        "relative work of each rank, such as 2,1,1; auto: by measured speed; default: equal",
        group="execution",
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    channels_last: bool = setting(
        True, "use the channels-last memory layout for images and weights", group="execution"
    )
    deterministic: bool = setting(False, "use deterministic kernels only (slower on GPUs)", group="execution")
    cudnn_benchmark: Literal["auto", "on", "off"] = setting(
        "auto",
        "let cuDNN choose kernels by timing them; auto: on, unless image sizes vary or kernels are deterministic",
        group="execution",
    )
    cache: Literal["auto", "none", "ram", "disk", "jpeg"] = setting(
        "auto",
        "keep decoded images; ram: one copy in the memory of each machine; disk: in the cache folder; jpeg: training "
        "images as JPEGs in memory, an eighth of ram, pixels change slightly; auto: ram if all fit, else disk if faster",
        group="execution",
    )
    stage: Path | None = setting(
        None,
        "copy the image files into this folder on a local disk of each machine, once, and read them there",
        group="execution",
    )
    prefetch: Natural = setting(
        4, "micro-batches that each loader process prepares in advance", group="execution"
    )
    pin_memory: bool = setting(True, "use page-locked host memory for copies to GPUs", group="execution")
    micro_batches_per_pass: int = setting(
        0,
        "micro-batches that pass the network together, each with its own batch-norm statistics; 0 = as many as fit into "
        "the memory of a GPU, but one on CPUs and with exact sums",
        ge=0,
        group="execution",
    )
    compile: bool = setting(
        False,
        "compile the network with torch.compile before the first step, which takes minutes; never run on a GPU (docs/speed.md)",
        group="execution",
    )
    check_steps: int = setting(
        50, "compare the weights of all ranks every N steps; 0 = never", ge=0, group="execution"
    )
    timeout_s: Natural = setting(600, "timeout of a collective operation, seconds", group="execution")
    stall_s: float = setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs, and restarts or ends; 0 = never",
        ge=0,
        group="execution",
    )
    preempt_notice: str = setting(
        "",
        "stop and save when this command ends with exit code 0; each host runs it every 5 s, without a shell",
        group="execution",
        in_files=False,
    )

    detach: bool = setting(
        False,
        "supervise the run on its hosts, and return when it has begun; `yolofleet fleet attach` shows it",
        group="execution",
        in_files=False,
    )

    # after a failure
    restarts: int = setting(
        10,
        "after a failure, go on with what is left, at most N times within an hour; 0 = end at the first failure",
        ge=0,
        group="after a failure",
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

    # saved files
    resume: str = setting(
        "",
        "resume a run: auto (the newest), a run folder, or a checkpoint file",
        group="saved files",
        in_files=False,
    )
    linked_folders: bool = setting(
        False,
        "with --resume and --exist-ok: follow symbolic links in the run folder and write through them",
        group="saved files",
        in_files=False,
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

    # reports and display
    val_period: int = setting(
        1, "validate every N epochs; 0 = only after the last", ge=0, group="reports and display"
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
    callbacks: tuple[str, ...] = setting(
        (),
        "your own code that watches the training: FILE.py:CLASS or MODULE:CLASS (docs/extend.md); may be repeated",
        group="reports and display",
        in_files=False,
    )
    plots: bool = setting(True, "write report.html, curves and example images", group="reports and display")
    log: str = setting(
        "",
        "store the figures of the run also with tensorboard, wandb, mlflow, clearml, comet, prometheus, http; several "
        "with commas; sends nothing without --log-server (docs/loggers.md)",
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


class BenchTrainConfig(TrainConfig):
    """Settings of ``yolofleet bench train``: those of the run to measure, of which the command line offers a part."""

    verb: ClassVar[str] = "bench"

    steps: Natural = setting(
        20, "measured steps of each part, after a few for warm-up", group="length and batch size"
    )


class LrFindConfig(TrainConfig):
    """Settings of ``yolofleet lr-find``: those of the run to find a rate for, of which the command line offers a part."""

    verb: ClassVar[str] = "lr-find"

    steps: int = setting(
        100, "steps of the search; the rate grows in each", ge=10, le=10_000, group="length and batch size"
    )
    lowest: float = setting(1e-5, "learning rate of the first step", gt=0, group="method")
    highest: float = setting(1.0, "learning rate of the last step", gt=0, group="method")


class BenchScalingConfig(TrainConfig):
    """Settings of ``yolofleet bench scaling``: those of its runs, of which the command line offers a part."""

    verb: ClassVar[str] = "bench"

    devices: str = setting(
        "1,2,4,8",
        "numbers of devices to train on, one run each; the first of those that --device names",
        group="input",
        pattern=r"^[1-9][0-9]{0,2}(,[1-9][0-9]{0,2})*$",
    )
    per_device: bool = setting(False, PER_DEVICE_HELP, group="length and batch size")
    epochs: Natural = setting(
        3, "epochs of each run; the first one is for warm-up", group="length and batch size"
    )


class PlanConfig(TrainConfig):
    """Settings of ``yolofleet plan``: those of the run to predict, and the fleets to predict it on."""

    verb: ClassVar[str] = "plan"

    machine: str = setting(
        "",
        "published machine: 8xA100, p4d.24xlarge, or several to choose from: 8xA100,8xV100 (docs/plan.md lists them)",
        group="input",
    )
    machines: str = setting(
        "1",
        "numbers of machines of each kind: 1..8, or 1,2,4",
        group="input",
        pattern=r"^[1-9][0-9]{0,3}(\.\.[1-9][0-9]{0,3})?(,[1-9][0-9]{0,3}(\.\.[1-9][0-9]{0,3})?)*$",
    )
    probe: Texts = setting(
        (),
        "file of `yolofleet plan probe`; once for each kind of machine; default: the one that was measured last",
        group="input",
        in_files=False,
    )
    network: str = setting(
        "",
        "link between machines, in place of the measured or published one: 10gbit, 100mbit",
        group="input",
        pattern=r"^$|^[1-9][0-9]{0,4}(gbit|mbit)$",
    )
    prices: Path | None = setting(
        None, "YAML file with prices and further machines (docs/plan.md)", group="input", in_files=False
    )
    images: int = setting(
        0, "training images, in place of those of --data; 0 = count them", ge=0, group="input"
    )
    val_images: int = setting(
        0, "validation images, in place of those of --data; 0 = count them", ge=0, group="input"
    )
    per_device: bool = setting(False, PER_DEVICE_HELP, group="length and batch size")
    deadline: str = setting(
        "",
        "choose the cheapest fleet that ends in time: 6h, 90m, 2d",
        group="length and batch size",
        pattern=r"^$|^[0-9]{1,6}(\.[0-9]{1,3})?[mhd]$",
    )
    budget: float = setting(
        0.0, "choose the fastest fleet that costs at most this many US dollars; 0 = no limit", ge=0, group="length and batch size"
    )  # fmt: skip
    picture: Path | None = setting(
        None, "write a picture of the table (PNG)", group="saved files", in_files=False
    )
    simulate: bool = setting(
        False,
        "simulate each rank, loader process, bucket and link, and list what stops scaling first; up to 4,096 devices",
        group="execution",
    )
    failures_per_hour: float = setting(
        0.0, "failures of one machine per hour, for example of a spot machine", ge=0, group="after a failure"
    )
    replace_minutes: float = setting(
        10.0, "mean minutes until a failed machine is replaced", gt=0, group="after a failure"
    )


class PlanProbeConfig(BenchTrainConfig):
    """Settings of ``yolofleet plan probe``: those of the run whose parts it measures."""

    steps: Natural = setting(8, "measured steps of each part", group="length and batch size")


class TuneConfig(TrainConfig):
    """Settings of ``yolofleet tune``: those of its trials, of which the command line offers a part, and of the search."""

    verb: ClassVar[str] = "tune"

    space: str = setting(
        "",
        "recipe values to search, with their ranges: a YAML file; default: the space of the model family",
        group="input",
    )
    trials: Natural = setting(
        30,
        "trials: trainings with recipe values of their own; the first has those of the recipe",
        group="length and batch size",
    )
    failures: Natural = setting(
        3, "end the study after N failed trials in a row", group="length and batch size"
    )
    generation: Natural = setting(
        8,
        "trials whose values are chosen together, from the results of earlier generations only; the devices do not change it",
        group="method",
    )
    prune: bool = setting(
        True,
        "stop a trial whose fitness is below the median of the trials of earlier generations in the same epoch",
        group="method",
    )
    asynchronous: bool = setting(
        False,
        "choose the values of a trial when a device is free, from all results; faster, but not reproducible",
        group="method",
        flag="--async",
    )
    devices_per_trial: Natural = setting(
        1,
        "devices of each trial; the number of devices of each host must be a multiple of N",
        group="execution",
    )
    # other defaults than those of a training
    reduce: Literal["fast", "fast16", "exact"] = setting(
        "exact",
        "sum of gradients; exact: the result of a trial does not depend on its devices; fast and fast16: as for train",
        group="execution",
    )
    resume: str = setting(
        "", "go on with a study: auto (the newest) or its folder", group="saved files", in_files=False
    )
    plots: bool = setting(
        False, "each trial writes report.html, curves and example images", group="reports and display"
    )


class InferenceSettings(ExecutionSettings):
    """Settings that ``yolofleet val`` and ``yolofleet predict`` share."""

    weights: Annotated[Texts, BeforeValidator(_file_of)] = setting(
        (),
        "weights: .safetensors, .pt, .weights or .pdparams (read as data, never executed), or an exported file; repeat it "
        "for an ensemble",
        group="input",
    )
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    img: int = setting(640, "longest image side, pixels", ge=32, group="input")
    agnostic_nms: bool = setting(False, "run NMS over all classes together", group="method")
    augment: bool = setting(
        False,
        "test-time augmentation: detect on three views of each image (full size, 0.83 mirrored, 0.67)",
        group="method",
    )
    merge: Literal["nms", "wbf", "mean"] = setting(
        "nms",
        "how the predictions of several weights, views and tiles become one list; nms: one suppression over all, as YOLOv5; "
        "wbf: weighted box fusion; mean: average the predictions of networks of one architecture",
        group="method",
    )
    tile: int = setting(
        0,
        "detect also on tiles of N x N pixels, for small objects in large images; 0 = off",
        ge=0,
        group="method",
    )
    overlap: float = setting(
        0.2,
        "with --tile: overlap of neighbouring tiles, as a fraction of their side",
        ge=0,
        lt=1,
        group="method",
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    save_txt: bool = setting(False, "write detections as YOLO txt files", group="saved files")
    save_conf: bool = setting(False, "add scores to the txt files", group="saved files")


class ValConfig(FleetSettings, InferenceSettings):
    """Settings of ``yolofleet val``."""

    verb: ClassVar[str] = "val"
    # settings of training that have one value in a validation
    parallel: ClassVar[str] = "ddp"
    reduce: ClassVar[str] = "fast"
    shares: ClassVar[str] = ""
    resume: ClassVar[str] = ""
    linked_folders: ClassVar[bool] = False

    data: str = setting("", "data set: YAML file, folder, COCO JSON, or a built-in name", group="input")
    split: Literal["train", "val", "test"] = setting("val", "split of the data set", group="input")
    single_cls: bool = setting(False, "treat all classes as one", group="input")
    fit: Literal["auto", "rect", "batch", "square"] = setting(
        "auto",
        "pad images to a multiple of the stride (rect), to the largest of their batch as YOLOv5 does (batch), or to a "
        "square; auto: rect, or square if the evaluation of the model family does so",
        group="method",
    )
    conf: Unit = setting(0.001, "discard boxes with a lower score", group="method")
    iou: Unit = setting(0.6, "IoU threshold of non-maximum suppression (NMS)", group="method")
    max_det: Natural = setting(300, "maximum number of boxes per image", group="method")
    classes: Texts = setting(
        (), "measure only these classes, by number or name; may be repeated", group="method"
    )
    batch: Natural = setting(32, "images per batch; the batches are the same on every fleet", group="method")
    timeout_s: Natural = setting(600, "timeout of a collective operation, seconds", group="execution")
    stall_s: float = setting(
        30.0,
        "seconds without progress, or 10 x the usual time if that is longer, until the run reports the rank that hangs and ends; 0 = never",
        ge=0,
        group="execution",
    )
    metric: Literal["coco", "voc07", "voc12"] = setting(
        "coco",
        "also show the AP of PASCAL VOC at IoU 0.5; voc07: at 11 recalls; voc12: area under the curve",
        group="method",
    )
    verbose: bool = setting(
        False,
        "show metrics of each class and of small, medium and large objects",
        group="reports and display",
    )
    error_analysis: bool = setting(
        False,
        "show the kinds of errors and what each costs, as TIDE does: classification, localisation, both, duplicate, "
        "background, missed",
        group="reports and display",
    )
    worst: int = setting(
        0,
        "draw the N images with the most errors, labels at the left and detections at the right",
        ge=0,
        le=10_000,
        group="reports and display",
    )
    plots: bool = setting(True, "write report.html, curves and example images", group="reports and display")
    save_json: bool = setting(False, "write detections in the COCO results format", group="saved files")
    json_out: str = setting(
        "",
        "write the results as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )


class PredictConfig(InferenceSettings):
    """Settings of ``yolofleet predict``."""

    source: str = setting(
        "",
        "image, folder, glob pattern, list of images (.txt), video, camera number; http, https or rtsp url; screen; - for "
        "standard input",
        group="input",
    )
    fit: Literal["auto", "rect", "square"] = setting(
        "auto",
        "pad images to a multiple of the stride (rect) or to a square; auto: as the evaluation of the model family does",
        group="method",
    )
    conf: Unit = setting(0.25, "discard boxes with a lower score", group="method")
    iou: Unit = setting(0.45, "IoU threshold of non-maximum suppression (NMS)", group="method")
    max_det: Natural = setting(1000, "maximum number of boxes per image", group="method")
    classes: Texts = setting(
        (), "keep only these classes, by number or name; may be repeated", group="method"
    )
    vid_stride: Natural = setting(1, "use every Nth frame of a video", group="method")
    batch: Natural = setting(1, "images per forward pass", group="method")
    save: Literal["images", "none"] = setting(
        "images", "write the images with boxes drawn on them", group="saved files"
    )
    txt_format: Literal["yolo", "voc"] = setting(
        "yolo",
        "format of --save-txt; yolo: class cx cy w h in 0..1; voc: class x1 y1 x2 y2 in pixels",
        group="saved files",
    )
    save_json: bool = setting(False, "write all detections to one JSON file", group="saved files")
    save_csv: bool = setting(False, "write all detections to one CSV file", group="saved files")
    save_crop: bool = setting(False, "write each detected object as an image", group="saved files")
    show: bool = setting(False, "show the images in a window", group="reports and display")
    line_width: int = setting(
        0, "line width of the boxes, pixels; 0 = by image size", ge=0, group="reports and display"
    )
    json_out: str = setting(
        "",
        "write all detections as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )
    hide_labels: bool = setting(False, "draw boxes without class names", group="reports and display")
    hide_conf: bool = setting(False, "draw boxes without scores", group="reports and display")


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
    json_out: str = setting(
        "",
        "write all results as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )


class Recipe(Frozen):
    """Hyperparameters: together with data, model and seed they decide the result of a run.

    The defaults are the values of YOLOv5's recipe ``scratch-low``; tests/parity compares the results with the original.
    Each model family has a default recipe. A recipe file has any of these keys; an unknown key is an error.
    """

    # optimiser
    lr0: float = setting(0.01, "initial learning rate", gt=0)
    lrf: float = setting(0.01, "final learning rate as a fraction of lr0", ge=0, le=1)
    momentum: float = setting(0.937, "SGD momentum, Adam beta1", ge=0, lt=1)
    nesterov: bool = setting(True, "SGD with Nesterov's momentum")
    weight_decay: float = setting(0.0005, "weight decay of convolution weights, for the nominal batch", ge=0)
    decay_biases: bool = setting(False, "apply weight decay to the biases of convolutions too")
    rates: Literal["epoch", "step"] = setting(
        "epoch",
        "epoch: YOLOv5's schedule, one value per epoch, linear or cosine; step: PP-YOLOE's schedule, one value per "
        "step, a linear rise from 0 and then a cosine",
    )
    horizon: float = setting(
        1.0, "with rates=step: end of the cosine, in multiples of the length of the run", ge=1
    )
    reference_epochs: int = setting(
        0,
        "with rates=step: number of epochs that warmup_epochs was chosen for; warm-up scales with --epochs",
        ge=0,
    )
    warmup_epochs: float = setting(
        3.0, "length of the warm-up, epochs; with rates=epoch at least 100 batches", ge=0
    )
    warmup_momentum: float = setting(0.8, "momentum at the first step", ge=0, lt=1)
    warmup_bias_lr: float = setting(0.1, "learning rate of biases at the first step", ge=0)
    lr_factors: str = setting(
        "",
        "factors of the learning rates of layers: PART:FACTOR, ...; a part is backbone, or a prefix or pattern (model.*.bias) of "
        "parameter names; the factors of all parts that fit are multiplied",
    )
    lr_layer_decay: float = setting(
        1.0,
        "factor of the learning rate from each layer to the one before it; the last layer has lr0",
        gt=0,
        le=1,
    )
    clip_norm: float = setting(10.0, "limit of the total gradient norm; 0 = off", ge=0)
    ema_decay: float = setting(
        0.9999, "decay of the moving average of the weights; 0 = no average", ge=0, lt=1
    )
    ema_rule: Literal["ramp", "threshold", "constant"] = setting(
        "ramp",
        "factor of the decay after n steps; ramp: 1 - exp(-n / ema_tau); threshold: at most (1 + n) / (10 + n); constant: 1",
    )
    ema_tau: float = setting(2000.0, "steps over which the decay ramps up", gt=0)
    reference_batch: int = setting(64, "nominal batch for which lr0 was chosen", ge=1)
    # loss
    box: float = setting(0.05, "box gain", ge=0)
    cls: float = setting(0.5, "class gain", ge=0)
    cls_pw: float = setting(1.0, "class positive weight", gt=0)
    obj: float = setting(1.0, "objectness gain", ge=0)
    obj_pw: float = setting(1.0, "objectness positive weight", gt=0)
    anchor_t: float = setting(4.0, "largest ratio between the sides of a label and of its anchor", gt=1)
    fl_gamma: float = setting(0.0, "focal-loss gamma; 0 = off", ge=0)
    label_smoothing: Unit = setting(0.0, "smoothing of the class targets")
    autobalance: bool = setting(False, "adapt the balance of objectness during training; not supported")
    # PP-YOLOE's loss
    cls_gain: float = setting(1.0, "PP-YOLOE: class gain", ge=0)
    iou_gain: float = setting(2.5, "PP-YOLOE: box overlap gain", ge=0)
    dfl_gain: float = setting(0.5, "PP-YOLOE: gain of the distribution focal loss", ge=0)
    assigner_switch: Unit = setting(
        1 / 3, "PP-YOLOE: fraction of the run with the ATSS assigner; the rest uses the task-aligned assigner"
    )
    # sampling
    repeat_threshold: float = setting(
        0.001,
        "--sampler repeat-factor: classes in a smaller share of the images occur more often",
        gt=0,
        le=1,
    )
    # augmentation
    size_low: float = setting(
        1.0, "smallest image size in training, as a fraction of --img; drawn for each step", gt=0, le=1
    )
    size_high: float = setting(1.0, "largest image size in training, as a fraction of --img", ge=1, le=4)
    hsv_h: Unit = setting(0.015, "hue gain, fraction")
    hsv_s: Unit = setting(0.7, "saturation gain, fraction")
    hsv_v: Unit = setting(0.4, "value gain, fraction")
    degrees: float = setting(0.0, "rotation, +- degrees", ge=0, le=180)
    translate: Unit = setting(0.1, "translation, +- fraction of the image")
    scale: Unit = setting(0.5, "scale gain, +-")
    shear: float = setting(0.0, "shear, +- degrees", ge=0, le=90)
    perspective: float = setting(0.0, "perspective, +-", ge=0, le=0.001)
    flipud: Unit = setting(0.0, "probability of a vertical flip")
    fliplr: Unit = setting(0.5, "probability of a horizontal flip")
    mosaic: Unit = setting(1.0, "probability of a mosaic")
    mosaic9: Unit = setting(0.0, "fraction of the mosaics that have nine images instead of four")
    mixup: Unit = setting(0.0, "probability of mixing two mosaics")
    close_mosaic: int = setting(0, "number of last epochs without mosaic and mixup", ge=0)
    copy_paste: Unit = setting(
        0.0, "probability of pasting each object of another image into an image; needs labels with polygons"
    )
    cutout: Unit = setting(0.0, "probability of a grey square in an image")
    albumentations: tuple[str, ...] = setting(
        (),
        "transforms of albumentations in order, such as [Blur p=0.01, CLAHE p=0.01] (needs the package albumentations)",
    )


class ExportConfig(Frozen):
    """Settings of ``yolofleet export``."""

    weights: Weights = setting(
        "", "weights to export: .safetensors, .pt, .weights or .pdparams", group="input"
    )
    recipe_class: str = setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
        group="input",
        in_files=False,
    )
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    format: str = setting(
        "onnx",
        "onnx, torchscript, openvino, ncnn, tflite, coreml or tensorrt; several with commas: onnx,openvino",
        group="input",
    )
    img: str = setting(
        "",
        "image size, pixels: one side, or height,width; rounded up to the stride; default: the training size",
        group="input",
        pattern=r"^([1-9][0-9]{1,4}(,[1-9][0-9]{1,4})?)?$",
    )
    batch: int = setting(1, "images per forward pass", ge=1, le=4096, group="input")
    dynamic: Literal["none", "batch", "size", "both"] = setting(
        "none", "dimensions that stay variable in the file: none, batch, image size, or both", group="input"
    )
    half: bool = setting(False, "compute in 16 bits; inputs and outputs stay 32-bit", group="method")
    int8: bool = setting(
        False,
        "compute in 8 bits, with ranges from images of --data; inputs and outputs stay 32-bit",
        group="method",
    )
    calibration_images: Natural = setting(
        64, "with --int8: images of the train split that find the ranges", group="method"
    )
    simplify: bool = setting(False, "simplify the ONNX graph (needs onnxslim)", group="method")
    nms: bool = setting(False, "include non-maximum suppression (NMS) in the file", group="method")
    conf: Unit = setting(0.25, "with --nms: discard boxes with a lower score", group="method")
    iou: Unit = setting(0.45, "with --nms: IoU threshold", group="method")
    max_det: int = setting(
        300, "with --nms: maximum number of boxes per image", ge=1, le=100_000, group="method"
    )
    agnostic_nms: bool = setting(False, "with --nms: run NMS over all classes together", group="method")
    data: str = setting(
        "",
        "data set whose images verify the file, and calibrate it with --int8; default: generated images",
        group="reports and display",
    )
    out: Path | None = setting(
        None,
        "file or folder to write; default: in the folder of the weights",
        group="saved files",
        in_files=False,
    )
    json_out: str = setting(
        "",
        "write the result of the check as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )


class BenchConfig(Frozen):
    """Settings of ``yolofleet bench``."""

    weights: Weights = setting("", "weights file or exported file", group="input")
    recipe_class: str = setting(
        "",
        "your own model, loss or data set: FILE.py:CLASS, a subclass of yolofleet.TrainingRecipe (docs/extend.md)",
        group="input",
        in_files=False,
    )
    cfg: str = setting("", "model description of weights files that contain none (.weights)", group="input")
    img: int = setting(640, "image size, pixels; not needed for a file of fixed size", ge=32, group="input")
    batch: Natural = setting(1, "images per forward pass", group="input")
    passes: Natural = setting(
        30, "measured forward passes, after a few for warm-up", group="length and batch size"
    )
    device: str = setting(
        "auto", "auto, cpu, mps, or one CUDA device number", group="execution", pattern=DEVICE
    )
    threads: int = setting(0, "CPU threads; 0 = all cores", ge=0, le=MAX_THREADS, group="execution")
    precision: Precision = setting("auto", PRECISION_HELP, group="execution")
    json_out: str = setting(
        "",
        "write the results as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )


class DoctorConfig(Frozen):
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
    json_out: str = setting(
        "",
        "write the findings as JSON to FILE, or to standard output (-)",
        group="saved files",
        flag="--json",
        in_files=False,
    )
