"""The image files of a data set as a run has found them: names, sizes, times, and digests of contents; images in two splits.

A run keeps this listing beside its states, and the id of the listing in each state, so it can find out later whether the data set
is still the same (``training/rank/same_data.py``). A store lists the digests. A thread reads those of local files while the run trains.
The cache folder keeps listings by their ids, so the next run with the same files has the digests from its start.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from yolofleet.data.datasets.index import DataIndex
from yolofleet.storage.atomic import write_text
from yolofleet.storage.caches import cache_folder
from yolofleet.storage.foreign import digest_of, read_foreign
from yolofleet.storage.mirrored import listed_by_store
from yolofleet.support.errors import StorageError

MAX_LISTING_BYTES = 2 << 30
KINDS = {32: "md5", 64: "sha256"}  # of digests, by their length; buckets list MD5
WAITING = 3.0  # the thread waits so much longer than it reads, to leave disk and cores to the training
READ_TOGETHER = 16  # files
STORED_EVERY_S = 60.0

Id = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})?$")]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class Listing(BaseModel):
    """The image files of the splits of a run, in the order of the indexes.

    Attributes:
        copy_id: of this copy of the data set: hosts may have their own, with other times.
        names: paths below the root of the data set; absolute for files that are elsewhere.
        sizes, times: bytes and modification times in ns.
        contents: digest of each content, hexadecimal MD5 or SHA-256; "" if it is not known.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    copy_id: Id
    indexes: list[str]
    names: list[str]
    sizes: list[Number]
    times: list[Number]
    contents: list[Digest]

    @classmethod
    def of(cls, splits: Sequence[DataIndex], root: Path, file: Path) -> Listing:
        """Return the listing of the files as the indexes have found them, with the digests that ``file`` or the cache has.

        Raises:
            StorageError: a mirror is damaged.
        """
        copy, above = copy_id(splits), f"{root}{os.sep}"
        paths, stamps = paths_of(splits), np.concatenate([index.stamps for index in splits])
        stored = stored_listing([copy], file)
        if stored is not None and len(stored.names) == len(paths):
            return stored
        return cls.model_construct(
            copy_id=copy,
            indexes=[index.digest for index in splits],
            names=[path.removeprefix(above) for path in paths],
            sizes=stamps[:, 0].tolist(),
            times=stamps[:, 1].tolist(),
            contents=listed_digests(splits) or [""] * len(paths),
        )

    @staticmethod
    def of_text(text: bytes) -> Listing | None:
        """Return the listing that an untrusted text holds; None if the text is no listing."""
        try:
            found = Listing.model_validate(json.loads(text))
        except (ValueError, RecursionError):
            return None
        lengths = {len(column) for column in (found.names, found.sizes, found.times, found.contents)}
        return found if len(lengths) == 1 else None

    def text(self) -> str:
        return json.dumps(self.model_dump())  # ASCII, for names with bytes that are no text

    def known(self) -> int:
        """Return the number of files with a digest."""
        return sum(map(bool, self.contents))

    def keep(self) -> None:
        """Write the listing into the cache folder, if its disk allows that."""
        with suppress(StorageError):
            write_text(cache_folder("index") / f"{self.copy_id}.listing", self.text())


def stored_listing(copies: Collection[str], file: Path) -> Listing | None:
    """Return the listing of one of these copies in ``file`` or the cache: the first complete one, else the one with most digests."""
    folder, best = cache_folder("index"), None
    for path in (file, *(folder / f"{copy}.listing" for copy in copies)):
        with suppress(OSError):
            found = Listing.of_text(read_foreign(path, limit_bytes=MAX_LISTING_BYTES, follow=False))
            if found and found.copy_id in copies and (best is None or found.known() > best.known()):
                best = found
        if best and best.known() == len(best.contents):
            break
    return best


def copy_id(splits: Sequence[DataIndex]) -> str:
    """Return the id of the listing of these splits: a hash of indexes, sizes, times, and digests that a store lists."""
    return _hash(splits, 2)


def files_digest(index: DataIndex) -> str:
    """Return a digest that is equal on machines with the same index, sizes of files, and digests that a store lists."""
    return _hash([index], 1)


def _hash(splits: Sequence[DataIndex], columns: int) -> str:
    found = hashlib.blake2b(" ".join(index.digest for index in splits).encode(), digest_size=16)
    for index in splits:
        found.update(np.ascontiguousarray(index.stamps[:, :columns]).tobytes())
    found.update("\n".join(listed_digests(splits)).encode())
    return found.hexdigest()


