"""Objects in a bucket or on a web server, listed and read through fsspec and its file systems.

Credentials come from the usual places of the provider (environment, profile, role of the instance), and never from an address.
A failure that may pass is tried again for ``OUTAGE_S`` seconds. Content counts only if its size and its digest are those of the
listing: the MD5 where the store states one, or the SHA-256 in the index of shards.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, urljoin

from yolofleet.storage.caches import INDEX
from yolofleet.storage.request import OFFLINE, Refused, check_redirect, is_forbidden, is_offline, may_pass
from yolofleet.storage.shards import (
    LIST,
    MAX_INDEX_BYTES,
    Stored,
    folders_among,
    is_plain,
    is_plain_path,
    read_index,
)
from yolofleet.support.errors import ConfigError, NotAsListed, StorageError, YolofleetError, install_hint
from yolofleet.support.text import announce, screen_line, size_text

# module, extra
SCHEMES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "https": ("aiohttp", "http"),
    "http": ("aiohttp", "http"),
    "file": ("fsspec", "http"),  # torch needs fsspec, so it is there
}
OUTAGE_S = 300.0  # a store that answers nothing for so long ends the run
TELL_AFTER_S = 5.0  # of an outage
LONGEST_WAIT_S = 10.0  # between two tries
MOST_OBJECTS = 10_000_000  # below one address
AT_ONCE = 32  # requests
DAMAGED_TRIES = 5  # for content that arrives with another digest
WAITS_S = (0.1, 0.2, 0.4, 0.8)  # between tries for a damaged index
GAP_BYTES = 64 << 10  # between two parts of a shard that one request reads
REQUEST_BYTES = 8 << 20  # of a shard in one request, unless one part is larger
_MD5 = re.compile(r"[0-9a-f]{32}")
# names of errors of botocore and google-auth
_OF_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "ParamValidationError",
    "SSOError",
    "LoginError",
)
# names of errors of botocore that are about the network, or the machine's own server of credentials, and not about settings
_OF_NETWORK = re.compile("HTTPClient|Connection|Incomplete|(?<!Invalid)Checksum|Retrieval")
# codes of S3 that come with a final HTTP status, but mean that the request arrived cut or too often
_PASSING = re.compile(
    "Throttl|Timeout|TooManyRequests|LimitExceeded|SlowDown|Busy|Conflict|Aborted|BadDigest|Checksum|SHA256Mismatch|IncompleteBody"
)

Done = TypeVar("Done")


def without_secrets(address: str) -> str:
    """Return an address for messages, without user data and query."""
    scheme, _, rest = address.partition("://")
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    return screen_line(f"{scheme}://{place.rpartition('@')[2]}")


def check_address(address: str, setting: str = "--data") -> None:
    """Raise ConfigError for an address that is not of a supported store, is not in its plain form, or holds a secret."""
    scheme, _, place = address.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(
            f"{setting}: {screen_line(scheme[:20])}:// is not supported", hint=f"one of {known}"
        )
    if scheme != "file" and re.search(r"[?#@]", place):
        raise ConfigError(
            f"{setting} {without_secrets(address)} has user data or a query, which could be a secret",
            hint="credentials belong into the environment or the profile of the provider (docs/object-storage.md)",
        )
    parts = place.removeprefix("/" if scheme == "file" else "").removesuffix("/").split("/")
    if (scheme == "file") != place.startswith("/") or any(not is_plain(part) for part in parts):
        raise ConfigError(
            f"{setting} {without_secrets(address)} is not a plain address",
            hint=f"{scheme}://BUCKET/FOLDER/data.yaml",
        )


class ObjectStore:
    """The objects below an address.

    Args:
        root: an address of a folder that passed :func:`check_address`, without a slash at its end.
        outage_s: how long to try again; an outage is told only if that is longer than ``TELL_AFTER_S``.
    """

    def __init__(self, root: str, outage_s: float | None = None) -> None:
        self.root = root
        self.outage_s = outage_s
        self.scheme, _, place = root.partition("://")
        self._place = root if self.scheme in ("http", "https") else place
        self._system: Any = None
        self._made_by = 0

    def listing(self) -> tuple[dict[str, Stored], list[str]]:
        """Return the files by key below the root, and the keys that cannot be the path of a file.

        An index of shards takes the place of the store's own list, and a web server has no other one than ``LIST``.

        Raises:
            ConfigError: there is no such folder, or a web server has neither.
            StorageError: the store cannot be read, or the index is damaged.
        """
        is_web = self.scheme in ("http", "https")
        names = (INDEX, LIST) if is_web else (INDEX,)
        for name in names:
            try:
                index = self._index(name)
            except Denied:  # some web servers deny access to what does not exist
                if name == names[-1]:
                    raise
                continue
            if index is not None:
                return index, []
        if is_web:
            raise ConfigError(
                f"{self.root} has no {INDEX} and no {LIST}, and a web server has no list of its files",
                hint="make one with yolofleet data shard or data index, or use a bucket (s3://, gs://, az://)",
            )
        return self.objects()

    def objects(self, folder: str = "") -> tuple[dict[str, Stored], list[str]]:
        """Return the store's own list of all files, or of those in a folder, as :meth:`listing`."""
        below = f"{self._place}/{folder}".rstrip("/")
        found = self._trying(f"list {self.root}", lambda: self._connected().find(below, detail=True))
        objects, odd = dict[str, Stored](), list[str]()
        for place, about in found.items():
            key = place.removeprefix(self._place).removeprefix("/")  # a second slash is a part of the key
            if about.get("type") != "file" or place.endswith("/") or not key:
                continue  # the mark of an empty folder
            if is_plain_path(key):
                objects[key] = listed_object(about)
            else:
                odd.append(key)
        if len(objects) > MOST_OBJECTS:
            raise StorageError(
                f"{self.root} has more than {MOST_OBJECTS:,} objects", hint="name a folder with less"
            )
        folders = folders_among(objects)
        odd += sorted(folders)
        return {key: about for key, about in objects.items() if key not in folders}, odd

    def _index(self, name: str) -> dict[str, Stored] | None:
        """Return the files that an index lists; None without such an index."""
        place, size = self._place_of(name), 0
        try:
            size = self._trying(f"read {self.root}/{name}", lambda: self._size_of(place))
        except Gone:
            return None
        if size > MAX_INDEX_BYTES:
            raise StorageError(
                f"{self.root}/{name} has {size_text(size)}, the limit is {size_text(MAX_INDEX_BYTES)}"
            )
        self._check_regular([place])
        if not size:
            read_index(b"", f"{self.root}/{name}")
        for wait_s in (None,) if self.scheme == "file" else (*WAITS_S, None):
            content = self._trying(
                f"read {self.root}/{name}",
                lambda: self._connected().cat_file(place, start=0, end=MAX_INDEX_BYTES),
            )
            try:
                return read_index(content, f"{self.root}/{name}")
            except StorageError:  # it may have been damaged on its way
                if wait_s is None:
                    raise
            time.sleep(wait_s)
        raise AssertionError

    def _size_of(self, place: str) -> int:
        """Return the size of an object; of a web server, whose file system takes every failure for a missing file, up to 1."""
        if self.scheme in ("http", "https"):
            try:
                return min(len(self._connected().cat_file(place, start=0, end=1)), 1)
            except Exception as problem:
                if _status(problem) == 416:  # no such part: it is empty
                    return 0
                raise
        return int(self._connected().info(place)["size"] or 0)

    def read(self, objects: Mapping[str, Stored]) -> dict[str, bytes]:
        """Return the content of these files; up to ``AT_ONCE`` requests run at a time.

        Raises:
            StorageError: one is gone, has another content than the listing says, or cannot be read.
        """
        done: dict[str, bytes] = {}

        def read_rest() -> None:
            problems: list[_OfObject] = []
            for key, content in self._contents({key: objects[key] for key in objects if key not in done}):
                about = objects[key]
                name = f"{about.shard} ({key} in it)" if about.shard else key
                if isinstance(content, Exception):
                    problems.append(_OfObject(name, content))
                elif fault := self._fault(key, about, len(content), digest_for(about, [content])):
                    problems.append(_OfObject(name, Damaged(fault)))
                else:
                    done[key] = content
            if problems:
                raise next((one for one in problems if not _may_pass(one.args[1])), problems[0])

        self._trying(f"read {self.root}", read_rest, progress=lambda: len(done))
        return done

    def _contents(self, objects: Mapping[str, Stored]) -> Iterator[tuple[str, bytes | Exception]]:
        """Yield the content of each file, or the error of the store."""
        whole = {key: self._place_of(key) for key, about in objects.items() if not about.shard}
        if whole:
            self._check_regular(whole.values())
            all_bytes = [None] * len(whole)
            yield from zip(whole, self._ranges([*whole.values()], all_bytes, all_bytes), strict=True)
        requests = _requests({key: about for key, about in objects.items() if about.shard})
        if requests:
            places = [self._place_of(shard) for shard, *_ in requests]
            self._check_regular(places)
            begins, ends = [begin for _, begin, *_ in requests], [end for *_, end, _ in requests]
            answers = self._ranges(places, begins, ends)
            for (shard, begin, end, keys), answer in zip(requests, answers, strict=True):
                if isinstance(answer, Exception):
                    yield from ((key, answer) for key in keys)
                    continue
                if len(answer) > end - begin:
                    raise StorageError(
                        f"{self.root}/{shard}: the server sends more than the part that was asked for",
                        hint="shards need a web server that answers requests for ranges",
                    )
                for key in keys:
                    at = objects[key].offset - begin
                    yield key, answer[at : at + objects[key].size]

    def _ranges(self, places: list[str], begins: list[Any], ends: list[Any]) -> list[Any]:
        """Return the parts of objects, or errors; unlike ``cat`` of fsspec, this takes no name for a pattern."""
        found: list[Any] = self._connected().cat_ranges(
            places, begins, ends, on_error="return", batch_size=AT_ONCE
        )
        return found

    def _place_of(self, key: str) -> str:
        """Return the name of an object for the file system."""
        return f"{self._place}/{quote(key) if self.scheme in ('http', 'https') else key}"

    def copy(self, key: str, about: Stored, target: Path) -> None:
        """Write a large object to a file. Raise StorageError as :meth:`read` does, and OSError of the disk."""

        def copied() -> None:
            self._check_regular([self._place_of(key)])
            self._connected().get_file(self._place_of(key), str(target))
            with target.open("rb") as file:
                digest = digest_for(about, pieces_of(file))
            if fault := self._fault(key, about, target.stat().st_size, digest):
                raise Damaged(fault)

        self._trying(f"read {self.root}/{key}", copied)

    def _check_regular(self, places: Iterable[str]) -> None:
        """Raise StorageError for a pipe or a device of a disk, which may block for ever or never end."""
        if self.scheme == "file":
            for place in dict.fromkeys(places):
                if os.path.exists(place) and not os.path.isfile(place):  # noqa: PTH110, PTH113
                    raise StorageError(
                        f"cannot read {screen_line(place)}: it is a named pipe, a device or a folder"
                    )

    def _fault(self, key: str, about: Stored, size: int, digest: str) -> str:
        """Return how content differs from what the listing says; "" if it does not."""
        if size != about.size:
            return f"it has {size} bytes; the listing says {about.size}"
        is_other = about.digest not in ("", digest)
        if is_other and not (len(about.digest) == 32 and self._has_another_digest(key)):
            return "its content does not have the digest that the listing says"
        return ""

    def _has_another_digest(self, key: str) -> bool:
        """Return whether the ETag of an object in S3 is no MD5: the store has encrypted it with a key of its own."""
        if self.scheme != "s3":
            return False
        bucket, _, folder = self._place.partition("/")
        name = f"{folder}/{key}" if folder else key
        head = self._connected().call_s3("head_object", Bucket=bucket, Key=name)
        return (
            str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in head
        )

    def _connected(self) -> Any:
        """Return the file system of fsspec, which a forked process must make again."""
        if self._system is None or self._made_by != os.getpid():
            # that of the parent must not be finalized here: it would close connections in a thread that only the parent has
            if self._system is not None:
                _of_parents.append(self._system)
            self._system, self._made_by = _file_system(self.scheme, self._place), os.getpid()
        return self._system

    def _trying(self, what: str, work: Callable[[], Done], progress: Callable[[], int] = int) -> Done:
        """Return what ``work`` returns; after a failure that may pass, try again. Raises StorageError.

        Args:
            progress: a count that grows while the store works, which ends an outage.
        """
        began_s, wait_s, is_told, before, damaged = time.monotonic(), 0.2, False, progress(), 0
        outage_s = OUTAGE_S if self.outage_s is None else self.outage_s
        while True:
            try:
                return work()
            except YolofleetError:
                raise
            except Exception as found:  # s3fs, botocore and aiohttp have no common class
                problem, task = found, what
                if isinstance(found, _OfObject):
                    task, problem = f"{what}/{found.args[0]}", found.args[1]
                if progress() > before:
                    began_s, wait_s, before = time.monotonic(), 0.2, progress()
                lasted_s = time.monotonic() - began_s
                damaged += _is_damaged(problem)
                is_final = self.scheme == "file" or not _may_pass(problem)
                if is_final or lasted_s > outage_s or damaged == DAMAGED_TRIES:
                    raise _refused(task, problem, lasted_s) from None
                if lasted_s > TELL_AFTER_S and not is_told and self.outage_s is None:
                    is_told = True
                    announce(
                        f"note: cannot {task} ({reason(problem)}); trying for {OUTAGE_S / 60:.0f} minutes"
                    )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


