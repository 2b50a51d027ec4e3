"""Find out at a resume, and at a start after a failure, whether the data set is still the one that the run has read.

Each state has the ids of the copies of the data set that the run has read (``datasets/listing.py``), one for each different
copy of its hosts. For each host:

1. Its copy has one of these ids: nothing has changed since.
2. Else its files are compared with the listing that the run keeps beside its states. Names, sizes, labels and digests must be equal.
   If only times differ, the contents are read and compared with the digests of the listing.
3. What differs, and what has another time and no digest, ends the run, unless ``--accept-changed-data``. Then the change is
   noted in all later states. A copy that cannot be compared is accepted with a warning beside a host whose copy has an id of the
   run, as at the first start of a run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
    Listings,
    carried,
    compare,
    copy_id,
    is_same_content,
)
from yolofleet.errors import DataError
from yolofleet.files.atomic import write_text
from yolofleet.files.foreign import bring, read_foreign
from yolofleet.parallel.world import ROUND_S, World
from yolofleet.rank.inputs import Data
from yolofleet.report.console import NullConsole
from yolofleet.report.folder import RunFolder
from yolofleet.text import listed
from yolofleet.train.resume import MOST_COPIES, StoredData

AT_ONCE = 64  # files of one rank
THREADS = 8  # they mostly wait for the disk
OTHER_INDEX = "other images, image sizes, labels or polygons"
MUST_RESTORE = "restore the data set, or start a new run with --weights"


@dataclass(frozen=True)
class SameData:
    """The data set of a run on this host.

    Attributes:
        stored: for the states of the run.
        copy: id of the copy of this host.
        listings: of this copy, with all digests that are known; None if its files have not been looked at.
    """

    stored: StoredData
    copy: str
    listings: Listings | None

    def recorded(self, data: Data, folder: RunFolder) -> Listings:
        """Write the listings of this host into the run folder, and return them. Raises StorageError."""
        listings = self.listings or read_listings(folder, self.copy) or own_listings(data)
        write_text(listing_file(folder, self.copy), listings.to_text())
        return listings

    def notes(self) -> list[str]:
        """Return what every start says of changes that the user has accepted."""
        return [
            f"the data set has changed (--accept-changed-data) {change}" for change in self.stored.accepted
        ]


def listing_file(folder: RunFolder, copy: str) -> Path:
    return folder.checkpoints / f"data-{copy}.json"


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
        identity: digest of the training data in the fingerprint of this start.
    Raises:
        DataError: a file has changed, or cannot be compared.
        StorageError: a store cannot be read.
    """
    mine, images = copy_id(data.train, data.val), len(data.train)
    every = world.gather((world.host, mine))
    copies = list(dict.fromkeys(copy for _, copy in every))
    if snapshot is None:
        if others := sorted({host for host, copy in every if copy != every[0][1]}):
            console.note(
                f"the images of {listed(others)} have other times than those of {every[0][0]}: names, sizes and labels "
                "are equal, contents are not compared"
            )
        return SameData(StoredData(images=images, copies=copies), mine, None)
    is_same_index = snapshot.values["fingerprint"]["data"] == identity
    if (stored := snapshot.values.get("data")) is None:
        if not is_same_index:
            raise _refused(config, OTHER_INDEX, MUST_RESTORE)
        console.note(
            "the state is of an earlier version: it does not say which files the run has read, so they cannot be compared"
        )
        return SameData(StoredData(images=images, copies=copies), mine, None)
    then = StoredData.model_validate(stored)
    changed, unknown, listings, run = list[str](), list[str](), None, None
    if any(copy not in then.copies for copy in copies):
        with world.activity.doing("indexing"):
            run = _listings_of_run(then, mine, data, world, folder)
            changed, unknown, listings = _differences(run, mine not in then.copies, data, world, console)
    if not is_same_index and not changed:
        changed = [OTHER_INDEX]
    if then.images != images:
        what = f"{images} training images instead of {then.images}: {listed(changed)}"
        raise _refused(config, what, "their number decides the steps of the run: " + MUST_RESTORE)
    if not changed and not unknown:
        return SameData(then.model_copy(update={"copies": _merged(then.copies, copies)}), mine, listings)
    summary = _summary(changed, unknown, run)
    is_beside_known = any(copy in then.copies for copy in copies)
    if changed and is_beside_known:
        hosts = sorted({host for host, copy in every if copy not in then.copies})
        raise _refused(config, f"{summary}; only on {listed(hosts)}", "make the copies of all hosts equal")
    if not is_beside_known and not config.accept_changed_data:
        copied = "" if changed else "copy the data set with its times (cp -p, rsync -t); or "
        hint = f"{copied}restore the files; or --accept-changed-data goes on with these"
        raise _refused(config, summary, hint)
    console.warn(f"the run goes on with another data set: {summary}")
    new = [] if is_beside_known else [f"after step {snapshot.step}: {summary}"]
    before = [] if changed else then.copies
    return SameData(
        StoredData(images=images, copies=_merged(before, copies), accepted=[*then.accepted, *new]),
        mine,
        listings,
    )


def _merged(before: Sequence[str], copies: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*before, *copies]))[-MOST_COPIES:]


