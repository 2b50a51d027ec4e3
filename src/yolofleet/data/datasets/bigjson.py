"""Read the lists of a large JSON object entry by entry: memory holds one entry and one block of the file.

``json.loads`` of Objects365's training annotations (10 million boxes) would take about 10 GB.

This module is ours because ijson 3.6 (C backend) loses its limits: an unfinished string of 400 MB keeps ijson busy for
150 s, 4 MB of ``[`` take more than 5 GB, and neither NaN nor UTF-16 nor the line of a mistake is supported. For the
three lists of a COCO file of 123 MB, ijson needs 8.1 s of CPU time (a pass per list), this module 4.1 s.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from yolofleet.storage.foreign import open_foreign

BLOCK_BYTES = 1 << 20
MAX_ENTRY_CHARS = 64 << 20

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODE = json.JSONDecoder().raw_decode


class JsonError(ValueError):
    """What makes a file unusable, with its line and character."""


def read_lists(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, entry) for each entry of the lists under the ``wanted`` keys of the file's object, in file order.

    (key, None) comes before the first entry of each list. Other members are read and ignored.

    Raises:
        JsonError: the file is not a JSON object in UTF-8, UTF-16 or UTF-32; a wanted member is not a list or occurs
            twice; a member or entry has more than ``MAX_ENTRY_CHARS`` characters.
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
                raise text.error("a member's name is not a string")
            text.expect(":")
            if key not in wanted:
                text.skip_value()
            elif key in seen:
                raise text.error(f"{key!r} occurs twice")
            else:
                seen.add(key)
                if not text.skip("["):
                    raise text.error(f"{key!r} is not a list")
                yield key, None
                for entry in text.entries():
                    yield key, entry
            if not text.skip(","):
                break
        text.expect("}")
        text.expect_end()


class _Text:
    """A window of a text file that moves forward. ``_text`` is decoded, ``_at`` is the next character in it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._passed_chars, self._passed_lines = 0, 0
        self._ended = False
        start = file.read(4)
        file.seek(0)
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")

    def error(self, what: str, ahead: int = 0) -> JsonError:
        """Return an error that names the current place, or one so many characters ahead."""
        at = self._at + ahead
        line = self._passed_lines + self._text.count("\n", 0, at) + 1
        return JsonError(f"{what} (line {line}, character {self._passed_chars + at + 1} of the file)")

    def skip(self, mark: str) -> bool:
        """Skip white space, and ``mark`` if it comes next; return whether it did."""
        if self._next() != mark:
            return False
        self._at += 1
        return True

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.error(f"{mark!r} is missing")

    def expect_end(self) -> None:
        if self._next():
            raise self.error("there is text behind the end of the object")

    def value(self) -> Any:
        """Return the next value, complete."""
        self._next()
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except RecursionError:
                raise self.error("nested too deeply") from None
            except ValueError as error:  # either the block ends within the value, or this is not JSON
                if self._ended or len(self._text) - self._at > MAX_ENTRY_CHARS:
                    what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                    position = error.pos - self._at if isinstance(error, json.JSONDecodeError) else 0
                    raise self.error(what, position) from None
            else:
                rest = self._text[end : end + 4]
                # A number at the end of the block may continue in the next one.
                if len(rest) == 4 or rest.strip(".eE+-") or self._ended:
                    self._at = end
                    return value
            self._more(len(self._text) - self._at)

    def entries(self) -> Iterator[Any]:
        """Yield the entries of the list whose opening bracket was just skipped."""
        if self.skip("]"):
            return
        while True:
            yield self.value()
            if not self.skip(","):
                break
        self.expect("]")

    def skip_value(self) -> None:
        """Skip the next value, entry by entry if it is a list."""
        if self.skip("["):
            for _ in self.entries():
                pass
        else:
            self.value()

    def _next(self) -> str:
        """Skip white space and return the next character without skipping it; '' at the end."""
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
        """Append the next block, at least as long as the unread text, so that a long value is scanned few times."""
        block = self._file.read(max(BLOCK_BYTES, at_least))
        try:
            decoded = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise self.error(f"not text: {error.reason}", len(self._text) - self._at) from None
        self._passed_chars += self._at
        self._passed_lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + decoded, 0
        self._ended = not block
