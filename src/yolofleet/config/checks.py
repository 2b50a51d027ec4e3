"""Check combinations of settings: raise or print a note before anything starts, so no setting is silently ignored."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Resolved
from yolofleet.config.schema import (
    BenchConfig,
    DoctorConfig,
    ExportConfig,
    PredictConfig,
    Recipe,
    TrainConfig,
    ValConfig,
)
from yolofleet.errors import ConfigError

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
TARGET_MICRO_BATCH = (8, 16)  # bounds of the size that the default approximates


def micro_batch_of(config: TrainConfig) -> int:
    """Return the number of images that batch normalisation treats together: ``--micro-batch``, or its default.

    The default cuts a full step into about eight micro-batches, enough for eight devices. Its target is an eighth of a
    full step, bounded by ``TARGET_MICRO_BATCH``. It is the divisor of ``--batch`` in ``MICRO_BATCHES`` whose ratio to
    the target is nearest to 1; of two equally near divisors the larger. It depends on batch and nominal batch only, so
    it is the same on every fleet. With ``--micro-batch -1`` it is an estimate, until the ranks have probed their memory.

    Raises:
        ConfigError: no divisor of ``--batch`` is in that range.
    """
    if config.micro_batch > 0:
        return config.micro_batch
    low, high = TARGET_MICRO_BATCH
    eighth = Fraction(step_images_of(config.batch, config.nominal_batch), 8)
    target = min(max(eighth, Fraction(low)), Fraction(high))
    return min(default_micro_batches(config.batch), key=lambda d: (max(d / target, target / d), -d))


def default_micro_batches(batch: int) -> list[int]:
    """Return the divisors of ``batch`` that the default micro-batch may be, ascending.

    Raises:
        ConfigError: ``batch`` has no such divisor.
    """
    found = _in_range(batch)
    if not found:
        smaller = next((n for n in range(batch - 1, 0, -1) if _in_range(n)), None)
        larger = next(n for n in range(batch + 1, 2 * batch + MICRO_BATCHES.start) if _in_range(n))
        sizes = f"{MICRO_BATCHES.start} to {MICRO_BATCHES.stop - 1}"
        raise ConfigError(
            f"--batch {batch} cannot be cut into micro-batches of {sizes} images: none of these divides it",
            hint=(f"--batch {smaller} or {larger}" if smaller else f"--batch {larger}")
            + f", or choose --micro-batch: {_either(divisors(batch))}",
        )
    return found


def _in_range(batch: int) -> list[int]:
    return [d for d in MICRO_BATCHES if batch % d == 0]


def step_images_of(batch: int, nominal_batch: int) -> int:
    """Return the number of images of a step after warm-up: the multiple of ``batch`` nearest to ``nominal_batch``."""
    return batch * max(round(nominal_batch / batch), 1)


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n`` >= 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def check_train(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise on missing settings and on combinations that cannot work.

    Raises:
        ConfigError: it names the settings and their sources.
    """
    c = config.value
    _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    if not (c.model or c.cfg or c.weights):
        raise ConfigError(
            "no model: expected one of --weights, --model and --cfg",
            hint="--weights yolov5s.pt starts from trained weights, --model yolov5s from scratch",
        )
    if c.model and c.cfg:
        raise _clash(config, "model", "cfg", "both choose the network", "leave one out")
    _check_micro_batch(config)
    if c.sync_bn and c.micro_batch < 0:
        raise _clash(
            config,
            "sync_bn",
            "micro_batch",
            "a device cannot try such a pass alone",
            "choose --micro-batch yourself",
        )
    if c.sync_bn and c.reduce == "exact":
        raise _clash(
            config,
            "sync_bn",
            "reduce",
            "statistics across devices are equal only up to rounding",
            "leave out --sync-bn and raise --micro-batch; statistics of one micro-batch are equal on every fleet",
        )
    if c.micro_batches_per_pass > 1 and (c.sync_bn or c.reduce == "exact"):
        raise _clash(
            config,
            "micro_batches_per_pass",
            "sync_bn" if c.sync_bn else "reduce",
            "a pass already spans the batch of a device"
            if c.sync_bn
            else "the rounding of a sum over a pass depends on it",
            "leave out --micro-batches-per-pass",
        )
    if c.deterministic and c.cudnn_benchmark == "on":
        raise _clash(
            config,
            "deterministic",
            "cudnn_benchmark",
            "timing may choose non-deterministic kernels",
            "leave one out",
        )
    if c.reduce == "exact" and c.cudnn_benchmark == "on":
        raise _clash(
            config,
            "reduce",
            "cudnn_benchmark",
            "timing chooses different kernels in each run, and their results differ in the last bits",
            "leave out --cudnn-benchmark",
        )
    if c.reduce == "exact" and c.augment_on == "device":
        raise _clash(
            config,
            "reduce",
            "augment_on",
            "devices of other types may round pixels differently",
            "leave out --augment-on",
        )
    if c.patience and not c.val_period and config.is_given("patience"):
        raise _clash(config, "patience", "val_period", "early stopping needs validation", "--val-period 1")
    _check_precision(config)
    _check_preempt_notice(config)
    r = recipe.value
    if r.autobalance:
        raise ConfigError(
            "autobalance: true is not available: its balance would depend on the fleet",
            source=recipe.sources["autobalance"],
            hint="remove it; yolofleet uses a fixed balance of the levels",
        )
    if r.mosaic9 and not r.mosaic:
        raise ConfigError(
            f"mosaic9: {r.mosaic9:g} is a fraction of the mosaics, but mosaic is 0",
            source=recipe.sources["mosaic9"],
            hint="set mosaic above 0, or mosaic9 to 0",
        )


