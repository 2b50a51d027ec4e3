"""Start the trainings of ``yolofleet selftest`` in processes of their own, and read their results."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from yolofleet.checkpoint.store import step_of
from yolofleet.config.load import dump_config, resolve_train
from yolofleet.errors import ClusterError, Stopped
from yolofleet.files.atomic import write_text
from yolofleet.hosts.torchrun import AGENT_MODULE, JobSpec, agent_arguments, agent_environment
from yolofleet.launch.local import explain
from yolofleet.measure.selftest.checks import Comparison, Leg, Record, further_legs
from yolofleet.measure.selftest.machine import Machine, StageFailed
from yolofleet.measure.selftest.processes import command
from yolofleet.report.folder import RunFolder
from yolofleet.report.results import read_rows
from yolofleet.system.children import start_module

Trainer: TypeAlias = Callable[[Mapping[str, Any], int, RunFolder, Mapping[str, str]], tuple[int, str]]


def train(
    settings: Mapping[str, Any],
    processes: int,
    folder: RunFolder,
    extra: Mapping[str, str],
    *,
    source: str = "selftest",
) -> tuple[int, str]:
    """Run a training in processes of its own, as the launcher starts them.

    Args:
        extra: environment variables. source: of the settings, for messages.
    Returns:
        Exit code and why it is not 0.
    Raises:
        Stopped: somebody stopped the run.
    """
    with started(settings, processes, folder, extra, source=source) as run:
        return outcome(run, folder)


def write_job(settings: Mapping[str, Any], folder: RunFolder, source: str = "selftest") -> list[str]:
    """Write the job of a training into its folder; return the arguments of a worker that runs it alone."""
    write_text(folder.job, dump_config(*resolve_train(settings, source=source)))
    return [str(folder.path), str(folder.job), "0"]


def started(
    settings: Mapping[str, Any],
    processes: int,
    folder: RunFolder,
    extra: Mapping[str, str],
    *,
    source: str = "selftest",
) -> subprocess.Popen[bytes]:
    """Start a training in processes of its own."""
    of_worker = write_job(settings, folder, source)
    for failure in folder.logs.glob("error-rank-*.json"):
        failure.unlink()  # of the run that this one resumes
    command = ["yolofleet.rank.worker", *of_worker]
    if processes > 1:
        command = [AGENT_MODULE, *agent_arguments(JobSpec(folder.path, processes))]
    with (folder.logs / "agent.log").open("wb") as log:  # `explain` reads it
        return start_module(*command, environment={**agent_environment(os.environ), **extra}, output=log)


def outcome(
    run: subprocess.Popen[bytes], folder: RunFolder, timeout_s: float | None = None
) -> tuple[int, str]:
    """Wait for the end of a training; return what :func:`train` returns.

    Raises:
        subprocess.TimeoutExpired: it did not end.
        Stopped: somebody stopped the run.
    """
    return explained(folder, run.wait(timeout_s))


def explained(folder: RunFolder, code: int) -> tuple[int, str]:
    """Return the exit code of a training and why it is not 0.

    Raises:
        Stopped: somebody stopped the run.
    """
    if code == 0:
        return 0, ""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = explain(folder.path, code, 0)
    if code == Stopped.exit_code:
        raise Stopped("stopped on request, before there was a result")
    return code, stderr.getvalue().strip()


def run_legs(
    comparison: Comparison,
    legs: Sequence[Leg],
    folder: Path,
    *,
    train: Trainer = train,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Record]:
    """Run the legs one after another, and further ones that help to find a cause.

    Args:
        folder: for their runs and their cache. train: see :func:`train`.
        environments: by a leg's title, variables that only its processes get.
    Yields:
        The result of a leg when it has ended.
    Raises:
        ClusterError: the reference failed; its text and exit code are those of that run.
    """
    waiting, records = list(legs), list[Record]()
    while waiting:
        leg = waiting.pop(0)
        run = RunFolder(folder / f"run-{len(records)}")
        extra = {"YOLOFLEET_CACHE": str(folder / "cache"), **(environments or {}).get(leg.title, {})}
        code, problem = train(comparison.settings_of(leg), leg.processes, run, extra)
        if code and not records:
            failed = ClusterError(f"{leg.title} failed: {problem}")
            failed.printed, failed.exit_code = problem, code
            raise failed
        records.append(comparison.read(leg, run, problem))
        yield records[-1]
        if len(records) == len(legs):
            waiting = further_legs(records)


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, or 0 without any."""
    return max(map(step_of, folder.checkpoints.glob("step-*.safetensors")), default=0)


def train_argv(machine: Machine, name: str, *more: str | Path) -> list[str | Path]:
    """Return the command line of a short training; a later option wins over an earlier one."""
    img, batch, micro = (64, 8, 2) if machine.is_toy else (320, 64, 16)
    size = f"--img {img} --batch {batch} --nominal-batch {batch} --micro-batch {micro} --epochs 2".split()
    files: list[str | Path] = ["--data", machine.data, "--project", machine.work, "--name", name]
    toy = ["--workers", "0", "--threads", "1"] if machine.is_toy else []
    plain = ["--no-plots", "--no-autoanchor", "--set", "warmup_epochs=0"]
    network = ["--model", machine.network, "--device", machine.one]
    return ["train", *files, *network, *size, *toy, *plain, *more]


def trained(machine: Machine, name: str, *more: str | Path) -> dict[str, Any]:
    """Train to the end; return the results.

    Raises:
        StageFailed: the command failed, or left a loss or a weight that is not finite.
    """
    command(*train_argv(machine, name, *more))
    return checked_results(RunFolder(machine.work / name))


def checked_results(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run whose losses and weights are finite.

    Raises:
        StageFailed: one is not.
    """
    from safetensors.torch import load_file

    from yolofleet.checkpoint.format import non_finite

    last = {
        name: cell for name, cell in read_rows(folder.results_csv)[-1].items() if name.startswith("train/")
    }
    if bad := [name for name, cell in last.items() if not cell]:  # what is not finite has an empty cell
        raise StageFailed(f"{folder.path.name}: {', '.join(bad)} of the last epoch is not finite")
    weights = load_file(folder.weights / "last.safetensors")
    if bad := non_finite(weights):
        raise StageFailed(
            f"{folder.path.name}: {len(bad)} of {len(weights)} tensors are not finite, first {bad[0]}"
        )
    results: dict[str, Any] = json.loads(folder.results_json.read_text(encoding="utf-8"))
    return results | {"loss": sum(map(float, last.values()))}
