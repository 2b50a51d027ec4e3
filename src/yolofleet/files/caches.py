"""The folder below which everything that can be made again is kept."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """``$YOLOFLEET_CACHE``, or ``yolofleet`` in the platform's folder for caches. Not created here."""
    chosen = os.environ.get("YOLOFLEET_CACHE")
    if chosen:
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:  # no HOME and no entry in the password file, as in some containers
        return Path(tempfile.gettempdir()) / "yolofleet"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "yolofleet"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "yolofleet"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "yolofleet"