def _check_preempt_notice(config: Resolved[TrainConfig]) -> None:
    """Raise if the command cannot be split into words, or if this system cannot watch it."""
    try:
        problem = "" if shlex.split(config.value.preempt_notice) else "has no words"
    except ValueError as error:
        problem = f"cannot be split into words: {error}"
    if config.value.preempt_notice and sys.platform == "win32":
        problem = "needs Linux or macOS"
    if config.value.preempt_notice and problem:
        raise ConfigError(
            f"{config.spelled('preempt_notice')} {problem}",
            source=config.sources["preempt_notice"],
            hint="a program and its arguments, as a shell would split them: --preempt-notice './notice.sh 5'",
        )


def check_val(config: Resolved[ValConfig]) -> Resolved[ValConfig]:
    """Check as :func:`check_train`; return the settings with notes about settings without effect."""
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    return _without_effect(config, "save_conf")


def check_predict(config: Resolved[PredictConfig]) -> Resolved[PredictConfig]:
    """Check as :func:`check_val`."""
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    _need(config, "source", "an image, folder, glob, list file or video")
    if 0 < config.value.tile < 32:
        raise ConfigError(
            f"{config.spelled('tile')} is below 32 pixels",
            source=config.sources["tile"],
            hint="--tile 640, or 0 for no tiles",
        )
    _only_with(config, "overlap", "tile")
    live = re.match(r"[a-z]+://|screen(:|$)|-$", config.value.source, re.IGNORECASE)
    if live and config.sources["source"] != COMMAND_LINE:
        raise ConfigError(
            f"{config.spelled('source')}: a configuration file must not choose a network address, the screen or standard input",
            source=config.sources["source"],
            hint="give --source on the command line",
        )
    return _without_effect(config, "save_conf", "txt_format")


def check_export(config: Resolved[ExportConfig]) -> None:
    """Check as :func:`check_train`."""
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    for name in ("conf", "iou", "max_det", "agnostic_nms"):
        _only_with(config, name, "nms")
    if config.value.dynamic in ("batch", "both") and config.is_given("batch"):
        raise _clash(config, "batch", "dynamic", "a variable batch has no size", "leave out --batch")


def check_bench(config: Resolved[BenchConfig]) -> None:
    """Check as :func:`check_train`."""
    _need(config, "weights", "a .safetensors file of a run, a .pt file, or an exported file")
    _check_precision(config)


def check_doctor(config: Resolved[DoctorConfig]) -> None:
    """Check as :func:`check_train`."""
    if config.value.hosts and config.value.fleet:
        raise _clash(config, "hosts", "fleet", "both choose the hosts", "leave one out")
    if config.value.log:
        for name in type(config.value).model_fields:
            if name not in ("log", "json_out") and config.is_given(name):
                raise _clash(
                    config, name, "log", "the doctor reads a log without other checks", "leave one out"
                )
    _check_micro_batch(config)


