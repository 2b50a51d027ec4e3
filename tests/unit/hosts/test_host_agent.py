"""A host agent without ssh: started here, spoken to, and left in every way; nothing that it started may outlive it."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from walks import sampled

from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.hosts.host_agent import LAST_OUTPUT_S
from yolofleet.fleet.hosts.messages import Gone, JobEnd
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.hosts.requests import discard, packed, take
from yolofleet.fleet.hosts.ssh import Unreachable, unreachable
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.proc import descendants

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux"),
]

STUBBORN = "trap '' TERM; (trap '' TERM; setsid sleep 61 & wait) & echo up; while :; do sleep 0.1; done"
DEADLINE_S = 900


def job(command: str, /, **more: Any) -> dict[str, Any]:
    meeting = {"node": 1, "nodes": 3, "address": "10.0.0.1", "port": 29500, "card": "lo", "secret": "5ec2e7"}
    shell = more.pop("shell", "sh")
    base = {
        "id": "j1",
        "title": "a job",
        "folder": ".",
        "text": "",
        "streamed": False,
        "terminal": None,
        "number": 1,
        "restarts": 0,
    }
    rest = {"first_rank": 2, "processes": 4, "env": {}, "silence_s": 20.0, "grace_s": 0.5}
    return {**base, **rest, "command": [shell, "-c", command], "meeting": meeting, **more}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Host("localhost", "cpu:4")


@pytest.fixture
def remote(host: Host) -> Iterator[Remote]:
    opened = Remote(host)
    opened.open()
    yield opened
    opened.close()


def wait_for(what: Callable[[], Any]) -> Any:
    gives_up_at_s = time.monotonic() + DEADLINE_S
    while not (value := what()):
        assert time.monotonic() < gives_up_at_s
        time.sleep(0.02)
    return value


def started(remote: Remote, command: str, **more: Any) -> list[int]:
    """Start a job; everything below the host agent once it has said something."""
    remote.start(job(command, **more))
    assert next_frame(remote)["text"] == "up\n"
    return wait_for(lambda: descendants(pid_of(remote)))


def pid_of(remote: Remote) -> int:
    """The process of its host agent."""
    assert remote.hello
    return remote.hello.pid


def next_frame(remote: Remote) -> dict[str, Any]:
    """The values of the next message."""
    try:
        message = remote.inbox.get(timeout=DEADLINE_S)[1]
        return {"type": "gone"} if isinstance(message, Gone) else message.model_dump()
    except Empty:
        raise AssertionError("no frame came") from None


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if state(pid) not in "ZX"]


def test_a_folder_that_cannot_be_made_is_an_answer_not_the_end(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="file"):
        remote.ask("warm_up", DEADLINE_S, job=job("", command=None, folder=str(tmp_path / "file" / "run")))
    assert remote.ask("list_jobs") is not None and alive([pid_of(remote)])


def test_it_greets_answers_and_says_why_it_cannot(remote: Remote, tmp_path: Path) -> None:
    assert remote.hello and remote.hello.software["python"] and abs(remote.ahead_s) < DEADLINE_S
    before_s = time.time()
    assert before_s <= remote.ask("time")["time_s"] <= time.time()
    assert remote.ask("enter", folder=str(tmp_path)) == str(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    assert list(remote.ask("hash_files", names=["a.bin", "b.bin"])) == ["a.bin"]
    assert remote.ask("read_piece", file="a.bin", offset=-6).data == "+vv8/f7/"
    with pytest.raises(ClusterError, match="no probe 'rm'"):
        remote.ask("rm", folder="/")
    with pytest.raises(ClusterError, match="No such file"):
        remote.ask("enter", folder="nowhere")


def test_a_job_is_told_its_place_and_its_words_and_code_come_back(remote: Remote) -> None:
    remote.start(
        job(
            'echo "$PET_NNODES $PET_NODE_RANK $PET_NPROC_PER_NODE $GLOO_SOCKET_IFNAME $A $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"; exit 3',
            env={"A": "b c"},
            grace_s=299.5,
        )
    )
    assert next_frame(remote)["text"] == "3 1 4 lo b c 300\n"
    ending = next_frame(remote)
    assert (ending["type"], ending["code"], ending["why"]) == ("exit", 3, "")
    (record,) = remote.ask("list_jobs")
    assert (record.job, record.code, record.runs, record.ranks) == ("j1", 3, False, (2, 4))
    remote.start(job("true", id="j2"))  # one after the other is possible
    assert next_frame(remote)["code"] == 0


def test_a_folder_of_jobs_that_cannot_be_is_said_in_words(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / f"yolofleet-{os.getuid()}").touch()
    with pytest.raises(ClusterError, match=r"localhost: cannot write .*: File exists") as caught:
        remote.ask("list_jobs")
    assert "StorageError(" not in caught.value.what


def test_orphans_that_have_ended_are_let_go(remote: Remote) -> None:
    host_agent = pid_of(remote)
    started(remote, "for i in 1 2 3 4 5; do (setsid sleep 0.1 & sleep 0.1 &); done; echo up; exec sleep 60")
    children = Path("/proc", str(host_agent), "task", str(host_agent), "children")
    wait_for(lambda: len(children.read_text().split()) == 1)  # zombies are among them
    remote.stop(0)
    assert next_frame(remote)["code"] == -signal.SIGTERM


def test_stop_kills_what_does_not_listen(remote: Remote) -> None:
    below = started(remote, STUBBORN)
    began_s = time.monotonic()
    remote.stop(0.5)
    ending = next_frame(remote)
    assert ending["why"] == "stopped by the launcher" and ending["code"] == -signal.SIGKILL
    assert time.monotonic() - began_s > 0.4
    assert not alive(below) and not descendants(pid_of(remote))


def test_a_command_of_one_process_has_all_its_time_to_end(remote: Remote) -> None:
    started(remote, "trap 'sleep 2.5; exit 7' TERM; echo up; while :; do read -t 0.1 x; done", shell="bash")
    remote.stop(DEADLINE_S)
    assert next_frame(remote)["code"] == 7


def test_signals_that_ask_twice_hasten_nothing(remote: Remote) -> None:
    """`fleet stop` typed again, or a machine that is shut down (SIGTERM, and SIGHUP to sessions)."""
    started(remote, "trap 'sleep 1; exit 75' TERM; echo up; while :; do sleep 0.1; done", grace_s=DEADLINE_S)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        os.kill(pid_of(remote), number)
        time.sleep(0.2)
    assert next_frame(remote)["code"] == 75


@pytest.mark.parametrize("terminal", [None, {"rows": 24, "columns": 80, "term": "dumb"}])
def test_a_job_that_has_closed_its_output_costs_nothing(
    remote: Remote, terminal: dict[str, Any] | None
) -> None:
    remote.start(job("exec >&- 2>&-; exec sleep 60", terminal=terminal))
    wait_for(
        lambda: "sleep" in [Path(f"/proc/{p}/comm").read_text().strip() for p in descendants(pid_of(remote))]
    )
    before_s, began_s = cpu_s(pid_of(remote)), time.monotonic()
    time.sleep(1.0)
    assert cpu_s(pid_of(remote)) - before_s < 0.3 * (time.monotonic() - began_s)


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.slow
def test_what_a_job_logged_last_comes_although_the_channel_is_full(
    bare: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The launcher reads slowly, and only after the job has ended; the logs are more than the channel holds."""
    host_agent = bare(
        "",
        command=None,
        folder=str(tmp_path / "run"),
        streamed=True,
        silence_s=DEADLINE_S,
        env=in_place_of_torchrun(tmp_path, MANY_WORDS),
    )
    wait_for(lambda: (tmp_path / "run/ended").exists() or host_agent.poll() is not None)
    assert host_agent.stdout
    got = 0
    while (frame := json.loads(host_agent.stdout.readline()))["type"] != "exit":
        got += len(frame["text"]) if frame["type"] == "log" and frame["rank"] == 2 else 0
        if frame["type"] == "log" and got < 3 << 20:  # 12 pieces, which take longer than LAST_OUTPUT_S
            time.sleep(LAST_OUTPUT_S / 10)
    assert got == (tmp_path / "run/logs/rank-2.log").stat().st_size


