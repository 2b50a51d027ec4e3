"""The plan of a run and its machines: hosts and what each gets, or those that a scheduler will choose. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.config.checks import check_train
from yolofleet.config.resolve import DEFAULT, Resolved, with_values
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, flag_of
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.config.stored.resume_options import options_to_repeat
from yolofleet.runs.report.folder import RunFolder, new_folder
from yolofleet.support.device_names import ALL, processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown
from yolofleet.training.parallel.partition import Partition

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.fleet import Fleet
    from yolofleet.fleet.launch.lease_renewal import Supervision
    from yolofleet.fleet.launch.next_action import RestartRules
    from yolofleet.fleet.launch.schedulers.scheduler import JobSettings, ScheduledRun

WITH_HOSTS = ("min_devices",)  # settings that need --hosts
START_PORT = "FLAGS_START_PORT"  # PaddleDetection's variable: the first port to try
OF_THE_LAUNCHER = (  # settings that the processes on the hosts do not need
    *("hosts", "fleet", "sync_code", "detach", "restarts"),
    *WITH_HOSTS,
)


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: what runs, where, and from which state. The command line and the Python interface make it."""

    config: Resolved[TrainConfig] | Resolved[ValConfig]
    recipe: Resolved[Recipe] | None  # recipe of a training; None for a validation
    fleet: Fleet | None  # the hosts; None: this machine
    # number of processes to start on this machine. 1: this process does the work, alone or as one of several
    # that another launcher started
    processes: int
    resumed: Path | None  # the folder of the run to resume; None: a new run
    # this process is the launcher of a detached run; None: a person started it
    supervision: Supervision | None = None

    @property
    def may_link(self) -> bool:
        """Whether symbolic links in the run's folder may lead out of it; a launcher that takes over wrote it itself."""
        takes_over = self.supervision is not None and self.supervision.term > 1
        return takes_over or self.config.value.linked_folders

    def text_for_host(self, fleet: Fleet, number: int, shares: str) -> str:
        """Return the configuration for one host: with its own devices and data, and without the fleet.

        Args:
            fleet: all hosts.
            number: of the host in the fleet.
            shares: of the hosts that take part (:func:`shares_of`).
        Raises:
            ConfigError: its settings are mutually exclusive.
        """
        config, recipe = self.config, self.recipe
        host, model = fleet.hosts[number], type(config.value)
        left = [name for name in OF_THE_LAUNCHER if name in model.model_fields]
        own: dict[str, Any] = {name: model.model_fields[name].default for name in left}
        own |= {"device": host.device}
        if "shares" in model.model_fields:
            own["shares"] = shares
        sources = {**dict.fromkeys(left, DEFAULT), "device": fleet.source}
        if host.data:
            own["data"], sources["data"] = host.data, fleet.source
        if config.value.json_out not in ("", "-"):  # it names a file of this machine
            own["json_out"], sources["json_out"] = "", DEFAULT
        there: Resolved[Any] = with_values(config, own, sources)
        if recipe is not None:
            check_train(there, recipe)
        return dump_config(there, recipe)

    def folder(self) -> RunFolder:
        """Return the folder of the resumed run, or create a new one.

        Raises:
            ConfigError: ``--name`` is not a folder name. StorageError: the folder cannot be written.
        """
        if self.resumed is not None:
            return RunFolder(self.resumed)
        return new_folder(self.config.value)


def _start_port(text: str) -> int:
    port = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1024 <= port <= 65000:
        raise ConfigError(
            f"{START_PORT}={shown(text)} is not a port from 1024 to 65000",
            source="environment",
            hint=f"unset {START_PORT}, or export {START_PORT}=17000",
        )
    return port