def _check_micro_batch(config: Resolved[Any]) -> None:
    batch, micro = config.value.batch, config.value.micro_batch
    if micro <= 0:
        try:
            default_micro_batches(batch)
        except ConfigError as error:
            error.source = f"--batch {config.sources['batch']}"
            raise
        return
    if batch % micro == 0:
        return
    near = sorted(sorted(divisors(batch), key=lambda d: (abs(d - micro), d))[:3])
    raise ConfigError(
        f"--micro-batch {micro} does not divide --batch {batch} (remainder {batch % micro})",
        source=_sources(config, "micro_batch", "batch"),
        hint=f"--batch {(batch // micro + 1) * micro}, or --micro-batch {_either(near)}",
    )


def _either(numbers: list[int]) -> str:
    """Return the numbers as text, such as ``8, 10 or 20``."""
    *first, last = map(str, numbers)
    return " or ".join([", ".join(first), last]) if first else last


T = TypeVar("T", ValConfig, PredictConfig)
FP16_ON_CPU = "--precision fp16 has no effect on a CPU, which computes in fp32; use bf16"


def _without_effect(config: Resolved[T], *of_txt: str) -> Resolved[T]:
    """Add notes about harmless settings without effect: those in ``of_txt`` without --save-txt, and fp16 on a CPU.

    Raises:
        ConfigError: ``--merge mean`` without several weights.
    """
    value, notes = config.value, list(config.notes)
    if value.merge == "mean" and len(value.weights) == 1:
        raise ConfigError(
            "--merge mean: there is one network, so there is no mean",
            source=config.sources["merge"],
            hint="repeat --weights for an ensemble, or use --merge nms or wbf",
        )
    if (
        value.merge == "wbf"
        and len(value.weights) == 1
        and not value.augment
        and not getattr(value, "tile", 0)
    ):
        notes.append(
            "--merge wbf has no effect without several --weights"
            + (", --augment or --tile" if isinstance(value, PredictConfig) else " or --augment")
        )
    for name in of_txt:
        if getattr(value, name) != type(value).model_fields[name].default and not value.save_txt:
            notes.append(f"{config.spelled(name)} has no effect without --save-txt")
    if value.precision == "fp16" and value.device.startswith("cpu"):
        notes.append(FP16_ON_CPU)
        value = value.model_copy(update={"precision": "fp32"})
    return replace(config, value=value, notes=tuple(notes))


def _check_precision(config: Resolved[Any]) -> None:
    precision = config.value.precision
    if precision in ("fp16", "tf32") and config.value.device.startswith("cpu"):
        raise _clash(
            config, "precision", "device", f"CPUs do not compute in {precision}", "--precision fp32, or bf16"
        )


def _need(config: Resolved[Any], name: str, example: str) -> None:
    if not getattr(config.value, name):
        raise ConfigError(f"--{name} is missing", hint=f"--{name} is {example}")


def _only_with(config: Resolved[Any], name: str, needed: str) -> None:
    """Raise if ``name`` is set without ``needed``, because it would have no effect."""
    if getattr(config.value, name) != type(config.value).model_fields[name].default and not getattr(
        config.value, needed
    ):
        flag = needed.replace("_", "-")
        raise ConfigError(
            f"{config.spelled(name)} has no effect without --{flag}",
            source=config.sources[name],
            hint=f"add --{flag}",
        )


def _clash(config: Resolved[Any], first: str, second: str, why: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{config.spelled(first)} and {config.spelled(second)} are mutually exclusive: {why}",
        source=_sources(config, first, second),
        hint=hint,
    )


def _sources(config: Resolved[Any], *names: str) -> str:
    """Return the sources of several settings, such as ``--micro-batch runs/a.yaml:12, --batch command line``."""
    sources = {name: config.sources[name] for name in names}
    if len(set(sources.values())) == 1:
        return sources[names[0]]
    return ", ".join(
        f"--{name.replace('_', '-')} {'by default' if source == DEFAULT else source}"
        for name, source in sources.items()
    )
