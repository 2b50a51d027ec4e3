"""The time line of a run: its starts, the phases of every rank in each epoch, and what else happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from yolofleet.runs.report.clock import PHASES
from yolofleet.runs.report.results import number

MOST_SPANS = 120  # bars of the time line; adjacent epochs are added up to stay below it
MOST_RANKS = 64  # ranks in the time line


def timeline_of(
    events: Sequence[Mapping[str, Any]], of_launcher: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the starts, the phases of every rank in each epoch, and what else happened; None without epochs.

    Times are seconds from the first start. An epoch's times are sums: the order of phases within it is not recorded.
    """
    starts = [event for event in events if event.get("kind") == "start"]
    phases = [event for event in events if event.get("kind") == "phases" and _is_table(event.get("seconds"))]
    if not starts:
        return None
    began_s = starts[0]["time"] - (number(starts[0].get("start_s")) or 0)
    events = sorted([*events, *of_launcher], key=lambda event: event["time"])
    events = [event for event in events if event["time"] >= began_s]
    attempts = [
        {
            "from_s": max(event["time"] - (number(event.get("start_s")) or 0) - began_s, 0),
            "to_s": event["time"] - began_s,
            "restarts": event.get("restarts"),
            "processes": event.get("world"),
            "step": event.get("step"),
        }
        for event in starts
    ]
    spans, ends_s = [], 0.0
    for event in phases:
        at_s = event["time"] - began_s
        latest = max((a["to_s"] for a in attempts if a["to_s"] <= at_s), default=0.0)
        from_s = max(ends_s, latest)  # a resumed epoch also counts seconds of the attempt before
        spans.append(
            {
                "from_s": from_s,
                "to_s": max(at_s, from_s),
                "epoch": event.get("epoch"),
                "seconds": event["seconds"],
            }
        )
        ends_s = spans[-1]["to_s"]
    hosts: list[Any] = next(
        (event["hosts"] for event in reversed(phases) if isinstance(event.get("hosts"), list)), []
    )
    ranks = _ranks(phases, hosts)
    shown = sorted(ranks, key=lambda rank: (-rank["slowest_epochs"], rank["seconds"]["comm"]))[:MOST_RANKS]
    order = sorted(rank["rank"] for rank in shown)
    return {
        "phases": list(PHASES),
        "attempts": attempts,
        "ends_s": max([ends_s, *(event["time"] - began_s for event in events)]),
        "ranks": [ranks[rank] for rank in order],
        "ranks_in_all": len(ranks),
        "spans": [_of_ranks(span, order) for span in _merged(spans)],
        "marks": [
            {"at_s": event["time"] - began_s, "kind": kind, "text": text.format_map(defaultdict(str, event))}
            for event in events
            if (text := _MARKS.get(kind := str(event.get("kind"))))
        ][:200],
    }


_MARKS = {
    "restart": "started again after step {step}: {why}",
    "host_left": "{host} was left out: {why}",
    "host_joined": "{host} takes part",
    "rollback": "back to the checkpoint of step {step}: {why}",
    "ends_in_time": "the minutes end after step {last_step}",
    "end": "finished after step {step}",
    "changed_data": "the run went on with another data set: {why}",
    "unreadable": "an image was replaced: {why}",
}


def _is_table(value: Any) -> bool:
    """Return whether the value has one number for each phase of each rank."""
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == len(PHASES) and all(isinstance(v, (int, float)) for v in row)
        for row in value
    )


def _ranks(phases: Sequence[Mapping[str, Any]], hosts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return for each rank its host, its seconds by phase, and in how many epochs the others waited for it.

    ``waited_s`` is how long the rank that waited most waited for it in these epochs.
    """
    count = max((len(event["seconds"]) for event in phases), default=0)
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "host": str(hosts[rank]) if rank < len(hosts) else "",
            "seconds": dict.fromkeys(PHASES, 0.0),
            "slowest_epochs": 0,
            "waited_s": 0.0,
        }
        for rank in range(count)
    ]
    comm = PHASES.index("comm")
    for event in phases:
        table = event["seconds"]
        for rank, row in enumerate(table):
            for phase, seconds in zip(PHASES, row, strict=True):
                ranks[rank]["seconds"][phase] += seconds
        if len(table) > 1:
            waits = [row[comm] for row in table]
            slowest = min(range(len(table)), key=waits.__getitem__)
            ranks[slowest]["slowest_epochs"] += 1
            ranks[slowest]["waited_s"] += max(waits) - waits[slowest]
    return ranks


def _merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most about ``MOST_SPANS`` spans: adjacent epochs without a pause between them are added up."""
    size, merged = -(-len(spans) // MOST_SPANS) or 1, list[dict[str, Any]]()
    for place, span in enumerate(spans):
        last = merged[-1] if merged else None
        if (
            last is None
            or place % size == 0
            or span["from_s"] > last["to_s"]
            or len(span["seconds"]) != len(last["seconds"])
        ):
            merged.append({**span, "epochs": 1})
            continue
        table = zip(last["seconds"], span["seconds"], strict=True)
        added = [[a + b for a, b in zip(mine, more, strict=True)] for mine, more in table]
        last |= {"to_s": span["to_s"], "epochs": last["epochs"] + 1, "seconds": added}
    return merged


def _of_ranks(span: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Return the span with the rows of some ranks, rounded; None for a rank that did not take part."""
    table = span["seconds"]
    chosen = [[round(s, 3) for s in table[rank]] if rank < len(table) else None for rank in order]
    return {**span, "from_s": round(span["from_s"], 3), "to_s": round(span["to_s"], 3), "seconds": chosen}
