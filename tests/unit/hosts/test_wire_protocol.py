"""Hosts that do not speak as a host agent does: each is lost, in words, whatever it says."""

from __future__ import annotations

import io
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from yolofleet.fleet.hosts import remote as channel
from yolofleet.fleet.hosts.fleet import Fleet, Host
from yolofleet.fleet.hosts.host_agent import introduction
from yolofleet.fleet.hosts.messages import Output, answer_of, message_of, values_of
from yolofleet.fleet.hosts.remote import MOST_WAITING, STRANGER, Remote
from yolofleet.fleet.hosts.ssh import Unreachable
from yolofleet.fleet.launch.watch import Watch
from yolofleet.support.errors import ClusterError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]
HELLO = introduction()
WORDS = {
    "rank": 1,
    "host": "n0",
    "message": "DataError: x.jpg",
    "exit_code": 3,
    "time": 7.5,
    "secondary": False,
}
EXIT = {"type": "exit", "code": 1, "words": [WORDS], "log": "a log", "why": "", "stopped": ["rank 1: process 7 is stopped"], "step": 7,
        "killed": {"group": 0, "machine": None}}  # fmt: skip
JOB = {"job": "j", "title": "t", "folder": "/f", "node": 0, "ranks": [0, 2], "runs": True, "began_s": 1.0, "ended_s": 0, "code": None}  # fmt: skip
SOUND: list[dict[str, Any]] = [
    {"type": "hello", **HELLO}, {"type": "beat"}, {"type": "reply", "id": 3, "value": None}, {"type": "reply", "id": 3, "error": "no"},
    {"type": "output", "text": "words\n"}, {"type": "log", "rank": -1, "text": "words\n"}, EXIT,
]  # fmt: skip
FAKE = """#!{python} -ISs
import json, pathlib, sys
here = pathlib.Path(__file__).parent
sys.stdout.buffer.write((here / "first").read_bytes())
sys.stdout.buffer.flush()
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] in ("ask", "start"):
        sys.stdout.buffer.write((here / "then").read_bytes().replace(b"ID", str(message.get("id")).encode()))
        sys.stdout.buffer.flush()
"""
Begin = Callable[[Any, bytes], Remote]


def line(frame: Any) -> bytes:
    return json.dumps(frame).encode() + b"\n"


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """A host behind ``python:`` that greets, and then says something when it is asked or told to start."""
    remotes = []

    def make(first: Any = None, then: bytes = b"") -> Remote:
        (tmp_path / "first").write_bytes(line({"type": "hello", **HELLO} if first is None else first))
        (tmp_path / "then").write_bytes(then)
        (tmp_path / "python").write_text(FAKE.format(python=sys.executable))
        (tmp_path / "python").chmod(0o755)
        remotes.append(Remote(Host("localhost", "cpu", python=str(tmp_path / "python"))))
        return remotes[-1]

    yield make
    for made in remotes:
        made.close()


@pytest.mark.parametrize(
    ("missing", "value"),
    [
        *((name, ...) for name in ("time_s", "software", "protocol", "platform")),
        *(("time_s", "x"), ("software", None), ("protocol", 1e300), ("platform", [])),
    ],
)
def test_a_greeting_that_lacks_something_is_nobodys(begin: Begin, missing: str, value: Any) -> None:
    hello = {**HELLO, "type": "hello", missing: value}
    if value is ...:
        del hello[missing]
    with pytest.raises(Unreachable, match=STRANGER):
        begin(hello, b"").open()


