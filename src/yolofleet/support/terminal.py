"""Progress of long work: lines that a terminal draws again in place, and elsewhere a plain line now and then.

The cursor rests at the beginning of the first line that is drawn in place. So erasing needs no count of lines, and the
following cannot damage other text: a window that changes its size, another process that prints, and the end of this
process at any moment. The cursor is never hidden, because a killed process could not show it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from yolofleet.support.closing import Closing
from yolofleet.support.text import ERASE, can_redraw, erasers, is_quiet, screen_line

DRAW_S = 0.25  # between two drawings, on a terminal
LINE_S = 30.0  # between two lines elsewhere
CUT_LINES, WRAP_LINES = "\x1b[?7l", "\x1b[?7h"  # at the right margin: a width that we computed may be wrong
SIZE = (80, 24)  # of a terminal that does not say
NARROW = 70  # columns; fewer have no room for a bar beside the figures
SLOW_RATE = 0.5  # a second; a lower one is shown as the time of each
SHORTEST_BAR, LONGEST_BAR = 6, 24

Forms = tuple[str, ...]  # texts of one figure, the longest first
Below = Callable[[int, int], Sequence[Text]]  # (columns, rows) of the terminal -> lines below the bar


def duration(seconds: float) -> str:
    """Return a duration as ``3.4 s``, ``2:05`` or ``1:02:05``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def end_text(left_s: float) -> str:
    """Return when something ends that takes ``left_s`` more seconds: ``18:05``, from tomorrow on ``Fri 18:05``."""
    now_s = time.time()
    then = time.localtime(now_s + left_s)
    is_today = then[:3] == time.localtime(now_s)[:3]
    return time.strftime("%H:%M" if is_today else "%a %H:%M" if left_s < 6 * 86400 else "%d %b", then)


def encodable(text: str, encoding: str | None) -> str:
    """Return ``text`` with escapes for letters that ``encoding`` lacks; None: UTF-8."""
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def fitted(parts: Sequence[Forms], columns: int) -> list[str]:
    """Return one form of each part so that the line fits, with two spaces before each part; "" if a part is left out.

    The parts are in the order of their importance. The last ones become short first; then the last ones are left out.
    """
    chosen = [forms[0] for forms in parts]

    def width() -> int:
        return sum(Text(text).cell_len + 2 for text in chosen if text)

    for number, forms in reversed(list(enumerate(parts))):
        for form in forms[1:]:
            if width() <= columns:
                return chosen
            chosen[number] = form
    for number in reversed(range(len(chosen))):
        if width() > columns:
            chosen[number] = ""
    return chosen


def bar_line(
    label: str, share: float, parts: Sequence[Forms], columns: int, encoding: str | None = None
) -> Text:
    """Return a line that fits into ``columns``: a label, a bar if there is room, and figures.

    Args:
        share: of the work that is done, 0..1; below 0: unknown, without a bar.
        parts: see :func:`fitted`.
        encoding: of the stream; None: UTF-8.
    """
    is_utf8 = (encoding or "utf-8").lower().replace("-", "").startswith("utf")
    full, empty, ends = ("━", "─", "") if is_utf8 else ("#", "-", "[]")
    line = Text(encodable(screen_line(label), encoding), style="bold")
    line.truncate(columns)
    left = columns - line.cell_len
    bar_least = SHORTEST_BAR + 1 if share >= 0 and columns >= NARROW else 0
    texts = [encodable(text, encoding) for text in fitted(parts, left - bar_least) if text]
    left -= sum(Text(text).cell_len + 2 for text in texts)
    cells = min(left - 1 - len(ends), LONGEST_BAR)
    if bar_least and cells > 0:
        done = round(cells * min(share, 1.0))
        line.append(f" {ends[:1]}").append(full * done, "cyan").append(empty * (cells - done), "dim")
        line.append(ends[1:])
    for text in texts:
        line.append("  ").append(text, "not bold")
    return line


