# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH112, PTH114, PTH116, PTH118, PTH120
"""The files of a store as files on this machine: names, sizes and times at once, each content when it is first read.

A mirror is a folder of the cache. Each file has the size and time that the store lists, and belongs to this user alone. Until
something reads it, it is empty space and has mode ``ABSENT``. ``foreign.open_downloaded``, through which everything of a data
set is read, then downloads the content. So an index, labels, images and checks need no second way to read. Other modules ask
``mirrored.py``.

The content replaces the file in one step, after its size and digest have been compared, so a killed process leaves nothing half
written. All processes of a machine share the mirrors. Together, the contents take at most ``YOLOFLEET_DISK_CACHE``; those that were
read longest ago are evicted: they become empty space again.

A process that reads a data set has a shared lock until it ends. If the store has changed by then, an update leaves the files of this
process as they are, and makes the next generation: another folder, whose unchanged files are hard links. An update deletes
the generations that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path

from yolofleet.storage.atomic import in_turn, whole_file, write_text, write_unsynced, writing
from yolofleet.storage.caches import (
    ABSENT,
    DISK_CACHE,
    PRESENT,
    cache_folder,
    check_own,
    is_mirrored,
    mirrors_root,
)
from yolofleet.storage.object_store import (
    ObjectStore,
    check_address,
    digest_for,
    folder_of,
    pieces_of,
    without_secrets,
)
from yolofleet.storage.shards import Stored
from yolofleet.support.errors import ConfigError, NotAsListed, StorageError
from yolofleet.support.system.proc import text_of
from yolofleet.support.terminal import Progress
from yolofleet.support.text import inform, listed, screen_line, size_of, size_text

with contextlib.suppress(ImportError):  # Windows has no mirrors
    import fcntl

AT_ONCE_BYTES = 64 << 20  # of objects that are read into memory together; a larger one is written to its file
LOCKED_AT_ONCE = 64  # files, each of which is open; less if the limit of open files is low
SHOWN_EVERY = 1000  # files of a list
FREE_SHARE = 0.8  # of the disk's free space, if YOLOFLEET_DISK_CACHE does not say
KEPT_SHARE = 0.9  # of the limit remains in use after an eviction
_TREE, _TABLE, _ADDRESS, _BOOT, _NEW = "tree", "files.sqlite", "address", "boot", "new-"
_READERS = "readers.lock"
_STALE_S = 3600.0  # of a file that a killed process has left
_TRIES = 20  # to open a file whose content is evicted at once


def local_path(
    address: str, setting: str = "--data", *, may_be_empty: bool = False, may_change: bool = False
) -> Path:
    """Return the path of a mirrored file or folder; read the list of its folder anew.

    A last part with a suffix names a file, and the folder of that file is mirrored.

    Args:
        may_be_empty: a folder without files is no error.
        may_change: updates may change the files while this process lives, as those of a run that goes on.
    Raises:
        ConfigError: the address is not usable, or a package is missing.
        StorageError: the store or the disk cannot be read or written.
    """
    check_address(address, setting)
    if os.name == "nt":
        raise ConfigError(
            f"{setting} {address}: mirrors of stores need the file modes and locks of Linux or macOS"
        )
    root, name = folder_of(address)
    mirror = Mirror.at(root).update(name, holds=not may_change)
    path = mirror.tree / name if name else mirror.tree
    if not path.exists() or (not name and not may_be_empty and not any(path.iterdir())):
        raise ConfigError(f"{setting} {without_secrets(address)} does not exist", hint="check the address")
    return path


def read_anew(paths: Sequence[str]) -> int:
    """Read the contents of some files from the store, also those that are here, and keep none; return how many bytes.

    Args:
        paths: absolute; all of one mirror.
    Raises:
        StorageError: the store cannot be read.
    """
    mirror = Mirror.of(paths[0])
    assert mirror is not None
    about = mirror._table([mirror.key(path) for path in paths])
    return sum(len(content) for group in _groups(about) for content in mirror.store.read(group).values())


class Mirror:
    """The mirror of one address. Threads and processes may use mirrors of the same address at the same time."""

    def __init__(self, folder: Path, root: str) -> None:
        self.folder, self.root = folder, root
        self.tree = folder / _TREE
        self.store = ObjectStore(root)
        self._is_told = False
        self._held = 0, -1  # the process that reads the files, and its open file

    @classmethod
    def at(cls, root: str) -> Mirror:
        """Return the newest generation of the mirror of the address of a folder; make its folder.

        Raises:
            StorageError: the cache folder cannot be written, another user may change it, or it has the files of another address.
        """
        first = cache_folder("objects", mode=0o700) / hashlib.sha256(root.encode()).hexdigest()[:20]
        folder = cache_folder("objects", _generations(first)[-1].name, _TREE, mode=0o700).parent
        if not any((folder / name).exists() for name in (_ADDRESS, _TABLE)):
            write_text(folder / _ADDRESS, root)
            _check_modes(folder)
        if (known := _root_of(str(folder))) != root:
            what = f"{folder} has the files of {without_secrets(known) if known else 'no address'}, expected {root}"
            raise StorageError(what, hint="delete this folder; it is a cache")
        return _mirror(str(folder), root)

    @classmethod
    def of(cls, path: str) -> Mirror | None:
        """Return the mirror in which a path lies that ``is_mirrored``; None: it is of no tree."""
        folder, _, rest = path.removeprefix(_prefix()).partition(os.sep)
        if rest.partition(os.sep)[0] != _TREE:
            return None
        root = _root_of(os.path.join(_prefix(), folder))
        return _mirror(os.path.join(_prefix(), folder), root) if root else None

    def key(self, path: str) -> str:
        return os.path.relpath(path, self.tree).replace(os.sep, "/")

    def address(self, path: str) -> str:
        return f"{self.root}/{self.key(path)}".removesuffix("/.")

    def opened(self, path: str, handle: int, found: os.stat_result) -> tuple[int, os.stat_result]:
        """Return an open file after its content is downloaded, see ``mirrored.with_content``."""
        for _ in range(_TRIES):
            if stat.S_IMODE(found.st_mode) != ABSENT:
                with contextlib.suppress(OSError):  # for the order of evictions
                    os.utime(handle, ns=(time.time_ns(), found.st_mtime_ns))
                return handle, found
            self.fetch([self.key(path)])
            new = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(new, handle, inheritable=False)
            os.close(new)
            found = os.fstat(handle)
        raise StorageError(f"{path} is evicted before it can be read", hint="a larger YOLOFLEET_DISK_CACHE")

    def download(self, paths: Sequence[str]) -> int:
        """Download the absent contents of some files, see ``mirrored.download``."""
        absent = [path for path in dict.fromkeys(paths) if _is_absent(path)]
        self.fetch(list(map(self.key, absent)))
        return len(absent)

    def listed(self, paths: Sequence[str]) -> dict[str, Stored]:
        """Return what the listing says of some files, see ``mirrored.listed_by_store``."""
        about = self._table(map(self.key, paths))
        return {path: about[key] for path in paths if (key := self.key(path)) in about}

    def update(self, needed: str = "", *, holds: bool = False) -> Mirror:
        """Make the files those of the store; contents stay where size, time and digest have not changed.

        Processes that wait for another one to do so take over what it has read.

        Args:
            needed: a file or folder without which no file is made.
            holds: no update changes the files while this process lives.
        Returns:
            the newest generation, which has them.
        Raises:
            ConfigError: ``needed`` does not exist.
            StorageError: the store cannot be read, or the disk cannot be written.
        """
        asked_ns = time.time_ns()
        with in_turn(self.folder.with_name(f"{self.folder.name.partition('-')[0]}.lock")):
            newest = Mirror.at(self.root)._updated(asked_ns, needed)
            if holds:
                newest._hold()
            return newest

    def _updated(self, asked_ns: int, needed: str) -> Mirror:
        with contextlib.suppress(OSError):
            if (self.folder / _TABLE).stat().st_mtime_ns > asked_ns:
                return self
        files, odd = self.store.listing()
        if needed and needed not in files and not any(key.startswith(f"{needed}/") for key in files):
            raise ConfigError(f"{self.root}/{needed} does not exist", hint="check the address")
        if odd:
            inform(
                f"note: {self.root}: {len(odd)} objects are left out, whose keys are no paths: {listed(list(map(screen_line, odd)))}"
            )
        before = dict[str, Stored]()
        with contextlib.suppress(StorageError):  # the table is missing, damaged, or of another version
            before = self._table(None)
        with writing(self.folder):
            target = self._next_generation() if before != files and self._is_read() else self
            target._remove_stale()
            target._make_files(files, before)
            target._write_table(files)
            for old in _generations(self.folder)[:-1]:
                if not _mirror(str(old), self.root)._is_read():
                    shutil.rmtree(old, ignore_errors=True)
            contents = _Space().count()
        here = sum(size for _, size, path in contents if path.startswith(f"{target.tree}{os.sep}"))
        whole = sum(about.size for about in files.values())
        if not target._is_told:
            target._is_told = True
            inform(
                f"note: {self.root}: {len(files)} files, {size_text(whole)}; {size_text(here)} of it on this machine"
            )
        return target

    def _hold(self) -> None:
        """Let no update change the files until this process ends. The caller has the lock of updates."""
        if self._held[0] != os.getpid():  # a forked process takes a lock of its own
            self._held = os.getpid(), _open_lock(self.folder / _READERS)
        fcntl.flock(self._held[1], fcntl.LOCK_SH)

    def _is_read(self) -> bool:
        """Return whether another process holds the files. The caller has the lock of updates."""
        is_mine = self._held[0] == os.getpid()
        handle = self._held[1] if is_mine else _open_lock(self.folder / _READERS)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            if is_mine:
                self._hold()
            else:
                os.close(handle)
        return False

    def _next_generation(self) -> Mirror:
        """Return a new generation with the files of this one, which share their contents on the disk."""
        first, _, number = self.folder.name.partition("-")
        made = _mirror(str(self.folder.with_name(f"{first}-{int(number or 1) + 1}")), self.root)
        shutil.rmtree(made.folder, ignore_errors=True)  # of an update that was killed
        made.folder.mkdir(mode=0o700)
        shutil.copytree(self.tree, made.tree, symlinks=True, copy_function=os.link)
        for name in (_ADDRESS, _BOOT):
            shutil.copy2(self.folder / name, made.folder / name)
        return made

    def _remove_stale(self) -> None:
        for path in self.folder.glob(f"{_NEW}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_ctime > _STALE_S:
                    path.unlink()

    def _make_files(self, objects: Mapping[str, Stored], before: Mapping[str, Stored]) -> None:
        is_new_boot, boot = self._boot()
        made: set[str] = set()
        for key, about in _shown(objects, self.root):
            path = f"{self.tree}/{key}"
            folder = os.path.dirname(path)
            if folder not in made:
                _clear_way(folder, self.tree)
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            is_here = before.get(key) == about and _is_file_of(path, about)
            if not is_here or (is_new_boot and not _is_intact(path, about)):
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                self._make_absent(path, about.size, about.modified_ns)
        for path in _files_of(self.tree):
            if self.key(path) not in objects:
                os.unlink(path)
        write_text(self.folder / _BOOT, boot)  # now that all contents have been compared

    def _boot(self) -> tuple[bool, str]:
        """Return whether the machine has started since the last update, so that contents may be lost, and the id of that start."""
        boot = text_of(Path("/proc/sys/kernel/random/boot_id"))
        with contextlib.suppress(OSError):
            return (self.folder / _BOOT).read_text(encoding="utf-8") != boot, boot
        return True, boot

    def _write_table(self, files: Mapping[str, Stored]) -> None:
        columns = ", ".join(field.name for field in fields(Stored))
        rows = ((key, *astuple(about)) for key, about in files.items())
        try:
            with (
                whole_file(self.folder / _TABLE, durable=False) as file,
                contextlib.closing(sqlite3.connect(file.name)) as table,
            ):
                table.execute(f"CREATE TABLE files (key PRIMARY KEY, {columns}) WITHOUT ROWID")
                table.executemany(f"INSERT INTO files VALUES (?{', ?' * len(fields(Stored))})", rows)
                table.commit()
        except sqlite3.Error as problem:  # not OSErrors
            code = errno.ENOSPC if "full" in str(problem) else errno.EIO
            raise OSError(code, str(problem)) from None

    def _table(self, keys: Iterable[str] | None) -> dict[str, Stored]:
        """Return what the last listing said of these files, or of all; nothing of one that it did not have."""
        found = dict[str, Stored]()
        ask = "SELECT * FROM files WHERE key = ?"
        address = f"{(self.folder / _TABLE).as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(address, uri=True)) as table:
                if keys is None:
                    return {row[0]: Stored(*row[1:]) for row in table.execute("SELECT * FROM files")}
                for key in keys:
                    row = table.execute(ask, (key,)).fetchone()
                    if row is not None:
                        found[key] = Stored(*row[1:])
        except (sqlite3.Error, TypeError) as problem:
            hint = "delete this folder; it is a cache"
            raise StorageError(f"{self.folder / _TABLE}: {problem}", hint=hint) from None
        return found

    def fetch(self, keys: Sequence[str]) -> None:
        """Read the contents of these objects, unless they are here or another process is reading them: then wait for it.

        Raises:
            StorageError: an object cannot be read, or its content cannot be stored.
        """
        import resource

        at_once = min(LOCKED_AT_ONCE, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        with writing(self.folder):
            for first in range(0, len(keys), at_once):
                others = self._fetch(keys[first : first + at_once], waits=False)
                if others:  # in one order, so that no two processes wait for each other
                    self._fetch(sorted(others), waits=True)
            _Space().evict()

    def _fetch(self, keys: Sequence[str], *, waits: bool) -> list[str]:
        """Read those objects that no other process reads; return the keys of the rest."""
        others: list[str] = []
        with contextlib.ExitStack() as locks:
            mine: list[str] = []
            for key in keys:
                state = locks.enter_context(_absent_and_mine(f"{self.tree}/{key}", waits=waits))
                if state is None:
                    others.append(key)
                elif state:
                    mine.append(key)
            about = self._table(mine)
            if gone := [key for key in mine if key not in about]:
                hint = "the data set changed during the run: start again"
                raise NotAsListed(f"{self.root}/{gone[0]} is gone", hint=hint)
            for group in _groups(about):
                _Space().take(sum(one.size for one in group.values()))
                ((key, one), *others_of_group) = group.items()
                if not others_of_group and one.size > AT_ONCE_BYTES and not one.shard:
                    with self._replacing(f"{self.tree}/{key}", PRESENT, one.modified_ns) as temporary:
                        self.store.copy(key, one, Path(temporary))
                    continue
                for key, content in self.store.read(group).items():
                    with self._replacing(f"{self.tree}/{key}", PRESENT, about[key].modified_ns) as temporary:
                        Path(temporary).write_bytes(content)
        return others

    def _make_absent(self, path: str, size: int, modified_ns: int) -> None:
        """Put empty space of the size and time of an object in the place of a file."""
        try:  # without a file to replace, half as many calls of the system; an unfinished one is made again
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, ABSENT)
        except FileExistsError:
            with self._replacing(path, ABSENT, modified_ns) as temporary:
                os.truncate(temporary, size)
            return
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, ABSENT)
            file.truncate(size)
            os.utime(handle, ns=(time.time_ns(), modified_ns))

    @contextlib.contextmanager
    def _replacing(self, path: str, mode: int, modified_ns: int) -> Iterator[str]:
        """Yield an empty file, which then replaces the file of an object."""
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=_NEW)
        os.close(handle)
        try:
            yield temporary
            os.chmod(temporary, mode)
            os.utime(temporary, ns=(time.time_ns(), modified_ns))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


class _Space:
    """The bytes that the contents of all mirrors take, and their limit, in files that all processes share."""

    def __init__(self) -> None:
        self.root = cache_folder("objects", mode=0o700)

    def limit(self) -> int:
        if chosen := os.environ.get(DISK_CACHE):
            try:
                return size_of(chosen)
            except ValueError as problem:
                raise ConfigError(f"{DISK_CACHE}: {problem}", source="environment") from None
        return int(FREE_SHARE * (shutil.disk_usage(self.root).free + self._used()))

    def _used(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.root / "used").read_text(encoding="utf-8"))
        return 0

    def take(self, size: int) -> None:
        """Count ``size`` more bytes. A process that is killed before it has written them counts too much until :meth:`count`."""
        with _locked(self.root / "used.lock"):
            self._write_used(self._used() + size)

    def _write_used(self, used: int) -> None:
        write_unsynced(self.root / "used", str(used).encode())

    def count(self) -> list[tuple[int, int, str]]:
        """Return time of the last reading, size and path of each content; count them anew.

        Generations share contents: all but one path of such a content has the size 0.
        """
        found, seen = list[tuple[int, int, str]](), set[int]()
        with _locked(self.root / "used.lock"):
            for tree in sorted(self.root.glob(f"*/{_TREE}")):
                for part in (tree.parent, tree):
                    check_own(part, hint="delete it; it is a cache")
                for path in _files_of(tree):
                    with contextlib.suppress(OSError):
                        about = os.stat(path, follow_symlinks=False)
                        if stat.S_IMODE(about.st_mode) != ABSENT:
                            size = 0 if about.st_ino in seen else about.st_size
                            found.append((about.st_atime_ns, size, path))
                            seen.add(about.st_ino)
            self._write_used(sum(size for _, size, _ in found))
        return found

    def evict(self) -> None:
        """Evict the contents that were read longest ago, if all together take more than the limit."""
        limit = self.limit()
        if self._used() <= limit:
            return
        with _locked(self.root / "evict.lock"):
            if self._used() <= limit:  # another process has done it
                return
            contents = sorted(self.count())
            used = sum(size for _, size, _ in contents)
            for _, size, path in contents:
                if used <= KEPT_SHARE * limit:
                    break
                mirror = Mirror.of(path)
                if mirror is not None:
                    with contextlib.suppress(OSError):
                        about = os.stat(path)
                        mirror._make_absent(path, about.st_size, about.st_mtime_ns)
                        used -= size
            with _locked(self.root / "used.lock"):
                self._write_used(used)


@contextlib.contextmanager
def _absent_and_mine(path: str, *, waits: bool) -> Iterator[bool | None]:
    """Lock an absent content for the block. Yield True; False if the content is here; None if another process reads it."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state: bool | None = None
        while state is None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                break
            # a content that arrived while this process waited is another file with the same name
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                state = stat.S_IMODE(os.fstat(handle).st_mode) == ABSENT
            else:
                os.close(handle)
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        yield state
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    """Open a lock file, and make it if it is missing. Raises StorageError."""
    with writing(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which stays, for the block."""
    handle = _open_lock(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_modes(folder: Path) -> None:
    """Raise StorageError if the disk of a folder does not keep the modes of files, or has no locks for them."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            for mode in (ABSENT, PRESENT):
                os.fchmod(file.fileno(), mode)
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
                    raise OSError("it does not keep the modes of files")
        with _locked(folder / _READERS):
            pass
    except OSError as problem:
        reason = problem.strerror or problem
        raise StorageError(
            f"the disk of {folder} cannot hold mirrors: {reason}",
            hint="set YOLOFLEET_CACHE to a folder on a local disk",
        ) from None


def _groups(objects: dict[str, Stored]) -> Iterator[dict[str, Stored]]:
    """Yield the objects in groups that fit into memory together."""
    group, size = dict[str, Stored](), 0
    for key, about in objects.items():
        if group and size + about.size > AT_ONCE_BYTES:
            yield group
            group, size = {}, 0
        group[key] = about
        size += about.size
    if group:
        yield group


def _shown(objects: Mapping[str, Stored], root: str) -> Iterator[tuple[str, Stored]]:
    """Yield the objects, and show how far a caller has come with many."""
    with Progress(sys.stderr) as progress:
        for done, (key, about) in enumerate(objects.items(), 1):
            yield key, about
            if done % SHOWN_EVERY == 0:
                progress.show(f"{root}: names", done, len(objects), "files", amount="{:,.0f}".format)


def _is_absent(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_IMODE(mode) == ABSENT and is_mirrored(path)


def _is_file_of(path: str, about: Stored) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    is_ours = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) in (PRESENT, ABSENT)
    return is_ours and (found.st_size, found.st_mtime_ns) == (about.size, about.modified_ns)


def _is_intact(path: str, about: Stored) -> bool:
    """Return whether a content that is here has the digest of the listing; an absent one is intact."""
    if stat.S_IMODE(os.stat(path).st_mode) == ABSENT or not about.digest:
        return True
    with open(path, "rb") as file:
        return digest_for(about, pieces_of(file)) == about.digest


def _clear_way(folder: str, tree: Path) -> None:
    """Remove a file where a folder is to be, at any level below the tree. Raise StorageError if a link is there."""
    for parent in [Path(folder), *Path(folder).parents]:
        if parent == tree:
            return
        if parent.is_file() and not parent.is_symlink():
            parent.unlink()
        check_own(parent, forbidden=0, hint="delete it; it is in a cache")


def _files_of(tree: Path) -> Iterator[str]:
    for folder, _, names in os.walk(tree):
        for name in names:
            yield f"{folder}/{name}"


def _generations(one: Path) -> list[Path]:
    """Return the folders of the generations of a mirror, oldest first; only ``one`` of them if none is complete."""
    first = one.name.partition("-")[0]
    found = [path.parent for path in one.parent.glob(f"{first}*/{_TABLE}")]
    found = [path for path in found if re.fullmatch(r"\w+(-\d+)?", path.name)]  # no copy that a person made
    return sorted(found, key=lambda path: int(path.name.partition("-")[2] or 1)) or [one]


def _prefix() -> str:
    return str(mirrors_root()) + os.sep


@lru_cache(maxsize=64)
def _root_of(folder: str) -> str:
    """Return the address of the mirror in a folder; "" if it is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        path = Path(folder) / _ADDRESS
        return path.read_text(encoding="utf-8") if stat.S_ISREG(path.lstat().st_mode) else ""
    return ""


_made: dict[str, Mirror] = {}
_making = threading.Lock()


def _mirror(folder: str, root: str) -> Mirror:
    """Return the one mirror of a folder in this process, whose store keeps its connections."""
    with _making:
        return _made.setdefault(folder, Mirror(Path(folder), root))