_of_parents: list[Any] = []  # file systems that a forked process has inherited


class Damaged(Exception):
    """Content arrived that is not what the listing says."""


class _OfObject(Exception):
    """One of several objects could not be read. Its arguments are the name of the object, and the error of the store."""


class Gone(NotAsListed):
    """There is no such object."""


class Denied(StorageError):
    """The store refuses access, or this machine has no credentials."""


def _is_damaged(problem: Exception) -> bool:
    """Return whether content arrived that is not what the listing says; botocore also compares checksums of its own."""
    return isinstance(problem, Damaged) or "Checksum" in type(problem).__name__


def _refused(what: str, problem: Exception, lasted_s: float) -> StorageError:
    if isinstance(problem, FileNotFoundError):
        return Gone(
            f"cannot {what}: it does not exist",
            hint="check the address; if it changed during a run, start again",
        )
    tried = f"; tried for {lasted_s:.0f} s" if lasted_s > 1 else ""
    hint = "check the network and the store; a run goes on with --resume"
    if _is_damaged(problem):
        return NotAsListed(f"cannot {what}: {reason(problem)}{tried}", hint=hint)
    if not _may_pass(problem):
        if _is_refusal(problem):
            hint = (
                "check the credentials of this machine, their rights, and its clock (docs/object-storage.md)"
            )
            return Denied(f"cannot {what}: {reason(problem)}", hint=hint)
        hint = "check the address, and the settings of the store on this machine (docs/object-storage.md#credentials)"
    return StorageError(f"cannot {what}: {reason(problem)}{tried}", hint=hint)


