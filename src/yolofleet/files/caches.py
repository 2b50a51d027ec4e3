"""The cache folder, and the folder of this user among the temporary files of all.

The cache holds only files that can be made again, so a user may delete it at any time.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from yolofleet.errors import StorageError
from yolofleet.files.atomic import writing

# environment variable: the most that the mirrors of stores take, such as 200GiB
DISK_CACHE = "YOLOFLEET_DISK_CACHE"


def cache_root() -> Path:
    """Return ``$YOLOFLEET_CACHE``, or ``yolofleet`` in the platform's folder for caches. It may not exist yet.

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


def mirrors_root() -> Path:
    """Return the folder of the mirrors of stores (``files/mirror.py``), without links. Raises as :func:`cache_root`."""
    return Path(os.path.realpath(cache_root() / "objects"))


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
    with writing(folder, "set TMPDIR"):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    is_foreign = hasattr(os, "getuid") and (found.st_uid != user or found.st_mode & 0o077)
    if is_foreign or not stat.S_ISDIR(found.st_mode):
        raise StorageError(
            f"{folder} is not a folder that only this user can open (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o})",
            hint="remove it, because others may have written into it; or set TMPDIR",
        )
    return folder
