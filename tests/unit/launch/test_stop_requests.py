"""Ctrl-C, SIGTERM and the like before and after training: exit code 75, and what is said. During training:
tests/e2e/test_bad_input.py, "being stopped"."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_data import yolo_set

from yolofleet.cli import main
from yolofleet.fleet.hosts.agent_process import JobSpec
from yolofleet.fleet.hosts.fleet import Fleet, Host
from yolofleet.fleet.hosts.messages import Exit
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.folders import Folders, Site
from yolofleet.fleet.launch.local import LocalAttempts
from yolofleet.fleet.launch.watch import Watch
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import Stopped
from yolofleet.support.system.signals import STOP_SIGNALS, stoppable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def ask_to_stop(number: int = signal.SIGINT) -> Callable[..., Any]:
    return lambda *_, **__: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_no_part_of_a_run_takes_a_request_for_a_failure_of_its_own(number: int) -> None:
    handlers = [signal.getsignal(stop) for stop in STOP_SIGNALS]
    swallowed = []
    with pytest.raises(Stopped, match="on request") as caught, stoppable(), stoppable():
        try:
            ask_to_stop(number)()
            signal.pause()
        except Exception as problem:
            swallowed.append(problem)
    assert not swallowed
    assert caught.value.source == ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
    assert [signal.getsignal(stop) for stop in STOP_SIGNALS] == handlers


def test_a_repeated_request_is_announced_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attempts = LocalAttempts(JobSpec(tmp_path, 1))
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    ) as agent:
        agent.terminate = lambda: None  # type: ignore[method-assign]
        attempts._process = agent
        printed = []
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            attempts.on_signal(number, None)
            printed.append(capfd.readouterr().err.strip().partition(",")[0])
    assert printed == ["stopping after this step", "", "ending at once"] and attempts.asked == "SIGTERM"


def test_the_exit_code_stays_if_the_request_comes_while_a_module_is_imported(tmp_path: Path) -> None:
    """Modules such as dataclasses execute texts while they are imported."""
    (tmp_path / "stopped.py").write_text(
        "import os, signal, sys\n"
        "from yolofleet.support.errors import Stopped\n"
        "from yolofleet.support.system.signals import stoppable\n"
        "try:\n"
        "    with stoppable():\n"
        "        exec('os.kill(os.getpid(), signal.SIGTERM); signal.pause()')\n"
        "except Stopped as stopped:\n"
        "    sys.exit(stopped.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-m", "stopped"], cwd=tmp_path)
    assert done.returncode == Stopped.exit_code == 75


def test_a_process_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            ask_to_stop(signal.SIGHUP)()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        (("train", "--model", "yolov5n"), signal.SIGINT),
        (("val", "--weights", "w.safetensors"), signal.SIGTERM),
    ],
)
def test_before_the_processes_of_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: tuple[str, ...],
    number: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    usage = shutil.disk_usage

    def ask_first(path: Path) -> Any:
        ask_to_stop(number)()
        return usage(path)

    monkeypatch.setattr("shutil.disk_usage", ask_first)  # a check of this machine calls it
    assert main([*verb, "--data", "shapes:4", "--device", "cpu:2"]) == Stopped.exit_code
    assert "Stopped: stopped on request" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")
@pytest.mark.parametrize("moment", ["preflight.check", "run_on_hosts.Folders.begin"])
def test_between_the_login_to_the_hosts_and_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # nothing outside of the launcher happens at exactly these moments
    monkeypatch.setattr(f"yolofleet.fleet.launch.{moment}", ask_to_stop())
    yolo_set(tmp_path / "d", {"a": "0 0.5 0.5 0.2 0.4\n"})
    train = ["train", "--model", "yolov5n", "--data", "d", "--hosts", "localhost:cpu"]
    assert main(train) == Stopped.exit_code
    assert "Stopped: stopped on request" in capsys.readouterr().err
    assert not list(tmp_path.rglob("exp"))


class Asked(Remote):
    """A host that is told what to do; the job ends when it is to stop."""

    def __init__(self, name: str, at_start: Callable[[], Any]) -> None:
        super().__init__(Host(name, "cpu"))
        self.at_start = at_start
        self.told: list[dict[str, Any] | float] = []

    def start(self, job: dict[str, Any]) -> None:
        self.told.append(job)
        self.at_start()

    def stop(self, grace_s: float) -> None:
        self.told.append(grace_s)
        self.inbox.put((self, Exit(code=75)))


@pytest.mark.parametrize(
    ("numbers", "wishes", "grace_s"),
    [
        ([signal.SIGINT], 1, 30.0),
        ([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], 1, 30.0),  # of a scheduler
        ([signal.SIGTERM, signal.SIGINT], 2, 0.0),
    ],
)
def test_while_the_hosts_are_told_to_start(
    capfd: pytest.CaptureFixture[str], numbers: list[int], wishes: int, grace_s: float
) -> None:
    def signal_launcher() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    first = Asked("a", signal_launcher)
    second = Asked("b", lambda: None)
    second.inbox = first.inbox
    watch = Watch(Fleet((first.host, second.host)), [first, second], lambda *_: None)
    watch.follow([{"part": 0}, {"part": 1}])
    assert (first.told, second.told) == ([{"part": 0}, grace_s], [{"part": 1}, grace_s])
    assert watch.stop_requests == wishes and watch.command_code() == Stopped.exit_code
    assert capfd.readouterr().err.count("stopping all hosts") == 1


class Copying(Remote):
    def ask(self, request: str, timeout_s: float = 0, **_: Any) -> Any:
        if request == "list_files":
            ask_to_stop()()


def test_while_results_are_copied(tmp_path: Path) -> None:
    folders = Folders(RunFolder(tmp_path, is_new=True), [Site("/there/exp", "a", True)], ".mark")
    with pytest.raises(Stopped, match="results are not copied") as caught, stoppable():
        folders.fetch([Copying(Host("a", "cpu"))], saved=True, discard=False)
    assert caught.value.hint == "they are on a, in /there/exp"
