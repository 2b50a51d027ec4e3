"""What a run knows of the image files that it reads: names, sizes, times, and digests of contents.

A run keeps the listing of its data set beside its states, and the id of the listing in each state, so it can find out later
whether the data set is still the same (``rank/same_data.py``). A store lists the digests. A thread reads those of local files
while the run trains.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from yolofleet.datasets.index import DataIndex
from yolofleet.errors import StorageError
from yolofleet.files.atomic import write_text
from yolofleet.files.caches import cache_folder, is_mirrored
from yolofleet.files.foreign import digest_of, read_foreign

MAX_LISTING_BYTES = 2 << 30
KINDS = {
    32: "md5",
    64: "sha256",
}  # by the length of the digest; that of local files is the one that buckets list
BUSY_SHARE = (
    0.25  # of the time in which the thread reads; in the rest it leaves disk and cores to the training
)
STORED_EVERY_S = 60.0

Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})?$")]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class Listing(BaseModel):
    """The image files of the splits of a run, in the order of the indexes.

    Attributes:
        indexes: digests of the indexes.
        names: paths below the root of the data set.
        sizes, times: bytes and modification times in ns.
        contents: digest of each content, hexadecimal MD5 or SHA-256; "" if it is not known.
        is_listed: a store lists the digests.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    indexes: list[str]
    names: list[str]
    sizes: list[Number]
    times: list[Number]
    contents: list[Digest]
    is_listed: bool

    @classmethod
    def of(cls, splits: Sequence[DataIndex], root: Path) -> Listing:
        """Return the listing of the files as the indexes have found them. Raises StorageError: a mirror is damaged."""
        listed, above = listed_digests(splits), f"{root}{os.sep}"
        stamps = _stamps(splits)
        return cls.model_construct(
            indexes=[index.digest for index in splits],
            names=[p.removeprefix(above) if p.startswith(above) else Path(p).name for p in paths_of(splits)],
            sizes=stamps[:, 0].tolist(),
            times=stamps[:, 1].tolist(),
            contents=_cached_digests(splits) if listed is None else listed,
            is_listed=listed is not None,
        )

    @staticmethod
    def of_text(text: bytes) -> Listing | None:
        """Return the listing that an untrusted text holds; None if the text is no listing."""
        try:
            found = Listing.model_validate(json.loads(text))
        except (ValueError, ValidationError, RecursionError):
            return None
        lengths = {len(column) for column in (found.names, found.sizes, found.times, found.contents)}
        return found if len(lengths) == 1 else None

    def text(self) -> str:
        return json.dumps(self.model_dump())  # ASCII, for names with bytes that are no text

    def copy_id(self) -> str:
        stamps = np.array([self.sizes, self.times], np.int64).T
        return _hash(self.indexes, stamps, self.contents if self.is_listed else None)


def copy_id(splits: Sequence[DataIndex]) -> str:
    """Return the id of the listing of these splits: a hash of indexes, sizes, times, and digests that a store lists."""
    return _hash([index.digest for index in splits], _stamps(splits), listed_digests(splits))


def files_digest(index: DataIndex) -> str:
    """Return a digest that is equal on machines with the same index, sizes of files, and digests that a store lists."""
    return _hash([index.digest], index.stamps[:, 0], listed_digests([index]))


def _hash(indexes: Sequence[str], stamps: np.ndarray, listed: Sequence[str] | None) -> str:
    found = hashlib.blake2b(" ".join(indexes).encode(), digest_size=16)
    found.update(np.ascontiguousarray(stamps, np.int64).tobytes())
    found.update("\n".join(listed or ()).encode())
    return found.hexdigest()


def _stamps(splits: Sequence[DataIndex]) -> np.ndarray:
    return np.concatenate([index.stamps for index in splits])


def paths_of(splits: Sequence[DataIndex]) -> list[str]:
    return [path for index in splits for path in index.paths]


def listed_digests(splits: Sequence[DataIndex]) -> list[str] | None:
    """Return the digests that a store lists, "" if it does not know one; None: the files are not those of a store."""
    paths = paths_of(splits)
    if not is_mirrored(paths[0]):
        return None
    from yolofleet.files.mirror import stored

    about = stored(paths)
    return [about[path].digest if path in about else "" for path in paths]


