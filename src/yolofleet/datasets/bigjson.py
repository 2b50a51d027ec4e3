"""The lists of a large JSON object, entry by entry: memory for one entry and one block of the file, not for all.

``json.loads`` of Objects365's training annotations (10 million boxes) would take about 10 GB.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from yolofleet.files.foreign import open_foreign

BLOCK_BYTES = 1 << 20
MAX_ENTRY_CHARS = 64 << 20

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODE = json.JSONDecoder().raw_decode


class JsonFault(ValueError):
    """A file that is not JSON, or not of the form that is needed; says where."""


def read_lists(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(key, entry) for each entry of the lists that stand under the ``wanted`` keys of the file's object, in file
    order; (key, None) before the first entry of each. Other members are read and dropped.

    Raises:
        JsonFault: not a JSON object in UTF-8, UTF-16 or UTF-32; a wanted member that is no list or stands there
            twice; a member or entry of more than ``MAX_ENTRY_CHARS``.
        OSError: the file cannot be read.
    """
    with open_foreign(path) as file:
        text = _Text(file)
        seen: set[str] = set()
        text.expect("{")
        if text.skip("}"):
            text.expect_end()
            return
        while True:
            key = text.value()
            if not isinstance(key, str):
                raise text.fault("a member's name is not a string")
            text.expect(":")
            if key not in wanted:
                text.pass_over()
            elif key in seen:
                raise text.fault(f"{key!r} stands there twice")
            else:
                seen.add(key)
                if not text.skip("["):
                    raise text.fault(f"{key!r} is not a list")
                yield key, None
                for entry in text.entries():
                    yield key, entry
            if not text.skip(","):
                break
        text.expect("}")
        text.expect_end()


class _Text:
    """The part of a text file that is being read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._passed_chars, self._passed_lines = 0, 0
        self._ended = False
        start = file.read(4)
        file.seek(0)
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")

    def fault(self, what: str, ahead: int = 0) -> JsonFault:
        at = self._at + ahead
        line = self._passed_lines + self._text.count("\n", 0, at) + 1
        return JsonFault(f"{what} (line {line}, character {self._passed_chars + at + 1} of the file)")

    def skip(self, mark: str) -> bool:
        """Pass over white space, and over ``mark`` if it comes next."""
        if self._next() != mark:
            return False
        self._at += 1
        return True

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.fault(f"{mark!r} is missing")

    def expect_end(self) -> None:
        if self._next():
            raise self.fault("more follows behind the end")

    def value(self) -> Any:
        """The next value, whole."""
        self._next()
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except RecursionError:
                raise self.fault("nested too deeply") from None
            except ValueError as error:  # cut off by the end of the block, or no JSON
                if self._ended or len(self._text) - self._at > MAX_ENTRY_CHARS:
                    what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                    position = error.pos - self._at if isinstance(error, json.JSONDecodeError) else 0
                    raise self.fault(what, position) from None
            else:
                rest = self._text[end : end + 4]
                if (
                    len(rest) == 4 or rest.strip(".eE+-") or self._ended
                ):  # else a number may go on in the next block
                    self._at = end
                    return value
            self._more(len(self._text) - self._at)

    def entries(self) -> Iterator[Any]:
        """Of the list whose bracket was just passed."""
        if self.skip("]"):
            return
        while True:
            yield self.value()
            if not self.skip(","):
                break
        self.expect("]")

    def pass_over(self) -> None:
        """The next value, entry by entry where it is a list."""
        if self.skip("["):
            for _ in self.entries():
                pass
        else:
            self.value()

    def _next(self) -> str:
        """The next character that is no white space, '' at the end; it is not passed."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more(0)

    def _more(self, at_least: int) -> None:
        """Append the next block; it is as long as what waits already, so a long value is scanned a few times only."""
        block = self._file.read(max(BLOCK_BYTES, at_least))
        try:
            decoded = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise self.fault(f"not text: {error.reason}", len(self._text) - self._at) from None
        self._passed_chars += self._at
        self._passed_lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + decoded, 0
        self._ended = not block
