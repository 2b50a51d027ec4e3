"""Files from the internet: whole and verified, or not there.

A file gets its name only when its size and digest are right. What came before an interruption stays beside it as
``.NAME.part`` and is continued, from any of the urls: the digest decides in the end whether it is the file. If it
is not and was put together from several answers, it is fetched once more from the beginning. Nothing is fetched
that has no digest. Proxies are taken from the environment, as usual (``https_proxy``, ``no_proxy``).
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from yolofleet import __version__
from yolofleet.errors import DataError, StorageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:
    msvcrt = None  # type: ignore[assignment]

OFFLINE = "YOLOFLEET_OFFLINE"
DIGESTS = {"sha256": 64, "sha1": 40, "md5": 32}  # hexadecimal digits of each kind
MAX_UNSTATED_BYTES = 4 << 30  # of a file whose size neither the table nor the server says
MIN_BYTES_PER_TIMEOUT = 1024  # a slower answer has stalled
SPARE_BYTES = 16 << 20  # a disk is never filled to the brim
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # HTTP status codes of which another attempt may be better
_CHUNK_BYTES = 256 << 10


class DownloadError(DataError):
    """A file could not be had from the internet."""

    usual_hint = "check the network, and the proxy in https_proxy"


@dataclass(frozen=True)
class Item:
    """A file that somebody publishes.

    Attributes:
        name: under which it is kept.
        urls: of the same bytes, best first.
        size_bytes: None where nobody says.
        digest: ``sha256:HEX``, or ``sha1:HEX`` or ``md5:HEX`` where that is all that is known; None: not to be
            downloaded.
        licence: one line, shown before the download.
        origin: the publisher's page.
    """

    name: str
    urls: tuple[str, ...]
    size_bytes: int | None
    digest: str | None
    licence: str
    origin: str


@dataclass(frozen=True)
class Patience:
    """How long a download waits.

    Attributes:
        timeout_s: for a connection, and for the next KiB of an answer.
        attempts: failures in a row before an url is given up; one that brought a hundredth of the file is none.
        first_wait_s, longest_wait_s: pause after a failure; it doubles from the first to the longest.
        lock_s: for another process that fetches the same file and makes no progress.
    """

    timeout_s: float = 30.0
    attempts: int = 5
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    lock_s: float = 600.0


def fetch(
    item: Item, folder: Path, *, patience: Patience | None = None, tell: Callable[[str], None] | None = None
) -> Path:
    """The file in ``folder``, downloaded if it is not there. One process downloads, others wait for it.

    Args:
        tell: gets what a person may want to know; default: standard error.
    Raises:
        DownloadError: not to be had, or not what was published; says how to get it by hand. What came of it is
            kept.
        StorageError: the disk refused or is too small.
    """
    patience, tell = patience or Patience(), tell or to_stderr
    target = folder / item.name
    if target.is_file():
        _check_present(item, target)
        return target
    if item.digest is None:
        raise DownloadError(
            f"{item.name} has no published digest, so it is not downloaded", hint=by_hand(item, folder)
        )
    if is_offline():
        raise DownloadError(f"{item.name} is not here, and {OFFLINE} is set", hint=by_hand(item, folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _fetch_unless_locked(item, folder, patience, tell):
            pass
    except OSError as problem:
        raise _refused_by_disk(problem, target) from None
    return target


def _fetch_unless_locked(item: Item, folder: Path, patience: Patience, tell: Callable[[str], None]) -> bool:
    """False after another process has been at it; raises DownloadError when that makes no progress."""
    lock, target = folder / f".{item.name}.lock", folder / item.name
    with exclusive(lock) as is_mine:
        if is_mine:
            if target.is_file():  # another process was faster
                _check_present(item, target)
            else:
                _Download(item, folder, patience, tell).run()
            return True
    tell(f"{item.name}: another process is downloading it; waiting")
    seen, deadline_s = _stamp(_part(target)), time.monotonic() + patience.lock_s
    while True:
        time.sleep(0.1)
        with exclusive(lock) as is_free:
            if is_free:
                return False
        now = _stamp(_part(target))
        if now != seen:
            seen, deadline_s = now, time.monotonic() + patience.lock_s
        if time.monotonic() > deadline_s:
            raise DownloadError(
                f"another process is fetching {item.name} and has made no progress for {patience.lock_s:.0f} s",
                hint=f"end that process, or {by_hand(item, folder)}",
            )


def adopt(item: Item, source: Path, folder: Path) -> Path:
    """Copy a file that somebody has downloaded by hand to where :func:`fetch` looks for it.

    Raises:
        DownloadError: it is not the one that was published.
        StorageError: the disk refused.
    """
    target = folder / item.name
    part = _part(target)
    try:
        _check_present(item, source)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, part)
        _give_name(part, target)
    except OSError as problem:
        with contextlib.suppress(OSError):
            part.unlink()
        raise _refused_by_disk(problem, target) from None
    return target


def is_offline() -> bool:
    """The person forbids downloads."""
    return os.environ.get(OFFLINE, "").lower() not in ("", "0", "no", "off", "false")


def by_hand(item: Item, folder: Path) -> str:
    """What to do without a download."""
    facts = [size_text(item.size_bytes)] if item.size_bytes else []
    if item.digest:
        facts.append(item.digest.replace(":", " "))
    about = f" ({', '.join(facts)})" if facts else ""
    return f"get {item.urls[0]}{about} by other means, and put it into {folder} as {item.name}"


def size_text(size_bytes: float) -> str:
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= bytes_each:
            return f"{size_bytes / bytes_each:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def digest_of(path: Path, kind: str = "sha256") -> str:
    """Hexadecimal digest of a file's bytes; reads 1 MiB at a time.

    Raises:
        OSError: it cannot be read.
    """
    found = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _check_present(item: Item, path: Path) -> None:
    """Raises DownloadError when the file is not the published one."""
    size = path.stat().st_size
    hint = f"move it away, or {by_hand(item, path.parent)}"
    if item.size_bytes is not None and size != item.size_bytes:
        raise DownloadError(
            f"{path} has {size:,} bytes; the {item.name} that was published has {item.size_bytes:,}",
            hint=hint,
        )
    if item.digest is not None:
        kind, wanted = item.digest.split(":")
        found = digest_of(path, kind)
        if found != wanted:
            raise DownloadError(
                f"{path} is not the {item.name} that was published: its {kind} is {found}, not {wanted}",
                hint=hint,
            )


class _Refused(Exception):
    """This url is no good, however often it is asked."""


class _Transient(Exception):
    """Another attempt may be better."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class _Download:
    """One file on its way into ``folder``; the caller holds the lock.

    Attributes:
        answers: of how many answers of a server ``part`` is made.
    """

    def __init__(self, item: Item, folder: Path, patience: Patience, tell: Callable[[str], None]) -> None:
        self.item, self.folder, self.patience, self.tell = item, folder, patience, tell
        self.target = folder / item.name
        self.part = _part(self.target)
        self.answers = 0
        self.tags: dict[str, str] = {}  # ETag of each url
        self.line = _ProgressLine(item.name)

    def run(self) -> None:
        self.tell(f"downloading {self.item.urls[0]}" + self._size_note())
        if self.item.licence:
            self.tell(f"  licence: {self.item.licence}; {self.item.origin}")
        problems = []
        for url in self.item.urls:
            try:
                self._from_url(url)
                _give_name(self.part, self.target)
                return
            except _Refused as problem:
                problems.append(f"{url}: {problem}")
            finally:
                self.line.close()
                if not self._have():
                    self.part.unlink(missing_ok=True)
        kept = f"; the {size_text(self._have())} that came are kept and continued" if self._have() else ""
        raise DownloadError(
            f"{self.item.name} could not be downloaded: {'; '.join(problems)}",
            hint=f"try again later{kept}; or {by_hand(self.item, self.folder)}",
        )

    def _size_note(self) -> str:
        have, size = self._have(), self.item.size_bytes
        return (f", {size_text(size)}" if size else "") + (
            f", continuing after {size_text(have)}" if have else ""
        )

    def _have(self) -> int:
        """Bytes of the part."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

    def _from_url(self, url: str) -> None:
        """Fill the part and check it. Raises _Refused."""
        assert self.item.digest
        kind, wanted = self.item.digest.split(":")
        for is_last in (False, True):
            self.answers = 1 if self._have() else 0
            self._fill(url)
            found = digest_of(self.part, kind)
            if found == wanted:
                return
            self.part.unlink()
            if is_last or self.answers == 1:
                raise _Refused(f"its {kind} is {found}, not {wanted}")
            self.tell(f"{self.item.name}: the pieces do not fit together; once more from the beginning")

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
            except _Transient as problem:
                enough = max(1, (self.item.size_bytes or 0) // 100)
                failures = 1 if self._have() - before >= enough else failures + 1
                if failures >= self.patience.attempts:
                    raise _Refused(f"{problem} ({failures} attempts)") from None
                wait_s = self.patience.first_wait_s * 2 ** (failures - 1)
                wait_s = min(problem.wait_s or wait_s, self.patience.longest_wait_s)
                self.line.close()
                self.tell(f"{self.item.name}: {problem}; another attempt in {wait_s:.0f} s")
                time.sleep(wait_s)

    def _one_answer(self, url: str, have: int) -> None:
        """Ask once for what is missing. Raises _Transient or _Refused."""
        headers = {"User-Agent": f"yolofleet/{__version__}", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if url in self.tags:
                headers["If-Range"] = self.tags[url]
        with _opened(url, headers, self.patience.timeout_s) as answer:
            if answer.status == 416:
                self.part.unlink(missing_ok=True)
                raise _Transient("the server has less than is here already")
            start, total = self._checked_start(answer, have)
            tag = answer.headers.get("ETag", "")
            if tag.startswith('"'):  # a weak one says nothing about bytes
                self.tags[url] = tag
            expected = total if self.item.size_bytes is None else self.item.size_bytes
            _check_space(self.folder, (expected or 0) - start)
            with self.part.open("r+b" if start else "wb") as file:
                file.truncate(start)
                file.seek(start)
                self.answers = self.answers + 1 if start else 1
                received = self._copy(
                    answer, file, start, MAX_UNSTATED_BYTES if expected is None else expected
                )
                file.flush()
                os.fsync(file.fileno())
        if expected is not None and received < expected:
            raise _Transient(f"the connection ended after {received:,} of {expected:,} bytes")

    def _checked_start(self, answer: Any, have: int) -> tuple[int, int | None]:
        """At which byte the answer starts, and the size of the whole file if it says so."""
        kind = answer.headers.get_content_type()
        if kind in ("text/html", "application/xhtml+xml"):
            raise _Refused("a web page came instead of the file")
        total, start = _whole_number(answer.headers.get("Content-Length")), 0
        if answer.status == 206:
            match = re.fullmatch(
                r"bytes (\d{1,18})-\d+/(\d{1,18}|\*)", answer.headers.get("Content-Range", "")
            )
            if not match or int(match[1]) != have:
                self.part.unlink(missing_ok=True)
                raise _Transient("the server sent another part of the file than was asked for")
            start, total = have, _whole_number(match[2])
        elif answer.status != 200:
            raise _Refused(f"HTTP status {answer.status}")
        size = self.item.size_bytes
        if size is not None and total is not None and total != size:
            raise _Refused(f"it offers {total:,} bytes; the file has {size:,}")
        return start, total

    def _copy(self, answer: Any, file: IO[bytes], start: int, limit: int) -> int:
        """Bytes of the part after what came."""
        received, window, window_ends_s = start, 0, time.monotonic() + self.patience.timeout_s
        while True:
            try:
                chunk = answer.read1(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as problem:
                raise _Transient(f"the connection broke: {_reason(problem)}") from None
            if not chunk:
                return received
            if not received and re.match(rb"\s*<(!doctype\s+)?html", chunk[:200], re.IGNORECASE):
                raise _Refused("a web page came instead of the file")
            if received + len(chunk) > limit:
                file.truncate(0)
                raise _Refused(f"it sends more than the {limit:,} bytes that the file has")
            file.write(chunk)
            received += len(chunk)
            self.line.show(received, limit)
            window += len(chunk)
            if time.monotonic() > window_ends_s:
                if window < MIN_BYTES_PER_TIMEOUT:
                    raise _Transient(f"only {window} bytes came in {self.patience.timeout_s:.0f} s")
                window, window_ends_s = 0, time.monotonic() + self.patience.timeout_s


# -- HTTP ----------------------------------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only, and never from https to http; at most ten."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if new not in ("http", "https") or (old == "https" and new == "http"):
            raise _Refused(f"it redirects from {old} to {newurl[:200]!r}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS with the proxies of the environment; no file, ftp or data urls."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _opened(url: str, headers: dict[str, str], timeout_s: float) -> Any:
    """An open answer: status below 300, or 416 (no such range). Raises _Transient or _Refused."""
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise _Refused("only http and https are asked")
        return _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as problem:
        if problem.code == 416:
            return problem
        what = f"HTTP {problem.code} {problem.reason}".splitlines()[0][:200]
        problem.close()
        if problem.code in TRANSIENT:
            raise _Transient(what, _retry_after_s(problem.headers.get("Retry-After"))) from None
        raise _Refused(what) from None
    except urllib.error.URLError as problem:
        if isinstance(problem.reason, ssl.SSLCertVerificationError):
            raise _Refused(f"its certificate is not trusted ({problem.reason.verify_message})") from None
        if isinstance(problem.reason, socket.gaierror) and "Range" not in headers:  # no network, most likely
            raise _Refused(
                f"the name {urlsplit(url).hostname} is not found: {_reason(problem.reason)}"
            ) from None
        raise _Transient(f"not reachable: {_reason(problem.reason)}") from None
    except (OSError, http.client.HTTPException) as problem:
        raise _Transient(f"no answer: {_reason(problem)}") from None
    except ValueError as problem:  # an address that is none
        raise _Refused(str(problem)[:200]) from None


def _reason(problem: Any) -> str:
    text = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    return str(text).splitlines()[0][:200]


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,18}", text) else None


def _retry_after_s(text: str | None) -> float | None:
    """Seconds, or a date, as RFC 9110 has them."""
    if not text:
        return None
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


# -- disk ----------------------------------------------------------------------------------------------------


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _give_name(part: Path, target: Path) -> None:
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _check_space(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need_bytes + SPARE_BYTES:
        raise StorageError(
            f"{folder} has {size_text(free)} free; {size_text(need_bytes)} more are needed",
            hint="free some space, or choose another folder; what came so far is kept",
        )


def _refused_by_disk(problem: OSError, target: Path) -> StorageError:
    return StorageError(
        f"{target} cannot be written: {problem.strerror or problem}",
        hint="free some space, or set YOLOFLEET_CACHE or the folder to one that can be written; what came so far "
        "is kept",
    )


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Whether this process holds the lock file ``path`` inside the block; does not wait.

    The system frees the lock when the process ends, however it ends.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    is_mine = False
    try:  # the file may have been removed between open and lock
        is_mine = _try_lock(handle) and (os.name != "posix" or _is_same(handle, path))
        yield is_mine
    finally:
        if is_mine:
            with contextlib.suppress(OSError):  # Windows: it is open
                path.unlink()
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: two downloads at once are wasteful, not wrong
        return True
    return True


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns


class _ProgressLine:
    """One line of standard error, rewritten twice a second; nothing where that is no terminal."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_shown = False
        self.started: tuple[float, int] | None = None  # clock s, bytes
        self.next_s = 0.0

    def show(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        self.started = self.started or (now_s, done)
        if now_s < self.next_s or not sys.stderr.isatty():
            return
        self.next_s = now_s + 0.5
        rate = (done - self.started[1]) / max(now_s - self.started[0], 1e-3)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        text = f"{self.name}: {done / total:4.0%} of {size_text(total)}, {size_text(rate)}/s{left}"
        print(f"\r{text:<78.78}", end="", file=sys.stderr, flush=True)
        self.is_shown = True

    def close(self) -> None:
        if self.is_shown:
            print(file=sys.stderr)
            self.is_shown = False
