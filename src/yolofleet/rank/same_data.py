"""Find out at a resume, and at a start after a failure, whether the data set is still the one that the run has read.

Each state has the ids of the copies of the data set that the run has read (``datasets/listing.py``): hosts may have their own, with
other times. For each host:

1. Its copy has one of these ids: nothing has changed.
2. Else its files are compared with the listing that the run keeps beside its states. Where only times differ, the contents are
   read and compared with the digests of the listing.
3. What differs, and what cannot be compared, ends the run, unless ``--accept-changed-data``: then all later states say so.
   Beside a host whose copy has not changed, a copy that cannot be compared causes a warning, as at the start of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from yolofleet.checkpoint.store import Snapshot
from yolofleet.config.schema import TrainConfig
from yolofleet.datasets.listing import (
    MAX_LISTING_BYTES,
    Comparison,
    Listing,
    compare,
    copy_id,
    is_same_content,
    paths_of,
)
from yolofleet.errors import DataError
from yolofleet.files.atomic import write_text, writing
from yolofleet.files.foreign import bring, read_foreign
from yolofleet.parallel.world import World
from yolofleet.rank.inputs import Data
from yolofleet.report.console import NullConsole
from yolofleet.report.folder import RunFolder
from yolofleet.text import listed
from yolofleet.train.resume import BEFORE, LISTING, MOST_COPIES, StoredData

AT_ONCE = 64  # files of one rank
THREADS = 8  # they mostly wait for the disk
MUST_RESTORE = "restore the data set, or start a new run with --weights"


@dataclass(frozen=True)
class SameData:
    """The data set of a run on this host.

    Attributes:
        stored: for the states of the run.
        copy: id of the copy of this host.
        listing: of this copy, with the digests that the run knows; None if its files did not need a comparison.
        change: how it differs from what the run has read, which the user has accepted; else "".
    """

    stored: StoredData
    copy: str
    listing: Listing | None = None
    change: str = ""

    def recorded(self, data: Data, folder: RunFolder) -> tuple[Listing, Path]:
        """Write the listing of this host into the run folder; return it, and its file. Raises StorageError.

        The listing of another copy gets the name ``BEFORE``, because no state has this copy yet.
        """
        file, before = (folder.checkpoints / name for name in (LISTING, BEFORE))
        stored = _stored_listings(folder)
        listing = self.listing or stored.get(self.copy) or Listing.of(data.splits, data.root)
        if self.copy not in stored and file.exists():
            with writing(before):
                file.replace(before)
        write_text(file, listing.text())
        return listing, file


def check_same_data(
    data: Data,
    snapshot: Snapshot | None,
    identity: str,
    config: TrainConfig,
    world: World,
    folder: RunFolder,
    console: NullConsole,
) -> SameData:
    """Compare the copy of each host with the data set of the run. Collective: every rank.

    Args:
        snapshot: the state to go on from; None: a new run.
        identity: of the training data, in the fingerprint of this start.
    Raises:
        DataError: a file has changed, or cannot be compared.
        StorageError: a store cannot be read.
    """
    mine, images = copy_id(data.splits), len(data.train)
    every = world.gather((world.host, mine))
    copies = list(dict.fromkeys(copy for _, copy in every))
    then = None if snapshot is None else snapshot.values.get("data")
    is_same_index = snapshot is None or snapshot.values["fingerprint"]["data"] == identity
    if snapshot is None or then is None:
        others = sorted({host for host, copy in every if copy != every[0][1]})
        if not is_same_index:
            raise _refused(config, "other images, image sizes or labels", MUST_RESTORE)
        if snapshot is not None:
            console.note(
                "the state is of an earlier version, and does not say which image files the run has read"
            )
        elif others:
            console.note(
                f"the images of {listed(others)} have other times than those of {every[0][0]}: not compared"
            )
        return SameData(StoredData(images=images, copies=copies), mine)
    then = StoredData.model_validate(then)
    changed, unknown, listing = list[str](), list[str](), None
    if not set(copies) <= set(then.copies):
        with world.activity.doing("indexing"):
            run = _listing_of_run(then, mine, data, world, folder)
            changed, unknown, listing = _differences(run, mine not in then.copies, data, world, console)
    if not is_same_index and not changed:
        changed = ["polygons of labels"]
    summary = "; ".join(
        f"{len(texts)} {what}: {listed(texts)}"
        for what, texts in (("changed", changed), ("with another time and no digest to compare", unknown))
        if texts
    )
    is_beside_known = not set(copies).isdisjoint(then.copies)
    hint = "restore the files, or --accept-changed-data goes on with these"
    if then.images != images:
        hint = f"their number decides the steps of the run: {MUST_RESTORE}"
        raise _refused(config, f"{images} training images instead of {then.images}: {summary}", hint)
    if changed and is_beside_known:
        hosts = sorted({host for host, copy in every if copy not in then.copies})
        raise _refused(config, f"{summary} (only on {listed(hosts)})", "make the copies of all hosts equal")
    if summary and not is_beside_known and not config.accept_changed_data:
        raise _refused(
            config, summary, hint if changed else f"copy it with its times (cp -p, rsync -t), {hint}"
        )
    accepted = list(then.accepted)
    if summary:
        console.warn(f"the run goes on with another data set: {summary}")
        accepted += [] if is_beside_known else [f"after step {snapshot.step}: {summary}"]
    known = list(dict.fromkeys([*([] if changed else then.copies), *copies]))[-MOST_COPIES:]
    return SameData(StoredData(images=images, copies=known, accepted=accepted), mine, listing, summary)


def _refused(config: TrainConfig, what: str, hint: str) -> DataError:
    source = f"--resume {config.resume}" if config.resume else "the start after a failure"
    return DataError(f"{config.data} differs from the data set of the run: {what}", source=source, hint=hint)


def _stored_listings(folder: RunFolder) -> dict[str, Listing]:
    """Return the listings that the run folder has on this disk, by the ids of their copies."""
    found = {}
    for name in (LISTING, BEFORE):
        with suppress(OSError):
            text = read_foreign(folder.checkpoints / name, limit_bytes=MAX_LISTING_BYTES, follow=False)
            if (listing := Listing.of_text(text)) is not None:
                found[listing.copy_id()] = listing
    return found


def _listing_of_run(
    then: StoredData, mine: str, data: Data, world: World, folder: RunFolder
) -> Listing | None:
    """Return a listing of the run, with the most digests that a host has; None if no host has any.

    A host whose copy has not changed can make it again. Collective: every rank.
    """
    stored = _stored_listings(folder) if world.local_rank == 0 else {}
    if world.local_rank == 0 and mine in then.copies and mine not in stored:
        stored[mine] = Listing.of(data.splits, data.root)
    known = {copy: sum(map(bool, one.contents)) for copy, one in stored.items() if copy in then.copies}
    best = max(known, key=known.__getitem__, default="")
    most = world.gather(known.get(best, -1))
    source = max(range(world.size), key=lambda rank: (most[rank], -rank))
    text = stored[best].text().encode() if best and world.rank == source else b""
    return Listing.of_text(world.broadcast_bytes(text, source))


def _differences(
    run: Listing | None, is_new: bool, data: Data, world: World, console: NullConsole
) -> tuple[list[str], list[str], Listing | None]:
    """Return the files that have changed on any host, those that cannot be compared, and the listing of a new copy.

    Args:
        run: what the run has read; None: no host has its listing any more.
        is_new: the run has not read the copy of this host.
    Collective: every rank.
    """
    now, found = Listing.of(data.splits, data.root) if is_new else None, Comparison()
    names = now.names if now is not None else []
    if now is not None:
        found = Comparison(unknown=list(range(len(names)))) if run is None else compare(run, now)
    paths = paths_of(data.splits)
    files = [(row, paths[row], found.contents[row]) for row in found.to_read]
    other = _other_contents(files, world, console)
    found.changed += [f"{names[row]} (other content)" for row in other]
    every = world.gather((found.changed, [names[row] for row in found.unknown], other))
    if now is not None and run is not None and not now.is_listed:
        for row in (row for *_, theirs in every for row in theirs):
            found.contents[row] = ""
        now = now.model_copy(update={"contents": found.contents})
    changed, unknown = (
        list(dict.fromkeys(one for theirs in every for one in theirs[part])) for part in (0, 1)
    )
    return changed, unknown, now


def _other_contents(files: Sequence[tuple[int, str, str]], world: World, console: NullConsole) -> list[int]:
    """Return which files of this rank's part, which the ranks of a host divide, do not have the digest beside their path."""
    mine, other = files[world.local_rank :: world.local_size], list[int]()
    with ThreadPoolExecutor(THREADS) as threads:
        for first in range(0, len(mine), AT_ONCE):
            group = mine[first : first + AT_ONCE]
            bring([path for _, path, _ in group])
            same = threads.map(lambda file: is_same_content(*file[1:]), group)
            other += [row for (row, *_), is_same in zip(group, same, strict=True) if not is_same]
            console.progress("comparing contents", first + len(group), len(mine), "files")
            world.activity.tick()
    return other
