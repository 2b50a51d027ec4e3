"""The lock of a run's folder when its holder is paused, on a host that is lost, or of another run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from yolofleet.runs.report.folder import Owner, RunFolder
from yolofleet.storage import atomic
from yolofleet.support.errors import ConfigError
from yolofleet.training.rank.folder import _remove_leftovers

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals that pause a process")

# Holds the lock. It writes WHAT into the file that each line of standard input names, and prints how that ended. With
# `pause` before the name it stops itself between the last look at the lock and the rename.
HOLDER = """
import os, signal, sys
from pathlib import Path
from yolofleet.runs.report.folder import Owner, RunFolder
from yolofleet.support.errors import YolofleetError
from yolofleet.storage import atomic

look = atomic.check_fence

def look_and_pause(path):
    look(path)
    os.kill(os.getpid(), signal.SIGSTOP)

folder = RunFolder(Path(sys.argv[1]))
with folder.locked(owner=Owner(sys.argv[2], (0, int(sys.argv[3])))):
    print("held", flush=True)
    for line in sys.stdin:
        *pause, name = line.split()
        atomic.check_fence = look_and_pause if pause else look
        try:
            atomic.write_text(folder.path / name, "late")
            print("written", flush=True)
        except YolofleetError as problem:
            print(type(problem).__name__, problem.what, flush=True)
"""


class Holder:
    """A process that holds the lock of ``folder``."""

    def __init__(self, folder: Path, run: str, attempt: int) -> None:
        words = [sys.executable, "-c", HOLDER, str(folder), run, str(attempt)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "held"

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.wait_until_paused()

    def wait_until_paused(self) -> None:
        assert os.waitid(os.P_PID, self.process.pid, os.WSTOPPED) is not None

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def holder(folder: Path, run: str = "run", attempt: int = 0) -> Iterator[Holder]:
    """Return a process that holds the lock of ``folder`` during the block."""
    one = Holder(folder, run, attempt)
    try:
        yield one
    finally:
        one.process.kill()
        for stream in (one.process.stdin, one.process.stdout):
            assert stream
            with suppress(OSError):
                stream.close()
        one.process.wait()


def later(attempt: int = 1) -> Owner:
    return Owner("run", (0, attempt))


def test_the_next_attempt_takes_the_lock_from_a_paused_one_which_writes_nothing_when_it_wakes(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    run.make_tree()
    with holder(tmp_path) as old:
        old.tell("weights/last.safetensors")
        assert old.answer() == "written"
        old.pause()
        with run.locked(owner=later()):
            atomic.write_text(run.weights / "last.safetensors", "new")
            old.wake()
            for name in ("weights/last.safetensors", "results.csv", "logs/status.json", "checkpoints/step-1"):
                old.tell(name)
                assert old.answer().startswith("ClusterError this process was paused or cut off"), name
            assert (run.weights / "last.safetensors").read_text() == "new"
            with pytest.raises(ConfigError), run.locked():
                pass
        for _ in range(2):
            old.tell("results.csv")
            assert old.answer().startswith("ClusterError"), "the later attempt has ended"
            with run.locked(owner=Owner("another")):
                pass
        old.process.stdin.close()  # type: ignore[union-attr]
        assert old.process.wait() == 0
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == [".lock", "last.safetensors"]


def test_a_rename_that_was_decided_before_the_lock_was_lost_fails(tmp_path: Path) -> None:
    """The holder is paused at the worst instruction: it has looked at the lock, and has not renamed yet."""
    run = RunFolder(tmp_path)
    run.make_tree()
    for name in ("results.csv", "weights/last.safetensors", "checkpoints/step-00000001.safetensors"):
        with holder(tmp_path) as old:
            old.tell(f"pause {name}")
            old.wait_until_paused()
            with run.locked(owner=later()):
                _remove_leftovers(run)
                atomic.write_text(tmp_path / name, "new")
            old.wake()
            assert old.answer().startswith("StorageError cannot write"), name
            assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize(
    ("run", "attempt"),
    [("run", 1), ("run", 2), ("another", 0), ("", 0)],
    ids=["same", "later", "other", "none"],
)
def test_a_holder_that_is_no_earlier_attempt_keeps_the_lock_and_is_named(
    tmp_path: Path, run: str, attempt: int
) -> None:
    with holder(tmp_path, run, attempt) as other:
        words = f"another process is writing into {tmp_path}: process {other.process.pid} on "
        with pytest.raises(ConfigError) as refused, RunFolder(tmp_path).locked(0.2, later()):
            pass
        assert words in refused.value.what
        other.tell("results.csv")
        assert other.answer() == "written"


def test_a_lock_of_a_holder_that_has_died_is_free(tmp_path: Path) -> None:
    with holder(tmp_path, "another") as other:
        other.process.kill()
        other.process.wait()
        assert (tmp_path / ".lock").exists()
        with RunFolder(tmp_path).locked():
            pass
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_the_file_system_lost_is_a_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where the server frees the lock of a host that was silent, or on a disk without locks."""
    with holder(tmp_path) as old:
        monkeypatch.setattr(atomic, "_try_lock", lambda handle: True)
        with RunFolder(tmp_path).locked(owner=Owner("another")):
            old.tell("results.csv")
            assert old.answer().startswith("ClusterError")


def test_a_removed_lock_file_does_not_end_the_run_that_had_it(tmp_path: Path) -> None:
    with holder(tmp_path) as one:
        (tmp_path / ".lock").unlink()
        one.tell("results.csv")
        assert one.answer() == "written"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\x00",
        b"[" * 4000,
        b"[1, 2]",
        b'["run", [1e999], "h", 1, "t"]',
        b'["run", 5, "h", 1, "t"]',
        json.dumps(["x", [0], "evil\x1b[2J\nhost", 1, "t"]).encode(),
    ],
)
def test_a_strange_record_in_a_lock_that_is_held_is_refused_in_plain_words(
    tmp_path: Path, record: bytes
) -> None:
    with holder(tmp_path):
        (tmp_path / ".lock").write_bytes(record)
        with pytest.raises(ConfigError) as refused, RunFolder(tmp_path).locked(owner=later()):
            pass
    assert "another process is writing into" in refused.value.what
    assert "\x1b" not in refused.value.what and "\n" not in refused.value.what