def pieces_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the rest of a file in pieces of up to 1 MiB."""
    return iter(lambda: file.read(1 << 20), b"")


def digest_for(about: Stored, pieces: Iterable[bytes]) -> str:
    """Return the digest of content, of the kind that the listing states."""
    digest = hashlib.new("sha256" if len(about.digest) == 64 else "md5", usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _requests(parts: Mapping[str, Stored]) -> list[tuple[str, int, int, list[str]]]:
    """Return requests for parts of shards, with near parts in one: shard, begin, end, and the keys."""
    requests: list[tuple[str, int, int, list[str]]] = []
    for key, about in sorted(parts.items(), key=lambda item: (item[1].shard, item[1].offset)):
        end = about.offset + about.size
        if requests:
            shard, begin, before, keys = requests[-1]
            if shard == about.shard and about.offset - before <= GAP_BYTES and end - begin <= REQUEST_BYTES:
                keys.append(key)
                requests[-1] = shard, begin, max(before, end), keys
                continue
        requests.append((about.shard, about.offset, end, [key]))
    return requests


def reason(problem: Exception) -> str:
    """Return why a store refused, without secrets: its first line, else its class."""
    from yolofleet.support.redaction import Redaction

    if type(problem).__name__ == "TooManyRedirects":  # aiohttp gives it no words
        return "it redirects in a circle"
    said = error_code(problem) if None in problem.args else str(problem)  # Ceph states a code and no message
    first = (said.strip().splitlines() or [""])[0]
    return screen_line(Redaction(os.environ)(first)[:200]) or type(problem).__name__


def error_code(problem: BaseException) -> str:
    """Return the error code of an S3 server, which s3fs keeps only in the cause of its exception; "" without one."""
    return str(_answer(problem).get("Error", {}).get("Code", ""))


def _answer(problem: BaseException) -> dict[str, Any]:
    answer = getattr(problem.__cause__ or problem, "response", None)
    return answer if isinstance(answer, dict) else {}


def _status(problem: BaseException) -> int:
    """Return the HTTP status in the error of a store's library; 0 without one."""
    status = _answer(problem).get("ResponseMetadata", {}).get("HTTPStatusCode")  # s3fs
    if problem.__cause__ is None:  # aiohttp states 400, with a cause, for an answer that makes no sense
        for name in ("status", "status_code", "code"):  # aiohttp, Azure, gcsfs
            status = status or getattr(problem, name, 0)
    return status if type(status) is int else 0


