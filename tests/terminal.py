"""A terminal for tests: a pseudo-terminal of a given size, and a model of the screen that its text makes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.cells import cell_len

KNOWN = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


@dataclass
class Screen:
    """What a terminal shows that knows only the commands of our progress lines; any other one is an error.

    Attributes:
        scrolled: lines that have left the screen at its top.
        wrapped: lines that went past the right margin, and continued below.
        cut: lines that went past the right margin while wrapping was off.
    """

    rows: int
    columns: int
    lines: list[list[str]] = field(default_factory=lambda: [[]])
    scrolled: list[str] = field(default_factory=list)
    row: int = 0
    column: int = 0
    wraps: bool = True
    wrapped: int = 0
    cut: int = 0

    def feed(self, text: str) -> Screen:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = KNOWN.match(text, at)
                assert match, f"an unknown command: {text[at : at + 12]!r}"
                self._obey(match[1] + match[2] + match[3])
                at = match.end()
                continue
            self._put(text[at])
            at += 1
        return self

    def _obey(self, command: str) -> None:
        if command.endswith("m"):
            return
        if command == "J":
            del self.lines[self.row + 1 :]
            del self.lines[self.row][self.column :]
        elif command.endswith("A"):
            self.row = max(self.row - int(command[:-1] or 1), 0)
        elif command in ("?7l", "?7h"):
            self.wraps = command.endswith("h")
        else:
            raise AssertionError(f"an unknown command: {command}")

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable(), f"a control character: {character!r}"
            width = cell_len(character)
            if self.column + width > self.columns:
                if not self.wraps:
                    self.cut += 1
                    return
                self.wrapped += 1
                self._down()
                self.column = 0
            line = self.lines[self.row]
            line += [" "] * (self.column + width - len(line))
            if width:
                line[self.column : self.column + width] = [character] + [""] * (width - 1)
            self.column += width

    def _down(self) -> None:
        self.row += 1
        while len(self.lines) <= self.row:
            self.lines.append([])
        if len(self.lines) > self.rows:
            self.scrolled.append("".join(self.lines.pop(0)).rstrip())
            self.row -= 1

    @property
    def text(self) -> str:
        """The lines on the screen, from the first one to the last that is not empty."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip()


@dataclass
class PseudoTerminal:
    """Attributes: stream: where programs of the test print; output: what they have printed."""

    stream: TextIO
    output: bytearray

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def text(self) -> str:
        """All that was printed, once it has arrived."""
        import termios

        termios.tcdrain(self.stream.fileno())
        return self.output.decode()


@contextmanager
def pseudo_terminal(rows: int, columns: int) -> Iterator[PseudoTerminal]:
    """Open a pseudo-terminal for the block."""
    ours, theirs = os.openpty()
    output = bytearray()

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:
                return
            if not piece:
                return
            output.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    stream = os.fdopen(theirs, "w", encoding="utf-8", errors="backslashreplace")
    terminal = PseudoTerminal(stream, output)
    terminal.resize(rows, columns)
    try:
        yield terminal
    finally:
        stream.close()
        thread.join()
        os.close(ours)
