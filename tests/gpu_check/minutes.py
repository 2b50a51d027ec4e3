"""Run the stages of ``make test-gpu STAGES=all N`` within a time limit, one after another, and keep their results.

Each stage is a process group of its own, which ends before the next stage begins. A stage that fails, hangs or crashes does
not stop the others. Results are written after each stage, so an interrupted or repeated call goes on where the last one
ended: first with stages that never ran, then with those that failed.

This process must not ask for devices, because a process that has used CUDA cannot be forked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_check import stages as selftest_stages
from gpu_check.machine import Found, Machine, StageFailed, write_facts
from gpu_check.processes import become_stage, end_group, has_ended
from gpu_check.results import MOST_BYTES, Record, Results
from gpu_check.stages import Stage
from yolofleet.measure.selftest.contract import copy_of_this_process
from yolofleet.storage.atomic import exclusive, make_folder, write_json
from yolofleet.storage.foreign import check_links, read_foreign_text
from yolofleet.support.errors import ConfigError, YolofleetError
from yolofleet.support.system.proc import end_descendants
from yolofleet.support.terminal import duration

FOLDER = Path("runs/selftest")
RESERVE = 1.25  # of a stage's estimate: it is left out if less time is left
MOST_SHARES = 2.5  # a stage may take so many times its share of the time, because most stages take less
MOST_ESTIMATES = 6.0  # and so many times as long as estimated
LEAST_S = 20.0  # of a time limit
POLL_S = 0.05
MOST_TEXT = 240  # characters of a failure's text; the log has all of it
LAST_ERROR = re.compile(r"^(?:\w+Error|StageFailed|Stopped|\w*Exception): .*$", re.MULTILINE)


def facts_of(device: str, folder: Path) -> tuple[Machine, dict[str, Any]]:
    """Return what stages and readers must know of the devices. A copy of this process asks them.

    Raises:
        ConfigError: this machine does not have a device.
    """
    target = folder / "machine.json"
    process = copy_of_this_process(write_facts, device, target)
    process.join()
    try:
        found = json.loads(read_foreign_text(target, limit_bytes=MOST_BYTES))
    except (OSError, ValueError):
        raise ConfigError(
            f"--device {device}: the process that asks for its devices ended with exit code {process.exitcode}",
            hint="yolofleet doctor",
        ) from None
    finally:
        target.unlink(missing_ok=True)
    if problem := found.get("problem"):
        raise ConfigError(problem["what"], source=problem["source"], hint=problem["hint"])
    return Machine(folder, **found["machine"]), found["facts"]


def pace_of(seconds: Sequence[tuple[float, float]]) -> float:
    """Return how much longer stages take here than estimated.

    Args:
        seconds: measured and estimated, of the stages that have passed in this call.
    """
    measured_s, estimated_s = (sum(column) for column in zip((0.0, 0.0), *seconds, strict=True))
    return min(max(measured_s / estimated_s, 0.5), 10.0) if estimated_s else 1.0


def next_stage(
    waiting: Sequence[Stage], left_s: float, machine: Machine, pace: float = 1.0
) -> tuple[Stage, float] | None:
    """Return the next stage and its time limit, seconds; None if no stage fits into the time that is left.

    Stages are counted in the order of ``waiting`` until the time is full, and share it by their estimates. A stage may take
    two and a half times its share, which costs the last ones their time, but no more: so the first ones run even if others hang.
    """
    planned, needed_s = None, 0.0
    for stage in waiting:
        estimate_s = pace * stage.estimate_s(machine)
        if (needed_s + estimate_s) * RESERVE <= left_s:
            planned = planned or stage
            needed_s += estimate_s
    if planned is None:
        return None
    estimate_s = planned.estimate_s(machine)
    share_s = left_s * pace * estimate_s / needed_s
    limit_s = min(MOST_SHARES * share_s, MOST_ESTIMATES * max(pace, 1.0) * estimate_s)
    return planned, min(max(limit_s, LEAST_S), left_s)


@dataclass(frozen=True)
class Reporter:
    """What the command line does when a stage begins, while it runs, and when it has ended."""

    header: Callable[[Machine, Results], None]
    running: Callable[[Stage, float, float], None]  # stage, seconds so far, limit in seconds
    ended: Callable[[Record], None]


def run_stages(
    device: str, minutes: float, folder: Path, stages: Sequence[Stage], reporter: Reporter, *, again: bool
) -> Results:
    """Run the stages that fit into ``minutes``; see the text of this module.

    Args:
        again: repeat stages that have passed.
    Returns:
        The results of all calls on this folder.
    Raises:
        ConfigError: no such device, a link leads out of the folder, or it has results of another machine.
        StorageError: the disk refused.
    """
    ends_at_s = time.monotonic() + 60 * minutes
    make_folder(folder)
    check_links(folder)
    with ExitStack() as stack:
        if not stack.enter_context(exclusive(folder / ".lock")):
            raise ConfigError(
                f"another process is writing into {folder}",
                hint="wait until it has ended, or --out another folder",
            )
        import yolofleet.training.rank.worker  # noqa: F401  (the copies of this process have it, and torch, then)

        machine, facts = facts_of(device, folder)
        machine = replace(machine, folder=folder.absolute(), minutes=minutes)
        before = Results.read(folder)
        results = Results(folder, facts) if again else replace(before, facts=facts)
        if results.records and before.facts != facts:
            changed = next(
                name for name in {**facts, **before.facts} if facts.get(name) != before.facts.get(name)
            )
            raise ConfigError(
                f"{folder} has results of another machine or version: {changed} was {before.facts.get(changed)}, "
                f"and is {facts.get(changed)}",
                hint="--out another folder, or --again",
            )
        reporter.header(machine, results)
        waiting = []
        for stage in stages:
            if reason := stage.unfit(machine):
                results.left_out[stage.name] = reason
            elif stage.name not in results.records or results.records[stage.name].result != "passed":
                waiting.append(stage)
        waiting.sort(key=lambda stage: stage.name in results.records)  # those that never ran come first
        data = next(stage for stage in selftest_stages.STAGES if stage.name == "data")
        if waiting and not machine.data.is_file():
            waiting = [data, *(stage for stage in waiting if stage is not data)]
        took: list[tuple[float, float]] = []
        while found := next_stage(waiting, ends_at_s - time.monotonic(), machine, pace_of(took)):
            stage, limit_s = found
            waiting.remove(stage)
            record = run_stage(stage, machine, limit_s, reporter.running)
            results.records[stage.name] = record
            if record.result == "passed":
                took.append((record.seconds, stage.estimate_s(machine)))
            results.write()
            reporter.ended(record)
        for stage in waiting:
            if stage.name not in results.records:
                needed = duration(RESERVE * pace_of(took) * stage.estimate_s(machine))
                results.left_out[stage.name] = (
                    f"no time: it needs about {needed}, so more --minutes, or a second call"
                )
        results.write()
        return results


def run_stage(
    stage: Stage, machine: Machine, limit_s: float, running: Callable[[Stage, float, float], None]
) -> Record:
    """Run one stage in a process group of its own, and end all its processes."""
    machine = replace(machine, work=machine.folder / "work" / stage.name)
    log, answer = machine.folder / "logs" / f"{stage.name}.log", machine.work / "answer.json"
    shutil.rmtree(machine.work, ignore_errors=True)
    make_folder(machine.work)
    make_folder(log.parent)
    began_at_s = time.monotonic()
    process = copy_of_this_process(_stage_process, stage.name, machine, log, answer)
    is_cut = False
    try:
        while not has_ended(process):
            elapsed_s = time.monotonic() - began_at_s
            if elapsed_s > limit_s:
                is_cut = True
                break
            running(stage, elapsed_s, limit_s)
            time.sleep(POLL_S)
    finally:
        end_group(process)
    record = Record(
        stage.name, stage.group, stage.what, "passed", round(time.monotonic() - began_at_s, 1), "",
        str(log.relative_to(machine.folder)),
    )  # fmt: skip
    if is_cut:
        return replace(record, result="CUT", text=f"it did not end within {limit_s:.0f} s")
    try:
        found = json.loads(read_foreign_text(answer, limit_bytes=MOST_BYTES))
    except (OSError, ValueError):
        return replace(record, result="FAILED", text=f"its process ended with exit code {process.exitcode}")
    if "problem" in found:
        return replace(record, result="FAILED", text=" ".join(found["problem"].split())[:MOST_TEXT])
    shutil.rmtree(machine.work, ignore_errors=True)
    return replace(record, text=found["text"], figures=found["figures"], missed=found["missed"])


def _stage_process(name: str, machine: Machine, log: Path, answer: Path) -> int:
    """Run a stage in this process: its output goes to ``log``, its result to ``answer``."""
    become_stage(log)
    os.environ["YOLOFLEET_CACHE"] = str((machine.folder / "cache").absolute())
    stage = next(stage for stage in selftest_stages.STAGES if stage.name == name)
    try:
        found: Found = stage.run(machine)
    except Exception as problem:  # also any error of a driver
        traceback.print_exc()
        text = problem.what if isinstance(problem, YolofleetError) else str(problem) or repr(problem)
        errors = LAST_ERROR.findall(log.read_text("utf-8", "replace"))
        if isinstance(problem, StageFailed) and errors and not errors[-1].endswith(text):
            text += f": {errors[-1]}"
        write_json(answer, {"problem": text})
        return 1
    finally:
        end_descendants(os.getpid())
    write_json(answer, asdict(found))
    return 0
