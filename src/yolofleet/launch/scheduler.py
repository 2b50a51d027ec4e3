"""What the renderers for schedulers share: their settings as ``key=value``, and the command that a job repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.device import processes_of
from yolofleet.config.resolve import Resolved, Sourced, resolve
from yolofleet.config.schema import Frozen, TrainConfig, flag_of
from yolofleet.config.suggest import shown
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.errors import ConfigError

T = TypeVar("T", bound=Frozen)


def read_settings(model: type[T], texts: Iterable[str], option: str) -> T:
    """A scheduler's settings from ``nodes=2,partition=gpu`` or YAML files, later ones winning.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    layer: dict[str, Sourced] = {}
    for text in texts:
        if "=" in text:
            for part in re.split(r",(?=[A-Za-z_]+=)", text):  # a value may have commas
                name, _, value = part.partition("=")
                layer[name] = Sourced(value, option)
        elif Path(text).is_file():
            layer |= {
                n: Sourced(value, f"{text}:{line}") for n, (value, line) in read_yaml(Path(text)).items()
            }
        else:
            raise ConfigError(
                f"{option} {shown(text)} is neither name=value nor a file",
                hint=f"{option} {next(iter(model.model_fields))}=...; names: {', '.join(model.model_fields)}",
            )
    return resolve(model, [layer]).value


def train_arguments(given: Mapping[str, Any], config_file: str) -> list[str]:
    """The arguments of ``yolofleet train`` that say again what was given here, each as one word; the run's name and
    what it resumes are left to the job.

    Args:
        given: by name of the setting, as the command line had it.
    """
    words = [f"--config={config_file}"] if config_file else []
    for name, value in given.items():
        if name in ("name", "resume"):
            continue
        flag = flag_of(name, TrainConfig.model_fields[name])
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [f"{flag}={one}" for one in (value if isinstance(value, (tuple, list)) else (value,))]
    return words


def processes_per_machine(config: Resolved[TrainConfig], gpus: int) -> int:
    """One for each GPU; without GPUs what ``--device cpu:N`` says.

    Raises:
        ConfigError: ``--device`` names another number of devices, or ``--hosts`` other machines.
    """
    for name in ("hosts", "fleet"):
        if getattr(config.value, name):
            raise ConfigError(
                f"--{name} names machines, and the scheduler chooses them itself",
                source=config.sources[name],
                hint=f"leave out --{name}, or train over ssh without a scheduler",
            )
    device = config.value.device
    here = processes_of(device)
    if gpus and device != "auto" and (device.startswith("cpu") or here != gpus):
        raise ConfigError(
            f"--device {device} is not {gpus} GPU{'s' if gpus > 1 else ''} on each machine",
            source=config.sources["device"],
            hint="leave out --device: each process takes its own GPU",
        )
    if not gpus and device != "auto" and not device.startswith("cpu"):
        raise ConfigError(
            f"--device {device} needs GPUs, and the job asks for none",
            source=config.sources["device"],
            hint=f"gpus={here}",
        )
    return 1 if config.value.parallel == "dp" else gpus or here