def fleet_of(
    config: Resolved[TrainConfig] | Resolved[ValConfig], count: Callable[[Fleet], Fleet] | None = None
) -> Fleet | None:
    """Return the hosts that the settings name; None means this machine alone, with a launcher that stays.

    Args:
        count: replaces the devices ``all`` by numbers.

    Raises:
        ConfigError: the hosts cannot be used, or another setting contradicts them.
    """
    settings = config.value
    if not (config.is_given("hosts") or config.is_given("fleet")):
        for name in ("sync_code", *WITH_HOSTS):
            if name in config.sources and config.is_given(name):
                raise config.error(name, " has no effect without --hosts or --fleet", hint="leave it out")
        if not getattr(settings, "detach", False):
            return None
    # a run on this machine alone imports no hosts
    from yolofleet.fleet.hosts.fleet import HERE, Fleet, Host, given_fleet

    found = given_fleet(config) or Fleet((Host(HERE, settings.device),), config.sources["device"])
    if count is not None and any(host.device == ALL for host in found.hosts):
        found = count(found)
    if START_PORT in os.environ and not settings.fleet:  # the file of --fleet has a port of its own
        found = replace(found, port=_start_port(os.environ[START_PORT]))
    if settings.parallel == "dp":
        raise ConfigError(
            "--parallel dp starts one process, but every host needs its own", hint="leave out --parallel"
        )
    if (
        config.is_given("device")
        and settings.device != ALL
        and all(host.device != settings.device for host in found.hosts)
    ):
        raise config.error(
            "device",
            " has no effect: every host has devices of its own",
            hint="leave it out; it counts for hosts that are named without devices",
        )
    if not isinstance(settings, TrainConfig):
        if found.spare:
            raise ConfigError(
                f"{found.spare[0].name} is a spare, and {settings.verb} replaces no host",
                source=found.source,
                hint="leave out :spare, or the host",
            )
        return found
    if settings.detach:
        check_detach(found, settings)
    devices = sum(host.processes for host in found.hosts)
    if settings.min_devices > devices:
        raise ConfigError(
            f"--min-devices {settings.min_devices}, and there are {devices} with all spares",
            hint=f"--min-devices {devices}, or name more hosts",
        )
    return found


def check_detach(fleet: Fleet, settings: TrainConfig) -> None:
    """Raise ConfigError if a setting contradicts ``--detach``."""
    from yolofleet.fleet.hosts.fleet import HERE

    if len(fleet.hosts) > 1 and any(host.name == HERE for host in fleet.hosts):  # alone, it logs in nowhere
        raise ConfigError(
            f"--detach: the other hosts cannot log in to {HERE}",
            source=fleet.source,
            hint="name this machine as the other hosts know it",
        )
    if settings.shares not in ("", "auto"):
        raise ConfigError(
            "--shares has one number for each rank, and the ranks of a detached run may change",
            hint="leave it out, or --shares auto",
        )
    for flag, given in (("--sync-code", settings.sync_code), ("--json", settings.json_out)):
        if given:
            raise ConfigError(
                f"{flag} needs a launcher that stays, and --detach ends it",
                hint=f"leave out {flag} or --detach",
            )


def restart_rules(settings: TrainConfig | ValConfig) -> RestartRules:
    """Return when a run goes on after a failure: a training, by its settings."""
    from yolofleet.fleet.launch.next_action import RestartRules

    if not isinstance(settings, TrainConfig):
        return RestartRules()
    return RestartRules(settings.restarts, settings.min_devices)


# -- what the hosts of a run get -----------------------------------------------------------------------------


def shares_of(shares: str, fleet: Fleet, members: Sequence[int]) -> str:
    """Return the part of ``--shares`` for the ranks of some hosts; "" if it names none for them."""
    numbers = shares.split(",")
    if len(numbers) != fleet.processes:
        return shares  # none, or auto
    if not all(number < len(fleet.active) for number in members):
        return ""  # a spare has no share
    return ",".join(numbers[rank] for number in members for rank in fleet.ranks(number))


def files_read(settings: TrainConfig | ValConfig) -> list[str]:
    """Return the names of files that every rank reads."""
    weights = settings.weights if isinstance(settings, ValConfig) else (settings.weights,)
    names = [*weights, str(settings.cfg)]
    own_optimizer = getattr(settings, "optimizer_class", "")
    code = [settings.recipe_class, own_optimizer, *getattr(settings, "callbacks", ())]
    for name in code:
        if ".py:" in name:
            from yolofleet.config.user_code import source_files  # with --callbacks and the like

            names += source_files(name.rpartition(":")[0])
    return [name for name in dict.fromkeys(names) if name and Path(name).suffix]


