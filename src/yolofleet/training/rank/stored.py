"""What a run stores beside its tensors: takes up its state, and writes ``config.yaml`` and the listing of its data set."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe
from yolofleet.data.datasets.listing import Listing, reading_contents
from yolofleet.runs.checkpoint.names import NAME
from yolofleet.runs.checkpoint.store import set_aside, set_aside_later
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import StorageError
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import write_config
from yolofleet.training.rank.inputs import Inputs
from yolofleet.training.rank.network import Prepared
from yolofleet.training.stored_data import StoredData, data_of_new_run


def taken_up(
    inputs: Inputs,
    prepared: Prepared,
    identity: dict[str, Any],
    world: World,
    clock: Clock,
    folder: RunFolder,
    events: EventLog,
) -> tuple[StoredData, bool]:
    """Restore the stored state if it is of this run. Collective: every rank.

    Returns:
        what checkpoints say of the data, and whether the validation images or labels are others than those of the state.
    """
    data, snapshot = inputs.data, inputs.snapshot
    if snapshot is None:
        return data_of_new_run(data.splits, len(data.train), world), False
    from yolofleet.training.rank.same_data import check_same_data
    from yolofleet.training.resume import check_resume

    check_resume(snapshot.values["fingerprint"], identity, prepared.config, world.console)
    found = check_same_data(data, snapshot, identity["data"], prepared.config, world, folder, events)
    prepared.state.restore(snapshot)
    clock.restore(snapshot.values["clock"])
    return found


class FilesBesideStates:
    """What a resume needs beside a state: ``config.yaml``, and the listing of the data set."""

    def __init__(self, folder: RunFolder, inputs: Inputs, recipe: Resolved[Recipe]) -> None:
        self.folder, self._inputs, self._recipe = folder, inputs, recipe

    def begin(self, world: World) -> str:
        """Move the files of an earlier run in the folder aside, and write; return why the disk refuses, else "".

        If ``--resume`` names a state, later ones are moved aside, too.

        Raises:
            StorageError: the disk of rank 0 refuses.
        """
        try:
            for kept in set_aside(self.folder.path) if self._inputs.snapshot is None else ():
                world.console.note(f"an earlier run in this folder: its files are in {kept}")
            snapshot, resume = self._inputs.snapshot, self._inputs.config.resume
            is_named = not world.restarts and NAME.fullmatch(Path(resume).name)
            if (
                snapshot is not None
                and is_named
                and (aside := set_aside_later(self.folder.path, snapshot.step))
            ):
                world.console.note(
                    f"states after step {snapshot.step}, which this run leaves, are in {aside}"
                )
            data = self._inputs.data
            self._listing = Listing.of(data.splits, data.root, self.folder.listing)
            self.write()
        except StorageError as problem:  # this rank writes nothing then
            if world.is_main:
                raise
            return f"{world.host}: {problem.what}"
        return ""

    def write(self) -> None:
        """Write the files. Raise StorageError if the disk refuses."""
        write_config(self.folder, self._inputs.resolved, self._recipe)
        write_text(self.folder.listing, self._listing.text())

    def reading_contents(self) -> AbstractContextManager[None]:
        """Read the contents of the images in the background, for the listing."""
        return reading_contents(self._listing, self.folder.listing, self._inputs.data.splits)
