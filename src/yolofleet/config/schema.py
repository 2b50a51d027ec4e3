"""Every setting of every verb, declared once: name, type, default, unit and help.

The command line is generated from these models (``cli/``), the resolved values are frozen, printed and
stored (``load.py``). Old spellings live in ``aliases.py``. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


def setting(
    default: Any, help: str, *, group: str = "run", flag: str = "", in_files: bool = True, **constraints: Any
) -> Any:
    """Declare a field.

    Args:
        group: the heading it stands under in ``--help``.
        flag: its flag, where that is not the field's own name.
        in_files: False: it counts on the command line only. A configuration file or a run folder may come from
            somebody else, and must not say which hosts to log in to, which program to start there, which run to
            continue or which file to overwrite.
    """
    extra: dict[str, Any] = {"group": group, "flag": flag} if flag else {"group": group}
    if not in_files:
        extra["in_files"] = False
    return Field(default, description=help, json_schema_extra=extra, **constraints)


def flag_of(name: str, field: FieldInfo) -> str:
    """The flag of a setting: ``--micro-batch`` of ``micro_batch``, unless the schema gives another."""
    extra = field.json_schema_extra
    given = str(extra.get("flag", "")) if isinstance(extra, dict) else ""
    return given or "--" + name.replace("_", "-")


def group_of(field: FieldInfo) -> str:
    """The heading that a setting stands under."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else "run"


def may_be_in_files(field: FieldInfo) -> bool:
    """Whether a configuration file may give this setting; see :func:`setting`."""
    extra = field.json_schema_extra
    return not isinstance(extra, dict) or extra.get("in_files") is not False


MOST_THREADS = 1024  # more are a slip, and each costs memory
Natural = Annotated[int, Field(ge=1)]
Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
PRECISION_HELP = "auto: fp16 on CUDA, fp32 elsewhere; tf32: fp32 with shorter products, on NVIDIA GPUs"
DEVICE = r"^(auto|cpu(:[1-9][0-9]{0,2})?|mps|[0-9]{1,3}(,[0-9]{1,3})*)$"
Unit = Annotated[float, Field(ge=0.0, le=1.0)]


class Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `device: 0` in a YAML file
    )


class Where(Frozen):
    """Settings that say where a verb runs; none of them may change a result."""

    device: str = setting(
        "auto", "auto | cpu | cpu:N (N processes) | mps | CUDA ids as 0 or 0,1", group="where", pattern=DEVICE
    )
    threads: int = setting(
        0, "CPU threads per process; 0 = cores / local processes", ge=0, le=MOST_THREADS, group="where"
    )
    workers: int = setting(
        -1,
        "loader processes per rank; 0 = in the main process, -1 = by cores",
        ge=-1,
        le=MOST_THREADS,
        group="where",
    )
    project: Path | None = setting(None, "parent folder of results (default runs/<verb>)", group="where")
    name: str = setting("exp", "run name; numbered when taken", group="where")
    exist_ok: bool = setting(False, "reuse the run folder of that name", group="where", in_files=False)


class WhereAll(Where):
    """As :class:`Where`, of verbs that several machines share."""

    hosts: str = setting(
        "",
        "several machines, by ssh: a:8,b:4,c:0+2,d:cpu:2 (docs/fleet.md); rank 0 is on the first",
        group="where",
        in_files=False,
    )
    fleet: str = setting(
        "", "the same as a YAML file, with folders, cards and variables", group="where", in_files=False
    )
    sync_code: bool = setting(
        False,
        "hosts compute with the yolofleet of this machine, whatever they have installed",
        group="where",
        in_files=False,
    )


