"""The stages of failures: processes and whole runs are killed, and the training must end, resume, or go on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from yolofleet.errors import ClusterError
from yolofleet.measure.selftest.checks import Leg
from yolofleet.measure.selftest.machine import Found, Machine, StageFailed
from yolofleet.measure.selftest.numbers import comparison_of
from yolofleet.measure.selftest.processes import command, start_command
from yolofleet.measure.selftest.runs import checked_results, newest_step, train_argv, trained
from yolofleet.measure.trainings import outcome_of, run_training, started_training
from yolofleet.report.folder import RunFolder
from yolofleet.system.proc import descendants, end_descendants, rank_of

START_S = 600.0  # until a training has its first checkpoint; the time limit of a stage is shorter as a rule
STALL_S = 20.0  # of the run whose rank is killed
ENDS_WITHIN_S = 60.0  # after the kill: the stall limit, and the end of all processes
LENGTH = [
    "--epochs",
    "1000",
    "--val-period",
    "0",
    "--reduce",
    "exact",
    "--save-steps",
    "1",
    "--keep-last",
    "9",
]


def killed_rank_check(
    settings: Mapping[str, Any], device: str, processes: int, folder: RunFolder, extra: Mapping[str, str]
) -> dict[str, Any]:
    """Kill one rank of a run: the others must end and name it, and the run must resume.

    Returns:
        device, name, passed, detail.
    """
    settings = {**settings, "max_steps": 0, "stall_s": STALL_S}
    check = {"device": device, "name": f"one of {processes} processes killed", "passed": False}
    with started_training(settings, processes, folder, extra) as run:
        try:
            deadline_s = time.monotonic() + START_S
            ranks: list[int] = []
            while not ranks or not newest_step(folder):
                if run.poll() is not None:
                    return {
                        **check,
                        "detail": f"it ended before the kill: {outcome_of(folder, run.wait())[1]}"[:300],
                    }
                if time.monotonic() > deadline_s:
                    return {**check, "detail": f"no checkpoint within {START_S:.0f} s"}
                time.sleep(0.05)
                ranks = [pid for pid in descendants(run.pid) if rank_of(pid) == processes - 1]
            os.kill(ranks[0], signal.SIGKILL)
            killed_at_s = time.monotonic()
            try:
                code, problem = outcome_of(folder, run.wait(ENDS_WITHIN_S))
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
    code, problem = run_training(again, processes, folder, extra)
    if code:
        return {**check, "detail": f"it does not resume: {problem}"[:300]}
    return {**check, "passed": True, "detail": f"ended after {elapsed_s:.1f} s, resumed after step {last}"}


def killed_rank(machine: Machine) -> Found:
    leg = Leg("exact", "2 processes", machine.pair, devices=2)
    settings = comparison_of(machine, [leg]).settings_of(leg)
    check = killed_rank_check(settings, machine.pair, 2, RunFolder(machine.work / "killed"), {})
    if not check["passed"]:
        raise StageFailed(check["detail"])
    return Found(check["detail"])


@contextmanager
def at_step(step: int, run: Path, argv: Sequence[str | Path]) -> Iterator[BaseProcess]:
    """Start a training and wait until the checkpoint of ``step`` exists; end all its processes after the block."""
    process = start_command(*argv)
    try:
        deadline_s = time.monotonic() + START_S
        while newest_step(RunFolder(run)) < step:
            if not process.is_alive():
                raise StageFailed(f"{run.name} ended with exit code {process.exitcode} before step {step}")
            if time.monotonic() > deadline_s:
                raise StageFailed(f"{run.name} has no checkpoint of step {step} after {START_S:.0f} s")
            time.sleep(0.02)
        yield process
    finally:
        if process.is_alive() and process.pid is not None:
            end_descendants(process.pid)
            process.kill()
        process.join()


def killed_run(machine: Machine) -> Found:
    steps = ("--max-steps", "6", *LENGTH)
    unbroken = trained(machine, "unbroken", *steps)
    run = machine.work / "killed"
    with at_step(2, run, train_argv(machine, "killed", *steps)):
        pass
    last = newest_step(RunFolder(run))
    command("train", "--resume", run)
    resumed = checked_results(RunFolder(run))
    if resumed["weights_sha256"] != unbroken["weights_sha256"]:
        raise StageFailed(f"resumed after step {last}, it ends with other weights than without a break")
    return Found(f"killed after step {last}, resumed, equal bits", {"sha256": unbroken["weights_sha256"]})


def elastic(machine: Machine) -> Found:
    steps = 12 if machine.is_toy else 60
    setup = f"--device {machine.pair} --max-steps {steps} --restarts 2 --stall-s 20".split()
    run = machine.work / "restarted"
    with at_step(2, run, train_argv(machine, "restarted", *setup, *LENGTH)) as process:
        ranks = [pid for pid in descendants(process.pid or 0) if rank_of(pid) == 1]
        if not ranks:
            raise StageFailed("the run has no process of rank 1")
        at = newest_step(RunFolder(run))
        os.kill(ranks[0], signal.SIGKILL)
        killed_at_s = time.monotonic()
        process.join()
        elapsed_s = time.monotonic() - killed_at_s
    if process.exitcode:
        raise StageFailed(f"it ended with exit code {process.exitcode} after rank 1 was killed")
    results = checked_results(RunFolder(run))
    if results["steps"] != steps or not RunFolder(run).launcher_events.is_file():
        raise StageFailed(f"it ended after {results['steps']} of {steps} steps, or without a restart")
    return Found(f"killed after step {at}, went on by itself, all {steps} steps {elapsed_s:.0f} s later")