def _is_refusal(problem: BaseException) -> bool:
    """Return whether a store or its library refuses the credentials, or has none."""
    names = {one.__name__ for one in type(problem).__mro__}
    # S3 answers a request without a body 400, and no code, if a token has expired
    is_denied = isinstance(problem, PermissionError) or _status(problem) in (400, 401, 403)
    return is_denied or not names.isdisjoint(_OF_CREDENTIALS)


def _may_pass(problem: BaseException) -> bool:
    """Return whether another try may succeed. All that reads and writes in a store asks this."""
    inner = getattr(problem, "kwargs", None)  # botocore wraps errors of the network and of its settings
    if isinstance(inner, dict) and isinstance(inner.get("error"), Exception):
        return _may_pass(inner["error"])
    if isinstance(problem, json.JSONDecodeError | UnicodeError) or _PASSING.search(error_code(problem)):
        return True  # an answer or a request that did not arrive whole
    if _is_refusal(problem) or isinstance(problem, FileNotFoundError | TypeError | Refused):
        return False
    if status := _status(problem):
        return may_pass(status)
    names = " ".join(one.__name__ for one in type(problem).__mro__)
    if "TooManyRedirects" in names:  # aiohttp gives it no status
        return False
    is_setting = "BotoCoreError" in names and not _OF_NETWORK.search(names)
    return not (is_setting or isinstance(problem, ValueError | OverflowError))


