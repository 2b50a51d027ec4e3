"""What a run records of its start weights: where they come from, their SHA-256 and their licence."""

from __future__ import annotations

from yolofleet.config.hub_names import is_hub_name
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.contents import published_as
from yolofleet.families.weights.hub import hub_weights
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import inputs_of, read_events

SCRATCH = "none (random start weights)"  # the licence of weights that a run has trained from random ones


def start_facts(name: str) -> dict[str, str]:
    """Return the facts of a value of ``--weights``: ``given``, ``sha256``, and as far as they are known ``licence`` and ``origin``.

    Weights that a run has trained have the licence of those that it started from.

    Raises:
        CheckpointError, DownloadError: as :func:`resolve_weights`.
    """
    path = resolve_weights(name)
    same, _, sha256 = published_as(path)
    facts = {"given": name, "sha256": sha256}
    if same is not None:
        return {**facts, "licence": same.item.licence, "origin": same.item.origin}
    if is_hub_name(name):
        found = hub_weights(name)
        return {**facts, "licence": found.licence, "origin": found.origin}
    earlier = RunFolder(path.absolute().parent.parent)
    if path.absolute().parent == earlier.weights and (events := read_events(earlier.events(0))):
        known = inputs_of(events)
        before = known.get("weights", {"licence": SCRATCH} if "data" in known else {})
        facts |= {key: str(before[key])[:200] for key in ("licence", "origin") if before.get(key)}
    return facts
