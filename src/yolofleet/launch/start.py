"""Where a run runs. No torch here: ``worker.py`` is imported only when this process becomes a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from yolofleet.config.device import processes_of
from yolofleet.config.load import Resolved, dump_config
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.errors import ClusterError, ConfigError, DataError, Stopped
from yolofleet.files.atomic import write_text
from yolofleet.launch.fleet import Fleet, fleet_of
from yolofleet.launch.job import JobSpec
from yolofleet.launch.local import run_agent
from yolofleet.parallel.partition import Partition
from yolofleet.parallel.place import place_from_environment
from yolofleet.report.folder import RunFolder
from yolofleet.system.signals import stoppable
from yolofleet.text import echo

NO_SUCH_GPU = ("gpu-none", "gpu-missing", "gpus-hidden")  # findings of the doctor


def start(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> int:
    """Train: on the hosts that were named, else in this process for one device or under somebody's torchrun, else
    in one process per device.

    Returns:
        The exit code of a launched job; 0 otherwise.
    Raises:
        YolofleetError: from a run in this process.
    """
    return _start("train", config, recipe)


def start_val(config: Resolved[ValConfig]) -> int:
    """Validate, like :func:`start`."""
    return _start("val", config, None)


@stoppable()
def _start(
    verb: str, config: Resolved[TrainConfig] | Resolved[ValConfig], recipe: Resolved[Recipe] | None
) -> int:
    settings = config.value
    fleet = check_start(config)
    if fleet is not None:
        from yolofleet.launch.ssh import run_on_fleet

        return run_on_fleet(config, recipe, fleet, resumed_folder(settings))[0]
    processes = processes_to_start(settings)
    if processes == 1 or is_worker():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see launch/job.py
        from yolofleet.worker import run

        resumed = resumed_folder(settings)
        run(config, recipe, RunFolder(resumed) if resumed else None)
        return 0
    resumed = resumed_folder(settings)
    folder = (
        RunFolder(resumed)
        if resumed
        else RunFolder.create(verb, project=settings.project, name=settings.name, exist_ok=settings.exist_ok)
    )
    return run_processes(config, recipe, folder, processes)


def check_start(config: Resolved[TrainConfig] | Resolved[ValConfig]) -> Fleet | None:
    """Check what the launcher can check before it starts processes; return the hosts, None for this machine alone.

    Raises:
        ConfigError, ClusterError: the run could not start, or would end at once.
    """
    fleet = fleet_of(config)
    if fleet is not None and is_worker():
        raise ConfigError(
            "--hosts and --fleet start all processes, and this one is one of several already",
            hint="give the command once, without torchrun, srun or mpirun; or leave out --hosts",
        )
    check_shares(config.value, fleet)
    if fleet is None and not is_worker():
        look_first(config.value)
    return fleet


def rehearse(config: Resolved[TrainConfig]) -> None:
    """Raise what the run would raise about devices, data, model and weights on this machine. Nothing is written or
    downloaded, and torch is not loaded. Hosts check their own files at the start of a run.

    Raises:
        YolofleetError: as the run, with the same exit code.
    """
    from yolofleet.checkpoint.catalogue import resolve_weights
    from yolofleet.data.sources import is_generated, load_dataset
    from yolofleet.models.description import describe

    settings = config.value
    if check_start(config) is not None:
        return
    if not is_generated(settings.data):
        spec = load_dataset(settings.data)
        for split in ("train", "val"):
            spec.sources(split)
    if settings.resume:
        return  # the checkpoint has the model and its weights
    if settings.cfg or settings.model:
        describe(settings.cfg or settings.model)
    if settings.weights:
        resolve_weights(settings.weights, download=False)


def check_shares(settings: TrainConfig | ValConfig, fleet: Fleet | None) -> None:
    """``--shares`` has a number for each rank: said before a login or an import of torch.

    Raises:
        ConfigError: it has not.
    """
    if not isinstance(settings, TrainConfig) or settings.shares == "auto" or is_worker():
        return
    if fleet is None and settings.parallel == "dp" and settings.device == "auto":
        return  # torch must count them
    Partition.parse(settings.shares, fleet.processes if fleet else processes_of(settings.device))


def look_first(settings: TrainConfig | ValConfig) -> None:
    """The doctor's quick examination of this machine: what hurts a run is said, what it cannot do with is refused.

    Raises:
        ConfigError: ``--device`` names GPUs that are not there.
        ClusterError: another thing that would end the run.
    """
    from yolofleet.doctor.run import preflight

    for finding in preflight(as_training(settings)):
        if finding.level == "fault" and not finding.code.startswith(
            "disk-"
        ):  # a run says itself what it could not write
            source = f"yolofleet doctor: {finding.code}"
            if finding.code in NO_SUCH_GPU:
                raise ConfigError(
                    f"--device {settings.device}: {finding.seen}", source=source, hint=finding.fix
                )
            raise ClusterError(finding.seen, source=source, hint=finding.fix)
        if finding.level in ("warn", "fault"):
            echo(finding.render(), to=sys.stderr)


def as_training(settings: TrainConfig | ValConfig) -> TrainConfig:
    """A validation as the doctor knows it: a training that has images of validation only."""
    if isinstance(settings, TrainConfig):
        return settings
    shared = TrainConfig.model_fields.keys() & ValConfig.model_fields.keys() - {"batch", "project"}
    values = {name: getattr(settings, name) for name in shared}
    values |= {
        "batch": 1,
        "micro_batch": 1,
        "val_batch": settings.batch,
        "project": settings.project or Path("runs", "val"),
    }
    return TrainConfig(**values)


def run_processes(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None,
    folder: RunFolder,
    processes: int,
) -> int:
    """One process per device on this machine; returns the exit code. They have said why it is not 0.

    Raises:
        StorageError: the disk refused.
    """
    code = None
    try:
        write_text(folder.job, dump_config(config, recipe))
        code = run_agent(JobSpec(folder.path.resolve(), processes))
    finally:
        if code in (None, ConfigError.exit_code, DataError.exit_code, Stopped.exit_code):
            folder.discard_unless_used()
    return code


def processes_to_start(settings: TrainConfig | ValConfig) -> int:
    """One per device, or one for all of them (``--parallel dp``)."""
    if isinstance(settings, TrainConfig) and settings.parallel == "dp":
        return 1
    return processes_of(settings.device)


def is_worker() -> bool:
    """Somebody's launcher started this process as one of several."""
    told = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return told or place_from_environment(os.environ).size > 1


def resumed_folder(settings: TrainConfig | ValConfig) -> Path | None:
    """The folder of the run that ``--resume`` continues (``config/resume.py`` has found it)."""
    if not isinstance(settings, TrainConfig) or not settings.resume:
        return None
    path = Path(settings.resume)
    return path if path.is_dir() else path.parent.parent
