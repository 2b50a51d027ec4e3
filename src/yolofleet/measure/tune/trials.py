"""The trials of ``yolofleet tune`` as processes: groups of devices, and the training of one trial on a group.

A trial is ``yolofleet train`` in a child process, with its own run folder and ``--set`` for its values. So every check of a
training holds, and a trial runs on several processes or on another host as any training does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import RunSettings, flag_of, may_be_in_files, rules_of
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.stored.resume import CHECKPOINTS, ELSEWHERE
from yolofleet.measure.tune.space import Value
from yolofleet.runs.report.folder import RESUME_COMMAND, RunFolder
from yolofleet.runs.report.history import judgement_of, metrics_of
from yolofleet.runs.report.results import read_rows
from yolofleet.storage.atomic import open_append
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.device_names import gpu_ids, processes_of
from yolofleet.support.errors import CheckpointError, ConfigError, NumericsError
from yolofleet.support.system.children import start_module
from yolofleet.support.system.proc import end_descendants

# settings of a trial that the study chooses
OWN = {"device", "hosts", "fleet", "sync_code", "project", "name", "quiet", "recipe", "set"}
MOST_LOG_BYTES = 64 << 20
ATTEMPTS = 3  # starts of a trial that fails for reasons other than its values
PAUSE_S = 5.0  # before another start, for the processes of the last one to end
FAILED = re.compile(r"^(?:\w+Error: |Stopped: |Unreachable: ).*", re.MULTILINE)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of this machine, or all hosts, that train one trial at a time.

    Attributes:
        arguments: of ``yolofleet train``, to run there.
    """

    text: str
    arguments: tuple[str, ...]
    has_hosts: bool = False


def local_groups(config: TuneConfig, gpus: int, cores: int) -> list[DeviceGroup]:
    """Return the groups of devices of this machine.

    Args:
        gpus: of this machine, for ``--device auto``. cores: of this machine, which the trials share.

    Raises:
        ConfigError: the devices are not a multiple of ``--devices-per-trial``.
    """
    device = config.device
    if device == "auto":
        device = ",".join(map(str, range(gpus))) or "cpu"
    groups = _split(device, config.devices_per_trial, f"--device {config.device}")
    processes = len(groups) * config.devices_per_trial
    arguments = []
    if not config.threads and config.reduce != "exact":  # exact sums take one thread
        arguments.append(f"--threads={max(cores // processes, 1)}")
    if config.workers < 0 and not device.startswith("cpu"):
        arguments.append(f"--workers={max(cores // processes - 1, 1)}")
    return [DeviceGroup(group, (f"--device={group}", *arguments)) for group in groups]


