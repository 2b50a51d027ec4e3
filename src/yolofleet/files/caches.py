"""The cache folder. It holds only files that can be made again, so a user may delete it at any time."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """Return ``$YOLOFLEET_CACHE``, or ``yolofleet`` in the platform's folder for caches. It may not exist yet."""
    chosen = os.environ.get("YOLOFLEET_CACHE")
    if chosen:
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:  # some containers have neither HOME nor an entry in the password file
        return Path(tempfile.gettempdir()) / "yolofleet"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "yolofleet"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "yolofleet"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "yolofleet"
