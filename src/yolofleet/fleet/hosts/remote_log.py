"""Read a log on a host line by line, of which a few pieces are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from yolofleet.fleet.hosts.remote import Refused, Remote

LAST_BYTES = 64 << 10  # the search for the last lines begins with so much of the file's end,
PIECE_BYTES = 1 << 20  # and goes back in pieces of this size
LONGEST_LINE = 1 << 20  # bytes; what is longer is cut


@dataclass
class Log:
    """What a rank writes on its host, line by line, of which a few pieces are in memory at a time.

    Attributes:
        offset: bytes that have been read or skipped.
        half: the beginning of a line whose end has not been read.
    """

    remote: Remote
    file: str
    offset: int = 0
    half: bytes = b""

    def skip_to_last(self, lines: int) -> bool:
        """Go to the beginning of the last ``lines`` lines. Return whether the file has more before it."""
        begin, piece = self._piece(-LAST_BYTES)
        ends = lines + piece.endswith(b"\n")  # of lines, counted from the end of the file
        while begin and piece.count(b"\n") < ends:
            ends -= piece.count(b"\n")
            begin, piece = self._before(begin)
        if ends:
            parts = piece.rsplit(b"\n", ends)
            piece = piece[: len(parts[0]) + 1] if len(parts) > ends else b""
        self.offset = begin + len(piece)
        return self.offset > 0

    def _before(self, end: int) -> tuple[int, bytes]:
        """Return the piece that ends at ``end``: its offset and its content."""
        begin = max(0, end - PIECE_BYTES)
        found = b""
        while len(found) < end - begin and (piece := self._piece(begin + len(found))[1]):
            found += piece
        return begin, found[: end - begin]

    def lines(self, *, to_end: bool) -> Iterator[bytes]:
        """Yield the lines that are complete now and were not at the last call.

        Args:
            to_end: the file will not grow, so its last line counts without a line end too.
        """
        while piece := self._piece(self.offset)[1]:
            self.offset += len(piece)
            *whole, self.half = (self.half + piece).split(b"\n")
            yield from whole
            if len(self.half) > LONGEST_LINE:
                yield self.half
                self.half = b""
        if to_end and self.half:
            yield self.half
            self.half = b""

    def _piece(self, offset: int) -> tuple[int, bytes]:
        """Return where the piece at ``offset`` begins, and its content. A negative offset counts from the file's end.

        Raises:
            ClusterError: the host is lost.
        """
        try:
            answer = self.remote.ask("read_piece", file=self.file, offset=offset)
        except Refused:  # the rank has not written yet
            return 0, b""
        return answer.offset, answer.content
