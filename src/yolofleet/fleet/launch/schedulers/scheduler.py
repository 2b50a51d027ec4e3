"""What a scheduler is for the command line: its settings as ``key=value``, and the job that it makes of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from yolofleet.config.resolve import Sourced, resolve
from yolofleet.config.schema import Frozen
from yolofleet.storage.yaml_lines import read_yaml
from yolofleet.support.errors import ConfigError, DataError, NumericsError
from yolofleet.support.text import shown


class JobSettings(Frozen):
    """The keys of a scheduler's option."""

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the largest number of machines."""
        raise NotImplementedError

    @property
    def gpu_count(self) -> int:
        """GPUs of each machine."""
        raise NotImplementedError


T = TypeVar("T", bound=JobSettings)
# another start repeats the error
PERMANENT_CODES = (ConfigError.exit_code, DataError.exit_code, NumericsError.exit_code)


@dataclass(frozen=True)
class ScheduledRun:
    """What a job of a scheduler runs."""

    name: str  # name of the run
    resume: str  # the run folder that ``--resume`` names; "" for a new run
    arguments: list[str]  # arguments of ``yolofleet train``, without the name and ``--resume``
    processes: int  # on each machine
    restarts: int  # how often it may fail within an hour and go on
    # data and copies of the run are at addresses, so the machines need no common disk
    is_stored: bool = False


@dataclass(frozen=True)
class Scheduler(Generic[T]):
    """A row of ``table.SCHEDULERS``."""

    settings: type[T]  # model of the job's settings
    render: Callable[[T, ScheduledRun], str]  # returns the file that the scheduler takes. Raises ConfigError
    help: str  # help text of ``yolofleet render NAME``
    # submits such a file, and returns lines that say how to follow the job; None: ``train`` has no option for
    # it. Raises ConfigError and ClusterError
    submit: Callable[[str], str] | None = None


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
