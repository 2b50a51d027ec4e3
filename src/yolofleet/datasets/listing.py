"""What a run knows of the image files that it reads: names, sizes, times, labels, and digests of contents.

A run keeps the listings of its data set beside its states, and their id in each state. So a resume, or a start after a failure,
finds out whether the data set is still the same (``rank/same_data.py``). Another folder or another time of a file is no
difference: the contents decide. A store lists their digests. A thread reads those of local files while the run trains.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from yolofleet.datasets.index import DataIndex
from yolofleet.errors import StorageError
from yolofleet.files.arrayfile import read_arrays, write_arrays
from yolofleet.files.atomic import write_text
from yolofleet.files.caches import cache_root, is_mirrored
from yolofleet.files.foreign import digest_of

MAX_LISTING_BYTES = 2 << 30
KINDS = {32: "md5", 64: "sha256"}  # by the length of the digest
BUSY_SHARE = (
    0.25  # of the time in which the thread reads; in the rest it leaves disk and cores to the training
)
STORED_EVERY_S = 60.0
ID = r"[0-9a-f]{32}"

Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})?$")]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class Listing(BaseModel):
    """The image files of one split, in the order of its index.

    Attributes:
        index: digest of the index.
        names: paths below the root of the data set.
        sizes, times: bytes and modification times in ns.
        labels: hash of the labels and of the size in pixels of each image.
        contents: digest of each content, hexadecimal MD5 or SHA-256; "" if it is not known.
        is_listed: a store has listed the digests.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    index: str
    names: list[str]
    sizes: list[Number]
    times: list[Number]
    labels: list[Number]
    contents: list[Digest]
    is_listed: bool

    @classmethod
    def of(cls, index: DataIndex, root: Path) -> Listing:
        """Return the listing of the files as the index has found them. Raises StorageError: a mirror is damaged."""
        listed, above = listed_digests(index), f"{root}{os.sep}"
        return cls.model_construct(
            index=index.digest,
            names=[p.removeprefix(above) if p.startswith(above) else Path(p).name for p in index.paths],
            sizes=index.stamps[:, 0].tolist(),
            times=index.stamps[:, 1].tolist(),
            labels=_label_hashes(index).tolist(),
            contents=_stored_digests(index) if listed is None else listed,
            is_listed=listed is not None,
        )

    def text_id(self) -> str:
        stamps = np.array([self.sizes, self.times], np.int64).T
        return _split_id(self.index, stamps, self.contents if self.is_listed else None)


class Listings(BaseModel):
    """The listings of the splits of a run, as a file keeps them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    train: Listing
    val: Listing

    def to_text(self) -> str:
        return json.dumps(self.model_dump())

    @staticmethod
    def of_text(text: str | bytes, copy: str) -> Listings | None:
        """Return the listings with the id ``copy``; None if the text, perhaps of a stranger, is not theirs."""
        try:
            found = Listings.model_validate(json.loads(text))
        except (ValueError, ValidationError, RecursionError):
            return None
        for one in (found.train, found.val):
            columns = (one.names, one.sizes, one.times, one.labels, one.contents)
            if len({len(column) for column in columns}) > 1:
                return None
        return found if _copy_id(found.train.text_id(), found.val.text_id()) == copy else None


def copy_id(train: DataIndex, val: DataIndex) -> str:
    """Return the id of a copy of a data set: a hash of both indexes, of sizes and times, and of the digests that a store lists.

    Raises:
        StorageError: a mirror is damaged.
    """
    return _copy_id(*(_split_id(index.digest, index.stamps, listed_digests(index)) for index in (train, val)))


def _copy_id(train: str, val: str) -> str:
    return hashlib.blake2b(f"{train} {val}".encode(), digest_size=16).hexdigest()


def _split_id(index: str, stamps: np.ndarray, listed: Sequence[str] | None) -> str:
    found = hashlib.blake2b(index.encode(), digest_size=16)
    found.update(np.ascontiguousarray(stamps, np.int64).tobytes())
    found.update("\n".join(listed or ()).encode())
    return found.hexdigest()


def files_digest(index: DataIndex) -> str:
    """Return a digest that is equal on all machines with the same index, sizes of files and digests that a store lists.

    Raises:
        StorageError: a mirror is damaged.
    """
    return _split_id(index.digest, index.stamps[:, 0], listed_digests(index))


def listed_digests(index: DataIndex) -> list[str] | None:
    """Return the digests that a store lists of the images; "" if it does not know one. None: they are not in a store."""
    paths = index.paths
    if not paths or not is_mirrored(paths[0]):
        return None
    from yolofleet.files.mirror import digests

    return digests(paths)


def _label_hashes(index: DataIndex) -> np.ndarray:
    """Return a number below 2**52 for each image, int64 [N], which another label or size in pixels changes."""
    boxes = np.ascontiguousarray(index.boxes_cxcywh_unit).view(np.int32)
    area = np.ascontiguousarray(index.area_px).view(np.int64)
    values = np.column_stack([index.classes, index.crowd, boxes, area]).astype(np.uint64)  # [M, 7]
    factors = np.arange(1, 10, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )  # overflow is wanted here and below
    rows = (values * factors[:7]).sum(axis=1, dtype=np.uint64)
    rows = (rows ^ (rows >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(rows, dtype=np.uint64)])[index.offsets]
    sizes = index.sizes_wh.astype(np.uint64) * factors[7:]
    images = sums[1:] - sums[:-1] + sizes.sum(axis=1, dtype=np.uint64)
    mixed: np.ndarray = (images ^ (images >> np.uint64(31))) >> np.uint64(12)
    return mixed.astype(np.int64)


# -- comparison ------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What is known before a content is read.

    Attributes:
        changed: names of files that differ, with how.
        other: rows of files with another content; new files are among them.
        then: the row of each file in the listing of the run; -1 for a new one.
        to_read: rows of files whose content must be compared with the digest of the run.
        unknown: rows of files with another time, of which the run has no digest.
    """

    changed: list[str] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    then: list[int] = field(default_factory=list)
    to_read: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


