"""The plain ``yolofleet selftest``: all legs of the contract, the checks of each device, and one killed process, in a table."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.measure.selftest.checks import (
    Comparison,
    Leg,
    Record,
    fleet_of,
    further_legs,
    is_broken,
    judge,
    lone_devices,
    plan,
    short,
)
from yolofleet.measure.trainings import outcome_of, run_training, started_training
from yolofleet.runs.checkpoint.names import step_of
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.screen_table import aligned
from yolofleet.storage.atomic import emit_json, writing
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.system.children import die_with_parent
from yolofleet.support.system.proc import descendants, end_descendants, rank_of
from yolofleet.support.terminal import duration
from yolofleet.support.text import echo, is_quiet, screen_line

COLUMNS = ("run", "SHA-256", "result", "update off by", "losses off by", "s/step")
START_S = 600.0  # until a training has its first checkpoint; the time limit of a stage is shorter as a rule
STALL_S = 20.0  # of the run whose rank is killed
ENDS_WITHIN_S = 60.0  # after the kill: the stall limit, and the end of all processes


def run_contract(
    config: SelftestConfig,
    *,
    titles: Collection[str] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Run all legs, print a line after each, and the verdict.

    Args:
        titles: for tests: of all legs only these; the reference and a fast one are needed to hold.
        environments: for tests: by a leg's title, variables that only its processes get, to break the contract.
    Raises:
        ClusterError: the contract is broken here, or the reference failed; says why, as far as that can be told.
        YolofleetError: no such model or device; the disk refused; somebody stopped a run.
    """
    began_at_s = time.monotonic()
    out = sys.stderr if config.json_out == "-" else sys.stdout
    records: list[Record] = []
    checks: list[dict[str, Any]] = []

    def show(text: str) -> None:
        if not is_quiet():
            echo(text, to=out)

    with TemporaryDirectory(prefix="yolofleet-selftest-", ignore_cleanup_errors=True) as temporary:
        device = resolved_fleet(config.device)
        legs = [leg for leg in plan(device) if not titles or leg.title in titles]
        with writing(Path(temporary)):
            comparison = Comparison(config, legs, Path(temporary))
        show(f"yolofleet selftest: {comparison.text}, on {device}\n{table_line(legs, COLUMNS)}")
        for record in run_legs(comparison, legs, Path(temporary), environments=environments):
            records.append(record)
            show(table_line(legs, cells_of(record, records[0])))
        verdict = judge(records)
        for check in [] if titles else checked_devices(lone_devices(device)):
            checks.append(check)
            show(check_line(check))
        many = next((leg for leg in legs if leg.processes > 1), None)
        if many is not None and sys.platform == "linux" and not titles:
            extra = {"YOLOFLEET_CACHE": str(Path(temporary, "cache"))}
            folder = RunFolder(Path(temporary, "killed"))
            settings = comparison.settings_of(many)
            checks.append(killed_rank_check(settings, device, many.processes, folder, extra))
            show(check_line(checks[-1]))
    elapsed_s = time.monotonic() - began_at_s
    figures = {
        "contract_holds": verdict.cause is None,
        "verdict": verdict.text,
        "cause": verdict.cause and asdict(verdict.cause),
        "settings": config.model_dump(),
        "runs": [asdict(record) for record in records],
        "checks": checks,
        "seconds": elapsed_s,
    }
    emit_json(figures, config.json_out)
    show(cost(records))
    if verdict.cause is not None:
        raise ClusterError(verdict.text, source=verdict.cause.what, hint=verdict.cause.hint)
    if failed := [check for check in checks if not check["passed"]]:
        raise ClusterError(
            f"{len(failed)} of {len(checks)} checks failed, first: {failed[0]['name']} on {failed[0]['device']}",
            source=failed[0]["detail"],
            hint="another torch build or driver; please report it with what --json FILE writes",
        )
    echo(f"{verdict.text} ({duration(elapsed_s)})", to=out)
    return 0


