"""Share code between the schedulers' renderers: their settings as ``key=value``, and the run that they repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yolofleet.config.resolve import Sourced, resolve
from yolofleet.config.schema import Frozen
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.support.errors import ConfigError, DataError, NumericsError
from yolofleet.support.text import shown

T = TypeVar("T", bound=Frozen)
# another start repeats the error
PERMANENT_CODES = (ConfigError.exit_code, DataError.exit_code, NumericsError.exit_code)


@dataclass(frozen=True)
class ScheduledRun:
    """What a job of a scheduler runs.

    Attributes:
        name: name of the run.
        resume: the run folder that ``--resume`` names; "" for a new run.
        arguments: of ``yolofleet train``, without the name and ``--resume``.
        processes: on each machine.
        restarts: how often it may fail within an hour and go on.
        is_stored: data and copies of the run are at addresses, so the machines need no common disk.
    """

    name: str
    resume: str
    arguments: list[str]
    processes: int
    restarts: int
    is_stored: bool = False


def read_settings(model: type[T], texts: Iterable[str], option: str) -> T:
    """Return a scheduler's settings from ``nodes=2,partition=gpu`` or YAML files. Later ones win.

    Raises:
        ConfigError: a name is unknown or a value is invalid.
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
