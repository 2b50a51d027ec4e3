"""Text for users: sizes, lists, suggestions, and untrusted text made safe for a terminal. Imports nothing of this package.

All output goes through :func:`echo` (results), :func:`inform` (what ``--quiet`` leaves out), :func:`announce` (errors and
news of running processes), ``support/terminal.py`` or ``runs/report/console.py``; tests/unit/cli/test_screen_text.py checks it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TextIO

# C0 and C1 control characters without tab and newline, DEL, line and paragraph separators, marks and
# overrides of writing direction, zero-width characters, the byte-order mark, lone surrogates, tag characters
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


SIZE = r"([1-9][0-9]{0,5}(?:\.[0-9]{1,3})?)([KMGT])(i?)B"  # 200GiB


def size_text(size_bytes: float) -> str:
    """Return a size as text: ``1.5 GiB``, ``64.0 MiB``, ``3.2 KiB``, ``12 bytes``."""
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= bytes_each:
            return f"{size_bytes / bytes_each:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def size_of(text: str) -> int:
    """Return the bytes of a size such as ``200GiB``. Raises ValueError."""
    match = re.fullmatch(SIZE, text)
    if match is None:
        raise ValueError(f"{shown(text)} is not a size such as 200GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix))


def listed(texts: Sequence[str], between: str = ", ", *, most: int = 4) -> str:
    """Return the first ``most`` texts, and the number of the others."""
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name most similar to ``name``; None if none is similar."""
    import difflib

    folded = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower()[:100], folded, 1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return the hint "did you mean ...?" with the nearest known name; None if none is similar."""
    near = nearest(name, names)
    return f"did you mean {near}?" if near else None


def shown(value: object) -> str:
    """Return an untrusted value as a short text of one line."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = text.isprintable() and text.strip() == text and text
    text = text if plain else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def quoted(value: object) -> str:
    """Return a path or a name as one word of a command that a person may paste into a shell."""
    return shlex.quote(str(value))


def screen_text(value: object) -> str:
    """Return ``str(value)`` with every control character, which a terminal could execute, as an escape (``\\x1b``).

    Tabs and newlines stay. Use :func:`screen_line` for a value that must stay inside one line.
    """
    return _UNSAFE.sub(_escaped, str(value))


def screen_line(value: object, *, limit: int | None = None) -> str:
    """Return :func:`screen_text` in one line, with tabs and newlines as escapes too.

    Args:
        limit: maximum number of characters; a longer text ends in ``...``.
    """
    text = screen_text(value).replace("\n", "\\n").replace("\t", "\\t")
    return text if limit is None or len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def echo(text: object = "", *, to: TextIO | None = None, end: str = "\n") -> None:
    """Print :func:`screen_text` of ``text``, and flush. First erase progress lines that this process has drawn.

    Args:
        to: None: standard output.
    """
    for erase in list(erasers):
        erase()
    print(screen_text(text), file=sys.stdout if to is None else to, end=end, flush=True)


# -- progress on a terminal (terminal.py) ----------------------------------------------------------------------

# The cursor rests at the beginning of the lines that are drawn in place, so this erases all of them.
ERASE = "\r\x1b[J"
erasers: list[Callable[[], None]] = []  # erase the progress lines of this process
_QUIET = [False]  # a list, so that functions can change it


def can_redraw(stream: TextIO) -> bool:
    """Return whether lines of ``stream`` can be drawn again in place.

    It is a terminal with a known type (a Windows console has none), and not that of a CI service, which keeps every
    character in a log.
    """
    try:
        is_terminal = stream.isatty()
    except ValueError:  # a closed stream
        return False
    return (
        is_terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown") and not os.environ.get("CI")
    )


def announcement(text: str) -> str:
    """Return a line for standard error that replaces progress lines, also those of another process on the terminal.

    Args:
        text: begins with a new line if another process may have left a line incomplete.
    """
    cleaned = screen_text(text)
    return (ERASE + cleaned.removeprefix("\n") if can_redraw(sys.stderr) else cleaned) + "\n"


def announce(text: str) -> None:
    """Print :func:`announcement` on standard error, unless that cannot be written: its terminal is closed, or a disk full."""
    with suppress(OSError):
        sys.stderr.write(announcement(text))
        sys.stderr.flush()


def set_quiet(quiet: bool) -> None:
    """Set whether the user gave ``--quiet``, for this process."""
    _QUIET[0] = quiet


def is_quiet() -> bool:
    """Return whether this process prints only errors and results."""
    return _QUIET[0]


def inform(text: str, *, to: TextIO | None = None) -> None:
    """Print a line that is neither an error nor a result, unless ``--quiet``.

    Args:
        to: None: standard error, as :func:`announce` prints.
    """
    if is_quiet():
        return
    if to is None:
        announce(text)
    else:
        echo(text, to=to)


# Commands of progress bars: colours, cursor up and to the left, erase a line or what is below, hide and show the
# cursor, wrap long lines or cut them.
_BAR = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[AG]|[0-2]?K|J|\?25[lh]|\?7[lh])|\r")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]{0,16})?\Z")


class RelayedText:
    """Cleans the output of a terminal program on another machine, piece by piece; keeps commands of progress bars.

    Other commands could make the terminal type text, write to the clipboard or open links. They become escapes as in
    :func:`screen_text`.
    """

    def __init__(self) -> None:
        self._held = ""  # the start of a command whose rest is in the next piece

    def clean(self, piece: str) -> str:
        """Return the text that can be printed so far."""
        text = self._held + piece
        match = _UNFINISHED.search(text)
        self._held = match[0] if match else ""
        text = text[: match.start()] if match else text
        parts, at = [], 0
        for command in _BAR.finditer(text):
            parts += [screen_text(text[at : command.start()]), command[0]]
            at = command.end()
        return "".join([*parts, screen_text(text[at:])])


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
