"""Names of files in the folder of a run. No torch here."""

from __future__ import annotations

import re
from pathlib import Path

STATES = "checkpoints"
LISTING = f"{STATES}/data.json"  # of the data set
RESULTS, EVENTS = "results.csv", "events.jsonl"
NAME = re.compile(r"step-(\d+)\.safetensors")


def name_of(step: int) -> str:
    """Return the name of the state after so many steps."""
    return f"step-{step:08d}.safetensors"


def step_of(path: Path) -> int:
    """Return the step in the name of a state."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
