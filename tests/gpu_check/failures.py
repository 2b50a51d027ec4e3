"""The stages of failures: processes and whole runs are killed, and the training must end, resume, or go on by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from gpu_check.machine import Found, Machine, StageFailed
from gpu_check.numbers import comparison_of
from gpu_check.processes import command, start_command
from gpu_check.runs import checked_results, train_argv, trained
from yolofleet.measure.selftest.checks import Leg
from yolofleet.measure.selftest.contract import START_S, killed_rank_check, newest_step
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.system.proc import descendants, end_descendants, rank_of

LENGTH = [
    "--epochs",
    "1000",
    "--val-period",
    "0",
    "--reduce",
    "exact",
    "--save-every",
    "1steps",
    "--keep-last",
    "9",
]


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
