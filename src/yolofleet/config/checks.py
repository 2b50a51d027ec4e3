"""Check combinations of settings: raise or print a note before anything starts, so no setting is silently ignored."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.loggers import check_loggers
from yolofleet.config.recipe import parse_lr_factors, transform_of
from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Resolved
from yolofleet.config.schema import (
    BenchConfig,
    DoctorConfig,
    ExportConfig,
    PredictConfig,
    Recipe,
    SelftestConfig,
    TrainConfig,
    TuneConfig,
    ValConfig,
)
from yolofleet.errors import ConfigError
from yolofleet.extend.user_code import split_name
from yolofleet.text import shown

MICRO_BATCHES = range(4, 33)  # sizes of the default; batch normalisation over fewer images is inaccurate
NOT_IN_TUNE = (  # settings of a training that the trials of a study do not have
    *("exist_ok", "detach", "linked_folders", "spares", "min_hosts", "min_devices", "host_timeout"),
)
MEASURED = "measured memory (--batch auto)"  # source of a batch that the ranks have chosen
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
    if config.batch < 0:  # before the ranks have measured it: an estimate
        return TARGET_MICRO_BATCH[0]
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


def decay_of(config: TrainConfig) -> str:
    """Return the decay of the learning rate: ``--lr-schedule``, unless ``--minutes`` decides it."""
    return "cooldown" if config.minutes and config.lr_schedule == "linear" else config.lr_schedule


def check_train(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise on missing settings and on combinations that cannot work.

    Raises:
        ConfigError: it names the settings and their sources.
    """
    c = config.value
    _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    _check_device(config)
    _check_code(c.recipe_class, *c.callbacks)
    if c.optimizer_class:
        split_name(c.optimizer_class, "--optimizer-class")
    check_loggers(config)
    if not (c.model or c.cfg or c.weights or c.recipe_class):
        raise ConfigError(
            "no model: expected one of --weights, --model and --cfg",
            hint="--weights yolov5s.pt starts from trained weights, --model yolov5s from scratch",
        )
    if c.model and c.cfg:
        raise _clash(config, "model", "cfg", "both choose the network", "leave one out")
    _check_batch(config)
    _check_micro_batch(config)
    if c.sync_bn and (c.micro_batch < 0 or c.batch < 0):
        raise _clash(
            config,
            "sync_bn",
            "micro_batch" if c.micro_batch < 0 else "batch",
            "a pass with --sync-bn needs all devices, so no device can measure its memory alone",
            f"choose --{'micro-batch' if c.micro_batch < 0 else 'batch'} yourself",
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
    if c.sampler == "weights" and not c.val_period:
        raise _clash(
            config, "sampler", "val_period", "it follows the accuracy in validations", "--val-period 1"
        )
    if c.rect:
        for name, is_set, why in (
            ("sync_bn", c.sync_bn, "statistics across devices need images of one shape"),
            ("augment_on", c.augment_on == "device", "devices render squares only"),
            ("micro_batches_per_pass", c.micro_batches_per_pass > 1, "each micro-batch has its own shape"),
        ):
            if is_set:
                raise _clash(config, "rect", name, why, f"leave out --{name.replace('_', '-')}")
    if c.compile:
        for name, is_set, why in (
            ("reduce", c.reduce == "exact", "compiled kernels add in another order on each type of machine"),
            ("multi_scale", c.multi_scale, "each image size would be compiled"),
            ("rect", c.rect, "each image size would be compiled"),
            ("sync_bn", c.sync_bn, "a compiled network cannot wait for other ranks"),
            ("parallel", c.parallel == "dp", "the compiler does not run in several threads"),
        ):
            if is_set:
                raise _clash(config, "compile", name, why, "leave out --compile")
        if c.batch < 0:
            raise ConfigError(
                "--compile and --batch auto are mutually exclusive: a trial of each size would compile it, which takes minutes",
                source=_sources(config, "compile", "batch"),
                hint="--batch 16 or another number, or leave out --compile",
            )
    if c.patience and not c.val_period and config.is_given("patience"):
        raise _clash(config, "patience", "val_period", "early stopping needs validation", "--val-period 1")
    _check_precision(config)
    _check_preempt_notice(config)
    _check_rates(config, recipe)
    r = recipe.value
    if r.autobalance:
        raise ConfigError(
            "autobalance: true is not available: its balance would depend on the fleet",
            source=recipe.sources["autobalance"],
            hint="remove it; yolofleet uses a fixed balance of the levels",
        )
    if c.rect and r.mosaic and recipe.sources["mosaic"] == COMMAND_LINE:
        raise ConfigError(
            f"--set mosaic={r.mosaic:g} and --rect are mutually exclusive: rectangular training shows no mosaics",
            source=COMMAND_LINE,
            hint="leave one out",
        )
    for text in r.albumentations:
        try:
            transform_of(text)
        except ConfigError as error:
            error.source = recipe.sources["albumentations"]
            raise
    if r.mosaic9 and not r.mosaic:
        raise ConfigError(
            f"mosaic9: {r.mosaic9:g} is a fraction of the mosaics, but mosaic is 0",
            source=recipe.sources["mosaic9"],
            hint="set mosaic above 0, or mosaic9 to 0",
        )


def _check_rates(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise on two optimizers, on schedules that ``--minutes`` excludes, and on wrong ``lr_factors``."""
    c = config.value
    if c.optimizer_class and config.is_given("optimizer"):
        raise _clash(config, "optimizer", "optimizer_class", "both choose the optimizer", "leave one out")
    if c.minutes and c.lr_schedule not in ("cooldown", "constant") and config.is_given("lr_schedule"):
        raise _clash(
            config,
            "minutes",
            "lr_schedule",
            "such a decay needs the length of the run from the start",
            "leave out --lr-schedule; the rate is constant, and falls in the last fifth of the time",
        )
    parse_lr_factors(recipe.value.lr_factors, recipe.sources["lr_factors"])


def _check_batch(config: Resolved[TrainConfig]) -> None:
    c = config.value
    if c.batch == 0:
        raise ConfigError("--batch 0 is below 1", source=config.sources["batch"], hint="--batch 16, or auto")
    if c.batch > 0 and config.is_given("batch_memory") and config.sources["batch"] != MEASURED:
        raise ConfigError(
            f"{config.spelled('batch_memory')} has no effect with --batch {c.batch}",
            source=config.sources["batch_memory"],
            hint="--batch auto, or leave it out",
        )
    if c.batch < 0 and c.verb != "train":
        raise ConfigError(
            f"--batch auto is not available in {c.verb}: its figures would depend on the memory of the devices",
            source=config.sources["batch"],
            hint="--batch 16, or the number that yolofleet train --batch auto prints",
        )
    if c.batch < 0 and c.micro_batches_per_pass:
        raise _clash(
            config,
            "batch",
            "micro_batches_per_pass",
            "auto chooses both",
            "leave out --micro-batches-per-pass",
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


def check_tune(config: Resolved[TuneConfig]) -> None:
    """Check what a study needs beside the settings of a training, as :func:`check_train`."""
    for name in NOT_IN_TUNE:
        if config.is_given(name):
            raise ConfigError(
                f"{config.spelled(name)} is not available in tune",
                source=config.sources[name],
                hint="leave it out",
            )
    if config.value.asynchronous and config.is_given("generation"):
        raise _clash(
            config,
            "asynchronous",
            "generation",
            "without generations, each result counts at once",
            "leave one out",
        )


def _check_code(recipe_class: str, *callbacks: str) -> None:
    """Raise if a name of the user's code has the wrong form, or its file does not exist. Loads nothing."""
    if recipe_class:
        split_name(recipe_class, "--recipe-class")
    for name in callbacks:
        split_name(name, "--callbacks")


def check_val(config: Resolved[ValConfig]) -> Resolved[ValConfig]:
    """Check as :func:`check_train`; return the settings with notes about settings without effect."""
    _check_device(config)
    _check_code(config.value.recipe_class)
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    _check_tiles(config)
    if config.value.tile and config.value.fit == "batch":
        raise _clash(
            config, "tile", "fit", "the tiles of an image are a batch of their own", "--fit rect or square"
        )
    return _without_effect(config, "save_conf")


def check_predict(config: Resolved[PredictConfig]) -> Resolved[PredictConfig]:
    """Check as :func:`check_val`."""
    _check_device(config)
    _check_code(config.value.recipe_class)
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    _need(config, "source", "an image, folder, glob, list file or video")
    _check_tiles(config)
    live = re.match(r"[a-z]+://|screen(:|$)|-$", config.value.source, re.IGNORECASE)
    if live and config.sources["source"] != COMMAND_LINE:
        raise ConfigError(
            f"{config.spelled('source')}: a configuration file must not choose a network address, the screen or standard input",
            source=config.sources["source"],
            hint="give --source on the command line",
        )
    return _without_effect(config, "save_conf", "txt_format")


def _check_tiles(config: Resolved[Any]) -> None:
    if 0 < config.value.tile < 32:
        raise ConfigError(
            f"{config.spelled('tile')} is below 32 pixels",
            source=config.sources["tile"],
            hint="--tile 640, or 0 for no tiles",
        )
    _only_with(config, "overlap", "tile")


def check_export(config: Resolved[ExportConfig]) -> None:
    """Check as :func:`check_train`."""
    _check_code(config.value.recipe_class)
    _need(config, "weights", "a .safetensors file of a run, or a .pt file")
    for name in ("conf", "iou", "max_det", "agnostic_nms"):
        _only_with(config, name, "nms")
    _only_with(config, "calibration_images", "int8")
    if config.value.int8 and not config.value.data:
        raise ConfigError(
            "--int8 needs images that find the ranges of its 8-bit numbers",
            source=config.sources["int8"],
            hint="--data with the data set that the weights were trained on",
        )
    for other in ("half", "simplify"):
        if config.value.int8 and getattr(config.value, other):
            raise _clash(
                config, "int8", other, "both change how the file stores its weights", "leave one out"
            )
    if config.value.calibration_images < config.value.batch and config.value.int8:
        raise ConfigError(
            f"--calibration-images {config.value.calibration_images} do not fill a batch of {config.value.batch}",
            source=_sources(config, "calibration_images", "batch"),
            hint=f"--calibration-images {8 * config.value.batch}",
        )
    if config.value.dynamic in ("batch", "both") and config.is_given("batch"):
        raise _clash(config, "batch", "dynamic", "a variable batch has no size", "leave out --batch")


def check_bench(config: Resolved[BenchConfig]) -> None:
    """Check as :func:`check_train`."""
    _check_device(config)
    _check_code(config.value.recipe_class)
    _need(config, "weights", "a .safetensors file of a run, a .pt file, or an exported file")
    _check_precision(config)


def check_doctor(config: Resolved[DoctorConfig]) -> None:
    """Check as :func:`check_train`."""
    log = config.value.log
    if config.value.support and log and not Path(log).is_dir():
        raise ConfigError(
            f"--support with --log {shown(log)}: not the folder of a run",
            source=config.sources["log"],
            hint="--support --log runs/train/exp",
        )
    if config.value.hosts and config.value.fleet:
        raise _clash(config, "hosts", "fleet", "both choose the hosts", "leave one out")
    if config.value.log:
        for name in type(config.value).model_fields:
            if name not in ("log", "json_out", "support") and config.is_given(name):
                raise _clash(
                    config, name, "log", "the doctor reads a log without other checks", "leave one out"
                )
    _check_micro_batch(config)


def _check_device(config: Resolved[Any]) -> None:
    """Raise if this machine cannot have the device ``mps``; other hosts check their own devices.

    Whether a Mac has it only torch knows, whose import takes seconds.
    """
    c = config.value
    if (
        c.device == "mps"
        and sys.platform != "darwin"
        and not getattr(c, "hosts", "")
        and not getattr(c, "fleet", "")
    ):
        raise ConfigError(
            f"--device mps is the GPU of a Mac, and this system is {sys.platform}",
            source=config.sources["device"],
            hint="--device cpu, or 0 for the first CUDA device",
        )


def check_selftest(config: Resolved[SelftestConfig]) -> None:
    """Check as :func:`check_train`."""
    of_stages, of_comparison = ("stages", "again", "out"), ("model", "img", "steps", "precision")
    for name in of_comparison if config.value.minutes else of_stages:
        if config.is_given(name) and config.value.minutes:
            raise _clash(config, name, "minutes", "each stage has its own", "leave one out")
        if config.is_given(name):
            raise ConfigError(
                f"{config.spelled(name)} works with --minutes only",
                source=config.sources[name],
                hint="--minutes 10",
            )


def _check_micro_batch(config: Resolved[Any]) -> None:
    batch, micro = config.value.batch, config.value.micro_batch
    if batch < 0:
        return
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
    if value.merge == "wbf" and len(value.weights) == 1 and not value.augment and not value.tile:
        notes.append("--merge wbf has no effect without several --weights, --augment or --tile")
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