@pytest.mark.parametrize(
    "said",
    [
        b"words\n", b"[1]\n", b'{"type": 3}\n', b'{"type": "dance"}\n', b'{"type": "output"}\n', b'{"type": "output", "text": 3}\n',
        b'{"type": "log", "rank": [1], "text": ""}\n', b'{"type": "reply", "id": [1], "value": 1}\n', b'{"type": "reply", "id": ID}\n',
        b'{"type": "exit"}\n', line({**EXIT, "code": 1000}), line({**EXIT, "words": [3]}), line({**EXIT, "killed": None}),
        line(SOUND[0]), b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"\n", b"x" * (9 << 20),
    ],
)  # fmt: skip
def test_a_host_that_says_what_no_host_agent_says_is_lost(
    begin: Begin, said: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(channel, "MOST_MESSAGE_BYTES", 8 << 20)
    remote = begin(None, said)
    remote.open()
    watch = Watch(Fleet((remote.host,)), [remote], lambda *_: None)
    watch.follow([{}])
    assert watch.explain("") == ClusterError.exit_code
    assert f"localhost is lost, with rank 0: {STRANGER}" in capsys.readouterr().err
    with pytest.raises(ClusterError, match="is lost"):
        remote.ask("time", timeout_s=3600)  # at once


@pytest.mark.parametrize(
    ("request_", "value"),
    [
        *[(name, value) for name in ("claim", "list_jobs", "list_files", "time") for value in (None, 3)],
        ("claim", {"folder": 3, "owner": "", "made": True, "linked": ""}),
        ("claim", {"folder": "a\0b", "owner": "", "made": True, "linked": ""}),
        ("claim", {"folder": "a", "owner": ""}),
        ("list_jobs", [{**JOB, "ranks": [0]}]),
        ("list_jobs", [{**JOB, "ranks": [0, 1.0]}]),
        ("list_files", [["a"]]),
        ("list_files", [["\ud800", 3]]),
        *[("read_piece", {"offset": 0, "data": data, "size": 3}) for data in ("a", "&", 3, None)],
        ("list_files", [["a", "3"]]),
        ("hash_files", {"a.pt": [3]}),
    ],
)
def test_an_answer_to_something_else_is_no_answer(begin: Begin, request_: str, value: Any) -> None:
    stray = {"type": "reply", "id": 77, "value": None}
    remote = begin(
        None, line(stray) + line({"type": "reply", "id": "ID", "value": value}).replace(b'"ID"', b"ID")
    )
    remote.open()
    with pytest.raises(ClusterError, match=f"is lost: {STRANGER}"):
        remote.ask(request_)


def test_what_host_agents_send_is_accepted() -> None:
    assert all(message_of(values_of(line(frame))) for frame in SOUND)
    for request, answer in {
        "enter": "/f", "claim": {"folder": "/f", "owner": "", "made": True, "linked": ""}, "unclaim": None, "hash_files": {"a.pt": "00"}, "reserve_port": 29500,
        "list_files": [["a/b", 3]], "read_piece": {"offset": 0, "data": "", "size": 3}, "list_jobs": [JOB, {**JOB, "code": 75}],
        "end_job": {"found": True, "left": False}, "take_code": "/tmp/x",
    }.items():  # fmt: skip
        answer_of(request, answer)


def altered(value: Any, chance: random.Random) -> Any:
    """Something in it, at any depth, is missing or something else."""
    if chance.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(
            [
                None,
                True,
                -1,
                0,
                300,
                10**400,
                1e308,
                float("nan"),
                "",
                "\ud800",
                "rank",
                [],
                [[]],
                {},
                {"rank": {}},
            ]
        )
    changed = dict(value) if isinstance(value, dict) else list(value)
    key = chance.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))  # type: ignore[arg-type]
    if isinstance(changed, dict) and chance.random() < 0.1:
        changed["more"] = 3
    elif chance.random() < 0.2:
        del changed[key]  # type: ignore[arg-type]
    else:
        changed[key] = altered(changed[key], chance)  # type: ignore[index]
    return changed


def test_no_frame_that_gets_through_brings_the_launcher_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as the CLI's is
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), errors="backslashreplace"))
    chance, passed = random.Random(0), 0
    host = Host("n0", "cpu")
    for _ in range(1500):
        frame = chance.choice(SOUND)
        for _ in range(chance.randint(1, 3)):
            frame = altered(frame, chance)
        message = message_of(values_of(line(frame)))
        if message is None:
            continue
        passed += 1
        with (tmp_path / "log").open("w", encoding="utf-8") as log:
            watch = Watch(
                Fleet((host,)), [Remote(host)], lambda _node, _rank, text: print(text, end="", file=log)
            )
            watch._take(0, message)
            watch.stdout.close()
        for wishes in (0, 1):
            watch.stop_requests = wishes
            if watch.nodes[0].is_over:
                assert watch.explain("") in range(256) and watch.command_code() in range(256)
    assert passed > 100


def test_what_comes_faster_than_it_is_taken_waits_on_its_host(begin: Begin) -> None:
    count = 20 * MOST_WAITING
    remote = begin(None, line({"type": "output", "text": "y\n" * 500}) * count)
    remote.open()
    remote.start({})
    most = 0
    for _ in range(50):
        most = max(most, remote.inbox.qsize())
        time.sleep(0.01)
    assert 0 < most <= MOST_WAITING
    remote.heard_at_s = 0.0
    messages = [remote.inbox.get(timeout=900)[1] for _ in range(count)]
    assert all(isinstance(message, Output) for message in messages) and remote.heard_at_s


def test_a_flood_that_nobody_takes_holds_nothing_up(begin: Begin) -> None:
    remote = begin(None, line({"type": "output", "text": "y\n" * 500}) * (20 * MOST_WAITING))
    remote.open()
    remote.start({})
    while remote.inbox.qsize() < MOST_WAITING:
        time.sleep(0.01)
    remote.close()
    for reader in remote._readers:
        reader.join(900)
        assert not reader.is_alive()


def test_a_connection_leaves_no_file_thread_or_process_behind(begin: Begin) -> None:
    def kept() -> set[object]:
        return {*(path.name for path in Path("/proc/self/fd").iterdir()), *threading.enumerate()}

    before = kept()
    for hello in (None, {"type": "hello"}, "words"):
        remote = begin(hello, b"")
        try:
            remote.open(timeout_s=0.5)
        except Unreachable:
            pass
        remote.close()
        assert remote._process is not None and remote._process.returncode is not None
    while not kept() <= before:  # what other tests left may end meanwhile
        time.sleep(0.05)  # beats end by themselves
