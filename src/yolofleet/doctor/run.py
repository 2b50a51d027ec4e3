"""Examine this machine, and print findings. ``hosts.py`` examines several machines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TextIO

from yolofleet.config.resource_estimate import by_number
from yolofleet.config.resources import RunResources
from yolofleet.config.strict import HERE
from yolofleet.doctor.collect import all_facts
from yolofleet.doctor.findings import LEVELS, Finding, worst
from yolofleet.doctor.host_facts import read_answer
from yolofleet.doctor.local import estimate_for, judge_host
from yolofleet.doctor.network import judge_network
from yolofleet.errors import ClusterError
from yolofleet.text import echo, is_quiet

PLURALS = {"ok": "in order", "note": "notes", "warn": "warnings", "fault": "faults"}


def examine_here(wanted: RunResources, *, port: int = 0, quick: bool = False) -> list[Finding]:
    """Examine this machine alone.

    Args:
        port: that a rendezvous would use here; 0 = none.
        quick: only what takes a tenth of a second; two seconds if the run asks for GPUs.
    """
    folders = [str(wanted.results)]
    question = {"folders": folders, "port": port, "quick": quick, "count_gpus": by_number(wanted.device)}
    facts = read_answer(HERE, "facts", question, all_facts(question))
    return [*judge_host(facts, estimate_for(wanted, facts)), *judge_network(facts)]


def tell(findings: Sequence[Finding], stream: TextIO) -> None:
    """Print findings, the worst last, then their numbers. Equal findings of several hosts are printed once.

    ``--quiet`` leaves out findings that are no fault.
    """
    wheres: dict[Finding, list[str]] = {}
    for one in findings:
        wheres.setdefault(replace(one, where=""), []).append(one.where)
    for one, where in sorted(wheres.items(), key=lambda entry: LEVELS.index(entry[0].level)):
        if one.level == LEVELS[-1] or not is_quiet():
            echo(replace(one, where=", ".join(where)).render(), to=stream)
    counts = Counter(one.level for one in wheres)
    told = [f"{counts[level]} {_plural(level, counts[level])}" for level in reversed(LEVELS) if counts[level]]
    if not is_quiet():
        echo("", to=stream)
    echo(", ".join(told) or "nothing found", to=stream)


def _plural(level: str, count: int) -> str:
    return PLURALS[level] if level == "ok" or count != 1 else PLURALS[level].removesuffix("s")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings for JSON."""
    return {"worst": worst(findings), "findings": [one.to_dict() for one in findings]}


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 4 if there is a fault, else 0."""
    return ClusterError.exit_code if worst(findings) == "fault" else 0


def stream_for(json_out: str) -> TextIO:
    """Return where to print findings: standard error if JSON goes to standard output."""
    return sys.stderr if json_out == "-" else sys.stdout
