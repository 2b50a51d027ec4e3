"""Text files that yolofleet may replace only until somebody changes them: their last line has the digest of the text above."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from yolofleet.storage.foreign import read_foreign_text

_SEAL = "\n<!-- yolofleet writes this file again until somebody changes it: "  # Markdown does not show it
_MAX_BYTES = 1 << 20


def sealed(text: str) -> str:
    """Return a text with its last line."""
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_replaceable(path: Path) -> bool:
    """Return whether nobody has changed a sealed file since yolofleet wrote it; True also if there is no file."""
    try:
        content = read_foreign_text(path, limit_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return not path.exists()
    return content == sealed(content.rpartition(_SEAL)[0])


def discard_unchanged(path: Path) -> None:
    """Delete a sealed file that nobody has changed; ignore errors."""
    if is_replaceable(path):
        with suppress(OSError):
            path.unlink()