def in_place_of_torchrun(folder: Path, body: str) -> dict[str, str]:
    """The environment in which the host agent's process runs ``body`` instead of torchrun."""
    (folder / "sitecustomize.py").write_text(f"""
import os, pathlib, sys, types

def main(argv):
{textwrap.indent(body, "    ")}

sys.modules["torch.distributed.run"] = types.ModuleType("torch.distributed.run")
sys.modules["torch.distributed.run"].main = main
""")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


MANY_WORDS = """
run = pathlib.Path(argv[-3])
(run / "logs/rank-2.log").write_text("0123456789abcde\\n" * (4 << 16))  # 4 MiB
(run / "ended").touch()
"""


TELLS = """
told = [pathlib.Path("/proc/self/cmdline").read_bytes(), pathlib.Path("/proc/self/environ").read_bytes()]
sys.stdout.buffer.write(b"\\n".join([*told, repr(argv).encode(), repr(os.listdir("/proc/self/fd")).encode()]))
sys.stdout.flush()
sys.exit(3)
"""


def test_the_secret_of_a_run_reaches_no_other_process_and_no_file(remote: Remote, tmp_path: Path) -> None:
    secret = "5ec2e7" * 10 + "0a11"
    env = in_place_of_torchrun(tmp_path, TELLS)
    ours = {"folder": str(tmp_path / "run"), "streamed": True, "env": env, "command": None}
    for node in (0, 1):  # the host of the store, and another one
        meeting = {
            "node": node,
            "nodes": 2,
            "address": "127.0.0.1",
            "port": 0,
            "card": "lo",
            "secret": secret,
        }
        remote.start({**job("", id=f"j{node}"), **ours, "meeting": meeting})
        frames = [next_frame(remote)]
        while frames[-1]["type"] != "exit":
            frames.append(next_frame(remote))
        said = json.dumps(frames)
        assert "yolofleet.training.parallel.torchrun_agent" in said and secret not in said
        command = Path(f"/proc/{pid_of(remote)}/cmdline").read_bytes()
        assert secret.encode() not in command + Path(f"/proc/{pid_of(remote)}/environ").read_bytes()
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_a_rank_that_cannot_end_because_it_is_stopped_is_named(remote: Remote) -> None:
    started(remote, "(RANK=5 exec sh -c 'kill -STOP $$') & echo up; sleep 63")
    (halted,) = wait_for(lambda: [p for p in descendants(pid_of(remote)) if state(p) == "T"])
    remote.stop(0.2)
    (said,) = next_frame(remote)["stopped"]
    assert said.startswith(f"rank 5: process {halted} is stopped")


