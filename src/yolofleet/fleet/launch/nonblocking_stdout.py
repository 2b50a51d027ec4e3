"""Standard output that never blocks its writer, even if its reader pauses (``| less``)."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress

MOST_WAITING = 32 << 20  # characters; then text is left out
PATIENCE_S = 5.0  # at the end, for a reader that reads nothing
LEFT_OUT = "\n[...]\n"


class NonblockingStdout:
    """Write texts in their order, from a thread. :meth:`close` waits at most ``patience_s`` for a reader."""

    def __init__(self, patience_s: float = PATIENCE_S, most_waiting: int = MOST_WAITING) -> None:
        self.patience_s, self.most_waiting = patience_s, most_waiting
        self._stream = sys.stdout
        self._texts: deque[str] = deque()
        self._waiting = 0  # characters, including those that the thread is writing
        self._left_out = False
        self._wrote_at_s = 0.0
        self._changed = threading.Condition()
        self._closed = self._given_up = False
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        with self._changed:
            if self._waiting + len(text) > self.most_waiting:
                self._left_out = True
                return
            if self._left_out:
                text, self._left_out = LEFT_OUT + text, False
            self._texts.append(text)
            self._waiting += len(text)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def give_up(self) -> None:
        """Do not wait for the reader at the end. A signal handler may call it."""
        self._given_up = True

    def close(self) -> None:
        """Wait until all text is read, or none for ``patience_s``. Drop the rest."""
        if self._left_out:
            self.write("")
        began_s = time.monotonic()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._waiting and not self._given_up:
                if time.monotonic() - max(began_s, self._wrote_at_s) > self.patience_s:
                    break
                self._changed.wait(0.1)
            self._texts.clear()
        if self._thread is not None and not self._waiting:
            self._thread.join()

    def _work(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()  # text of earlier writers
        while True:
            with self._changed:
                while not self._texts and not self._closed:
                    self._changed.wait()
                if not self._texts:
                    return
                text = self._texts.popleft()
            for begin in range(0, len(text), io.DEFAULT_BUFFER_SIZE):
                self._put(text[begin : begin + io.DEFAULT_BUFFER_SIZE])
                self._wrote_at_s = time.monotonic()
            with self._changed:
                self._waiting -= len(text)
                self._changed.notify_all()

    def _put(self, text: str) -> None:
        """Write past Python's buffered writer: its lock can deadlock the shutdown while this thread waits."""
        # the reader has closed it, or there is no standard output
        with suppress(OSError, ValueError, AttributeError):
            stream = self._stream
            if not isinstance(stream, io.TextIOWrapper):  # of a notebook
                stream.write(text)
                stream.flush()
                return
            left = text.encode(stream.encoding or "utf-8", "backslashreplace")
            while left:
                left = left[os.write(stream.fileno(), left) :]
