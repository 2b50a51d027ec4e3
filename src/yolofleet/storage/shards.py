"""The files of a data set in a few tar files, and an index of where each file begins.

The tar files follow the convention of WebDataset: the files of one sample have one name with different suffixes and follow each
other. A list of JSON lines, ``shards.jsonl``, gives each file its path in the data set, its place in a tar file, its time, its
SHA-256, and each image its width and height. So a reader needs neither the tar headers nor a whole shard, and no image for an index
of the labels. Labels are also in tar files of their own, from which a reader gets many with one request; the list names their place
there. The last line has the SHA-256 of all lines before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from yolofleet.support.errors import StorageError

LIST = "files.jsonl"  # the same for a web server with the files themselves: their shard has the number -1
FORMAT = "yolofleet shards 1"
MAX_INDEX_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30  # of one file in a shard
SMALL_BYTES = 64 << 10  # a file that is no image, up to this size, also goes into labels-NNNNN.tar
MOST = 1 << 62  # of any number
MOST_PIXELS = 1 << 28  # MAX_PIXELS of data/images/header.py
# S3, Google and Azure allow no longer names. On a disk, whose paths have at most 4096 bytes, the cache folder comes before it.
MAX_PATH_BYTES = 1024
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Stored:
    """What a listing says of a file in a store."""

    size: int
    modified_ns: int  # since 1970; 0 if the store does not say
    digest: str  # hexadecimal MD5 or SHA-256; "" if the listing states none
    shard: str = ""  # the object of which the file is a part; "" if the file is an object
    offset: int = 0  # where the part begins, bytes
    # width, height: of an image, pixels after rotation; 0 if the listing does not say
    width: int = 0
    height: int = 0


class _Fault(ValueError):
    """A fault of an index, in words for the user."""


def is_plain(part: str) -> bool:
    """Return whether a part of a key can be the name of a file on every disk."""
    return (
        part not in ("", ".", "..")
        and part.isprintable()
        and "\\" not in part
        and len(os.fsencode(part)) < 256
    )


def is_plain_path(path: str) -> bool:
    """Return whether a key, whose parts are separated by /, can be the path of a file below every folder."""
    return len(os.fsencode(path)) <= MAX_PATH_BYTES and all(map(is_plain, path.split("/")))


def read_index(content: bytes, source: str) -> dict[str, Stored]:
    """Return what an index says of each file, by its path. Raise StorageError for a damaged or hostile index."""
    body, _, last = content.rstrip(b"\n").rpartition(b"\n")
    try:
        if not content:
            raise _Fault("it is empty")
        end = _json(last)
        if end["sha256"] != hashlib.sha256(body + b"\n").hexdigest():
            raise _Fault("its last line has another SHA-256")
        lines = iter(body.split(b"\n"))
        head = _json(next(lines))
        if head["format"] != FORMAT:
            raise _Fault(f"its format is not {FORMAT}")
        shards = [(name, size) for name, size in head["shards"]]
        for name, size in shards:
            if type(name) is not str or not is_plain(name) or "/" in name:
                raise _Fault("a shard has an impossible name")
            if type(size) is not int or not 0 <= size < MOST:
                raise _Fault("a shard has an impossible size")
        found = dict(_checked(_json(line), shards) for line in lines)
        if len(found) != end["files"] or folders_among(found):
            raise _Fault("it lists a path twice")
    except (ValueError, TypeError, KeyError, IndexError, StopIteration, RecursionError) as problem:
        why = str(problem) if isinstance(problem, _Fault) else "its lines are not those of an index"
        hint = "make it again with yolofleet data shard, or data index"
        raise StorageError(f"{source} is damaged: {why}", hint=hint) from None
    return found


def folders_among(paths: Collection[str]) -> set[str]:
    """Return those of these paths that are folders of others, at any depth."""
    ends = ((path, at) for path in paths for at, letter in enumerate(path) if letter == "/")
    return {path[:at] for path, at in ends if path[:at] in paths}


def _json(line: bytes) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise _Fault("it has a line of more than 1 MiB")
    return json.loads(line)


def _checked(row: list[Any], shards: list[tuple[str, int]]) -> tuple[str, Stored]:
    """Return the path and the place that a line names. Raises ValueError, TypeError or IndexError."""
    path, number, offset, size, modified_ns, digest, *pixels = row
    width, height = pixels or (0, 0)
    is_file = number == -1 and offset == 0
    number = 0 if is_file else number
    numbers = (number, offset, size, modified_ns, width, height)
    if any(type(value) is not int or not 0 <= value < MOST for value in numbers):
        raise TypeError
    if width * height > MOST_PIXELS or (pixels and not width * height):
        raise _Fault("an image has an impossible size")
    shard, shard_size = ("", size) if is_file else shards[number]
    if type(path) is not str or not is_plain_path(path) or not _SHA256.fullmatch(digest):
        raise TypeError
    if offset + size > shard_size or size > MAX_FILE_BYTES or modified_ns >= 1 << 62:
        raise _Fault("a file lies outside its shard")
    return path, Stored(size, modified_ns, digest, shard, offset, width, height)
