"""This machine, what a run on it wants to know before it starts, and how findings are told. Several: ``fleet.py``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TextIO

from yolofleet.config.resource_estimate import by_number, estimate_here
from yolofleet.config.resources import RunResources
from yolofleet.errors import ClusterError
from yolofleet.fleet.doctor.findings import LEVELS, Finding, worst
from yolofleet.fleet.doctor.local import judge_host
from yolofleet.fleet.doctor.network import judge_network
from yolofleet.fleet.doctor.probes import run_probe
from yolofleet.text import echo

QUICK = (
    "shm-small",
    "memory-short",
    "disk-low",
    "disk-refuses",
    "open-files",
    "stray-variables",
    "card-setting",
    "gpu-none",
    "gpu-missing",
    "gpus-hidden",
    "torch-without-cuda",
)
PLURALS = {"ok": "in order", "note": "notes", "warn": "warnings", "fault": "faults"}


def examine_here(wanted: RunResources, *, port: int = 0, quick: bool = False) -> list[Finding]:
    """This machine alone.

    Args:
        port: that a rendezvous would use here; 0 = none.
        quick: only what takes a tenth of a second; two where GPUs are asked for.
    """
    folders = [str(wanted.results)]
    wishes = {"folders": folders, "port": port, "quick": quick, "count_gpus": by_number(wanted.device)}
    facts = run_probe("facts", wishes)
    return [*judge_host(facts, estimate_here(wanted, facts)), *judge_network(facts)]


def preflight(wanted: RunResources) -> list[Finding]:
    """What would end a run on this machine, or hurt it, as far as that shows in a tenth of a second."""
    return [f for f in examine_here(wanted, quick=True) if f.code in QUICK]


def tell(findings: Sequence[Finding], stream: TextIO) -> None:
    """The worst comes last, next to the verdict; what is the same on several hosts is said once."""
    wheres: dict[Finding, list[str]] = {}
    for finding in findings:
        wheres.setdefault(replace(finding, where=""), []).append(finding.where)
    for finding, where in sorted(wheres.items(), key=lambda entry: LEVELS.index(entry[0].level)):
        echo(replace(finding, where=", ".join(where)).render(), to=stream)
    counts = Counter(finding.level for finding in wheres)
    told = [f"{counts[level]} {_plural(level, counts[level])}" for level in reversed(LEVELS) if counts[level]]
    echo(f"\n{', '.join(told) or 'nothing found'}", to=stream)


def _plural(level: str, count: int) -> str:
    return PLURALS[level] if level == "ok" or count != 1 else PLURALS[level].removesuffix("s")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"worst": worst(findings), "findings": [finding.to_dict() for finding in findings]}


def exit_code(findings: Iterable[Finding]) -> int:
    return ClusterError.exit_code if worst(findings) == "fault" else 0


def stream_for(json_out: str) -> TextIO:
    """Where to tell: what reads the JSON on standard output reads nothing else."""
    return sys.stderr if json_out == "-" else sys.stdout
