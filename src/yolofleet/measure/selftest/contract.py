"""The plain ``yolofleet selftest``: all legs of the contract, the checks of each device, and one killed process, in a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet.config.schema.machine import SelftestConfig
from yolofleet.measure.selftest.checks import (
    Comparison,
    Leg,
    Record,
    is_broken,
    judge,
    lone_devices,
    plan,
    short,
)
from yolofleet.measure.selftest.device_checks import MODEL
from yolofleet.measure.selftest.failures import killed_rank_check
from yolofleet.measure.selftest.processes import checked_devices, resolved_fleet
from yolofleet.measure.selftest.runs import run_legs
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.screen_table import aligned
from yolofleet.support.errors import ClusterError
from yolofleet.support.files.atomic import emit_json, writing
from yolofleet.support.terminal import duration
from yolofleet.support.text import echo, is_quiet, screen_line

COLUMNS = ("run", "SHA-256", "result", "update off by", "losses off by", "s/step")


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
    Returns:
        0.
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
        for check in [] if titles else checked_devices(lone_devices(device), MODEL):
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
