"""Decide what a command runs and where, before it starts processes or writes files. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.config.checks import check_train
from yolofleet.config.device import processes_of
from yolofleet.config.load import dump_config
from yolofleet.config.resolve import DEFAULT, Resolved
from yolofleet.config.resources import resources_of
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.errors import ClusterError, ConfigError
from yolofleet.launch.machines import WITH_HOSTS, fleet_of
from yolofleet.parallel.partition import Partition
from yolofleet.parallel.place import place_from_environment
from yolofleet.report.folder import RunFolder, new_folder
from yolofleet.system.signals import stoppable
from yolofleet.text import inform

if TYPE_CHECKING:
    from yolofleet.hosts.fleet import Fleet
    from yolofleet.launch.lease_renewal import Supervision

OF_THE_LAUNCHER = (  # settings that the processes on the hosts do not need
    *("hosts", "fleet", "sync_code", "detach", "restarts"),
    *WITH_HOSTS,
)
NO_SUCH_GPU = ("gpu-none", "gpu-missing", "gpus-hidden")  # findings of the doctor


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: what runs, where, and from which state. The command line and the Python interface make it.

    Attributes:
        recipe: of a training; None for a validation.
        fleet: the hosts; None: this machine.
        processes: number of processes to start on this machine. 1: this process does the work, alone or as one of
            several that another launcher started.
        resumed: the folder of the run to resume; None: a new run.
        supervision: this process is the launcher of a detached run; None: a person started it.
    """

    config: Resolved[TrainConfig] | Resolved[ValConfig]
    recipe: Resolved[Recipe] | None
    fleet: Fleet | None
    processes: int
    resumed: Path | None
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
        own |= {"device": host.device, "shares": shares}
        sources = {**config.sources, **dict.fromkeys(left, DEFAULT), "device": fleet.source}
        if host.data:
            own["data"], sources["data"] = host.data, fleet.source
        if config.value.json_out not in ("", "-"):  # it names a file of this machine
            own["json_out"], sources["json_out"] = "", DEFAULT
        there: Resolved[Any] = Resolved(config.value.model_copy(update=own), sources, config.notes)
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


@stoppable()
def plan_run(
    config: Resolved[TrainConfig] | Resolved[ValConfig], recipe: Resolved[Recipe] | None = None
) -> RunPlan:
    """Return the plan of these settings, after the checks that need neither torch nor a login.

    Raises:
        ConfigError, ClusterError: the run cannot start, or would fail at once.
    """
    settings, is_rank = config.value, is_worker()
    fleet = fleet_of(config)
    if fleet is not None and is_rank:
        raise ConfigError(
            "--hosts and --fleet start all processes, but another launcher already started this one as one of several",
            hint="run the command once, without torchrun, srun or mpirun; or remove --hosts",
        )
    check_shares(settings, fleet)
    if fleet is None and not is_rank:
        check_machine(settings)
    processes = 1 if is_rank or settings.parallel == "dp" else processes_of(settings.device)
    resumed = Path(settings.resume) if settings.resume else None  # config/resume.py has found it
    if resumed is not None and not resumed.is_dir():
        resumed = resumed.parent.parent  # of a checkpoint
    return RunPlan(config, recipe, fleet, processes, resumed)


def is_worker() -> bool:
    """Return whether another launcher started this process as one of several."""
    has_torchrun = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return has_torchrun or place_from_environment(os.environ).size > 1


def check_shares(settings: TrainConfig | ValConfig, fleet: Fleet | None) -> None:
    """Check before any login or import of torch that ``--shares`` has a number for each rank.

    Raises:
        ConfigError: see :meth:`Partition.parse`.
    """
    if settings.shares in ("", "auto") or is_worker():
        return
    if fleet is None and settings.parallel == "dp" and settings.device == "auto":
        return  # only torch can count the devices
    Partition.parse(settings.shares, fleet.processes if fleet else processes_of(settings.device))


def check_machine(settings: TrainConfig | ValConfig) -> None:
    """Run the doctor's quick checks of this machine: print warnings, raise on fatal problems.

    Raises:
        ConfigError: ``--device`` names GPUs that do not exist.
        ClusterError: another fatal problem.
    """
    from yolofleet.doctor.local import preflight

    for finding in preflight(resources_of(settings)):
        # the run itself reports files that it cannot write
        if finding.level == "fault" and not finding.code.startswith("disk-"):
            source = f"yolofleet doctor: {finding.code}"
            if finding.code in NO_SUCH_GPU:
                raise ConfigError(
                    f"--device {settings.device}: {finding.seen}", source=source, hint=finding.fix
                )
            raise ClusterError(finding.seen, source=source, hint=finding.fix)
        if finding.level in ("warn", "fault"):
            inform(finding.render())


def rehearse(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise the errors that the run would raise about devices, data, model and weights on this machine.

    It writes and downloads nothing, and does not import torch. Other hosts check their own files when a run starts.

    Raises:
        YolofleetError: with the exit code of the run.
    """
    from yolofleet.checkpoint.catalogue import resolve_weights
    from yolofleet.datasets.sources import is_generated, load_dataset
    from yolofleet.models.description import describe

    settings = config.value
    if plan_run(config, recipe).fleet is not None:
        return
    if settings.device == "mps":
        inform("note: --dry-run cannot know whether torch finds the GPU of this Mac")
    if not (is_generated(settings.data) or settings.recipe_class):
        spec = load_dataset(settings.data)
        for split in ("train", "val"):
            spec.sources(split)
    if settings.resume:
        return  # the checkpoint has the model and its weights
    if settings.cfg or settings.model:
        describe(settings.cfg or settings.model)
    if settings.weights:
        resolve_weights(settings.weights, download=False)