def test_what_outlives_the_command_is_ended(remote: Remote) -> None:
    below = started(remote, "setsid sleep 62 & echo up; sleep 0.3")
    assert next_frame(remote)["code"] == 0
    assert not alive(below)


def test_everything_ends_when_the_connection_does(remote: Remote) -> None:
    below = [*started(remote, STUBBORN), pid_of(remote)]
    remote.close()
    assert not alive(below)


@pytest.mark.parametrize(
    "line", sampled([b"{", b"[]", b"3", b"[" * 100_000, b"{}", b'{"type": "ask"}', b'{"type": "stop"}'], 3)
)
def test_a_host_agent_that_is_told_nonsense_ends_everything(
    bare: Callable[..., subprocess.Popen[bytes]], line: bytes
) -> None:
    host_agent = bare(STUBBORN, grace_s=0.1)
    below = wait_for(lambda: descendants(host_agent.pid))
    assert host_agent.stdin and host_agent.stdout
    host_agent.stdin.write(line + b"\n")
    host_agent.stdin.flush()
    words = host_agent.stdout.read().decode()
    assert host_agent.wait(DEADLINE_S) == 0 and not alive(below)
    assert "unexpected protocol message" in words and "Traceback" not in words


def test_no_job_is_an_end_like_others(remote: Remote) -> None:
    for missing in ("meeting", "command", "grace_s", "env"):
        frame = job("sleep 60")
        del frame[missing]
        remote.start(frame)
        assert "cannot start here" in next_frame(remote)["why"]
    assert not descendants(pid_of(remote)) and remote.ask("list_jobs") == []