class TrainConfig(WhereAll):
    """`yolofleet train`."""

    verb: ClassVar[str] = "train"
    json_out: ClassVar[str] = ""

    # what
    data: str = setting(
        "", "data set: YAML file, folder, COCO json, or a built-in name (shapes)", group="what"
    )
    model: str = setting(
        "",
        "model name: yolov5n, yolov3-tiny, darknet-yolov3-spp, ppyoloe-s, ... (docs/models.md)",
        group="what",
    )
    cfg: str = setting("", "model description, YAML or Darknet .cfg; instead of --model", group="what")
    weights: str = setting(
        "",
        "start weights: .safetensors, or foreign .pt, .weights, .pdparams, read without executing them",
        group="what",
    )
    recipe: str = setting("", "recipe name or file (hyperparameters); default: the family's", group="what")
    set: tuple[str, ...] = setting((), "override one recipe value, as key=value; repeatable", group="what")
    img: int = setting(
        640, "square training and validation size, pixels; rounded up to the stride", ge=32, group="what"
    )
    single_cls: bool = setting(False, "treat all classes as one", group="what")

    # how much
    epochs: Natural = setting(100, "passes over the data", group="how much")
    max_steps: int = setting(
        0, "end after this many optimizer updates; 0 = by epochs", ge=0, group="how much"
    )
    batch: Natural = setting(16, "total batch over all devices, images (YOLOv5's --batch)", group="how much")
    nominal_batch: Natural = setting(64, "images accumulated for one optimizer update", group="how much")
    micro_batch: int = setting(
        0,
        "images that pass the network together; 0 = a divisor of --batch near an eighth of a step",
        ge=0,
        group="how much",
    )
    patience: int = setting(
        100, "stop after this many epochs without a better fitness; 0 = never", ge=0, group="how much"
    )

    # recipe switches
    optimizer: Literal["SGD", "Adam", "AdamW"] = setting("SGD", "optimizer", group="how")
    lr_schedule: Literal["linear", "cosine"] = setting("linear", "learning-rate decay", group="how")
    multi_scale: bool = setting(
        False, "vary the image size by +-50 % from step to step; else as the recipe says", group="how"
    )
    lr_scale: Literal["none", "linear", "sqrt"] = setting(
        "none", "learning rate by the images of a step over those the recipe was made for", group="how"
    )
    freeze: str = setting(
        "", "layers to freeze: a number (first N), a list 0,1,2, 'backbone', or name prefixes", group="how"
    )
    seed: int = setting(0, "seed of data order, augmentation and initialisation", ge=0, group="how")
    autoanchor: bool = setting(
        True, "fit the anchors to the labels where they match less than 98 % of them", group="how"
    )
    sync_bn: bool = setting(False, "batch-norm statistics over --batch images, across devices", group="how")

    # where
    parallel: Literal["ddp", "dp"] = setting(
        "ddp", "ddp: a process per device; dp: one process with threads", group="where"
    )
    reduce: Literal["fast", "exact"] = setting(
        "fast", "gradient sum: fast (rounding) or exact (equal bits on every fleet)", group="where"
    )
    shares: str = setting(
        "", "micro-batches per rank, as 2,1,1; auto = by measured speed; default equal", group="where"
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="where")
    channels_last: bool = setting(True, "memory layout of images and weights", group="where")
    deterministic: bool = setting(False, "deterministic kernels only (slower on GPUs)", group="where")
    cudnn_benchmark: Literal["auto", "on", "off"] = setting(
        "auto", "let cuDNN time its kernels; auto: on unless sizes vary or deterministic", group="where"
    )
    cache: Literal["auto", "none", "ram", "disk"] = setting(
        "auto", "keep decoded images: ram is one copy per machine", group="where"
    )
    prefetch: Natural = setting(4, "micro-batches prepared ahead by each loader process", group="where")
    pin_memory: bool = setting(True, "page-locked host memory for copies to GPUs", group="where")
    check_steps: int = setting(50, "compare all ranks' weights every N steps; 0 = never", ge=0, group="where")
    timeout_s: Natural = setting(600, "seconds that a collective may wait", group="where")
    stall_s: float = setting(
        30.0,
        "report a rank that makes no progress for so long, or 10 x as long as usual, and end; 0 = never",
        ge=0,
        group="where",
    )

    # keeping
    resume: str = setting(
        "",
        "continue a run: auto (newest), a run folder, or a checkpoint file",
        group="keeping",
        in_files=False,
    )
    linked_folders: bool = setting(
        False,
        "continue a run whose folder holds symbolic links to other folders, and write there",
        group="keeping",
        in_files=False,
    )
    save_period: int = setting(
        1, "full checkpoint every N epochs; 0 = only at the end", ge=0, group="keeping"
    )
    save_steps: int = setting(0, "also every N steps; 0 = off", ge=0, group="keeping")
    save_minutes: float = setting(10.0, "also every N minutes; 0 = off", ge=0, group="keeping")
    keep_last: Natural = setting(2, "checkpoints kept", group="keeping")

    # looking
    val_period: int = setting(1, "validate every N epochs; 0 = only after the last", ge=0, group="looking")
    val_batch: Natural = setting(
        32, "images per validation batch (fixed list, the same on every fleet)", group="looking"
    )
    plots: bool = setting(True, "curves and pictures", group="looking")
    tensorboard: bool = setting(
        False, "write TensorBoard events (extra: yolofleet[tensorboard])", group="looking"
    )
    verbose: bool = setting(False, "table per class", group="looking")


