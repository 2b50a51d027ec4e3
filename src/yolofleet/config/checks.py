"""Check combinations of settings: raise or print a note before anything starts, so no setting is silently ignored."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from yolofleet.config.decide import check_micro_batch
from yolofleet.config.recipe import parse_lr_factors
from yolofleet.config.resolve import COMMAND_LINE, FIRST_START, Resolved
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, rules_of
from yolofleet.config.schema.verbs import BenchConfig, DoctorConfig, ExportConfig, PredictConfig
from yolofleet.config.stored.resume import check_writable
from yolofleet.config.transforms import transform_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import listed, quoted, shown

WEIGHTS = "the file or folder of a run, or weights of another project (docs/models.md)"


def check_clashes(config: Resolved[Any]) -> None:
    """Raise ConfigError, which names both settings and their sources, on the first two settings that clash."""
    for name, field in type(config.value).model_fields.items():
        mine = getattr(config.value, name)
        for clash in rules_of(field).clashes:
            other = clash.other
            if (
                other in config.sources
                and clash.applies(mine, getattr(config.value, other))
                and (not clash.if_given or config.is_given(clash.if_given))
            ):
                raise ConfigError(
                    f"{config.spelled(name)} and {config.spelled(other)} are mutually exclusive: {clash.why}",
                    source=config.sources_of(name, other),
                    hint=clash.hint,
                )


def check_train(config: Resolved[TrainConfig], recipe: Resolved[Recipe], *, needs_data: bool = True) -> None:
    """Raise ConfigError, which names the sources, on missing settings and on combinations that cannot work."""
    c = config.value
    if needs_data:
        _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    _check_data_address(config)
    if c.checkpoint_to:
        check_writable(c.checkpoint_to, "--checkpoint-to")
        if sys.platform == "win32":
            raise ConfigError("--checkpoint-to needs Linux or macOS", hint="leave it out")
    _check_device(config)
    _check_code(c)
    if c.log:
        from yolofleet.config.loggers import check_loggers

        check_loggers(config)
    if not (c.model or c.cfg or c.weights or c.recipe_class):
        raise ConfigError(
            "no model: expected one of --weights, --model and --cfg",
            hint="--weights yolov5s.pt starts from trained weights, --model yolov5s from scratch",
        )
    if c.batch == 0:
        raise ConfigError("--batch 0 is below 1", source=config.sources["batch"], hint="--batch 16, or auto")
    check_micro_batch(config)
    check_clashes(config)
    _check_preempt_notice(config)
    parse_lr_factors(recipe.value.lr_factors, recipe.sources["lr_factors"])
    r = recipe.value
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


def check_suppression(config: ValConfig | PredictConfig, *, needs_nms: bool) -> None:
    """Raise ConfigError if a setting of suppression would have no effect, because the boxes need none."""
    for name in ("iou", "agnostic_nms"):
        value, default = getattr(config, name), type(config).model_fields[name].default
        if value != default and not (needs_nms or getattr(config, "tile", 0) > 0):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect: boxes of this network need no suppression",
                hint="leave it out",
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
        raise config.error(
            "preempt_notice",
            f" {problem}",
            hint="a program and its arguments, as a shell would split them: --preempt-notice './notice.sh 5'",
        )


def _check_code(settings: Any) -> None:
    """Raise if a name of the user's code has the wrong form, or its file does not exist. Loads nothing."""
    named = (("--recipe-class", "recipe_class"), ("--optimizer", "optimizer_class"))
    names = [(name, flag) for flag, setting in named if (name := getattr(settings, setting, ""))]
    names += [(name, "--callbacks") for name in getattr(settings, "callbacks", ())]
    if names:
        from yolofleet.config.user_code import split_name

        for name, flag in names:
            split_name(name, flag)


def check_val(config: Resolved[ValConfig]) -> Resolved[ValConfig]:
    """Check as :func:`check_train`; return the settings with notes about settings without effect."""
    config = check_networks(config, "save_conf")
    _need(config, "data", "a YAML file, a folder, a COCO json, or shapes")
    _check_data_address(config)
    return config


def _check_data_address(config: Resolved[Any]) -> None:
    """Raise if ``--data`` is an address that is not usable, or one of a web server or a disk that the user did not type.

    A run folder and a configuration file may be a stranger's. A web server may be one that only this machine reaches, and all
    files of a folder would be listed. A bucket belongs to the provider whose credentials the user has chosen.
    """
    data = str(config.value.data)
    if "://" not in data:
        return
    from yolofleet.storage.object_store import check_address

    check_address(data)
    source = config.sources["data"]
    if data.startswith(("http://", "https://", "file://")) and (
        source == FIRST_START or re.search(r":\d+$", source)
    ):
        raise ConfigError(
            f"{config.spelled('data')}: a file must not choose {'a web server' if data[0] == 'h' else 'a folder of a disk by file://'}",
            source=source,
            hint=f"type it: --data {quoted(data)}",
        )


def check_predict(config: Resolved[PredictConfig]) -> Resolved[PredictConfig]:
    """Check as :func:`check_val`."""
    config = check_networks(config, "save_conf", "txt_format")
    _need(config, "source", "an image, folder, glob, list file or video")
    _only_with(config, "overlap", "tile")
    if config.value.workers > 0:
        raise config.error("workers", ": prediction has no loader processes", hint="remove the option")
    live = re.match(r"[a-z][a-z0-9+.]*://|screen(:|$)|-$", config.value.source, re.IGNORECASE)
    if live and config.sources["source"] != COMMAND_LINE:
        raise config.error(
            "source",
            ": a configuration file must not choose a network address, the screen or standard input",
            hint="give --source on the command line",
        )
    return config


