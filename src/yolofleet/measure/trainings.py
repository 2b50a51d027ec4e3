"""Trainings that a measurement starts in processes of their own, and waits for."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr

from yolofleet.config.load import resolve_train
from yolofleet.config.stored.job import dump_config
from yolofleet.fleet.hosts.agent_process import AGENT_MODULE, JobSpec, agent_arguments, agent_environment
from yolofleet.fleet.launch.local import explain
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import Stopped
from yolofleet.support.system.children import start_module


def run_training(
    settings: Mapping[str, object],
    processes: int,
    folder: RunFolder,
    extra: Mapping[str, str],
    source: str = "selftest",
) -> tuple[int, str]:
    """Run a training to its end; see :func:`started_training` and :func:`outcome_of`."""
    with started_training(settings, processes, folder, extra, source) as run:
        return outcome_of(folder, run.wait())


def started_training(
    settings: Mapping[str, object],
    processes: int,
    folder: RunFolder,
    extra: Mapping[str, str],
    source: str = "selftest",
) -> subprocess.Popen[bytes]:
    """Start a training in processes of its own, as the launcher does for one attempt."""
    of_worker = write_job(settings, folder, source)
    for failure in folder.logs.glob("error-rank-*.json"):
        failure.unlink()  # of the run that this one resumes
    command = ["yolofleet.training.rank.worker", *of_worker]
    if processes > 1:
        command = [AGENT_MODULE, *agent_arguments(JobSpec(folder.path, processes))]
    with (folder.logs / "agent.log").open("wb") as log:  # `explain` reads it
        return start_module(*command, environment={**agent_environment(os.environ), **extra}, output=log)


def write_job(settings: Mapping[str, object], folder: RunFolder, source: str = "selftest") -> list[str]:
    """Write the job of a training into its folder; return the arguments of a worker that runs it alone."""
    write_text(folder.job, dump_config(*resolve_train(settings, source=source)))
    return [str(folder.path), str(folder.job), "0"]


def outcome_of(folder: RunFolder, code: int) -> tuple[int, str]:
    """Return the exit code of a training that has ended with ``code``, and why it is not 0. Raises Stopped."""
    if code == 0:
        return 0, ""
    with redirect_stderr(io.StringIO()) as stderr:
        code = explain(folder.path, code, 0)
    if code == Stopped.exit_code:
        raise Stopped("stopped on request, before there was a result")
    return code, stderr.getvalue().strip()
