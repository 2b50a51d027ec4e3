"""Decide what a command runs and where, and start it: on hosts, in processes of this machine, or in this process.

Imports torch only for the last.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.config.checks import check_without_validation
from yolofleet.config.hub_names import is_hub_name
from yolofleet.config.resolve import Resolved, with_values
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.config.stored.resume_options import is_address
from yolofleet.data.datasets.built_in import is_no_dataset
from yolofleet.fleet.launch.machines import RunPlan, fleet_of
from yolofleet.fleet.resources import resources_of
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.device_names import ALL, NO_GPU, numbered, processes_of
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.place import place_from_environment
from yolofleet.support.system.children import OPENMP_WAITS
from yolofleet.support.system.signals import stoppable
from yolofleet.support.text import inform, quoted, screen_line

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.fleet import Fleet

NO_SUCH_GPU = ("gpu-none", "gpu-missing", "gpus-hidden")  # findings of the doctor


@stoppable()
def plan_run(
    config: Resolved[TrainConfig] | Resolved[ValConfig], recipe: Resolved[Recipe] | None = None
) -> RunPlan:
    """Return the plan of these settings, after the checks that need neither torch nor a login, nor look at the machine.

    Raises:
        ConfigError, ClusterError: the run cannot start, or would fail at once.
    """
    is_rank = is_worker()
    fleet = counted_fleet(config)
    if fleet is not None and is_rank:
        raise ConfigError(
            "--hosts and --fleet start all processes, but another launcher already started this one as one of several",
            hint="run the command once, without torchrun, srun or mpirun; or remove --hosts",
        )
    if fleet is None and not is_rank:
        config = with_gpus_counted(config)
    config = with_commits(config)
    settings = config.value
    check_shares(settings, fleet)
    processes = 1 if is_rank or settings.parallel == "dp" else processes_of(settings.device)
    # config/stored/resume.py has found it; a run that an address keeps goes on in a new folder
    resumed = Path(settings.resume) if settings.resume and not is_address(settings.resume) else None
    if resumed is not None and not resumed.is_dir():
        resumed = resumed.parent.parent  # of a checkpoint
    return RunPlan(config, recipe, fleet, processes, resumed)


def counted_fleet(config: Resolved[Any]) -> Fleet | None:
    """Return the hosts that the settings name, with numbers instead of ``all``: it logs in to count GPUs.

    Raises:
        ConfigError, ClusterError: see :func:`fleet_of` and :func:`yolofleet.fleet.launch.preflight.with_gpus_counted`.
    """

    def count(fleet: Fleet) -> Fleet:
        from yolofleet.fleet.launch import preflight  # it logs in

        return preflight.with_gpus_counted(fleet)

    return fleet_of(config, None if is_worker() else count)


def with_gpus_counted(config: Resolved[Any]) -> Resolved[Any]:
    """Return the settings with the numbers of the GPUs of this machine instead of ``--device all``, and print them.

    It loads torch only where the driver of NVIDIA does not know the number.

    Raises:
        ConfigError: there is no GPU.
    """
    if config.value.device != ALL:
        return config
    from yolofleet.fleet.doctor.gpus import visible_gpus
    from yolofleet.fleet.doctor.machine import Machine
    from yolofleet.fleet.doctor.machine_facts import gpu_count

    there, shown_gpus = gpu_count(Machine()), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = visible_gpus(there, shown_gpus)
    if count == 0:
        hidden = f", and CUDA_VISIBLE_DEVICES={shown_gpus} hides all" if there else ""
        raise config.error(
            "device", f": this machine has {there or 'no'} GPU{'s' * bool(there)}{hidden}", hint=NO_GPU
        )
    if count is None:
        from yolofleet.support.devices import all_devices

        device = all_devices()
    else:
        device = numbered(range(count))
    inform(f"note: --device {ALL} is --device {device}")
    return with_values(config, {"device": device}, {})


def with_commits(config: Resolved[Any]) -> Resolved[Any]:
    """Return the settings with the commit in each name of weights on the hub, so that all processes get the same file.

    Raises:
        CheckpointError, DownloadError: the hub does not have them, or cannot be reached.
        ConfigError: this is one of several processes that another launcher has started.
    """
    weights = config.value.weights
    names = (weights,) if isinstance(weights, str) else weights
    if not any(names) or not any(map(is_hub_name, names)):
        return config
    from yolofleet.families.weights.hub import pinned_name  # its HTTP would slow every start

    pinned = tuple(pinned_name(name) if is_hub_name(name) else name for name in names)
    if pinned == tuple(names):
        return config
    if is_worker():
        raise ConfigError(
            f"--weights {' '.join(names)}: each of several processes asks the hub alone, and could get another commit",
            hint=f"--weights {' '.join(map(quoted, pinned))}",
        )
    return with_values(config, {"weights": pinned[0] if isinstance(weights, str) else pinned}, {})


def is_worker() -> bool:
    """Return whether another launcher started this process as one of several."""
    has_torchrun = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return has_torchrun or place_from_environment(os.environ).size > 1


def check_shares(settings: TrainConfig | ValConfig, fleet: Fleet | None) -> None:
    """Raise ConfigError unless ``--shares`` has a number for each rank, before any login or import of torch."""
    if settings.shares in ("", "auto") or is_worker():
        return
    if fleet is None and settings.parallel == "dp" and settings.device == "auto":
        return  # only torch can count the devices
    from yolofleet.training.parallel.partition import Partition

    Partition.parse(settings.shares, fleet.processes if fleet else processes_of(settings.device))


def check_machine(settings: TrainConfig | ValConfig) -> None:
    """Run the doctor's quick checks of this machine: print warnings, raise on fatal problems.

    Raises:
        ConfigError: ``--device`` names GPUs that do not exist.
        ClusterError: another fatal problem.
    """
    from yolofleet.fleet.doctor.local import preflight

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


@stoppable()
def start(plan: RunPlan) -> tuple[int, RunFolder]:
    """Execute ``plan`` to its end.

    Returns:
        The exit code of the started processes (they print the reason if it is not 0), and the folder of the run.
    Raises:
        YolofleetError: a run in this process failed, or the processes could not start.
    """
    if plan.fleet is not None:
        from yolofleet.fleet.launch.run_on_hosts import run_on_hosts

        return run_on_hosts(plan)
    if not is_worker():
        _check_data(plan.config.value)
    if not is_worker() and (plan.processes > 1 or "torch" not in sys.modules):  # as in a notebook
        inform(_what_starts(plan))  # the header of the run comes seconds later
    # a daemon of multiprocessing, as of Celery, may start no loader processes, but a program that starts them
    if plan.processes > 1 or (current_process().daemon and not is_worker()):
        from yolofleet.fleet.launch.local import run_processes

        return run_processes(plan, lambda: check_machine(plan.config.value))
    if not is_worker():
        check_machine(plan.config.value)
    os.environ.update(OPENMP_WAITS | os.environ)  # before torch is imported
    from yolofleet.training.rank.worker import run

    return 0, run(plan.config, plan.recipe, RunFolder(plan.resumed) if plan.resumed else None)


def _check_data(settings: TrainConfig | ValConfig) -> None:
    """Raise ConfigError if the data set does not exist, before torch is loaded for it."""
    if not (settings.recipe_class or getattr(settings, "resume", "")) and is_no_dataset(settings.data):
        from yolofleet.data.datasets.sources import load_dataset

        load_dataset(settings.data)


def _what_starts(plan: RunPlan) -> str:
    settings, many = plan.config.value, plan.processes
    weights = [settings.weights] if isinstance(settings.weights, str) else settings.weights
    network = settings.model or settings.cfg if isinstance(settings, TrainConfig) else ""
    of_what = (
        [settings.resume] if settings.resume else [*(weights if any(weights) else [network]), settings.data]
    )
    names = ", ".join(screen_line(word) for word in of_what)
    return f"starting {many} process{'es' * (many > 1)} ({names}): loading PyTorch"


def rehearse(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise the errors that the run would raise about devices, data, model and weights on this machine.

    It writes and downloads nothing, and imports torch only for ``--recipe-class``, whose code it loads. Other hosts check their own files when a run starts.

    Raises:
        YolofleetError: with the exit code of the run.
    """
    from yolofleet.data.datasets.sources import is_generated, load_dataset
    from yolofleet.families.networks.description import describe
    from yolofleet.families.weights.catalogue import resolve_weights

    settings = config.value
    if plan_run(config, recipe).fleet is not None:
        return
    if not is_worker():
        check_machine(settings)
    if settings.device == "mps":
        inform("note: --dry-run cannot know whether torch finds the GPU of this Mac")
    if not (is_generated(settings.data) or settings.recipe_class):
        spec = load_dataset(settings.data)
        if not spec.has_val:
            check_without_validation(config)
        for split in ("train", "val") if spec.has_val else ("train",):
            spec.sources(split)
    if settings.resume:
        return  # the checkpoint has the model and its weights
    if settings.recipe_class:
        from yolofleet.families.recipe_class import load_recipe_class

        load_recipe_class(settings.recipe_class)  # it may have a family with that network
    if named := settings.cfg or settings.model:
        describe(named)
    if settings.weights:
        resolve_weights(settings.weights, download=False)
