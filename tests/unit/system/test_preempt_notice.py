"""The command of --preempt-notice: what its end means, and that none of its processes stays. Real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import environment, wait_until

from yolofleet.support.system.proc import stat_table
from yolofleet.training import preempt_notice
from yolofleet.training.preempt_notice import preempt_notices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
HANGS = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "1000"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(1000)
"""
WORKER = """
import sys, time
from yolofleet.training.preempt_notice import preempt_notices
with preempt_notices(sys.argv[1], notice=print, log=print, warn=print):
    time.sleep(1000)
"""


def hanging(folder: Path) -> tuple[str, Path]:
    """Return a command that hangs with a child, and the file where it writes the child's PID."""
    (folder / "hangs.py").write_text(HANGS)
    return shlex.join([sys.executable, str(folder / "hangs.py"), str(folder / "pid")]), folder / "pid"


def is_alive(pid: Path) -> bool:
    fields = stat_table().get(int(pid.read_text()))
    return fields is not None and fields[0] not in "ZX"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preempt_notice, "PERIOD_S", 0.2)


class Told:
    def __init__(self) -> None:
        self.notices, self.log, self.problems = 0, list[str](), list[str]()

    def notice(self) -> None:
        self.notices += 1

    def until(self, command: str, ready: Callable[[], object]) -> Told:
        with preempt_notices(command, notice=self.notice, log=self.log.append, warn=self.problems.append):
            wait_until(ready)
        return self


def test_exit_code_0_is_a_notice_and_no_shell_runs_the_words() -> None:
    told = Told()
    told.until("echo 'a  b' $HOME ; exit 1", lambda: told.notices)
    assert (told.notices, told.log) == (1, ["--preempt-notice: a  b $HOME ; exit 1"])
    assert not told.problems


def test_another_exit_code_is_none_and_its_output_goes_to_the_log_once(tmp_path: Path) -> None:
    script = tmp_path / "no notice.sh"
    script.write_text(
        r"""if [ -e again ]; then touch twice; fi; touch again; printf '404\033[2J\nx'; exit 22"""
    )
    told = Told()
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        told.until(f"sh {shlex.quote(str(script))}", lambda: (tmp_path / "twice").exists())
    finally:
        os.chdir(before)
    assert (told.notices, told.log, told.problems) == (0, [r"--preempt-notice: 404\x1b[2J\nx"], [])


def test_a_command_that_cannot_be_started_is_reported_and_tried_again(tmp_path: Path) -> None:
    told, script = Told(), tmp_path / "later"

    def is_reported() -> bool:
        if told.problems and not script.exists():
            script.write_text("#!/bin/sh\n")
            script.chmod(0o755)
        return told.notices > 0

    told.until(str(script), is_reported)
    assert told.problems == [f"--preempt-notice: {script} cannot be started: No such file or directory"]


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children_and_reported_once(tmp_path: Path) -> None:
    command, pid = hanging(tmp_path)
    told = Told()
    told.until(command, lambda: told.problems and not is_alive(pid))
    assert len(told.problems) == 1 and "did not end within 10 s, and was killed" in told.problems[0]


def test_nothing_of_a_command_that_hangs_outlives_the_run(tmp_path: Path) -> None:
    command, pid = hanging(tmp_path)
    told = Told().until(command, lambda: pid.exists() and pid.read_text())
    assert not is_alive(pid) and not told.problems and not told.notices


def test_nothing_of_a_command_that_hangs_outlives_a_killed_worker(tmp_path: Path) -> None:
    command, pid = hanging(tmp_path)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, command], env=environment(tmp_path))
    try:
        wait_until(lambda: pid.exists() and pid.read_text())
        watched = is_alive(pid)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert watched
    wait_until(lambda: not is_alive(pid))