class LiveLines:
    """Lines at the end of a terminal's text that are drawn again in place; see ``text.can_redraw``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.lock = stream, threading.RLock()
        self.encoding = getattr(stream, "encoding", None)
        self._rich = RichConsole(file=stream, force_terminal=True, highlight=False)
        self._is_drawn = False
        erasers.append(self.erase)

    def size(self) -> tuple[int, int]:
        """Return columns and rows of the terminal as it is now."""
        with suppress(OSError, ValueError, AttributeError):
            columns, rows = os.get_terminal_size(self._stream.fileno())
            if columns and rows:
                return columns, rows
        return SIZE

    def draw(self, lines: Sequence[Text], *, waits: bool = True) -> None:
        """Draw ``lines``, which must fit, instead of those before.

        Args:
            waits: for a thread that draws now, which a stopped terminal (Ctrl-S) may hold up.
        """
        if not self.lock.acquire(blocking=waits):
            return
        try:
            with self._rich.capture() as captured:
                for line in lines:
                    self._rich.print(line, soft_wrap=True)
            drawn = captured.get().splitlines()
            up = f"\x1b[{len(drawn) - 1}A" if len(drawn) > 1 else ""
            self._write(f"{ERASE}{CUT_LINES}{chr(10).join(drawn)}{WRAP_LINES}{up}\r")
            self._is_drawn = bool(drawn)
        finally:
            self.lock.release()

    def erase(self) -> None:
        """Erase the lines, so that other text can be printed."""
        with self.lock:
            if self._is_drawn:
                self._write(ERASE)
                self._is_drawn = False

    def close(self) -> None:
        """Erase the lines, and draw no more."""
        self.erase()
        with suppress(ValueError):
            erasers.remove(self.erase)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a closed terminal
            self._stream.write(text)
            self._stream.flush()


class Progress(Closing):
    """Shows how far work has come: one line on a terminal, or a plain line every ``every_s`` seconds elsewhere.

    Args:
        every_s: seconds between plain lines; a terminal is drawn four times a second.
        live: whether lines are drawn in place; None: as ``stream`` allows.
        shown: False: show nothing; None: unless ``--quiet``.
        below: lines below the bar.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every_s: float = LINE_S,
        live: bool | None = None,
        shown: bool | None = None,
        below: Below = lambda columns, rows: (),
    ) -> None:
        self._stream = stream
        self.is_shown = not is_quiet() if shown is None else shown
        can_draw = can_redraw(stream) if live is None else live
        self.lines = LiveLines(stream) if can_draw and self.is_shown else None
        self._every_s = min(every_s, DRAW_S) if self.lines else every_s
        self._below = below
        self._what = ""
        self._last: tuple[str, float, Sequence[Forms]] | None = None
        self.begin("")

    def begin(self, what: str) -> None:
        """Begin the work ``what``: the first line follows after the interval, and rates count from the first call."""
        self._what, self._first = what, None if what else 0.0
        self._began_s = self._shown_s = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the next line is due."""
        return self.is_shown and time.monotonic() - self._shown_s >= self._every_s

    def rate(self, done: float) -> float:
        """Return the amount a second since the first call of this work; 0 at the first call."""
        now_s = time.monotonic()
        if self._first is None:
            self._first, self._began_s = done, now_s
        return max(done - self._first, 0.0) / max(now_s - self._began_s, 1e-3)

    def show(
        self,
        what: str,
        done: float,
        total: float,
        unit: str = "",
        *,
        amount: Callable[[float], str] = lambda number: f"{number:.4g}",
    ) -> None:
        """Show that ``done`` of ``total`` are done of the work ``what``.

        Args:
            total: 0: unknown.
            unit: such as "images", for the rate.
            amount: returns an amount as text.
        """
        if what != self._what:
            self.begin(what)
            self._shown_s -= self._every_s if self.lines else 0.0
        rate = self.rate(done)
        if not self.is_due():
            return
        count = f"{amount(done)}/{amount(total)}" if total else amount(done) if done else ""
        share = f"{done / total:.0%}" if total else ""
        left = f"{duration((total - done) / rate)} left" if rate and total > done else ""
        speed = f"{amount(rate)}{' ' * bool(unit)}{unit}/s" if rate else ""
        if 0 < rate < SLOW_RATE:
            speed = f"{duration(1 / rate)} each"
        self.draw(what, done / total if total else -1.0, [(count, share), (left,), (speed, "")])

    def draw(self, label: str, share: float, parts: Sequence[Forms], plain: str = "") -> None:
        """Show a line now; see :func:`bar_line`.

        Args:
            plain: line for streams that are no terminal; "": all parts.
        """
        self._shown_s = time.monotonic()
        if self.lines is not None:
            self._last = (label, share, parts)
            self.redraw(waits=False)
        elif self.is_shown:
            text = plain or f"{label} {'  '.join(forms[0] for forms in parts if forms[0])}"
            with suppress(OSError, ValueError):  # a closed pipe or stream
                self._stream.write(
                    encodable(screen_line(text), getattr(self._stream, "encoding", None)) + "\n"
                )
                self._stream.flush()

    def redraw(self, *, waits: bool = False) -> None:
        """Draw the last line again, with what is below it now."""
        if self.lines is not None and self._last is not None:
            columns, rows = self.lines.size()
            label, share, parts = self._last
            bar = bar_line(label, share, parts, columns - 1, self.lines.encoding)
            self.lines.draw([bar, *self._below(columns - 1, rows - 1)][: max(rows - 1, 1)], waits=waits)

    def end(self) -> None:
        """Erase the line: the work has ended."""
        self._last = None
        self.begin("")
        if self.lines is not None:
            self.lines.erase()

    def close(self) -> None:
        """Erase the line, and show no more."""
        self._last, self.is_shown = None, False
        if self.lines is not None:
            self.lines.close()
