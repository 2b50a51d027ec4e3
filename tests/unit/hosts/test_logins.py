"""Logins that do not end, too few files, and a reader who does not read: the command itself, in a process of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import environment

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fleets are started on Linux here")
DEADLINE_S = 900
Begin = Callable[..., "Typed"]


class Typed:
    """A command, and what it says on standard error."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.said = process, ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.said += line.decode()

    def wait_for(self, words: str) -> None:
        gives_up_at_s = time.monotonic() + DEADLINE_S
        while words not in self.said:
            assert time.monotonic() < gives_up_at_s and self.process.poll() is None, self.said
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Type a command where ``ssh`` is a script."""
    typed = []

    def type_it(*words: str, ssh: str = "exec sleep 600", **more: Any) -> Typed:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
        (tmp_path / "ssh").chmod(0o755)
        env = {
            **environment(tmp_path),
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
        }
        argv = [sys.executable, "-m", "yolofleet", *words]
        more = {"stdout": subprocess.DEVNULL, **more}
        typed.append(Typed(subprocess.Popen(argv, env=env, cwd=tmp_path, stderr=subprocess.PIPE, **more)))
        return typed[-1]

    yield type_it
    for one in typed:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stderr, one.process.stdout):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize(
    ("verb", "code", "says"),
    [
        (("fleet", "ps"), 130, "interrupted"),
        (("train", "--model", "yolov5n", "--data", "d"), 75, "Stopped: stopped on request"),
    ],
)
def test_ctrl_c_ends_a_login_to_a_dead_host_at_once(
    begin: Begin, verb: tuple[str, ...], code: int, says: str
) -> None:
    command = begin(*verb, "--hosts", "a:1,b:1")
    command.wait_for("logging in to 2 hosts ...")
    command.process.send_signal(signal.SIGINT)
    assert command.end() == code
    assert says in command.said and "Traceback" not in command.said


@pytest.mark.parametrize(
    ("most", "says"),
    [(14, ["cannot start a connection to it: Too many open files", "ulimit -n"]), (64, ["was lost before the first message"] * 4)],
)  # fmt: skip
def test_more_files_are_taken_where_they_may_be_and_too_few_are_called_so(
    begin: Begin, most: int, says: list[str]
) -> None:
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (14, most))
    command = begin("fleet", "ps", "--hosts", "a:1,b:1,c:1,d:1", ssh="sleep 1; exit 255", preexec_fn=limit)
    assert command.end() == 4
    assert all(command.said.count(words) >= says.count(words) for words in says), command.said
    assert "None" not in command.said and "Traceback" not in command.said


def test_two_ctrl_c_end_everything_although_nobody_reads(begin: Begin) -> None:
    command = begin("fleet", "run", "--hosts", "localhost:1", "--", "yes", stdout=subprocess.PIPE)
    assert command.process.stdout
    command.process.stdout.read(1)  # it runs
    time.sleep(0.5)  # and the pipe is full
    command.process.send_signal(signal.SIGINT)
    command.wait_for("stopping all hosts; Ctrl-C again ends at once")
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 75
    assert "localhost: stopped on request" in command.said and "Traceback" not in command.said