def table_line(legs: Sequence[Leg], cells: Sequence[str]) -> str:
    """Return a line of a table that grows: its columns have the width of the longest run's title."""
    widest = (max((leg.title for leg in legs), key=len), "0" * 12, "not judged", "", "", "0.0000")
    return aligned(COLUMNS, [widest, cells])[-1]


def cells_of(record: Record, reference: Record) -> Sequence[str]:
    if record.problem:
        return record.leg.title, "", "FAILED", "", "", ""
    good = {"exact": "equal", "fast": "rounding", "default": "not judged"}[record.leg.kind]
    result = "reference" if record is reference else "DIFFERS" if is_broken(record, reference) else good
    off = [f"{x:.1e}" if x else "0" for x in (record.update_difference, record.loss_difference)]
    return record.leg.title, short(record.sha256), result, *off, f"{record.step_s:.3g}"


def cost(records: Sequence[Record]) -> str:
    """Return the step time of exact sums relative to fast sums on equal kernels and to a default run."""
    exact = {r.leg.name: r.step_s for r in records if r.leg.kind == "exact" and not r.problem}
    others = [r for r in records if r.leg.kind != "exact" and not r.problem and r.leg.name in exact]
    ratios = [f"{exact[r.leg.name] / r.step_s:.2f} ({r.leg.title})" for r in others]
    return f"seconds a step, exact / other: {', '.join(ratios)}"


def check_line(check: Mapping[str, Any]) -> str:
    """Return a line of the table of checks: device, check, result, detail."""
    result = "passed" if check["passed"] else "FAILED"
    device, detail = screen_line(check["device"]), screen_line(check["detail"])
    return f"{device:<6}  {check['name']:<30}  {result}  {detail}"


def run_legs(
    comparison: Comparison,
    legs: Sequence[Leg],
    folder: Path,
    *,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Record]:
    """Run the legs one after another, and further ones that help to find a cause.

    Args:
        folder: for their runs and their cache.
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
        code, problem = run_training(comparison.settings_of(leg), leg.processes, run, extra)
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
                    detail = f"it ended before the kill: {outcome_of(folder, run.wait())[1]}"
                    return {**check, "detail": detail[:300]}
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


def copy_of_this_process(target: Callable[..., int], *args: Any) -> BaseProcess:
    """Start ``target`` in a copy of this process, which has torch loaded; its result is the exit code.

    A copy saves the seconds that torch takes to load. This process must not ask for devices, because a process that has used
    CUDA cannot be forked. Systems other than Linux start a new Python instead, which loads torch again.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process: BaseProcess = context.Process(target=_exit_with, args=(target, *args))
    process.start()
    return process


def _exit_with(target: Callable[..., int], *args: Any) -> None:
    """End this process with the result of ``target``. Exit handlers of ``atexit`` do not run in a copy."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.exit(target(*args))


def resolved_fleet(device: str) -> str:
    """Return :func:`checks.fleet_of` of ``--device``, for which a copy of this process asks. Raises ConfigError."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = copy_of_this_process(_send_fleet, device, sender)
    sender.close()
    try:
        fleet, problem = receiver.recv()
    except EOFError:
        what = f"--device {device}: the process that asks for its devices crashed"
        fleet, problem = "", {"what": what, "hint": "yolofleet doctor"}
    process.join()
    if problem:
        raise ConfigError(**problem)
    return str(fleet)


def _send_fleet(device: str, sender: Connection) -> int:
    try:
        sender.send((fleet_of(device), None))
    except ConfigError as problem:
        sender.send(("", {name: getattr(problem, name) for name in ("what", "source", "hint")}))
    return 0


def checked_devices(devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the checks of each device in a process of its own, so that a device that crashes does not end this process.

    Yields:
        One dictionary a check, when the check has ended: device, name, passed, detail.
    """
    from yolofleet.measure.selftest.device_checks import send_checks

    for device in devices:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = copy_of_this_process(send_checks, device, sender)
        sender.close()
        with receiver, suppress(EOFError):
            while True:
                yield {"device": device, **receiver.recv()}
        process.join()
        if process.exitcode:
            detail = f"ended with exit code {process.exitcode}"
            yield {"device": device, "name": "all checks", "passed": False, "detail": detail}
