"""The pairs of settings that cannot be used together, as one table for each command."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import DoctorConfig
from yolofleet.errors import ConfigError


@dataclass(frozen=True)
class Clash:
    """Two settings that are mutually exclusive.

    Attributes:
        pair: names of the settings, in the order of the message.
        applies: whether the values of a configuration clash.
        why, hint: for the message.
        if_given: the clash counts only if the user has set this one of the two: its default is not meant.
    """

    pair: tuple[str, str]
    applies: Callable[[Any], object]
    why: str
    hint: str = "leave one out"
    if_given: str = ""


def check_clashes(config: Resolved[Any], clashes: Iterable[Clash]) -> None:
    """Raise on the first clash of a table.

    Raises:
        ConfigError: it names both settings and their sources.
    """
    for clash in clashes:
        if clash.applies(config.value) and (not clash.if_given or config.is_given(clash.if_given)):
            raise ConfigError(
                f"{' and '.join(map(config.spelled, clash.pair))} are mutually exclusive: {clash.why}",
                source=config.sources_of(*clash.pair),
                hint=clash.hint,
            )


PRECISION_CLASHES = (
    Clash(
        ("precision", "device"),
        lambda c: c.precision == "fp16" and c.device.startswith("cpu"),
        "CPUs do not compute in fp16",
        "--precision fp32, or bf16",
    ),
    Clash(
        ("precision", "device"),
        lambda c: c.precision == "tf32" and c.device.startswith("cpu"),
        "CPUs do not compute in tf32",
        "--precision fp32, or bf16",
    ),
)
COMPILED_SUMS = "compiled kernels add in another order on each type of machine"
COMPILE_CLASHES: tuple[tuple[str, Callable[[Any], object], str], ...] = (  # the other setting, applies, why
    ("reduce", lambda c: c.compile and c.reduce == "exact", COMPILED_SUMS),
    ("multi_scale", lambda c: c.compile and c.multi_scale, "each image size would be compiled"),
    ("rect", lambda c: c.compile and c.rect, "each image size would be compiled"),
    ("sync_bn", lambda c: c.compile and c.sync_bn, "a compiled network cannot wait for other ranks"),
    (
        "checkpoint_activations",
        lambda c: c.compile and c.checkpoint_activations,
        "the compiler decides itself what it computes again",
    ),
    ("parallel", lambda c: c.compile and c.parallel == "dp", "the compiler does not run in several threads"),
)
TRAIN_CLASHES = (
    Clash(("model", "cfg"), lambda c: c.model and c.cfg, "both choose the network"),
    Clash(
        ("batch", "micro_batches_per_pass"),
        lambda c: c.batch < 0 and c.micro_batches_per_pass,
        "auto chooses both",
        "leave out --micro-batches-per-pass",
    ),
    Clash(
        ("sync_bn", "micro_batch"),
        lambda c: c.sync_bn and c.micro_batch < 0,
        "a pass with --sync-bn needs all devices, so no device can measure its memory alone",
        "choose --micro-batch yourself",
    ),
    Clash(
        ("sync_bn", "batch"),
        lambda c: c.sync_bn and c.batch < 0,
        "a pass with --sync-bn needs all devices, so no device can measure its memory alone",
        "choose --batch yourself",
    ),
    Clash(
        ("sync_bn", "reduce"),
        lambda c: c.sync_bn and c.reduce == "exact",
        "statistics across devices are equal only up to rounding",
        "leave out --sync-bn and raise --micro-batch; statistics of one micro-batch are equal on every fleet",
    ),
    Clash(
        ("micro_batches_per_pass", "sync_bn"),
        lambda c: c.micro_batches_per_pass > 1 and c.sync_bn,
        "a pass already spans the batch of a device",
        "leave out --micro-batches-per-pass",
    ),
    Clash(
        ("micro_batches_per_pass", "reduce"),
        lambda c: c.micro_batches_per_pass > 1 and c.reduce == "exact",
        "the rounding of a sum over a pass depends on it",
        "leave out --micro-batches-per-pass",
    ),
    Clash(
        ("deterministic", "cudnn_benchmark"),
        lambda c: c.deterministic and c.cudnn_benchmark == "on",
        "timing may choose non-deterministic kernels",
    ),
    Clash(
        ("reduce", "cudnn_benchmark"),
        lambda c: c.reduce == "exact" and c.cudnn_benchmark == "on",
        "timing chooses different kernels in each run, and their results differ in the last bits",
        "leave out --cudnn-benchmark",
    ),
    Clash(
        ("reduce", "augment_on"),
        lambda c: c.reduce == "exact" and c.augment_on == "device",
        "devices of other types may round pixels differently",
        "leave out --augment-on",
    ),
    Clash(
        ("sampler", "val_period"),
        lambda c: c.sampler == "weights" and not c.val_period,
        "it follows the accuracy in validations",
        "--val-period 1",
    ),
    Clash(
        ("rect", "sync_bn"),
        lambda c: c.rect and c.sync_bn,
        "statistics across devices need images of one shape",
        "leave out --sync-bn",
    ),
    Clash(
        ("rect", "augment_on"),
        lambda c: c.rect and c.augment_on == "device",
        "devices render squares only",
        "leave out --augment-on",
    ),
    Clash(
        ("rect", "micro_batches_per_pass"),
        lambda c: c.rect and c.micro_batches_per_pass > 1,
        "each micro-batch has its own shape",
        "leave out --micro-batches-per-pass",
    ),
    *(
        Clash(("compile", name), applies, why, "leave out --compile")
        for name, applies, why in COMPILE_CLASHES
    ),
    Clash(
        ("compile", "batch"),
        lambda c: c.compile and c.batch < 0,
        "a trial of each size would compile it, which takes minutes",
        "--batch 16 or another number, or leave out --compile",
    ),
    Clash(
        ("checkpoint_activations", "sync_bn"),
        lambda c: c.checkpoint_activations and c.sync_bn,
        "a backward pass would wait for the statistics of other ranks",
        "leave out --checkpoint-activations",
    ),
    Clash(
        ("patience", "val_period"),
        lambda c: c.patience and not c.val_period,
        "early stopping needs validation",
        "--val-period 1",
        if_given="patience",
    ),
    *PRECISION_CLASHES,
    Clash(
        ("optimizer", "optimizer_class"),
        lambda c: c.optimizer_class,
        "both choose the optimizer",
        if_given="optimizer",
    ),
    Clash(
        ("minutes", "lr_schedule"),
        lambda c: c.minutes and c.lr_schedule not in ("cooldown", "constant"),
        "such a decay needs the length of the run from the start",
        "leave out --lr-schedule; the rate is constant, and falls in the last fifth of the time",
        if_given="lr_schedule",
    ),
)
TUNE_CLASHES = (
    Clash(
        ("asynchronous", "generation"),
        lambda c: c.asynchronous,
        "without generations, each result counts at once",
        if_given="generation",
    ),
)
VAL_CLASHES = (
    Clash(
        ("tile", "fit"),
        lambda c: c.tile and c.fit == "batch",
        "the tiles of an image are a batch of their own",
        "--fit rect or square",
    ),
)
EXPORT_CLASHES = (
    Clash(("int8", "half"), lambda c: c.int8 and c.half, "both change how the file stores its weights"),
    Clash(
        ("int8", "simplify"), lambda c: c.int8 and c.simplify, "both change how the file stores its weights"
    ),
    Clash(
        ("batch", "dynamic"),
        lambda c: c.dynamic in ("batch", "both"),
        "a variable batch has no size",
        "leave out --batch",
        if_given="batch",
    ),
)
DOCTOR_CLASHES = (
    Clash(("hosts", "fleet"), lambda c: c.hosts and c.fleet, "both choose the hosts"),
    *(
        Clash(
            (name, "log"),
            lambda c: c.log,
            "the doctor reads a log without other checks",
            if_given=name,
        )
        for name in DoctorConfig.model_fields
        if name not in ("log", "json_out", "support")
    ),
)
