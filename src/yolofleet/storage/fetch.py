"""Download files: complete and verified, or not at all.

A file gets its name only if its size and digest are right. An interrupted download stays as ``.NAME.part`` and continues
later, from any of the urls. If the digest is wrong and the part came from several responses, the download starts once more
from the beginning. Files without a digest are not downloaded. Proxies come from the environment (``https_proxy``,
``no_proxy``).

This is our own code because urllib, requests and ``torch.hub`` neither continue an interrupted download nor change the
server during one.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from yolofleet import __version__
from yolofleet.storage.atomic import exclusive, sync_folder, whole_file, writing
from yolofleet.storage.foreign import digest_of
from yolofleet.storage.request import (
    OFFLINE,
    Refused,
    Transient,
    is_offline,
    open_url,
    reason_text,
    whole_number,
)
from yolofleet.support.errors import DataError, StorageError
from yolofleet.support.terminal import Progress
from yolofleet.support.text import inform, size_text

DIGESTS = {"sha256": 64, "sha1": 40, "md5": 32}  # hexadecimal digits of each kind
MAX_UNSTATED_BYTES = 4 << 30  # of a file whose size neither the table nor the server states
MIN_BYTES_PER_TIMEOUT = 1024  # a slower response counts as stalled
SPARE_BYTES = 16 << 20  # free space that always remains on the disk
_CHUNK_BYTES = 256 << 10
_HINT = (
    "free some space, or set YOLOFLEET_CACHE or the folder to a writable one; the partial download is kept"
)


class DownloadError(DataError):
    """A file could not be downloaded."""

    usual_hint = "check the network, and the proxy in https_proxy"


@dataclass(frozen=True)
class Item:
    """A published file."""

    name: str  # its local name
    urls: tuple[str, ...]  # addresses of the same bytes, best first
    size_bytes: int | None  # None if unknown
    # ``sha256:HEX``, or ``sha1:HEX`` or ``md5:HEX`` if the publisher has no other; None: do not download
    digest: str | None
    licence: str  # one line, printed before the download
    origin: str  # the publisher's page


@dataclass(frozen=True)
class Patience:
    """The timeouts and retries of a download."""

    timeout_s: float = 30.0  # for a connection, and for the next KiB of a response
    attempts: int = 5  # failures in a row before the next url; progress of 1 % of the file resets the count
    # first_wait_s, longest_wait_s: wait after a failure; it doubles from the first to the longest
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    lock_s: float = 600.0  # longest wait for another process that downloads the same file without progress


def fetch(
    item: Item, folder: Path, *, patience: Patience | None = None, tell: Callable[[str], None] | None = None
) -> Path:
    """Return the file in ``folder``; download it if it is missing. One process downloads, others wait for it.

    Args:
        tell: gets progress messages; None: print them on standard error.
    Raises:
        DownloadError: the download failed, or the file differs from the published one. The hint says how to get the file
            by hand. A partial download is kept.
        StorageError: the disk is full or failing.
    """
    patience, tell = patience or Patience(), tell or inform
    target = folder / item.name
    if target.is_file():
        _check_present(item, target)
        return target
    if item.digest is None:
        what = f"{item.name} has no published digest, so it is not downloaded"
        raise DownloadError(what, hint=by_hand(item, folder))
    check_online(item, folder)
    with writing(target, _HINT):
        folder.mkdir(parents=True, exist_ok=True)
        _download_or_wait(item, folder, patience, tell)
    return target


def _download_or_wait(item: Item, folder: Path, patience: Patience, tell: Callable[[str], None]) -> None:
    """Download; while another process does, wait. Raise DownloadError if that one makes no progress."""
    target, seen, deadline_s = folder / item.name, None, 0.0
    while True:
        with exclusive(folder / f".{item.name}.lock") as is_mine:
            if is_mine:
                if target.is_file():  # another process was faster
                    _check_present(item, target)
                else:
                    _Download(item, folder, patience, tell).run()
                return
        now = _stamp(_part(target))
        if not deadline_s:
            tell(f"{item.name}: another process is downloading it; waiting")
        if not deadline_s or now != seen:
            seen, deadline_s = now, time.monotonic() + patience.lock_s
        if time.monotonic() > deadline_s:
            raise DownloadError(
                f"another process is downloading {item.name} and has made no progress for {patience.lock_s:.0f} s",
                hint=f"end that process, or {by_hand(item, folder)}",
            )
        time.sleep(0.1)


def adopt(item: Item, source: Path, folder: Path) -> Path:
    """Copy a file that the user has downloaded to the place where :func:`fetch` looks for it.

    Raises:
        DownloadError: it differs from the published file.
        StorageError: the disk is full or failing.
    """
    target = folder / item.name
    with writing(target, _HINT):
        _check_present(item, source)
        with source.open("rb") as content, whole_file(target) as file:
            shutil.copyfileobj(content, file)
    return target


def check_online(item: Item, folder: Path) -> None:
    """Raise DownloadError if the user forbids downloads."""
    if is_offline():
        what = f"cannot download {item.name}, because {OFFLINE} is set"
        raise DownloadError(what, hint=by_hand(item, folder))


def by_hand(item: Item, folder: Path) -> str:
    """Return the hint how to get the file by hand."""
    details = [size_text(item.size_bytes)] if item.size_bytes else []
    if item.digest:
        details.append(item.digest.replace(":", " "))
    about = f" ({', '.join(details)})" if details else ""
    return f"get {item.urls[0]}{about} by other means, and put it into {folder} as {item.name}"


def _check_present(item: Item, path: Path) -> None:
    """Raise DownloadError if the file is not the published one."""
    size = path.stat().st_size
    hint = f"move it away, or {by_hand(item, path.parent)}"
    if item.size_bytes is not None and size != item.size_bytes:
        what = f"{path} has {size:,} bytes; the published {item.name} has {item.size_bytes:,}"
        raise DownloadError(what, hint=hint)
    if item.digest is not None:
        kind, wanted = item.digest.split(":")
        found = digest_of(path, kind)
        if found != wanted:
            what = f"{path} is not the published {item.name}: its {kind} is {found}, expected {wanted}"
            raise DownloadError(what, hint=hint)


class _Download:
    """The download of one file into ``folder``; the caller holds the lock."""

    def __init__(self, item: Item, folder: Path, patience: Patience, tell: Callable[[str], None]) -> None:
        self.item, self.folder, self.patience, self.tell = item, folder, patience, tell
        self.target = folder / item.name
        self.part = _part(self.target)
        self.is_of_one_answer = False  # all of `part` came in one response
        self.tags: dict[str, str] = {}  # ETag of each url
        self.progress = Progress(sys.stderr)

    def run(self) -> None:
        have, size = self._have(), self.item.size_bytes
        size_note = f", {size_text(size)}" if size else ""
        continuing = f", continuing after {size_text(have)}" if have else ""
        self.tell(f"downloading {self.item.urls[0]}{size_note}{continuing}")
        if self.item.licence:
            self.tell(f"  licence: {self.item.licence}; {self.item.origin}")
        problems = []
        for url in self.item.urls:
            try:
                self._from_url(url)
                with self.part.open("rb+") as file:
                    os.fsync(file.fileno())
                self.part.replace(self.target)
                sync_folder(self.folder)
                return
            except Refused as problem:
                problems.append(f"{url}: {problem}")
            finally:
                self.progress.end()
                if not self._have():
                    self.part.unlink(missing_ok=True)
        kept = f" (it continues after {size_text(self._have())})" if self._have() else ""
        raise DownloadError(
            f"{self.item.name} could not be downloaded: {'; '.join(problems)}",
            hint=f"try again later{kept}; or {by_hand(self.item, self.folder)}",
        )

    def _have(self) -> int:
        """Return the size of the part in bytes."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

    def _from_url(self, url: str) -> None:
        """Complete the part and check its digest. Raise Refused if this url cannot give the file."""
        assert self.item.digest
        kind, wanted = self.item.digest.split(":")
        for is_last in (False, True):
            self.is_of_one_answer = False
            self._fill(url)
            found = digest_of(self.part, kind)
            if found == wanted:
                return
            self.part.unlink()
            if is_last or self.is_of_one_answer:
                raise Refused(f"its {kind} is {found}, expected {wanted}")
            what = "the pieces do not fit together; downloading again from the beginning"
            self.tell(f"{self.item.name}: {what}")

    def _fill(self, url: str) -> None:
        failures = 0
        while True:
            before = self._have()
            if before and before == self.item.size_bytes:
                return
            if self.item.size_bytes is not None and before > self.item.size_bytes:
                self.part.unlink()
                before = 0
            try:
                self._one_answer(url, before)
                return
            except Transient as problem:
                enough = max(1, (self.item.size_bytes or 0) // 100)
                failures = 1 if self._have() - before >= enough else failures + 1
                if failures >= self.patience.attempts:
                    raise Refused(f"{problem} ({failures} attempts)") from None
                wait_s = self.patience.first_wait_s * 2 ** (failures - 1)
                wait_s = min(problem.wait_s or wait_s, self.patience.longest_wait_s)
                self.progress.end()
                self.tell(f"{self.item.name}: {problem}; next attempt in {wait_s:.0f} s")
                time.sleep(wait_s)

    def _one_answer(self, url: str, have: int) -> None:
        """Send one request for the missing bytes. Raise Transient or Refused if the part is still incomplete."""
        headers = {"User-Agent": f"yolofleet/{__version__}", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if url in self.tags:
                headers["If-Range"] = self.tags[url]
        with open_url(url, headers, self.patience.timeout_s) as answer:
            if answer.status == 416:
                self.part.unlink(missing_ok=True)
                raise Transient("the server has fewer bytes than the partial download")
            start, total = self._checked_start(answer, have)
            tag = answer.headers.get("ETag", "")
            if tag.startswith('"'):  # a weak ETag does not identify the bytes
                self.tags[url] = tag
            expected = total if self.item.size_bytes is None else self.item.size_bytes
            _check_space(self.folder, (expected or 0) - start)
            with self.part.open("r+b" if start else "wb") as file:
                file.truncate(start)
                file.seek(start)
                self.is_of_one_answer = start == 0
                limit = MAX_UNSTATED_BYTES if expected is None else expected
                received = self._copy(answer, file, start, limit)
                file.flush()
                os.fsync(file.fileno())
        if expected is not None and received < expected:
            raise Transient(f"the connection ended after {received:,} of {expected:,} bytes")

    def _checked_start(self, answer: Any, have: int) -> tuple[int, int | None]:
        """Return the first byte of the response, and the size of the whole file or None."""
        kind = answer.headers.get_content_type()
        if kind in ("text/html", "application/xhtml+xml"):
            raise Refused("the server sent a web page instead of the file")
        total, start = whole_number(answer.headers.get("Content-Length")), 0
        if answer.status == 206:
            match = re.fullmatch(
                r"bytes (\d{1,18})-\d+/(\d{1,18}|\*)", answer.headers.get("Content-Range", "")
            )
            if not match or int(match[1]) != have:
                self.part.unlink(missing_ok=True)
                raise Transient("the server sent another part of the file than requested")
            start, total = have, whole_number(match[2])
        elif answer.status != 200:
            raise Refused(f"HTTP status {answer.status}")
        size = self.item.size_bytes
        if size is not None and total is not None and total != size:
            raise Refused(f"the server has {total:,} bytes, expected {size:,}")
        return start, total

    def _copy(self, answer: Any, file: IO[bytes], start: int, limit: int) -> int:
        """Append the response to the part; return the part's size in bytes."""
        received, window, window_ends_s = start, 0, time.monotonic() + self.patience.timeout_s
        while True:
            try:
                chunk = answer.read1(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as problem:
                raise Transient(f"the connection broke: {reason_text(problem)}") from None
            if not chunk:
                return received
            if not received and re.match(rb"\s*<(!doctype\s+)?html", chunk[:200], re.IGNORECASE):
                raise Refused("the server sent a web page instead of the file")
            if received + len(chunk) > limit:
                file.truncate(0)
                raise Refused(f"the server sent more than {limit:,} bytes")
            file.write(chunk)
            received += len(chunk)
            self.progress.show(self.item.name, received, limit, amount=size_text)
            window += len(chunk)
            if time.monotonic() > window_ends_s:
                if window < MIN_BYTES_PER_TIMEOUT:
                    raise Transient(f"only {window} bytes arrived in {self.patience.timeout_s:.0f} s")
                window, window_ends_s = 0, time.monotonic() + self.patience.timeout_s


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _check_space(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need_bytes + SPARE_BYTES:
        raise StorageError(
            f"{folder} has {size_text(free)} free; {size_text(need_bytes)} more are needed",
            hint="free some space, or choose another folder; the partial download is kept",
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