def host_options(settings: TrainConfig | TuneConfig | ValConfig) -> list[str]:
    """Return the options that name the hosts of a run; [] without hosts."""
    options = ["--fleet", settings.fleet] if settings.fleet else ["--hosts", settings.hosts]
    if not (settings.fleet or settings.hosts):
        options = []
    elif settings.device != "auto":  # hosts that are named without devices use the devices of --device
        options += ["--device", settings.device]
    if settings.sync_code:
        options.append("--sync-code")
    return options


def resume_options(settings: TrainConfig | TuneConfig | ValConfig) -> list[str]:
    """Return the options of the command that resumes the run that its folder does not keep."""
    options = host_options(settings) + options_to_repeat(settings)
    for name in WITH_HOSTS:
        field = TrainConfig.model_fields[name]
        value = getattr(settings, name, field.default)
        if value != field.default:
            options += [flag_of(name, field), str(value)]
    return options


# -- schedulers ----------------------------------------------------------------------------------------------


def scheduled_run(
    config: Resolved[TrainConfig], given: Mapping[str, Any], config_file: str, job: JobSettings, option: str
) -> ScheduledRun:
    """Return a training run as the scheduler's renderers take it.

    Args:
        config: the checked settings.
        given, config_file: the options and the file that they were made from; the job repeats them.
        job: the machines that the job asks for.
        option: the scheduler's option, as the user typed it.
    Raises:
        ConfigError: ``--device``, ``--shares``, ``--hosts`` or ``--fleet`` contradicts the job.
    """
    from yolofleet.fleet.launch.schedulers.scheduler import ScheduledRun

    return ScheduledRun(
        name=config.value.name,
        resume=config.value.resume,
        arguments=_arguments(given, config_file),
        processes=_processes_per_machine(config, job.node_range, job.gpu_count, option),
        restarts=config.value.restarts,
        is_stored=all(
            "://" in address and not address.startswith("file:")
            for address in (config.value.data, config.value.checkpoint_to)
        ),
    )


def _arguments(given: Mapping[str, Any], config_file: str) -> list[str]:
    """Return arguments of ``yolofleet train`` that repeat ``given``, except the run's name and what it resumes."""
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


def _size_of(fleet: Fleet) -> str:
    """Return ``nodes=2,gpus=8``. All machines of a job are equal, so each gets the GPUs of the largest host."""
    gpus = [0 if host.device.startswith("cpu") else host.processes for host in fleet.hosts]
    return f"nodes={len(fleet.hosts)}" + (f",gpus={max(gpus)}" if any(gpus) else "")


def _processes_per_machine(
    config: Resolved[TrainConfig], machines: tuple[int, int], gpus: int, option: str
) -> int:
    """Return one process for each GPU; without GPUs, as many as ``--device cpu:N`` names."""
    from yolofleet.fleet.hosts.fleet import named_fleet

    device = config.value.device
    fleet = named_fleet(config.value.hosts or None, config.value.fleet or None, device.replace("auto", "cpu"))
    if fleet is not None:
        flag = "--fleet" if config.value.fleet else "--hosts"
        raise ConfigError(
            f"{flag} and {option} both choose the machines of the run",
            source=config.sources[flag[2:]],
            hint=f"{option} {_size_of(fleet)} without {flag}: the scheduler chooses the machines; or leave out {option} "
            "to start the run by ssh",
        )
    # before the job waits in a queue; this raises on settings that need --hosts, too
    if fleet_of(config) is not None:
        raise config.error(
            "detach", f" has no effect: a job of {option} needs no terminal", hint="leave it out"
        )
    if gpus and device == ALL:
        device = "auto"
    here = 1 if device == ALL else processes_of(device)
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
    if config.value.shares not in ("", "auto"):
        least, most = machines
        if least != most:
            raise ConfigError(
                f"--shares {config.value.shares} has a number for each process, and {option} nodes={least}-{most} does not fix "
                "how many there are",
                source=config.sources["shares"],
                hint=f"leave out --shares, or {option} nodes={most}",
            )
        Partition.parse(config.value.shares, most * (gpus or here))
    return 1 if config.value.parallel == "dp" else gpus or here