def _file_system(scheme: str, place: str) -> Any:
    """Return a new file system of fsspec. Raise ConfigError: its package is missing, or the user forbids connections."""
    module, extra = SCHEMES[scheme]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    url = {"s3": endpoint, "http": place, "https": place}.get(scheme, "")
    if scheme != "file" and (is_forbidden(url) if url else is_offline()):
        raise ConfigError(f"{scheme}:// needs a connection, and {OFFLINE} is set")
    try:
        importlib.import_module(module)
        import fsspec
    except ImportError:
        raise ConfigError(f"{scheme}:// needs the package {module}", hint=install_hint(extra)) from None
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": 10,
            "read_timeout": 30,
            "max_pool_connections": AT_ONCE,
            "retries": {"total_max_attempts": 1},
        }
    if scheme in ("http", "https"):
        options["client_kwargs"] = {"trace_configs": [_checked_redirects()]}
    system = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        system.retries = 1  # the tries of this module are told, and have one limit
    return system


def _checked_redirects() -> Any:
    """Return what makes aiohttp keep the rule of :func:`check_redirect`."""
    import aiohttp

    async def check(_session: Any, _context: Any, about: Any) -> None:
        url, headers = str(about.url), about.response.headers
        try:
            check_redirect(url, urljoin(url, headers.get("Location") or headers.get("URI", "")))
        except Exception:
            about.response.close()
            raise

    config = aiohttp.TraceConfig()
    config.on_request_redirect.append(check)
    return config


def listed_object(about: Mapping[str, Any]) -> Stored:
    """Return what the listing of a file system of fsspec says of an object; each has its own words."""
    modified: Any = next(
        (about[name] for name in ("LastModified", "last_modified", "updated", "mtime") if about.get(name)), 0
    )
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified.replace("Z", "+00:00"))
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    md5 = str(about.get("ETag", "")).strip('"')
    if encoded := about.get("md5Hash") or (about.get("content_settings") or {}).get("content_md5"):
        md5 = (encoded if isinstance(encoded, bytes | bytearray) else base64.b64decode(encoded)).hex()
    return Stored(int(about["size"]), round(float(modified) * 1e6) * 1000, md5 if _MD5.fullmatch(md5) else "")


def folder_of(address: str) -> tuple[str, str]:
    """Return the folder of an address and the name of the file in it; "" if the address is that of a folder.

    A last part with a suffix names a file.
    """
    bare = address.removesuffix("/")
    folder, _, name = bare.rpartition("/")
    is_file = "." in name and not address.endswith("/") and not folder.endswith(":/")
    return (folder, name) if is_file else (bare, "")
