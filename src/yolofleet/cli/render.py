"""`yolofleet render`: the files that schedulers take, on standard output; and `train --slurm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from yolofleet.cli.commands import SchemaCommand, job_option, print_notes
from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.launch.machines import scheduled_run
from yolofleet.fleet.launch.schedulers import kubernetes, slurm
from yolofleet.fleet.launch.schedulers.scheduler import read_settings
from yolofleet.support.text import echo


def run_slurm(given: dict[str, Any], config_file: str, job: Sequence[str]) -> int:
    _write(slurm_script(given, config_file, job))
    return 0


def slurm_script(given: dict[str, Any], config_file: str, job: Sequence[str]) -> str:
    """Check a run and return its batch script."""
    config, recipe = resolve_train(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    settings = read_settings(slurm.SlurmSettings, job, "--slurm")
    run = scheduled_run(
        config, given, config_file, machines=settings.node_range, gpus=settings.gpu_count, option="--slurm"
    )
    return slurm.render(settings, run)


def submit(given: dict[str, Any], config_file: str, job: Sequence[str], dry_run: bool) -> int:
    """Submit a run for ``train --slurm``, or print its script with ``--dry-run``."""
    script = slurm_script(given, config_file, job)
    if dry_run:
        _write(script)
        return 0
    number = slurm.submit(script)
    echo(f"job {number} is in the queue; its output: slurm-{number}.out")
    echo(f"  squeue -j {number}   shows where it is\n  scancel {number}     ends it")
    return 0


def run_kubernetes(given: dict[str, Any], config_file: str, job: Sequence[str]) -> int:
    config, recipe = resolve_train(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    settings = read_settings(kubernetes.KubernetesSettings, job, "--kubernetes")
    run = scheduled_run(
        config,
        given,
        config_file,
        machines=(settings.nodes, settings.nodes),
        gpus=settings.gpus,
        option="--kubernetes",
    )
    _write(kubernetes.render(settings, run))
    return 0


def _write(text: str) -> None:
    """Write to standard output: text on a terminal, bytes elsewhere, because file names may not be UTF-8."""
    if sys.stdout.isatty():
        echo(text, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()


slurm_command = SchemaCommand(
    "slurm",
    TrainConfig,
    run_slurm,
    spelled_as="train",
    extra_options=[job_option("--slurm", slurm.SlurmSettings, "settings of the job")],
    help="Write the batch script of a training run for SLURM. `yolofleet train --slurm ...` submits it.",
    epilog="The other options are those of `yolofleet train`.",
)
kubernetes_command = SchemaCommand(
    "kubernetes",
    TrainConfig,
    run_kubernetes,
    spelled_as="train",
    extra_options=[job_option("--kubernetes", kubernetes.KubernetesSettings, "settings of the job")],
    help="Write a training run as a Kubernetes Job, for `kubectl apply -f -`. Paths are paths inside the pods.",
    epilog="The other options are those of `yolofleet train`.",
)
