"""What a run has written into its event streams."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from yolofleet.runs.report.folder import RunFolder


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the events of all ranks by time; leave out a line that a crash has cut."""
    events = []
    for path in (folder.events(0), *folder.logs.glob("rank-*.events.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["time"])