def check_sides(config: Resolved[Any]) -> None:
    """Raise if the images of ``--img`` or the tiles of ``--tile`` are too small."""
    for name, none in (("img", "0 for the size of the training"), ("tile", "0 for no tiles")):
        if 0 < getattr(config.value, name, 0) < 32:
            raise config.error(name, " is below 32 pixels", hint=f"{config.flag(name)} 640, or {none}")


def check_export(config: Resolved[ExportConfig]) -> None:
    """Check as :func:`check_train`."""
    _check_code(config.value)
    _need(config, "weights", WEIGHTS)
    _check_data_address(config)
    for name in ("conf", "iou", "max_det", "agnostic_nms"):
        _only_with(config, name, "nms")
    _only_with(config, "calibration_images", "int8")
    if config.value.int8 and not config.value.data:
        raise ConfigError(
            "--int8 needs images that find the ranges of its 8-bit numbers",
            source=config.sources["int8"],
            hint="--data with the data set that the weights were trained on",
        )
    if config.value.calibration_images < config.value.batch and config.value.int8:
        raise ConfigError(
            f"--calibration-images {config.value.calibration_images} do not fill a batch of {config.value.batch}",
            source=config.sources_of("calibration_images", "batch"),
            hint=f"--calibration-images {8 * config.value.batch}",
        )
    check_clashes(config)


def check_bench(config: Resolved[BenchConfig]) -> None:
    """Check as :func:`check_train`."""
    _check_device(config)
    _check_code(config.value)
    _need(config, "weights", f"{WEIGHTS}, or an exported file")
    check_sides(config)
    check_clashes(config)


def check_doctor(config: Resolved[DoctorConfig]) -> None:
    """Check as :func:`check_train`."""
    log = config.value.log
    if config.value.support and log and not Path(log).is_dir():
        raise ConfigError(
            f"--support with --log {shown(log)}: not the folder of a run",
            source=config.sources["log"],
            hint="--support --log runs/train/exp",
        )
    check_clashes(config)
    for name in DoctorConfig.model_fields:
        if log and name not in ("log", "json_out", "support") and config.is_given(name):
            raise ConfigError(
                f"{config.spelled(name)} and {config.spelled('log')} are mutually exclusive: the doctor reads a log without "
                "other checks",
                source=config.sources_of(name, "log"),
                hint="leave one out",
            )
    check_micro_batch(config)


def _check_device(config: Resolved[Any]) -> None:
    """Raise if this machine cannot have the device ``mps``, or ``mps`` not the settings; other hosts check their own devices.

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
    if c.device == "mps" and getattr(c, "reduce", "") == "exact":
        raise config.error(
            "reduce",
            " rounds in 64 bits, which --device mps does not have",
            hint="--reduce fast (one device always adds in the same order), or --device cpu",
        )


FP16_ON_CPU = "--precision fp16 has no effect on a CPU, which computes in fp32; use bf16"


def check_networks(config: Resolved[Any], *of_txt: str) -> Resolved[Any]:
    """Check what ``val``, ``predict`` and ``serve`` share; note what has no effect, as ``of_txt`` without ``--save-txt``."""
    _check_device(config)
    _check_code(config.value)
    _need(config, "weights", WEIGHTS)
    check_sides(config)
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
        tiles = ", --augment or --tile" if value.verb == "predict" else " or --augment"
        notes.append(f"--merge wbf has no effect without several --weights{tiles}")
    for name in of_txt:
        if getattr(value, name) != type(value).model_fields[name].default and not value.save_txt:
            notes.append(f"{config.spelled(name)} has no effect without --save-txt")
    if value.precision == "fp16" and value.device.startswith("cpu"):
        notes.append(FP16_ON_CPU)
        value = value.model_copy(update={"precision": "fp32"})
    return replace(config, value=value, notes=tuple(notes))


def check_without_validation(resolved: Resolved[TrainConfig]) -> None:
    """Raise ConfigError for a setting that needs validation images, which the data set does not have."""
    config = resolved.value
    needs = (
        ("--patience", resolved.is_given("patience") and config.patience),
        ("--sampler weights", config.sampler == "weights"),
    )
    if flags := [flag for flag, is_set in needs if is_set]:
        what = f"{listed(flags, ' and ')}: {config.data} has no val split, and this follows the accuracy in validations"
        raise ConfigError(what, hint="yolofleet data split divides the images, or leave it out")


def _need(config: Resolved[Any], name: str, example: str) -> None:
    if not getattr(config.value, name):
        raise ConfigError(f"{config.flag(name)} is missing", hint=f"{config.flag(name)} is {example}")


def _only_with(config: Resolved[Any], name: str, needed: str) -> None:
    """Raise if ``name`` is set without ``needed``, because it would have no effect."""
    if getattr(config.value, name) != type(config.value).model_fields[name].default and not getattr(
        config.value, needed
    ):
        flag = config.flag(needed)
        raise config.error(name, f" has no effect without {flag}", hint=f"add {flag}")
