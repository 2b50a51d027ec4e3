"""Kill one process of a run: the others must end, and the run must resume."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from yolofleet.measure.selftest.runs import newest_step
from yolofleet.measure.trainings import outcome_of, run_training, started_training
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.proc import descendants, end_descendants, rank_of

START_S = 600.0  # until a training has its first checkpoint; the time limit of a stage is shorter as a rule
STALL_S = 20.0  # of the run whose rank is killed
ENDS_WITHIN_S = 60.0  # after the kill: the stall limit, and the end of all processes


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
