"""Examine this machine, wholly or by the quick checks before a run. ``hosts.py`` examines several machines."""

from __future__ import annotations

from yolofleet.config.resource_estimate import by_number
from yolofleet.config.resources import RunResources
from yolofleet.config.strict import HERE
from yolofleet.doctor.collect import all_facts
from yolofleet.doctor.findings import Finding
from yolofleet.doctor.host_facts import read_answer
from yolofleet.doctor.local import estimate_for, judge_host

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


def examine_here(wanted: RunResources, *, port: int = 0, quick: bool = False) -> list[Finding]:
    """Examine this machine alone.

    Args:
        port: that a rendezvous would use here; 0 = none.
        quick: only what takes a tenth of a second; two seconds if the run asks for GPUs.
    """
    folders = [str(wanted.results)]
    question = {"folders": folders, "port": port, "quick": quick, "count_gpus": by_number(wanted.device)}
    facts = read_answer(HERE, "facts", question, all_facts(question))
    return judge_host(facts, estimate_for(wanted, facts))


def preflight(wanted: RunResources) -> list[Finding]:
    """Return what would end or slow a run on this machine."""
    return [one for one in examine_here(wanted, quick=True) if one.code in QUICK]