class ValConfig(WhereAll):
    """`yolofleet val`."""

    verb: ClassVar[str] = "val"
    # a validation has no choice of these
    parallel: ClassVar[str] = "ddp"
    reduce: ClassVar[str] = "fast"
    shares: ClassVar[str] = ""
    resume: ClassVar[str] = ""
    linked_folders: ClassVar[bool] = False

    weights: str = setting(
        "",
        "weights: .safetensors, or foreign .pt, .weights, .pdparams, read without executing them",
        group="what",
    )
    cfg: str = setting("", "network of weights that do not describe theirs (.weights)", group="what")
    data: str = setting("", "data set: YAML file, folder, COCO json, or a built-in name", group="what")
    split: Literal["train", "val", "test"] = setting("val", "which split", group="what")
    img: int = setting(640, "longest image side, pixels", ge=32, group="what")
    single_cls: bool = setting(False, "treat all classes as one", group="what")
    fit: Literal["auto", "rect", "square"] = setting(
        "auto",
        "pad an image to whole strides (rect) or to a square; auto: as its family's own evaluation does",
        group="how",
    )
    conf: Unit = setting(0.001, "lowest score kept", group="how")
    iou: Unit = setting(0.6, "NMS overlap", group="how")
    max_det: Natural = setting(300, "most boxes per image", group="how")
    batch: Natural = setting(32, "images per batch (fixed list, the same on every fleet)", group="how")
    precision: Precision = setting("auto", PRECISION_HELP, group="where")
    timeout_s: Natural = setting(600, "seconds that a collective may wait", group="where")
    stall_s: float = setting(
        30.0,
        "report a rank that makes no progress for so long, or 10 x as long as usual, and end; 0 = never",
        ge=0,
        group="where",
    )
    verbose: bool = setting(False, "table per class", group="looking")
    plots: bool = setting(True, "curves and pictures", group="looking")
    save_json: bool = setting(False, "write detections in COCO's results format", group="keeping")
    save_txt: bool = setting(False, "write detections as YOLO txt", group="keeping")
    save_conf: bool = setting(False, "scores in the txt files", group="keeping")
    json_out: str = setting(
        "",
        "write the figures as JSON to a file, or - for standard output",
        group="keeping",
        flag="--json",
        in_files=False,
    )


class PredictConfig(Where):
    """`yolofleet predict`."""

    weights: str = setting(
        "",
        "weights: .safetensors, or foreign .pt, .weights, .pdparams, read without executing them",
        group="what",
    )
    cfg: str = setting("", "network of weights that do not describe theirs (.weights)", group="what")
    source: str = setting("", "image, folder, glob, list file (.txt) or video", group="what")
    img: int = setting(640, "longest image side, pixels", ge=32, group="what")
    fit: Literal["auto", "rect", "square"] = setting(
        "auto",
        "pad an image to whole strides (rect) or to a square; auto: as its family's own evaluation does",
        group="how",
    )
    conf: Unit = setting(0.25, "lowest score kept", group="how")
    iou: Unit = setting(0.45, "NMS overlap", group="how")
    max_det: Natural = setting(1000, "most boxes per image", group="how")
    classes: tuple[str, ...] = setting((), "keep only these classes, by number or name", group="how")
    agnostic_nms: bool = setting(False, "NMS over all classes together", group="how")
    vid_stride: Natural = setting(1, "every Nth video frame", group="how")
    batch: Natural = setting(1, "images per forward pass", group="how")
    precision: Precision = setting("auto", PRECISION_HELP, group="where")
    save: Literal["images", "none"] = setting("images", "write annotated pictures", group="keeping")
    save_txt: bool = setting(False, "write YOLO txt files", group="keeping")
    save_conf: bool = setting(False, "scores in the txt files", group="keeping")
    txt_format: Literal["yolo", "voc"] = setting(
        "yolo", "yolo: class cx cy w h in 0..1; voc: class x1 y1 x2 y2 in pixels", group="keeping"
    )
    save_json: bool = setting(False, "write all detections as one JSON", group="keeping")
    save_csv: bool = setting(False, "write all detections as one CSV", group="keeping")
    save_crop: bool = setting(False, "write cut-outs", group="keeping")
    show: bool = setting(False, "open a window", group="looking")
    line_width: int = setting(0, "pen width, pixels; 0 = by image size", ge=0, group="looking")
    hide_labels: bool = setting(False, "boxes without class names", group="looking")
    hide_conf: bool = setting(False, "boxes without scores", group="looking")


