"""Read small text files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """Return the text of a file without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # for example EINVAL for the speed of a network interface that is down
        return ""


def number_of(path: Path) -> int | None:
    """Return the whole number that a file holds; None if it holds none or cannot be read."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; [] if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
