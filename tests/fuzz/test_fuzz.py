"""A short part of the fuzzer with a fixed seed; `make fuzz` runs it for as long as wanted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from walks import sampled

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the fuzzer forks, and watches processes in /proc"
)
DEADLINE_S = 1200
GRACE_S = 900  # until killed processes must be gone
DISTURBS = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import harness
root, what = Path(sys.argv[2]), sys.argv[3]
harness.MOST_S = 2.0 if what == "time" else 600.0
harness.MOST_BYTES = harness._resident(os.getpid()) + (100 << 20)

def stubborn(case):
    def action():
        for name in ("SIGTERM", "SIGINT", "SIGXCPU", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (root / "pids").write_text(f"{os.getpid()} {other.pid}")
        held = bytearray(300 << 20) if what == "memory" else b""
        time.sleep(600)
    return action

harness.guard(root)
case = harness.Running("stubborn", stubborn, 0, 0, None, root / "case")
while (result := case.poll()) is None:
    time.sleep(0.01)
print(result.faults)
"""


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_every_reader_answers_broken_files_with_one_message() -> None:
    """The quick suite reads damaged files in ``tests/unit/test_damaged_files.py``."""
    command = [sys.executable, str(HERE / "run.py"), "--seed", "7", "--rounds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def started_by(root: Path, what: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a case that ignores signals, and return its fuzzer and its two processes."""
    root.mkdir()
    command = [sys.executable, "-c", DISTURBS, str(HERE), str(root), what]
    fuzzer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 900
    while not (root / "pids").exists() or not (root / "pids").read_text():
        assert fuzzer.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    return fuzzer, [int(pid) for pid in (root / "pids").read_text().split()]


def assert_gone(pids: list[int]) -> None:
    """A process that has ended but was not reaped yet has no command line."""
    deadline_s = time.monotonic() + GRACE_S
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline")
        while line.exists() and line.read_bytes():
            assert time.monotonic() < deadline_s, f"{pid} still runs"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("what", "says"), sampled([("memory", "it used more than"), ("time", "it took more than")], 2)
)
def test_a_case_is_killed_at_its_limits_with_all_its_processes(tmp_path: Path, what: str, says: str) -> None:
    fuzzer, pids = started_by(tmp_path / "scratch", what)
    said, _ = fuzzer.communicate(timeout=900)
    assert says in said
    assert_gone(pids)


def test_no_process_of_a_case_outlives_a_killed_fuzzer(tmp_path: Path) -> None:
    fuzzer, pids = started_by(tmp_path / "scratch", "nothing")
    fuzzer.kill()
    fuzzer.communicate(timeout=900)
    assert_gone(pids)
