"""The quick checks of this machine before a run."""

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


def preflight(wanted: RunResources) -> list[Finding]:
    """Return what would end or slow a run on this machine.

    It takes a tenth of a second, or two seconds if the run asks for GPUs.
    """
    question = {"folders": [str(wanted.results)], "quick": True, "count_gpus": by_number(wanted.device)}
    facts = read_answer(HERE, "facts", question, all_facts(question))
    return [one for one in judge_host(facts, estimate_for(wanted, facts)) if one.code in QUICK]