def compare(then: Listing, now: Listing) -> Comparison:
    """Compare a split with what the run has read. Names are equal if those of the files are, in the same order."""
    found = Comparison()
    if list(map(os.path.basename, then.names)) == list(map(os.path.basename, now.names)):
        found.then = list(range(len(now.names)))
    else:
        rows = {name: row for row, name in enumerate(then.names)}
        found.then = [rows.get(name, -1) for name in now.names]
        found.changed += [f"{name} (gone)" for name in sorted(rows.keys() - set(now.names))]
    for row, (name, was) in enumerate(zip(now.names, found.then, strict=True)):
        if was < 0:
            found.changed.append(f"{name} (new)")
            found.other.append(row)
            continue
        before, here = then.contents[was], now.contents[row]
        is_known = len(before) == len(here) > 0
        if before != here if is_known else then.sizes[was] != now.sizes[row]:
            found.changed.append(f"{name} (other content)")
            found.other.append(row)
        elif not is_known and then.times[was] != now.times[row]:
            (found.to_read if before else found.unknown).append(row)
        if then.labels[was] != now.labels[row]:
            found.changed.append(f"{name} (other labels)")
    return found


def carried(then: Listing, now: Listing, found: Comparison) -> Listing:
    """Return ``now`` with the digests that the run knows of contents that have not changed."""
    unknown = {*found.unknown, *found.other}
    contents = [
        here or ("" if row in unknown else then.contents[was])
        for row, (here, was) in enumerate(zip(now.contents, found.then, strict=True))
    ]
    return now.model_copy(update={"contents": contents})


def is_same_content(path: str, digest: str) -> bool:
    """Return whether a file can be read and has this digest. Raises StorageError: the store cannot be read."""
    try:
        return digest_of(Path(path), KINDS[len(digest)]) == digest
    except OSError:
        return False


# -- digests of local files ------------------------------------------------------------------------------------


@contextmanager
def reading_contents(listings: Listings, splits: Sequence[DataIndex], file: Path) -> Iterator[None]:
    """Read the contents of local images in a thread during the block, and add their digests to the listings in ``file``.

    The digests also go into the cache folder, so the next run with the same files has them from its start.
    """
    stop = threading.Event()
    parts = [(one, index) for one, index in zip((listings.train, listings.val), splits, strict=True)]
    if all(one.is_listed or all(one.contents) for one, _ in parts):
        yield
        return

    def read() -> None:
        for one, index in parts:
            if not one.is_listed:
                _read_contents(one, index, stop, lambda: write_text(file, listings.to_text()))

    thread = threading.Thread(target=read, daemon=True, name="contents")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _read_contents(one: Listing, index: DataIndex, stop: threading.Event, store: Callable[[], None]) -> None:
    """Add the digest of each content that is unknown, unless the file is no longer the one of the index."""
    stored_s, worked_s = time.monotonic(), 0.0

    def save() -> None:
        nonlocal stored_s
        stored_s = time.monotonic()
        with suppress(OSError, StorageError):  # a state that cannot be written says that the disk is full
            _store_digests(index, one.contents)
            store()

    for row, path in enumerate(index.paths):
        if one.contents[row]:
            continue
        began_s = time.monotonic()
        with suppress(OSError):
            digest, about = digest_of(Path(path), "md5"), Path(path).stat()
            if (about.st_size, about.st_mtime_ns) == (one.sizes[row], one.times[row]):
                one.contents[row] = digest
        worked_s += time.monotonic() - began_s
        if worked_s > 0.05:
            stop.wait(worked_s * (1 / BUSY_SHARE - 1))
            worked_s = 0.0
        if stop.is_set():
            break
        if time.monotonic() - stored_s > STORED_EVERY_S:
            save()
    save()


def _digests_file(index: DataIndex) -> Path:
    return cache_root() / "index" / f"{index.images_key()}.contents"


def _stored_digests(index: DataIndex) -> list[str]:
    found = read_arrays(_digests_file(index))
    rows = None if found is None else found[0].get("md5")
    if rows is None or rows.shape != (len(index), 16):
        return [""] * len(index)
    return [row.tobytes().hex() if row.any() else "" for row in rows]


def _store_digests(index: DataIndex, contents: Sequence[str]) -> None:
    """Raises OSError."""
    rows = [bytes.fromhex(one) if len(one) == 32 else bytes(16) for one in contents]
    write_arrays(_digests_file(index), {"md5": np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)}, {})