def paths_of(splits: Sequence[DataIndex]) -> list[str]:
    return [path for index in splits for path in index.paths]


def listed_digests(splits: Sequence[DataIndex]) -> list[str]:
    """Return the digest of each file that a store lists, "" if it does not know one; [] for the files of a disk."""
    paths = paths_of(splits)
    about = listed_by_store(paths)
    return [] if about is None else [about[path].digest if path in about else "" for path in paths]


def compare(then: Listing, now: Listing) -> tuple[dict[str, str], list[str], dict[int, str]]:
    """Compare files with those that the run has read. Their folders may have other names if the order is the same.

    Where only the digests of ``now`` are not known, it takes over those of ``then``.

    Returns:
        how files have changed, by their names; names of files with another time and no digest to compare; and by row, the digest of
        files with another time, which are the same if they have it.
    """
    bare_names, bare_names_now = ([*map(os.path.basename, one.names)] for one in (then, now))
    rows = {name: row for row, name in enumerate(now.names if bare_names == bare_names_now else then.names)}
    changed, unknown, to_read = dict[str, str](), list[str](), dict[int, str]()
    changed |= dict.fromkeys(sorted(rows.keys() - set(now.names)), " (gone)")
    for row, name in enumerate(now.names):
        if (was := rows.get(name)) is None:
            changed[name] = " (new)"
            continue
        before, here = then.contents[was], now.contents[row]
        is_known = len(before) == len(here) > 0
        if before != here if is_known else then.sizes[was] != now.sizes[row]:
            changed[name] = " (other content)"
        elif is_known or then.times[was] == now.times[row]:
            now.contents[row] = here or before
        elif before:
            to_read[row] = before
        else:
            unknown.append(name)
    if then.indexes != now.indexes and not changed:
        changed["labels, sizes of images in pixels, or names of classes"] = ""
    return changed, unknown, to_read


def is_same_content(path: str, digest: str) -> bool:
    """Return whether a file can be read and has this digest. Raise StorageError: the store cannot be read."""
    with suppress(OSError):
        return digest_of(Path(path), KINDS[len(digest)]) == digest
    return False


@contextmanager
def reading_contents(listing: Listing, file: Path, splits: Sequence[DataIndex]) -> Iterator[None]:
    """Read the contents of local images in a thread during the block; write the listing with their digests to ``file`` and the cache."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_read_contents, args=(listing, file, splits, stop), daemon=True, name="contents"
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _read_contents(listing: Listing, file: Path, splits: Sequence[DataIndex], stop: threading.Event) -> None:
    paths, stored_s = paths_of(splits), time.monotonic()
    rows = [row for row, digest in enumerate(listing.contents) if not digest]
    if splits[0].is_mirrored:
        return
    for first in range(0, len(rows), READ_TOGETHER):
        if stop.is_set():
            break
        began_s = time.monotonic()
        for row in rows[first : first + READ_TOGETHER]:
            with suppress(OSError):
                digest, about = digest_of(Path(paths[row]), KINDS[32]), Path(paths[row]).stat()
                if (about.st_size, about.st_mtime_ns) == (listing.sizes[row], listing.times[row]):
                    listing.contents[row] = digest  # else it is no longer the file that the run has found
        stop.wait(WAITING * (time.monotonic() - began_s))
        is_last = stop.is_set() or first + READ_TOGETHER >= len(rows)
        if is_last or time.monotonic() - stored_s > STORED_EVERY_S:
            with suppress(StorageError):  # a state that cannot be written says that the disk is full
                write_text(file, listing.text())
            listing.keep()
            stored_s = time.monotonic()


def overlap_notes(splits: Sequence[DataIndex]) -> list[str]:
    """Return a note for each two splits that share image files, also over symbolic links."""
    notes = []
    for first, second in combinations(splits, 2):
        known, stamps = set(first.paths), set(map(tuple, first.stamps.tolist()))
        others = [n for n, path in enumerate(second.paths) if path not in known]
        # one file has one size and one time under all its names
        linked = [n for n in others if tuple(second.stamps[n].tolist()) in stamps]
        real = set(map(os.path.realpath, known if linked else ()))
        shared = len(second) - len(others) + sum(os.path.realpath(second.path(n)) in real for n in linked)
        if shared == len(first) == len(second):
            what = f"{first.split} and {second.split} are the same {shared} images"
        else:
            what = f"{shared} of {len(second)} {second.split} images are {first.split} images too"
        if shared:
            notes.append(f"{what}: accuracy on images that were learned says nothing about others")
    return notes
