"""Write objects below an address: whole, compared with what the store then has, and some only if they do not exist yet."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from yolofleet.storage.atomic import make_folder, whole_file, write_bytes
from yolofleet.storage.foreign import check_links, open_foreign, reading
from yolofleet.storage.object_store import (
    Damaged,
    ObjectStore,
    digest_for,
    error_code,
    listed_object,
    pieces_of,
)
from yolofleet.storage.shards import Stored
from yolofleet.support.errors import StorageError

PART_BYTES = 16 << 20  # of a file that goes up in parts; S3 allows 10,000 parts
PARTS_AT_ONCE = 2  # each is in memory
_md5 = partial(hashlib.md5, usedforsecurity=False)


class ObjectWriter(ObjectStore):
    """Writes below an address of s3, gs, az or file. Its methods raise StorageError."""

    def put(self, file: Path, key: str) -> None:
        """Write a file of this machine, which must not change meanwhile, as an object; a large one goes up in parts."""
        size, whole, parts = _digests(file)
        more: dict[str, Any] = {}
        if self.scheme == "s3":
            more = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}

        def written() -> None:
            if self.scheme == "file":
                with open_foreign(file) as source, whole_file(Path(self._place, key)) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                return
            self._connected().put_file(str(file), f"{self._place}/{key}", **more)
            self._compare(key, size, whole, parts)

        self._trying(f"write {self.root}/{key}", written)

    def write(self, key: str, content: bytes) -> None:
        """Write a small object, which another process may replace at once."""

        def written() -> None:
            if self.scheme == "file":
                write_bytes(Path(self._place, key), content)
            else:
                self._connected().pipe_file(f"{self._place}/{key}", content)

        self._trying(f"write {self.root}/{key}", written)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether this call has made it.

        A store that ignores the condition overwrites the object.
        """

        def made() -> bool:
            try:
                if self.scheme == "file":  # fsspec looks first and writes then
                    path = Path(self._place, key)
                    make_folder(path.parent)
                    if path.is_symlink():
                        raise FileExistsError
                    with path.open("xb") as file:
                        file.write(content)
                else:
                    self._connected().pipe_file(f"{self._place}/{key}", content, mode="create")
            except Exception as problem:
                # of fsspec or Azure, of S3 (whose code is the status if the answer has no body), of Google
                is_there = (
                    isinstance(problem, FileExistsError)
                    or error_code(problem) in ("PreconditionFailed", "412")
                    or getattr(problem, "code", 0) == 412
                )
                if is_there:
                    return self.content(key) == content  # an earlier try has made it, whose answer was lost
                raise
            return True

        return self._trying(f"write {self.root}/{key}", made)

    def content(self, key: str, limit_bytes: int = 1 << 16) -> bytes:
        """Return the first bytes of an object."""
        place = f"{self._place}/{key}"
        self._check_regular([place])

        return self._trying(
            f"read {self.root}/{key}",
            lambda: bytes(self._connected().cat_file(place, start=0, end=limit_bytes)),
        )

    def remove(self, key: str) -> None:
        """Delete an object, which may be gone already."""

        def removed() -> None:
            with suppress(FileNotFoundError):
                self._connected().rm_file(f"{self._place}/{key}")

        self._trying(f"delete {self.root}/{key}", removed)

    def is_empty(self) -> bool:
        """Return whether no object lies below the root."""

        def found() -> bool:
            try:
                return not self._connected().ls(self._place, detail=False)
            except FileNotFoundError:
                return True

        return self._trying(f"list {self.root}", found)

    def check_links(self) -> None:
        """Raise ConfigError if a link in a folder of a disk leads out of it: writing would change other files."""
        if self.scheme == "file" and os.path.isdir(self._place):  # noqa: PTH112
            check_links(Path(self._place))

    def _compare(self, key: str, size: int, whole: str, parts: str) -> None:
        """Raise Damaged if the store has another content: by its digest of the object, else by reading it.

        Args:
            whole, parts: MD5 of the content, and what S3 states for an object that came in parts.
        """
        place = f"{self._place}/{key}"
        answer = self._connected().info(place)
        about = listed_object(answer)
        if about.size != size:
            raise Damaged(f"it has {about.size} bytes there, {size} here")
        if about.digest == whole or (parts and parts in str(answer.get("ETag", ""))):
            return
        with self._connected().open(place, "rb") as file:
            there = digest_for(Stored(size, 0, ""), pieces_of(file))
        if there != whole:
            raise Damaged("its content is not that of the file")


def _digests(file: Path) -> tuple[int, str, str]:
    """Return size and MD5 of a file, and the ETag that S3 gives it if it comes in parts. Raises StorageError."""
    whole, of_parts, size = _md5(), list[bytes](), 0
    with reading(file, StorageError), open_foreign(file) as opened:
        while part := opened.read(PART_BYTES):
            whole.update(part)
            of_parts.append(_md5(part).digest())
            size += len(part)
    return size, whole.hexdigest(), f"{_md5(b''.join(of_parts)).hexdigest()}-{len(of_parts)}"


@contextmanager
def unchanging(file: Path) -> Iterator[Path]:
    """Yield a path to the content that a file has now, even if another file replaces it meanwhile (Linux). Raises OSError."""
    with open_foreign(file, follow=False) as opened:
        of_handle = Path(f"/proc/self/fd/{opened.fileno()}")
        yield of_handle if os.path.exists(of_handle) else file  # noqa: PTH110