@pytest.fixture
def bare(host: Host) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a host agent with a job, and read no more than its greeting."""
    keepers = []

    def begin(command: str, /, **more: Any) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "yolofleet.fleet.hosts.host_agent"]
        host_agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        keepers.append(host_agent)
        assert host_agent.stdin and host_agent.stdout
        assert json.loads(host_agent.stdout.readline())["type"] == "hello"
        host_agent.stdin.write(json.dumps({"type": "start", "job": job(command, **more)}).encode() + b"\n")
        host_agent.stdin.flush()
        return host_agent

    yield begin
    for host_agent in keepers:
        host_agent.kill()
        host_agent.wait()
        assert host_agent.stdin and host_agent.stdout
        host_agent.stdin.close()
        host_agent.stdout.close()


def test_everything_ends_when_the_launcher_falls_silent(bare: Callable[..., subprocess.Popen[bytes]]) -> None:
    """As when a cable is pulled, or the launcher is stopped: the connection is there, and nothing comes."""
    host_agent = bare(STUBBORN, silence_s=0.5)
    below = wait_for(lambda: descendants(host_agent.pid))
    assert host_agent.stdout and host_agent.wait(DEADLINE_S) == 0
    frames = [json.loads(line) for line in host_agent.stdout]
    assert "no message from the launcher" in next(frame for frame in frames if frame["type"] == "exit")["why"]
    assert not alive(below)


def test_everything_ends_when_nobody_reads(bare: Callable[..., subprocess.Popen[bytes]]) -> None:
    host_agent = bare("while :; do echo 0123456789012345678901234567890123456789012345678901234567890; done")
    below = wait_for(lambda: descendants(host_agent.pid))
    time.sleep(0.5)  # the pipe is full
    assert host_agent.stdin
    host_agent.stdin.close()
    assert host_agent.wait(DEADLINE_S) == 0
    assert not alive(below)


def test_what_it_started_dies_with_a_host_agent_that_is_killed(remote: Remote) -> None:
    below = started(remote, "echo up; exec sleep 63")
    os.kill(pid_of(remote), signal.SIGKILL)
    assert next_frame(remote)["type"] == "gone"
    wait_for(lambda: not alive(below))


def test_another_connection_sees_the_job_and_ends_it(remote: Remote, host: Host) -> None:
    below = started(remote, "trap 'exit 75' TERM; echo up; while :; do sleep 0.1; done")
    other = Remote(host)
    other.open()
    assert [record.runs for record in other.ask("list_jobs")] == [True]
    assert other.ask("end_job", job="j1", deadline_s=10) == JobEnd(found=True, left=False)
    assert other.ask("end_job", job="j1", deadline_s=10) == JobEnd(found=False, left=False)
    other.close()
    ending = next_frame(remote)
    assert (ending["code"], ending["why"]) == (75, "stopped on request")
    assert next_frame(remote)["type"] == "gone" and not alive(below)


def test_hosts_compute_with_the_code_that_they_are_sent(remote: Remote, tmp_path: Path) -> None:
    package: dict[str, Any] = packed()
    there = Path(remote.ask("take_code", **package))
    assert there.is_relative_to(tmp_path) and not list(there.rglob("*.pyc"))
    program = "import yolofleet, sys; sys.stdout.write(yolofleet.__file__)"
    remote.start(job("") | {"command": [sys.executable, "-c", program]})
    assert next_frame(remote)["text"] == str(there / "__init__.py")
    with pytest.raises(ClusterError, match="is incomplete"):
        remote.ask("take_code", **{**package, "sha256": "0" * 64})
    remote.close()
    assert not there.exists()


@pytest.mark.parametrize("name", ["../x.py", "/x.py", "a/../../x.py"])
def test_code_cannot_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    with pytest.raises(OSError, match="which is not allowed"):
        take({"archive": base64.b64encode(stream.getvalue()).decode(), "sha256": ""})
    discard()
    assert not list(tmp_path.rglob("*"))


def test_words_of_a_login_shell_before_the_greeting_do_no_harm(host: Host, tmp_path: Path) -> None:
    noisy = tmp_path / "python"
    noisy.write_text(f'#!/bin/sh\necho "Welcome to a host"\necho "{{}}"\nexec {sys.executable} "$@"\n')
    noisy.chmod(0o755)
    remote = Remote(Host("localhost", "cpu", python=str(noisy)))
    assert remote.open().platform == "linux"
    remote.close()


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ("ssh: Could not resolve hostname n9: Name or service not known", "unknown-host", "no host of that name"),
        ("n9: Permission denied (publickey).", "key-refused", "ssh-copy-id n9"),
        ("Host key verification failed.", "host-key", "ssh n9"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "host-key", "ssh-keygen -R n9"),
        ("ssh: connect to host n9 port 22: Connection refused", "port-refused", "sshd"),
        ("ssh: connect to host n9 port 22: No route to host", "no-route", "switched on"),
        ("ssh: connect to host n9 port 22: Connection timed out", "time-out", "does not answer"),
        ("kex_exchange_identification: read: Connection reset by peer", "closed", "sshd log"),
        ("bash: line 1: /p/python: No such file or directory", "no-python", "no /p/python"),
        ("/p/python: No module named yolofleet", "no-package", "has no yolofleet"),
        ("something else", "other", "exit code 9"),
    ],
)  # fmt: skip
def test_why_a_host_cannot_be_reached_has_a_name(words: str, kind: str, says: str) -> None:
    problem = unreachable(Host("n9", "cpu", python="/p/python"), 9, words)
    assert problem.kind == kind and says in problem.render() and words.splitlines()[-1] in problem.render()


def test_a_host_that_is_switched_off_between_login_and_greeting_says_nothing() -> None:
    problem = unreachable(Host("n9", "cpu"), 255, "")
    assert problem.kind == "closed" and "was lost before the first message" in problem.render()


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(Unreachable) as caught:
        Remote(Host("localhost", "cpu", python="/no/such/python")).open()
    assert caught.value.exit_code == 4 and caught.value.kind == "no-python"
    assert "/no/such/python" in caught.value.render()
