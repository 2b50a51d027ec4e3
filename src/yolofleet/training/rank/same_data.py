"""Find out at a resume, and at a start after a failure, whether the data set is still the one that the run has read.

Each state has the ids of the copies of the data set that the run has read (``data/datasets/listing.py``): hosts may have their own, with
other times. For each host:

1. Its copy has one of these ids: nothing has changed.
2. Else its files are compared with a listing of the run, which is beside the states or in the cache. Where only times differ, the
   contents are read and compared with the digests of the listing.
3. What differs, and what cannot be compared, ends the run, unless ``--allow changed-data``: then all later states say so. Figures
   on other validation images cannot be compared, so the search for the best weights then begins anew.
   Beside a host whose copy has not changed, a copy that cannot be compared causes a warning, as at the start of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from yolofleet.config.schema import TrainConfig
from yolofleet.data.datasets.listing import (
    Listing,
    compare,
    files_digest,
    is_same_content,
    paths_of,
    stored_listing,
)
from yolofleet.runs.checkpoint.store import Snapshot
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.storage.mirrored import download
from yolofleet.support.errors import DataError
from yolofleet.support.text import listed, screen_line
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.inputs import Data
from yolofleet.training.stored_data import MOST_COPIES, StoredData, copies_of_hosts

AT_ONCE = 64  # files of one rank
THREADS = 8  # they mostly wait for the disk
MUST_RESTORE = "restore the data set, or start a new run with --weights"


def check_same_data(
    data: Data,
    snapshot: Snapshot,
    digest: str,
    config: TrainConfig,
    world: World,
    folder: RunFolder,
    events: EventLog,
) -> tuple[StoredData, bool]:
    """Compare the copy of each host with the data set of the run. Collective: every rank.

    Args:
        snapshot: the state to go on from.
        digest: of the training images and labels that this start has indexed; the fingerprint has it.
    Returns:
        what the states of the run say of its data set, and whether the validation images or labels have changed.
    Raises:
        DataError: a file has changed, or cannot be compared.
        StorageError: a store cannot be read.
    """

    def refused(what: str, hint: str) -> DataError:
        source = f"--resume {config.resume}" if config.resume else "the start after a failure"
        return DataError(
            f"{config.data} differs from the data set of the run: {what}", source=source, hint=hint
        )

    every, images = copies_of_hosts(data.splits, world), len(data.train)
    here, copies = every[world.rank][1], list(dict.fromkeys(copy for _, copy in every))
    stored = StoredData(images=images, copies=copies, val=files_digest(data.val))
    is_same_index = snapshot.values["fingerprint"]["data"] == digest
    if (values := snapshot.values.get("data")) is None:
        if not is_same_index:
            raise refused("other images, image sizes or labels", MUST_RESTORE)
        world.console.note(
            "the state is of an earlier version, and does not say which image files the run has read"
        )
        return stored, False

    then = StoredData.model_validate(values)
    others = sorted({host for host, copy in every if copy not in then.copies})
    changed, unknown = dict[str, str](), list[str]()
    if others:
        with world.activity.doing("indexing"):
            changed, unknown = _differences(then, here, data, world, folder)
    if not is_same_index and not changed:
        changed = {"polygons of labels": ""}
    changes = [f"{name}{how}" for name, how in changed.items()]
    summary = "; ".join(
        f"{len(texts)} {what}: {listed([*map(screen_line, texts)])}"
        for what, texts in (("changed", changes), ("with another time and no digest to compare", unknown))
        if texts
    )
    is_beside_known = not set(copies).isdisjoint(then.copies)
    hint = "restore the files, or --allow changed-data goes on with these"
    if then.images != images:
        hint = f"their number decides the steps of the run: {MUST_RESTORE}"
        raise refused(f"{images} training images instead of {then.images}: {summary}", hint)
    if changed and is_beside_known:
        raise refused(f"{summary} (only on {listed(others)})", "make the copies of all hosts equal")
    if summary and not is_beside_known and not config.accept_changed_data:
        raise refused(summary, hint if changed else f"copy it with its times (cp -p, rsync -t), {hint}")
    accepted = list(then.accepted)
    if summary:
        world.console.warn(f"the run goes on with another data set: {summary}")
        accepted += [] if is_beside_known else [f"after step {snapshot.step}: {summary}"]
        if world.is_main:
            events.write("changed_data", why=summary)
    known = list(dict.fromkeys([*([] if changed else then.copies), *copies]))[-MOST_COPIES:]
    is_other_val = False
    if summary and not is_beside_known:
        of_val = {path.removeprefix(f"{data.root}{os.sep}") for path in data.val.paths}
        is_other_val = then.val != stored.val or not of_val.isdisjoint([*changed, *unknown])
        is_other_val = any(world.gather(is_other_val))  # hosts may have other folders
    return StoredData(images=images, copies=known, accepted=accepted, val=stored.val), is_other_val


def _differences(
    then: StoredData, here: str, data: Data, world: World, folder: RunFolder
) -> tuple[dict[str, str], list[str]]:
    """Return the files that have changed on any host, with how, by their names, and those that cannot be compared.

    Keep the listings in the cache: the run will have a state of the new copy later, or never. Collective: every rank.
    """
    file, is_first = folder.listing, world.local_rank == 0
    run = stored_listing(then.copies, file) if is_first else None
    known = world.gather(-1 if run is None else run.known())
    source = known.index(max(known))
    text = run.text().encode() if run is not None and world.rank == source else b""
    run = Listing.of_text(world.broadcast_bytes(text, source))
    now = None if here in then.copies else Listing.of(data.splits, data.root, file)
    changed, unknown, to_read = dict[str, str](), list[str](), dict[int, str]()
    if now is not None:
        changed, unknown, to_read = compare(run, now) if run is not None else ({}, now.names, {})
        other = _other_contents(to_read, paths_of(data.splits), world)
        changed |= dict.fromkeys([now.names[row] for row in other], " (other content)")
    every = world.gather((changed, unknown))
    changed = {name: how for theirs, _ in every for name, how in theirs.items()}
    if now is not None and is_first:
        for row, digest in to_read.items():
            if now.names[row] not in changed:
                now.contents[row] = now.contents[row] or digest
        now.keep()
    if run is not None and is_first:
        run.keep()
    unknown = list(dict.fromkeys(name for _, theirs in every for name in theirs))
    return changed, unknown


def _other_contents(to_read: Mapping[int, str], paths: Sequence[str], world: World) -> list[int]:
    """Return the rows whose files do not have these digests. The ranks of a host divide the rows; each returns those of its part."""
    mine, other = list(to_read.items())[world.local_rank :: world.local_size], list[int]()
    with ThreadPoolExecutor(THREADS) as threads:
        for first in range(0, len(mine), AT_ONCE):
            files = [(paths[row], digest) for row, digest in mine[first : first + AT_ONCE]]
            download([path for path, _ in files])
            same = threads.map(is_same_content, *zip(*files, strict=True))
            other += [row for (row, _), is_same in zip(mine[first:], same, strict=False) if not is_same]
            world.console.progress("comparing contents", first + len(files), len(mine), "files")
            world.activity.tick()
    return other
