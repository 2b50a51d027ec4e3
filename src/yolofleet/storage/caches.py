"""The cache folder, and the folder of this user among the temporary files of all.

The cache holds only files that can be made again, so a user may delete it at any time. Files in it decide what a run reads, writes
and deletes. So every folder of it comes from :func:`cache_folder`, which refuses a folder that another user can change.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from yolofleet.support.errors import StorageError

# environment variable: the most that the mirrors of stores take, such as 200GiB
DISK_CACHE = "YOLOFLEET_DISK_CACHE"
ANOTHER_CACHE = (
    "another cache folder (YOLOFLEET_CACHE), or less for the data of stores (YOLOFLEET_DISK_CACHE)"
)
_OWN_CACHE = "chmod o-w, and replace a link by a folder, if only you wrote there; else set YOLOFLEET_CACHE to a folder of yours"
INDEX = "shards.jsonl"  # a folder with this file has its data set in shards; see shards.py
PRESENT, ABSENT = 0o400, 0o500  # modes of the files of a mirror; hardly any other file has them


def cache_root() -> Path:
    """Return ``$YOLOFLEET_CACHE``, or ``yolofleet`` in the platform's folder for caches. It may not exist yet.

    This path is for messages and comparisons: a caller that reads or writes there uses :func:`cache_folder`.

    Raises:
        StorageError: this account has no home folder, and see :func:`own_temporary_folder`.
    """
    chosen = os.environ.get("YOLOFLEET_CACHE")
    if chosen:
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:  # some containers have neither HOME nor an entry in the password file
        return own_temporary_folder() / "cache"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "yolofleet"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "yolofleet"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "yolofleet"


def cache_folder(*names: str, mode: int = 0o755, makes: bool = True) -> Path:
    """Return the folder of these names in the cache, without links.

    Args:
        mode: of a folder that is made.
        makes: make what is missing, if the disk allows that.

    Raises:
        StorageError: see :func:`check_own` and :func:`cache_root`; or another user made a link on the way to the cache folder.
    """
    chosen = cache_root()
    for part in (chosen, *chosen.parents):
        if part.is_symlink() and not _is_trusted(user := part.lstat().st_uid, part.parent):
            what = f"the cache folder {chosen} lies behind {part}, a symbolic link of user {user}"
            raise StorageError(what, hint=_OWN_CACHE)
    folder = Path(os.path.realpath(chosen))
    for name in ("", *names):
        folder /= name
        if makes:
            with suppress(OSError):  # a read-only disk: the caller says so, or works without a cache
                folder.mkdir(mode=mode, parents=not name, exist_ok=True)
        check_own(folder, is_shared=not name)
    return folder


def keep_compiled() -> None:
    """Let Triton and ``torch.compile`` keep compiled files in the cache folder, unless the user chose another one.

    Torch's default is a folder in /tmp with a known name, where another user could put code.

    Raises:
        StorageError: see :func:`cache_folder`.
    """
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "compiled"), ("TRITON_CACHE_DIR", "triton")):
        if name not in os.environ and os.access(path := cache_folder(folder), os.W_OK):
            os.environ[name] = str(path)


def check_own(
    folder: Path, *, forbidden: int = 0o002, is_shared: bool = False, hint: str = _OWN_CACHE
) -> None:
    """Raise StorageError for a link, and for a folder that a user other than this one and root owns or may change.

    A group that may write there is trusted: on many systems each user has a group of one.

    Args:
        forbidden: bits that the mode must not have.
        is_shared: they are allowed with the sticky bit, as in /tmp, where nobody can rename a folder of another user.
    """
    with suppress(OSError):  # nothing is there
        found = folder.lstat()
        mode, is_link = stat.S_IMODE(found.st_mode), stat.S_ISLNK(found.st_mode)
        is_open = mode & forbidden and not (is_shared and mode & stat.S_ISVTX)
        is_private = not hasattr(os, "getuid") or (not is_open and _is_trusted(found.st_uid, folder))
        if is_link or (stat.S_ISDIR(found.st_mode) and not is_private):
            what = "a symbolic link" if is_link else "a folder that other users may have changed"
            raise StorageError(f"{folder} is {what} (owner {found.st_uid}, mode {mode:04o})", hint=hint)


def _is_trusted(user: int, folder: Path) -> bool:
    """Return whether a user is this one or root, or has the files that this process makes in a folder."""
    if not hasattr(os, "getuid") or user in (0, os.getuid()):
        return True
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:  # some network disks rename root
        return os.fstat(file.fileno()).st_uid == user
    return False


def is_cached(path: Path) -> bool:
    """Return whether a path lies in the cache folder."""
    return os.path.realpath(path).startswith(os.path.realpath(cache_root()) + os.sep)


def mirrors_root() -> Path:
    """Return the folder of the mirrors of stores (``storage/mirror.py``), without links. Raises as :func:`cache_root`."""
    return Path(os.path.realpath(cache_root()), "objects")


def is_mirrored(path: str) -> bool:
    """Return whether an absolute path without links lies in the folder of the mirrors."""
    return path.startswith(f"{mirrors_root()}{os.sep}")


def own_temporary_folder() -> Path:
    """Return this user's folder in the system's temporary folder, which only this user can open. Make it if it is missing.

    Raises:
        StorageError: another user made it, or may open it; or it cannot be made.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir(), f"yolofleet-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        raise StorageError(f"cannot write {folder}: {problem.strerror}", hint="set TMPDIR") from None
    check_own(folder, forbidden=0o077, hint="remove it: others may have written into it; or set TMPDIR")
    return folder