class SelftestConfig(Frozen):
    """`yolofleet selftest`."""

    model: str = setting("yolov5n", "model name (yolov5n ... yolov5x)", group="what")
    img: int = setting(128, "image size, pixels", ge=32, group="what")
    steps: int = setting(3, "optimizer updates of each run", ge=2, le=10, group="how much")
    device: str = setting(
        "auto",
        "auto | cpu:N (N processes) | CUDA ids as 0,1; auto: all CUDA devices, else cpu:2",
        group="where",
        pattern=DEVICE,
    )
    precision: Precision = setting("auto", PRECISION_HELP, group="where")
    json_out: str = setting(
        "",
        "write all figures as JSON to a file, or - for standard output",
        group="keeping",
        flag="--json",
        in_files=False,
    )


class Recipe(Frozen):
    """Hyperparameters: what the result depends on beside data, model and seed. Defaults are YOLOv5's
    `scratch-low` (values are facts; measured against the original in tests/parity).

    Each family has a recipe of its own, taken unless another is named.

    A recipe file holds any of these keys; an unknown key is an error that offers the nearest name.
    """

    # optimiser
    lr0: float = setting(0.01, "initial learning rate", gt=0)
    lrf: float = setting(0.01, "final learning rate as a fraction of lr0", ge=0, le=1)
    momentum: float = setting(0.937, "SGD momentum, Adam beta1", ge=0, lt=1)
    nesterov: bool = setting(True, "SGD with Nesterov's momentum")
    weight_decay: float = setting(0.0005, "on convolution weights, for the nominal batch", ge=0)
    decay_biases: bool = setting(False, "weight decay on the convolutions' biases, too")
    rates: Literal["epoch", "step"] = setting(
        "epoch",
        "epoch: YOLOv5's schedule, a value per epoch, linear or cosine; step: PP-YOLOE's, a linear rise from 0, "
        "then a cosine, both step by step",
    )
    horizon: float = setting(1.0, "rates by step: where the cosine ends, in multiples of the run", ge=1)
    reference_epochs: int = setting(
        0, "rates by step: epochs that warmup_epochs was chosen for; it scales with --epochs", ge=0
    )
    warmup_epochs: float = setting(3.0, "warm-up length, epochs (by epoch: at least 100 batches)", ge=0)
    warmup_momentum: float = setting(0.8, "momentum at the first step", ge=0, lt=1)
    warmup_bias_lr: float = setting(0.1, "learning rate of biases at the first step", ge=0)
    clip_norm: float = setting(10.0, "total gradient norm; 0 = off", ge=0)
    ema_decay: float = setting(0.9999, "decay of the weights' moving average; 0 = no average", ge=0, lt=1)
    ema_rule: Literal["ramp", "threshold", "constant"] = setting(
        "ramp", "how the decay rises with steps n: ramp: 1 - exp(-n / ema_tau); threshold: (1 + n) / (10 + n)"
    )
    ema_tau: float = setting(2000.0, "steps over which the decay ramps up", gt=0)
    reference_batch: int = setting(64, "nominal batch that lr0 was chosen for", ge=1)
    # loss
    box: float = setting(0.05, "box gain", ge=0)
    cls: float = setting(0.5, "class gain", ge=0)
    cls_pw: float = setting(1.0, "class positive weight", gt=0)
    obj: float = setting(1.0, "objectness gain", ge=0)
    obj_pw: float = setting(1.0, "objectness positive weight", gt=0)
    anchor_t: float = setting(4.0, "largest side ratio of a label and its anchor", gt=1)
    fl_gamma: float = setting(0.0, "focal-loss gamma; 0 = off", ge=0)
    label_smoothing: Unit = setting(0.0, "class targets")
    autobalance: bool = setting(False, "objectness balance by its own history: refused in training")
    # PP-YOLOE's loss
    cls_gain: float = setting(1.0, "PP-YOLOE: class gain", ge=0)
    iou_gain: float = setting(2.5, "PP-YOLOE: box overlap gain", ge=0)
    dfl_gain: float = setting(0.5, "PP-YOLOE: gain of the sides' distributions", ge=0)
    assigner_switch: Unit = setting(
        1 / 3, "PP-YOLOE: fraction of the run with static labels (ATSS), before the task-aligned ones"
    )
    # augmentation
    size_low: float = setting(
        1.0, "smallest training size, drawn for each step, as a fraction of --img", gt=0, le=1
    )
    size_high: float = setting(1.0, "largest training size, as a fraction of --img", ge=1, le=4)
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
    mosaic9: Unit = setting(0.0, "of the mosaics, the share of nine images")
    mixup: Unit = setting(0.0, "probability of mixing two mosaics")
    close_mosaic: int = setting(0, "epochs at the end without mosaic and mixup", ge=0)