# -- comparison ------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What is known before a content is read.

    Attributes:
        changed: names of files that differ, with how.
        contents: the digest of each file, as far as a store or the run knows it.
        to_read: rows of files with another time, which are the same if they have their digest in ``contents``.
        unknown: rows of files with another time, of which the run has no digest.
    """

    changed: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    to_read: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


def compare(then: Listing, now: Listing) -> Comparison:
    """Compare files with those that the run has read. Their folders may have other names if the order is the same."""
    found = Comparison(contents=list(now.contents))
    rows = {name: row for row, name in enumerate(then.names)}
    places = [rows.get(name, -1) for name in now.names]
    if list(map(os.path.basename, then.names)) == list(map(os.path.basename, now.names)):
        places = list(range(len(now.names)))
    else:
        found.changed += [f"{name} (gone)" for name in sorted(rows.keys() - set(now.names))]
    for row, (name, was) in enumerate(zip(now.names, places, strict=True)):
        before, here = then.contents[was] if was >= 0 else "", now.contents[row]
        is_known = len(before) == len(here) > 0
        if was < 0:
            found.changed.append(f"{name} (new)")
        elif before != here if is_known else then.sizes[was] != now.sizes[row]:
            found.changed.append(f"{name} (other content)")
        elif not is_known and then.times[was] != now.times[row] and not before:
            found.unknown.append(row)
        elif not is_known:
            found.contents[row] = before
            if then.times[was] != now.times[row]:
                found.to_read.append(row)
    if then.indexes != now.indexes and not found.changed:
        found.changed.append("labels, sizes of images in pixels, or names of classes")
    return found


def is_same_content(path: str, digest: str) -> bool:
    """Return whether a file can be read and has this digest. Raises StorageError: the store cannot be read."""
    with suppress(OSError):
        return digest_of(Path(path), KINDS[len(digest)]) == digest
    return False


# -- digests of local files ------------------------------------------------------------------------------------


@contextmanager
def reading_contents(listing: Listing, file: Path, splits: Sequence[DataIndex]) -> Iterator[None]:
    """Read the contents of local images in a thread during the block, and add their digests to the listing in ``file``.

    They also go into the cache folder, so the next run with the same files has them from its start.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=_read_contents, args=(listing, splits, file, stop), daemon=True, name="contents"
    )
    if not listing.is_listed and not all(listing.contents):
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()


def _read_contents(listing: Listing, splits: Sequence[DataIndex], file: Path, stop: threading.Event) -> None:
    def store() -> None:
        with suppress(StorageError):  # a state that cannot be written says that the disk is full
            write_text(file, listing.text())
            write_text(_digests_file(splits), "\n".join(listing.contents))

    stored_s, busy_s = time.monotonic(), 0.0
    for row, path in enumerate(paths_of(splits)):
        if listing.contents[row] or stop.is_set():
            continue
        began_s = time.monotonic()
        with suppress(OSError):
            digest, about = digest_of(Path(path), KINDS[32]), Path(path).stat()
            if (about.st_size, about.st_mtime_ns) == (listing.sizes[row], listing.times[row]):
                listing.contents[row] = digest  # else it is no longer the file that the run has found
        busy_s += time.monotonic() - began_s
        if busy_s > 0.05:
            stop.wait(busy_s * (1 / BUSY_SHARE - 1))
            busy_s = 0.0
        if time.monotonic() - stored_s > STORED_EVERY_S:
            store()
            stored_s = time.monotonic()
    store()


def _digests_file(splits: Sequence[DataIndex]) -> Path:
    key = hashlib.blake2b(" ".join(index.images_key() for index in splits).encode(), digest_size=20)
    return cache_folder("index") / f"{key.hexdigest()}.digests"


def _cached_digests(splits: Sequence[DataIndex]) -> list[str]:
    unknown = [""] * sum(map(len, splits))
    with suppress(OSError, ValueError):
        found = read_foreign(_digests_file(splits), limit_bytes=MAX_LISTING_BYTES).decode("ascii").split("\n")
        return found if len(found) == len(unknown) and {*map(len, found)} <= {0, *KINDS} else unknown
    return unknown
