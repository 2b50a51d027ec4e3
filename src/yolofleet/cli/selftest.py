"""`yolofleet selftest`: the same short training by one process, by several and by DataParallel, compared."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import dump_config, resolve_selftest, resolve_train
from yolofleet.config.schema import SelftestConfig
from yolofleet.errors import ClusterError, ConfigError, Stopped
from yolofleet.files.atomic import emit_json, storage_error, write_text
from yolofleet.fleet.job import JobSpec, agent_argv, agent_environment
from yolofleet.fleet.launch.local import explain
from yolofleet.report.console import aligned, duration
from yolofleet.report.folder import RunFolder
from yolofleet.runs.plan import is_worker
from yolofleet.system.children import die_with_parent, module_argv, module_environment
from yolofleet.system.proc import descendants, end_descendants, rank_of
from yolofleet.text import echo, is_quiet, screen_line

if TYPE_CHECKING:
    from yolofleet.runs.selftest import Leg, Record, Verdict

STALL_S = 20.0  # of the run whose rank is killed
ENDS_WITHIN_S = 60.0  # after the kill: the stall limit, and the end of all processes
START_S = 600.0  # until its first checkpoint


def run(given: dict[str, Any], config_file: str) -> int:
    if is_worker():
        raise ConfigError("selftest starts its processes itself", hint="start it without torchrun")
    return selftest(resolve_selftest(given, config_file=config_file).value)


def selftest(
    config: SelftestConfig,
    *,
    titles: Collection[str] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Run all legs, print a line after each, and the verdict.

    Args:
        titles: for tests: of all legs only these; the reference and a fast one are needed to hold.
        environments: for tests: by a leg's title, variables that only its processes get, to break the contract.
    Returns:
        0, or the exit code of the reference when that run already failed (it has said why).
    Raises:
        ClusterError: the contract is broken here; says why, as far as that can be told.
        YolofleetError: no such model or device; the disk refused; somebody stopped a run.
    """
    from yolofleet.runs.selftest import Comparison, fleet_of, further_legs, judge, lone_devices, plan

    began_at_s = time.monotonic()
    device = fleet_of(config.device)
    legs = [leg for leg in plan(device) if not titles or leg.title in titles]
    out = sys.stderr if config.json_out == "-" else sys.stdout
    records: list[Record] = []
    with TemporaryDirectory(prefix="yolofleet-selftest-", ignore_cleanup_errors=True) as temporary:
        try:
            comparison = Comparison(config, legs, Path(temporary))
        except OSError as refusal:
            raise storage_error(refusal, Path(temporary)) from None
        table = Table(legs)
        told(f"yolofleet selftest: {comparison.text}, on {device}\n{table.header}", out)
        waiting = list(legs)
        while waiting:
            leg = waiting.pop(0)
            folder = RunFolder(Path(temporary, f"run-{len(records)}"))
            extra = {
                "YOLOFLEET_CACHE": str(Path(temporary, "cache")),
                **(environments or {}).get(leg.title, {}),
            }
            code, problem = train(comparison.settings_of(leg), leg.processes, folder, extra)
            if code and not records:
                echo(problem, to=sys.stderr)
                return code
            records.append(comparison.read(leg, folder, problem))
            told(table.line(records[-1], records[0]), out)
            if len(records) == len(legs):
                waiting = further_legs(records)
        verdict = judge(records)
        checks = [] if titles else device_checks(lone_devices(device), out)
        many = next((leg for leg in legs if leg.processes > 1), None)
        if many is not None and sys.platform == "linux" and not titles:
            extra = {"YOLOFLEET_CACHE": str(Path(temporary, "cache"))}
            folder = RunFolder(Path(temporary, "killed"))
            settings = comparison.settings_of(many)
            checks.append(killed_rank_check(settings, device, many.processes, folder, extra))
            told(check_line(checks[-1]), out)
    elapsed_s = time.monotonic() - began_at_s
    write_figures(config, verdict, records, checks, elapsed_s)
    told(cost(records), out)
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