def _split(device: str, size: int, source: str) -> list[str]:
    """Return ``--device`` of each group of ``size`` devices: ``0,1,2,3`` in groups of 2 is ``0,1`` and ``2,3``."""
    count = processes_of(device)
    if count % size:
        raise ConfigError(
            f"--devices-per-trial {size}: {source} has {count} devices, which cannot be cut into groups of {size}",
            hint="--devices-per-trial 1, or name other devices",
        )
    if device in ("cpu", "mps") or device.startswith("cpu:"):
        one = device.partition(":")[0]
        return [one if size == 1 else f"cpu:{size}"] * (count // size)
    ids = gpu_ids(device)
    return [_gpus(ids[first : first + size]) for first in range(0, count, size)]


def _gpus(ids: Sequence[int]) -> str:
    counts = [(gpu, len(list(same))) for gpu, same in groupby(ids)]
    return ",".join(f"{gpu}:{count}" if count > 1 else str(gpu) for gpu, count in counts)


def base_arguments(config: Resolved[TuneConfig], recipe_file: Path) -> list[str]:
    """Return the arguments of ``yolofleet train`` that all trials share."""
    words = [f"--recipe={recipe_file}"]
    for name, setting in RunSettings.model_fields.items():
        value, flag = getattr(config.value, name), flag_of(name, setting)
        is_repeated = rules_of(setting).again and not may_be_in_files(setting, value)  # at each start
        if name in OWN or is_repeated or value == setting.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [f"{flag}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return words


@dataclass
class TrialRun:
    """The training of one trial, in a child process.

    Attributes:
        base: arguments that all new trials share.
        each_start: arguments that new and resumed trials share.
        memory: environment of a process on this machine, with memory that all trials share for their images.
        is_resumed: the last start resumed its training.
    """

    number: int
    values: Mapping[str, Value]
    folder: RunFolder
    log: Path
    base: Sequence[str]
    each_start: Sequence[str]
    memory: Mapping[str, str] = field(default_factory=dict)
    group: DeviceGroup | None = None
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    is_resumed: bool = False
    starts_at_s: float = 0.0
    seconds: float = 0.0
    log_offset: int = 0
    figures_at_ns: int = 0  # of the figures that were read last

    def curve(self) -> Iterator[tuple[int, float]]:
        """Yield the epochs that were validated, and the highest fitness up to each."""
        best, task = float("-inf"), judgement_of(self.folder)
        for row in read_rows(self.folder.results_csv):
            if figures := metrics_of(row, task):
                best = max(best, task.fitness(figures))
                yield int(row["epoch"]), best

    def has_new_figures(self) -> bool:
        """Return whether the file of figures has changed since the last call."""
        before, self.figures_at_ns = self.figures_at_ns, 0
        with suppress(OSError):
            self.figures_at_ns = self.folder.results_csv.stat().st_mtime_ns
        return self.figures_at_ns != before

    def start(self, group: DeviceGroup, resume_command: str) -> None:
        """Resume the training on a group of devices, or begin it if there is no checkpoint of it."""
        path = self.folder.path
        self.is_resumed = any(path.glob(CHECKPOINTS)) or (path / ELSEWHERE).is_file()
        if self.is_resumed:
            words = [f"--resume={path}"]
        else:
            words = [*self.base, *(f"--set={name}={_text(value)}" for name, value in self.values.items())]
            words += [f"--project={path.parent}", f"--name={path.name}", "--exist-ok"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.group = group
        with open_append(self.log) as log:
            self.log_offset = log.tell()
            memory = {} if group.has_hosts else self.memory
            self.process = start_module(
                *("yolofleet", "train", *words, *self.each_start, *group.arguments),
                environment={**os.environ, **memory, RESUME_COMMAND: resume_command},
                output=log,
                has_own_session=True,
            )
        self.starts_at_s = time.monotonic()

    def ended(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            self.seconds += time.monotonic() - self.starts_at_s
            self.process = None
        return code

    def stop(self) -> None:
        """Ask the process to save its state and to end."""
        if self.process is not None:
            with suppress(OSError):
                self.process.terminate()

    def kill(self) -> None:
        """End the process and all below it."""
        if self.process is not None:
            end_descendants(self.process.pid, deadline_s=1.0)
            self.process.kill()

    def record_failure(self, code: int) -> bool:
        """Record that the last start failed, and return whether to start the trial again.

        NaN and too little memory follow from the values of the trial. The other failures are those of a process, a machine
        or a checkpoint. The trial begins again if its checkpoint is refused, because its result is a function of its values.
        """
        self.failures += 1
        if self.is_resumed and code in (ConfigError.exit_code, CheckpointError.exit_code):
            shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
        elif code in (NumericsError.exit_code, ConfigError.exit_code):
            return False
        return self.failures < ATTEMPTS

    def reason(self, code: int) -> str:
        """Return why the last start of the process failed, in one line."""
        text = ""
        with suppress(OSError, ValueError), open_foreign(self.log) as file:
            file.seek(self.log_offset)
            text = file.read(MOST_LOG_BYTES).decode("utf-8", "replace")
        found = FAILED.findall(text)
        return found[-1] if found else f"ended with exit code {code}; see {self.log}"

    def discard_state(self, *, weights: bool) -> None:
        """Delete the checkpoints of a trial that has ended, and with ``weights`` its weights."""
        for folder in (self.folder.checkpoints, *([self.folder.weights] if weights else [])):
            shutil.rmtree(folder, ignore_errors=True)

    def wait_for_last_process(self, wait_s: float) -> None:
        """Wait until a process of an earlier start of the study has left the folder.

        Raises:
            ConfigError: it has not within ``wait_s``. StorageError: the folder cannot be written.
        """
        if self.folder.path.is_dir():
            with self.folder.locked(wait_s):
                pass


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