class ExportConfig(Frozen):
    """`yolofleet export`."""

    weights: str = setting("", "weights: .safetensors, or foreign .pt, .weights, .pdparams", group="what")
    cfg: str = setting("", "network of weights that do not describe theirs (.weights)", group="what")
    format: str = setting(
        "onnx", "onnx | torchscript | openvino | ncnn | tflite | coreml | tensorrt", group="what"
    )
    img: str = setting(
        "",
        "image size, pixels: one side, or height,width; rounded up to the stride; default: the size in training",
        group="what",
        pattern=r"^([1-9][0-9]{1,4}(,[1-9][0-9]{1,4})?)?$",
    )
    batch: int = setting(1, "images at once", ge=1, le=4096, group="what")
    dynamic: Literal["none", "batch", "size", "both"] = setting(
        "none", "what the user of the file may choose: batch, image size or both", group="what"
    )
    half: bool = setting(False, "16 bits inside; inputs and outputs stay 32", group="how")
    simplify: bool = setting(False, "shorten the ONNX graph (needs onnxslim)", group="how")
    nms: bool = setting(False, "suppress overlapping boxes inside the file", group="how")
    conf: Unit = setting(0.25, "with --nms: lowest score kept", group="how")
    iou: Unit = setting(0.45, "with --nms: overlap", group="how")
    max_det: int = setting(300, "with --nms: most boxes per image", ge=1, le=100_000, group="how")
    agnostic_nms: bool = setting(False, "with --nms: over all classes together", group="how")
    data: str = setting(
        "", "data set whose pictures verify the file; default: generated ones", group="looking"
    )
    out: Path | None = setting(
        None, "file or folder to write; default: beside the weights", group="keeping", in_files=False
    )
    json_out: str = setting(
        "",
        "write what was found as JSON to a file, or - for standard output",
        group="keeping",
        flag="--json",
        in_files=False,
    )


class BenchConfig(Frozen):
    """`yolofleet bench`."""

    weights: str = setting("", "weights, or an exported file", group="what")
    cfg: str = setting("", "network of weights that do not describe theirs (.weights)", group="what")
    img: int = setting(640, "image side, pixels; a file of fixed size has its own", ge=32, group="what")
    batch: Natural = setting(1, "images per forward pass", group="what")
    passes: Natural = setting(30, "passes that are measured, after a few that are not", group="how much")
    device: str = setting("auto", "auto | cpu | mps | one CUDA id", group="where", pattern=DEVICE)
    threads: int = setting(0, "CPU threads; 0 = all cores", ge=0, le=MOST_THREADS, group="where")
    precision: Precision = setting("auto", PRECISION_HELP, group="where")
    json_out: str = setting(
        "",
        "write the figures as JSON to a file, or - for standard output",
        group="keeping",
        flag="--json",
        in_files=False,
    )


class DoctorConfig(Frozen):
    """`yolofleet doctor`. What it takes of a run's settings says what such a run would need."""

    hosts: str = setting(
        "",
        "these machines, and every way between them: a:8,b:4,c:0+2,d:cpu:2",
        group="what",
        in_files=False,
    )
    fleet: str = setting("", "as --hosts, from a fleet file (YAML)", group="what", in_files=False)
    log: str = setting(
        "",
        "say what a log of NCCL, gloo or torchrun means: a file, the folder of a run, - = standard input",
        group="what",
    )
    data: str = setting("", "data set of the run: is it the same on every machine?", group="what")
    img: int = setting(640, "image size of the run, pixels", ge=32, group="how much")
    batch: Natural = setting(16, "total batch of the run, images", group="how much")
    micro_batch: int = setting(
        0, "images that pass the network together; 0 = a divisor of --batch near an eighth of a step", ge=0, group="how much"
    )  # fmt: skip
    device: str = setting(
        "auto", "auto | cpu | cpu:N (N processes) | mps | CUDA ids as 0 or 0,1", group="where", pattern=DEVICE
    )
    workers: int = setting(
        -1,
        "loader processes per rank; 0 = in the main process, -1 = by cores",
        ge=-1,
        le=MOST_THREADS,
        group="where",
    )
    prefetch: Natural = setting(4, "micro-batches prepared ahead by each loader process", group="where")
    port: int = setting(29500, "port of the rendezvous", ge=1, le=65535, group="where")
    quick: bool = setting(False, "load no torch and measure nothing: a second or two", group="how much")
    project: Path | None = setting(None, "parent folder of results (default runs/train)", group="where")
    json_out: str = setting(
        "",
        "write the findings as JSON to a file, or - for standard output",
        group="keeping",
        flag="--json",
        in_files=False,
    )
