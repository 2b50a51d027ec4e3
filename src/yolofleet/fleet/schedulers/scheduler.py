"""What the renderers for schedulers share: their settings as ``key=value``, and the command that a job repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.device import processes_of
from yolofleet.config.resolve import Resolved, Sourced, resolve
from yolofleet.config.schema import Frozen, TrainConfig, flag_of
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.errors import ConfigError
from yolofleet.fleet.description import Fleet, fleet_of, named_fleet
from yolofleet.parallel.partition import Partition
from yolofleet.text import shown

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


def _as_many(fleet: Fleet) -> str:
    """``nodes=2,gpus=8``: a scheduler's machines are alike, so each has what the largest of the fleet has."""
    gpus = [0 if host.device.startswith("cpu") else host.processes for host in fleet.hosts]
    return f"nodes={len(fleet.hosts)}" + (f",gpus={max(gpus)}" if any(gpus) else "")


def processes_per_machine(config: Resolved[TrainConfig], machines: int, gpus: int, option: str) -> int:
    """One for each GPU; without GPUs what ``--device cpu:N`` says.

    Args:
        machines: their number.
        gpus: of each machine.
        option: of the scheduler, as it is typed.
    Raises:
        ConfigError: ``--device`` or ``--shares`` is for another number of processes, or ``--hosts`` names machines.
    """
    device = config.value.device
    fleet = named_fleet(config.value.hosts or None, config.value.fleet or None, device.replace("auto", "cpu"))
    if fleet is not None:
        flag = "--fleet" if config.value.fleet else "--hosts"
        raise ConfigError(
            f"{flag} and {option} both say where the run runs",
            source=config.sources[flag[2:]],
            hint=f"{option} {_as_many(fleet)} without {flag}: the scheduler chooses the machines; or leave out {option} "
            "to start the run by ssh",
        )
    fleet_of(config)  # refuses what means nothing without hosts, before a job has waited in a queue
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
    if config.value.shares != "auto":
        Partition.parse(config.value.shares, machines * (gpus or here))
    return 1 if config.value.parallel == "dp" else gpus or here