def _summary(changed: Sequence[str], unknown: Sequence[str], run: Listings | None) -> str:
    count = "1 change" if len(changed) == 1 else f"{len(changed)} changes"
    parts = [f"{count}: {listed(changed)}"] if changed else []
    if unknown:
        why = "have other times, and the run has no digest to compare their contents with"
        if run is None:
            why = "cannot be compared, because no host has the list of the files of the run (checkpoints/data-*.json)"
        parts.append(f"{len(unknown)} files {why}: {listed(unknown)}")
    return "; ".join(parts)


def _refused(config: TrainConfig, what: str, hint: str) -> DataError:
    source = f"--resume {config.resume}" if config.resume else "the start after a failure"
    return DataError(f"{config.data} differs from the data set of the run: {what}", source=source, hint=hint)


def own_listings(data: Data) -> Listings:
    """Return the listings of the copy of this host, with the digests that are known here."""
    return Listings.model_construct(
        train=Listing.of(data.train, data.root), val=Listing.of(data.val, data.root)
    )


def _listings_of_run(
    then: StoredData, mine: str, data: Data, world: World, folder: RunFolder
) -> Listings | None:
    """Return the listings of a copy that the run has read, from any host; None if no host has them.

    A host whose copy has not changed can make them again. Collective: every rank.
    """
    found: list[tuple[int, str, bytes]] = []
    for copy in then.copies if world.local_rank == 0 else ():
        if (stored := read_listings(folder, copy)) is not None:
            found.append((_known(stored), copy, stored.to_text().encode()))
    if world.local_rank == 0 and not found and mine in then.copies:
        made = own_listings(data)
        found.append((_known(made), mine, made.to_text().encode()))
    best = max(found, default=(-1, "", b""))
    known = world.gather(best[:2])
    source = max(range(world.size), key=lambda rank: (known[rank][0], -rank))
    text = world.broadcast_bytes(best[2], source)
    return Listings.of_text(text, known[source][1])


def read_listings(folder: RunFolder, copy: str) -> Listings | None:
    """Return the listings of a copy that the run folder has on this disk; None without them."""
    with suppress(OSError):
        text = read_foreign(listing_file(folder, copy), limit_bytes=MAX_LISTING_BYTES, follow=False)
        return Listings.of_text(text, copy)
    return None


def _known(listings: Listings) -> int:
    return sum(map(bool, listings.train.contents)) + sum(map(bool, listings.val.contents))


def _differences(
    run: Listings | None, is_new: bool, data: Data, world: World, console: NullConsole
) -> tuple[list[str], list[str], Listings | None]:
    """Return the files that have changed on any host, those that cannot be compared, and the listings of a new copy.

    Args:
        run: what the run has read; None if no host has its listings any more.
        is_new: the run has not read the copy of this host.
    Collective: every rank.
    """
    now = own_listings(data) if is_new else None
    changed, unknown = list[str](), list[str]()
    found: dict[str, Comparison] = {}
    to_read: dict[str, tuple[str, str]] = {}  # name, with how it differs -> path and digest
    for split, index in (("train", data.train), ("val", data.val)) if now is not None else ():
        here: Listing = getattr(now, split)
        if run is None:
            unknown += [f"{split}: {name}" for name in here.names]
            continue
        then: Listing = getattr(run, split)
        part = found[split] = compare(then, here)
        if then.index != here.index and not part.changed:
            part.changed.append("other numbers of images, or other names of classes")
        changed += [f"{split}: {text}" for text in part.changed]
        unknown += [f"{split}: {here.names[row]}" for row in part.unknown]
        for row in part.to_read:
            name = f"{split}: {here.names[row]} (other content)"
            to_read[name] = index.path(row), then.contents[part.then[row]]
    other = _other_contents(to_read, world, console)
    every = world.gather((changed, unknown))
    changed = list(dict.fromkeys([*(text for theirs, _ in every for text in theirs), *other]))
    unknown = list(dict.fromkeys(name for _, theirs in every for name in theirs))
    if now is None or run is None:
        return changed, unknown, now
    for split, part in found.items():
        names, those = getattr(now, split).names, set(other)
        part.other += [row for row in part.to_read if f"{split}: {names[row]} (other content)" in those]
    train, val = carried(run.train, now.train, found["train"]), carried(run.val, now.val, found["val"])
    return changed, unknown, Listings.model_construct(train=train, val=val)


def _other_contents(files: Mapping[str, tuple[str, str]], world: World, console: NullConsole) -> list[str]:
    """Return the names of files, of all hosts, that have another digest than the one beside their path. The ranks of a host divide its files.

    Collective: every rank.
    """
    mine = list(files.items())[world.local_rank :: world.local_size]
    other, done, total = list[str](), 0, 0.0
    with ThreadPoolExecutor(THREADS) as threads:
        while True:
            (left,) = world.sum_rows([float(len(mine) - done)])
            total = total or left
            if left == 0:
                break
            console.progress("comparing contents", total - left, total, "files")
            ends_s = time.monotonic() + ROUND_S
            while done < len(mine) and time.monotonic() < ends_s:
                group = mine[done : done + AT_ONCE]
                bring([path for _, (path, _) in group])
                same = threads.map(lambda file: is_same_content(*file[1]), group)
                other += [name for (name, _), is_same in zip(group, same, strict=True) if not is_same]
                done += len(group)
            world.activity.tick()
    return [name for theirs in world.gather(other) for name in theirs]
