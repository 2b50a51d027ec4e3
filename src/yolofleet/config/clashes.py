"""The pairs of settings that cannot be used together, as one table for each command."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema.verbs import DoctorConfig
from yolofleet.support.errors import ConfigError


@dataclass(frozen=True)
class Clash:
    """Two settings that are mutually exclusive.

    Attributes:
        values: the two settings, in the order of the message, each with the value that clashes, or a function that says of a
            value whether it does.
        why, hint: for the message.
        if_given: the clash counts only if the user has set this one of the two: its default is not meant.
    """

    values: Mapping[str, Any]
    why: str
    hint: str = "leave one out"
    if_given: str = ""

    def applies(self, config: Any) -> bool:
        """Return whether the values of a configuration clash."""
        found = ((getattr(config, name), wanted) for name, wanted in self.values.items())
        return all(wanted(value) if callable(wanted) else value == wanted for value, wanted in found)


def check_clashes(config: Resolved[Any], clashes: Iterable[Clash]) -> None:
    """Raise ConfigError, which names both settings and their sources, on the first clash of a table."""
    for clash in clashes:
        if clash.applies(config.value) and (not clash.if_given or config.is_given(clash.if_given)):
            raise ConfigError(
                f"{' and '.join(map(config.spelled, clash.values))} are mutually exclusive: {clash.why}",
                source=config.sources_of(*clash.values),
                hint=clash.hint,
            )


ON, OFF = bool, operator.not_


def anything(_: object) -> bool:
    return True


def negative(value: int) -> bool:
    return value < 0


def several(value: int) -> bool:
    return value > 1


def cpu(device: str) -> bool:
    return device.startswith("cpu")


ONE_BY_ONE = "a pass with --sync-bn needs all devices, so no device can measure its memory alone"
ONE_PASS = "leave out --micro-batches-per-pass"
COMPILED_SUMS = "compiled kernels add in another order on each type of machine"
BOTH_STORE = "both change how the file stores its weights"

PRECISION_CLASHES = tuple(
    Clash({"precision": name, "device": cpu}, f"CPUs do not compute in {name}", "--precision fp32, or bf16")
    for name in ("fp16", "tf32")
)
COMPILE_CLASHES = tuple(
    Clash({"compile": ON, name: value}, why, "leave out --compile")
    for name, value, why in (
        ("reduce", "exact", COMPILED_SUMS),
        ("multi_scale", ON, "each image size would be compiled"),
        ("rect", ON, "each image size would be compiled"),
        ("sync_bn", ON, "a compiled network cannot wait for other ranks"),
        ("checkpoint_activations", ON, "the compiler decides itself what it computes again"),
        ("parallel", "dp", "the compiler does not run in several threads"),
    )
)
TRAIN_CLASHES = (
    Clash({"model": ON, "cfg": ON}, "both choose the network"),
    Clash({"batch": negative, "micro_batches_per_pass": ON}, "auto chooses both", ONE_PASS),
    Clash({"sync_bn": ON, "micro_batch": negative}, ONE_BY_ONE, "choose --micro-batch yourself"),
    Clash({"sync_bn": ON, "batch": negative}, ONE_BY_ONE, "choose --batch yourself"),
    Clash(
        {"sync_bn": ON, "reduce": "exact"},
        "statistics across devices are equal only up to rounding",
        "leave out --sync-bn and raise --micro-batch; statistics of one micro-batch are equal on every fleet",
    ),
    Clash(
        {"micro_batches_per_pass": several, "sync_bn": ON},
        "a pass already spans the batch of a device",
        ONE_PASS,
    ),
    Clash(
        {"micro_batches_per_pass": several, "reduce": "exact"},
        "the rounding of a sum over a pass depends on it",
        ONE_PASS,
    ),
    Clash({"deterministic": ON, "cudnn_benchmark": "on"}, "timing may choose non-deterministic kernels"),
    Clash(
        {"reduce": "exact", "cudnn_benchmark": "on"},
        "timing chooses different kernels in each run, and their results differ in the last bits",
        "leave out --cudnn-benchmark",
    ),
    Clash(
        {"sampler": "weights", "val_period": OFF}, "it follows the accuracy in validations", "--val-period 1"
    ),
    Clash(
        {"rect": ON, "sync_bn": ON},
        "statistics across devices need images of one shape",
        "leave out --sync-bn",
    ),
    Clash({"rect": ON, "micro_batches_per_pass": several}, "each micro-batch has its own shape", ONE_PASS),
    *COMPILE_CLASHES,
    Clash(
        {"compile": ON, "batch": negative},
        "a trial of each size would compile it, which takes minutes",
        "--batch 16 or another number, or leave out --compile",
    ),
    Clash(
        {"checkpoint_activations": ON, "sync_bn": ON},
        "a backward pass would wait for the statistics of other ranks",
        "leave out --checkpoint-activations",
    ),
    Clash(
        {"patience": ON, "val_period": OFF}, "early stopping needs validation", "--val-period 1", "patience"
    ),
    *PRECISION_CLASHES,
    Clash({"optimizer": anything, "optimizer_class": ON}, "both choose the optimizer", if_given="optimizer"),
    Clash(
        {"minutes": ON, "lr_schedule": lambda name: name not in ("cooldown", "constant")},
        "such a decay needs the length of the run from the start",
        "leave out --lr-schedule; the rate is constant, and falls in the last fifth of the time",
        "lr_schedule",
    ),
)
TUNE_CLASHES = (
    Clash(
        {"asynchronous": ON, "generation": anything},
        "without generations, each result counts at once",
        if_given="generation",
    ),
)
EXPORT_CLASHES = (
    Clash({"int8": ON, "half": ON}, BOTH_STORE),
    Clash({"int8": ON, "simplify": ON}, BOTH_STORE),
    Clash(
        {"batch": anything, "dynamic": lambda sizes: sizes in ("batch", "both")},
        "a variable batch has no size",
        "leave out --batch",
        "batch",
    ),
)
DOCTOR_CLASHES = (
    Clash({"hosts": ON, "fleet": ON}, "both choose the hosts"),
    *(
        Clash({name: anything, "log": ON}, "the doctor reads a log without other checks", if_given=name)
        for name in DoctorConfig.model_fields
        if name not in ("log", "json_out", "support")
    ),
)
