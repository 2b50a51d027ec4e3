"""Start the trainings and the device checks of ``yolofleet selftest`` in processes of their own, and judge their ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from yolofleet.checkpoint.store import step_of
from yolofleet.config.load import dump_config, resolve_train
from yolofleet.errors import ClusterError, Stopped
from yolofleet.files.atomic import write_text
from yolofleet.hosts.torchrun import AGENT_MODULE, JobSpec, agent_arguments, agent_environment
from yolofleet.launch.local import explain
from yolofleet.measure.selftest.checks import Comparison, Leg, Record, further_legs
from yolofleet.report.folder import RunFolder
from yolofleet.system.children import start_module
from yolofleet.system.proc import descendants, end_descendants, rank_of

STALL_S = 20.0  # of the run whose rank is killed
ENDS_WITHIN_S = 60.0  # after the kill: the stall limit, and the end of all processes
START_S = 600.0  # until its first checkpoint
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
    with contextlib.redirect_stderr(io.StringIO()) as words:
        code = explain(folder.path, code, 0)
    if code == Stopped.exit_code:
        raise Stopped("stopped on request, before there was a result")
    return code, words.getvalue().strip()


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


def killed_rank_check(
    settings: Mapping[str, Any], device: str, processes: int, folder: RunFolder, extra: Mapping[str, str]
) -> dict[str, Any]:
    """Kill one rank of a run: the others must end and name it, and the run must resume.

    Returns:
        device, name, passed, detail.
    """
    settings = {**settings, "max_steps": 0, "stall_s": STALL_S}
    check = {"device": device, "name": f"one of {processes} processes killed", "passed": False}
    with started(settings, processes, folder, extra) as run:
        try:
            deadline_s = time.monotonic() + START_S
            ranks: list[int] = []
            while not ranks or not newest_step(folder):
                if run.poll() is not None:
                    return {**check, "detail": f"it ended before the kill: {outcome(run, folder)[1]}"[:300]}
                if time.monotonic() > deadline_s:
                    return {**check, "detail": f"no checkpoint within {START_S:.0f} s"}
                time.sleep(0.05)
                ranks = [pid for pid in descendants(run.pid) if rank_of(pid) == processes - 1]
            os.kill(ranks[0], signal.SIGKILL)
            killed_at_s = time.monotonic()
            try:
                code, problem = outcome(run, folder, timeout_s=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                return {**check, "detail": f"the others did not end within {ENDS_WITHIN_S:.0f} s"}
            elapsed_s = time.monotonic() - killed_at_s
        finally:
            end_descendants(run.pid)
            run.kill()
    if code != ClusterError.exit_code or f"rank {processes - 1}" not in problem:
        return {**check, "detail": f"exit code {code}, and no message names the rank: {problem}"[:300]}
    last = newest_step(folder)
    again = {"resume": str(folder.path), "max_steps": last + 1}
    code, problem = train(again, processes, folder, extra)
    if code:
        return {**check, "detail": f"it does not resume: {problem}"[:300]}
    return {**check, "passed": True, "detail": f"ended after {elapsed_s:.1f} s, resumed after step {last}"}


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, or 0 without any."""
    return max(map(step_of, folder.checkpoints.glob("step-*.safetensors")), default=0)


def device_checks(devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the checks of each device in a process of its own.

    Yields:
        One dictionary a check, when the check has ended: device, name, passed, detail.
    """
    for device in devices:
        child = start_module(
            "yolofleet.measure.selftest.device_checks",
            device,
            environment=agent_environment(os.environ),
            output=subprocess.PIPE,
        )
        assert child.stdout is not None
        words = ""
        with child:
            for line in map(partial(str, encoding="utf-8", errors="replace"), child.stdout):
                if not line.startswith('{"name"'):
                    words = line.strip() or words
                    continue
                yield {"device": device, **json.loads(line)}
        if child.returncode:
            detail = f"ended with exit code {child.returncode}: {words[:300]}"
            yield {"device": device, "name": "all checks", "passed": False, "detail": detail}
