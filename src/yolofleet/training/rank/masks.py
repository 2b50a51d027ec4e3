"""Refuse data without the masks that a network needs."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.resolve import COMMAND_LINE, Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.family import MASKED
from yolofleet.families.networks.description import ModelDescription
from yolofleet.support.errors import DataError


def check_masks(*indexes: DataIndex, instead: str) -> None:
    """Raise DataError if a split has labels, and none of them has a mask.

    Args:
        instead: what the user can do with these labels.
    """
    for index in indexes:
        if len(index.classes) and not len(index.run_lengths):
            what = f"no label of {index.split} has a mask, which the network needs"
            raise DataError(what, hint=f"label polygons or masks, or {instead}")


def way_to_boxes(resolved: Resolved[TrainConfig], description: ModelDescription) -> str:
    """Return how to learn boxes with the same network, for a hint."""
    if not description.name.endswith(MASKED):
        return "choose a network without masks"
    named = next((name for name in ("cfg", "model", "weights") if getattr(resolved.value, name)), "weights")
    is_typed = resolved.sources[named] == COMMAND_LINE
    if is_typed and Path(str(getattr(resolved.value, named))).stem.endswith(MASKED):
        return "--task boxes"
    return f"--{'cfg' if named == 'cfg' else 'model'} {description.name.removesuffix(MASKED)}"
