"""The data set of a run, as its checkpoints state it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.listing import Id, copy_id, files_digest
from yolofleet.support.text import listed, screen_line
from yolofleet.training.parallel.world import World

MOST_COPIES = 1 << 12  # of a data set
Amount = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Stored(BaseModel):
    """A part of the values of a training state."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StoredData(Stored):
    """The data set of a run (``training/rank/same_data.py``).

    Attributes:
        images: number of the training images.
        copies: ids of the copies of the data set that the run has read and that count as equal.
        accepted: the changes that the user has accepted, in words.
        val: digest of the validation images and labels; earlier versions did not store it.
    """

    images: Count
    copies: Annotated[list[Id], Field(max_length=MOST_COPIES)]
    val: Annotated[str, Field(max_length=64)] = ""
    accepted: Annotated[list[str], Field(max_length=1 << 12)] = []

    def accepted_notes(self) -> list[str]:
        return [
            f"the data set has changed (--allow changed-data) {screen_line(change)}"
            for change in self.accepted
        ]


def copies_of_hosts(splits: Sequence[DataIndex], world: World) -> list[tuple[str, str]]:
    """Return the host of each rank and the id of its copy of the data set. Collective: every rank."""
    return [tuple(theirs) for theirs in world.gather((world.host, copy_id(splits)))]


def data_of_new_run(splits: Sequence[DataIndex], images: int, world: World) -> StoredData:
    """Return what the states of a new run say of its data set. Collective: every rank.

    Args:
        splits: train and val.
    """
    every = copies_of_hosts(splits, world)
    if others := sorted({host for host, copy in every if copy != every[0][1]}):
        world.console.note(
            f"the images of {listed(others)} have other times than those of {every[0][0]}: not compared"
        )
    copies = list(dict.fromkeys(copy for _, copy in every))
    return StoredData(images=images, copies=copies, val=files_digest(splits[1]))