def started(
    settings: Mapping[str, Any],
    processes: int,
    folder: RunFolder,
    extra: Mapping[str, str],
    *,
    source: str = "selftest",
) -> subprocess.Popen[bytes]:
    """Start a training in processes of its own."""
    resolved, recipe = resolve_train(settings, source=source)
    write_text(folder.job, dump_config(resolved, recipe))
    for words in folder.logs.glob("error-rank-*.json"):
        words.unlink()  # of the run that this one resumes
    if processes > 1:
        argv = agent_argv(JobSpec(folder.path, processes))
    else:
        argv = module_argv("yolofleet.worker", str(folder.path), str(folder.job), "0")
    with (folder.logs / "agent.log").open("wb") as log:  # `explain` reads it
        return subprocess.Popen(
            argv,
            env={**module_environment(agent_environment(os.environ)), **extra},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def outcome(
    run: subprocess.Popen[bytes], folder: RunFolder, timeout_s: float | None = None
) -> tuple[int, str]:
    """Wait for the end of a training; return what :func:`train` returns.

    Raises:
        subprocess.TimeoutExpired: it did not end.
        Stopped: somebody stopped the run.
    """
    if (code := run.wait(timeout_s)) == 0:
        return 0, ""
    with contextlib.redirect_stderr(io.StringIO()) as words:
        code = explain(folder.path, code, 0)
    if code == Stopped.exit_code:
        raise Stopped("stopped on request, before there was a result")
    return code, words.getvalue().strip()


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
            while not ranks or not any(folder.checkpoints.glob("step-*.safetensors")):
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
    last = max(int(file.stem.split("-")[1]) for file in folder.checkpoints.glob("step-*.safetensors"))
    again = {"resume": str(folder.path), "max_steps": last + 1}
    code, problem = train(again, processes, folder, extra)
    if code:
        return {**check, "detail": f"it does not resume: {problem}"[:300]}
    return {**check, "passed": True, "detail": f"ended after {elapsed_s:.1f} s, resumed after step {last}"}


class Table:
    """Lines of a table that grows: columns have the width of the longest run's title."""

    COLUMNS = ("run", "SHA-256", "result", "update off by", "losses off by", "s/step")

    def __init__(self, legs: Sequence[Leg]) -> None:
        self.widest = (max((leg.title for leg in legs), key=len), "0" * 12, "not judged", "", "", "0.0000")
        self.header = self._format(*self.COLUMNS)

    def _format(self, *cells: str) -> str:
        return aligned(self.COLUMNS, [self.widest, cells])[-1]

    def line(self, record: Record, reference: Record) -> str:
        from yolofleet.runs.selftest import is_broken, short

        if record.problem:
            return self._format(record.leg.title, "", "FAILED", "", "", "")
        good = {"exact": "equal", "fast": "rounding", "default": "not judged"}[record.leg.kind]
        result = "reference" if record is reference else "DIFFERS" if is_broken(record, reference) else good
        off = [f"{x:.1e}" if x else "0" for x in (record.update_difference, record.loss_difference)]
        return self._format(record.leg.title, short(record.sha256), result, *off, f"{record.step_s:.3g}")


def cost(records: Sequence[Record]) -> str:
    """Return the step time of exact sums relative to fast sums on equal kernels and to a default run."""
    exact = {r.leg.name: r.step_s for r in records if r.leg.kind == "exact" and not r.problem}
    others = [r for r in records if r.leg.kind != "exact" and not r.problem and r.leg.name in exact]
    ratios = [f"{exact[r.leg.name] / r.step_s:.2f} ({r.leg.title})" for r in others]
    return f"seconds a step, exact / other: {', '.join(ratios)}"


def device_checks(devices: Sequence[str], out: TextIO) -> list[dict[str, Any]]:
    """Run the checks of each device in a process of its own and print a line after each.

    Returns:
        One dictionary a check: device, name, passed, detail.
    """
    done: list[dict[str, Any]] = []
    for device in devices:
        child = subprocess.Popen(
            module_argv("yolofleet.runs.device_checks", device),
            env=module_environment(agent_environment(os.environ)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        assert child.stdout is not None
        words = ""
        with child:
            for line in child.stdout:
                if not line.startswith('{"name"'):
                    words = line.strip() or words
                    continue
                done.append({"device": device, **json.loads(line)})
                told(check_line(done[-1]), out)
        if child.returncode:
            detail = f"ended with exit code {child.returncode}: {words[:300]}"
            done.append({"device": device, "name": "all checks", "passed": False, "detail": detail})
            told(check_line(done[-1]), out)
    return done


def told(text: str, out: TextIO) -> None:
    """Print a detail of the verdict, unless ``--quiet``."""
    if not is_quiet():
        echo(text, to=out)


def check_line(check: Mapping[str, Any]) -> str:
    """Return a line of the table of checks: device, check, result, detail."""
    result = "passed" if check["passed"] else "FAILED"
    return "  ".join(
        (screen_line(check["device"]).ljust(6), check["name"].ljust(30), result, screen_line(check["detail"]))
    )


def write_figures(
    config: SelftestConfig,
    verdict: Verdict,
    records: Sequence[Record],
    checks: Sequence[Mapping[str, Any]],
    elapsed_s: float,
) -> None:
    """Write the figures for ``--json``."""
    figures = {
        "contract_holds": verdict.cause is None,
        "verdict": verdict.text,
        "cause": verdict.cause and asdict(verdict.cause),
        "settings": config.model_dump(),
        "runs": [asdict(record) for record in records],
        "checks": list(checks),
        "seconds": elapsed_s,
    }
    emit_json(figures, config.json_out)


command = SchemaCommand(
    "selftest",
    SelftestConfig,
    run,
    help="Test on the devices of this machine that the number of processes does not change the result. Train the same few "
    "steps with one process, several processes, unequal shares and DataParallel. With exact reduction the weights must be "
    "equal bit for bit, with fast reduction up to rounding. Then check each device: ten steps compared with the CPU, an fp16 "
    "overflow, resuming with each optimizer. Finally kill one process of a run: the others must end, and the run must "
    "resume. If a test fails, print the likely cause and end with exit code 4.",
)
