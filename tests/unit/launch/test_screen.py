"""Standard output whose reader does not read."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from yolofleet.fleet.launch.nonblocking_stdout import LEFT_OUT, NonblockingStdout


class Reader:
    """The other end of standard output, and what was read there."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.text = descriptor, ""

    def read(self, until: str) -> None:
        while until not in self.text:
            self.text += os.read(self.descriptor, 1 << 16).decode()


@contextmanager
def a_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w", encoding="ascii") as stdout:
        with monkeypatch.context() as changed:
            changed.setattr(sys, "stdout", stdout)
            yield Reader(ours)
        os.close(ours)


def test_everything_arrives_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_reader(monkeypatch) as reader:
        screen = NonblockingStdout()
        print("before")
        for number in range(2000):
            screen.write(f"{number:050d}\n")
        screen.write("caf\xe9 \ud800 end\n")

        def read_late() -> None:
            time.sleep(0.3)
            reader.read("end\n")

        reading = threading.Thread(target=read_late, daemon=True)
        reading.start()
        screen.close()
        reading.join(900)
        lines = reader.text.splitlines()
        assert lines[0] == "before" and lines[1:2001] == [f"{number:050d}" for number in range(2000)]
        assert lines[2001] == "caf\\xe9 \\ud800 end"


def test_a_reader_who_pauses_holds_up_nothing_and_sees_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_reader(monkeypatch) as reader:
        screen = NonblockingStdout(most_waiting=1 << 20)
        for number in range(100):
            screen.write(str(number % 10) * (1 << 15))  # three mebibytes that nobody reads yet
        while len(reader.text) < 1 << 19:
            reader.text += os.read(reader.descriptor, 1 << 16).decode()
        screen.write("later\n")
        reading = threading.Thread(target=reader.read, args=["later\n"], daemon=True)
        reading.start()
        screen.close()
        reading.join(900)
        assert reader.text.endswith(LEFT_OUT + "later\n")
        assert 1 << 20 <= len(reader.text) < 2 << 20


def test_the_end_does_not_wait_for_a_reader_who_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_reader(monkeypatch):
        screen = NonblockingStdout(patience_s=0.5)
        screen.write("x" * (1 << 18))
        began_s = time.monotonic()
        screen.close()
        assert time.monotonic() - began_s > 0.4
        again = NonblockingStdout(patience_s=3600)
        again.write("x" * (1 << 18))
        threading.Timer(0.2, again.give_up).start()
        again.close()


def test_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    for stream in (os.fdopen(theirs, "w"), None):
        monkeypatch.setattr(sys, "stdout", stream)
        before = set(threading.enumerate())  # other tests' threads may end meanwhile
        screen = NonblockingStdout()
        screen.write("words\n")
        screen.close()
        assert set(threading.enumerate()) <= before
        if stream is not None:
            stream.close()


def test_a_stream_that_is_no_file_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notebook:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    notebook = Notebook()
    monkeypatch.setattr(sys, "stdout", notebook)
    screen = NonblockingStdout()
    screen.write("a cell's words\n")
    screen.close()
    assert notebook.text == "a cell's words\n"
