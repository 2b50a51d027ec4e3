"""`yolofleet fleet` and other verbs as they are typed: slips, closed streams, jobs by part of their name."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from yolofleet.cli import main
from yolofleet.fleet.hosts import jobs
from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.hosts.messages import JobEnd, answer_of
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.jobs_on_hosts import Log, jobs_of, named_job
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.system.proc import started_at

pytestmark = pytest.mark.long

linux = pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Exit code, standard output and error (without the line that a slow login writes)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capfd.readouterr()
        return code, out, err.replace("logging in to 1 host ...\n", "")

    return run


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams by a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_shell_has_closed(closed: str) -> None:
    script = f'"$0" -m yolofleet data list {closed}'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("verb", [("ps",), ("stop",), ("logs",), ("check",), ("run", "true")])
def test_every_verb_refuses_an_empty_list_of_hosts(cli: Cli, verb: tuple[str, ...]) -> None:
    code, _, err = cli("fleet", verb[0], "--hosts", "", *verb[1:])
    assert code == 2 and "--hosts is given, and empty" in err
    if verb[0] in ("check", "run"):  # the others look at this machine
        assert "expected --hosts or --fleet" in cli("fleet", *verb)[2]


@pytest.mark.parametrize(
    "argv", [("stop", "--grace", "-5"), ("stop", "--grace", "nan"), ("logs", "--lines", "-1")]
)
def test_numbers_below_zero_are_refused(cli: Cli, argv: tuple[str, ...]) -> None:
    code, _, err = cli("fleet", *argv, "--hosts", "localhost")
    assert code == 2 and argv[1] in err


# -- names ---------------------------------------------------------------------------------------------------

NAMES = ["exp-7c651b", "exp2-aaaaaa", "exp2-bbbbbb", "long-run-cccccc"]


@pytest.mark.parametrize(
    ("asked", "name"), [("exp-7c651b", 0), ("exp", 0), ("exp-7", 0), ("exp2-b", 2), ("long-run", 3), ("l", 3)]
)
def test_a_job_is_meant_by_its_run_or_by_the_begin_of_its_name(asked: str, name: int) -> None:
    assert named_job(asked, NAMES, "running") == NAMES[name]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("exp2", "ambiguous: exp2-aaaaaa, exp2-bbbbbb"),
        ("e", "ambiguous: exp-7c651b, "),
        ("x", "running jobs: exp-7c651b, "),
    ],
)
def test_a_name_of_none_or_several_is_refused_with_those_that_there_are(asked: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        named_job(asked, NAMES, "running")


# -- on this machine, as a host ------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a job that this machine knows; one that runs is a sleeping process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sleepers = []

    def make(name: str, *, began_s: float, folder: str = "", runs: bool = False, ranks: int = 1) -> None:
        host_agent = (0, "")
        if runs:
            stubborn = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
            sleepers.append(subprocess.Popen(stubborn, stdout=subprocess.PIPE))
            assert sleepers[-1].stdout and sleepers[-1].stdout.readline()
            host_agent = (sleepers[-1].pid, started_at(sleepers[-1].pid))
        jobs.write(
            jobs.Record(
                name,
                name,
                "here",
                folder,
                0,
                (0, ranks),
                host_agent,
                began_s,
                0.0 if runs else began_s + 1,
                0,
            )
        )

    yield make
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.communicate()


@linux
def test_stop_knows_a_job_by_its_run(cli: Cli, job: Callable[..., None]) -> None:
    job("p-7c651b", began_s=1.0, runs=True)
    job("q-aaaaaa", began_s=2.0, runs=True)
    job("old-bbbbbb", began_s=3.0)
    for asked in ("x", "old"):
        code, _, err = cli("fleet", "stop", asked, "--hosts", "localhost")
        assert code == 2 and f"no running job {asked} on these hosts" in err and "q-aaaaaa, p-7c651b" in err
    code, _, err = cli("fleet", "stop", "--hosts", "localhost:cpu")
    assert code == 2 and "yolofleet fleet stop q-aaaaaa --hosts localhost:cpu" in err
    code, _, err = cli("fleet", "stop", "q", "--hosts", "localhost:cpu", "--grace", "0")
    assert code == 4 and "yolofleet fleet stop q-aaaaaa --now --hosts localhost:cpu" in err
    code, out, _ = cli("fleet", "stop", "q-", "--hosts", "localhost", "--now")
    assert code == 0 and "q-aaaaaa has ended on localhost" in out
    listed = cli("fleet", "ps", "--hosts", "localhost")[1]
    assert "p-7c651b" in listed and "q-" not in listed


@linux
def test_logs_are_those_of_the_newest_run_that_has_some(
    cli: Cli, job: Callable[..., None], tmp_path: Path
) -> None:
    logs = tmp_path / "runs" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("one\n\nthree\nhalf")
    (logs / "rank-1.log").write_text("other\n")
    job("exp-aaaaaa", began_s=1.0, folder=str(logs.parent), ranks=3)
    job("run-bbbbbb", began_s=2.0)
    told = ("fleet", "logs", "--hosts", "localhost")
    assert cli(*told) == (0, "rank 0: one\nrank 0: \nrank 0: three\nrank 0: half\nrank 1: other\n", "")
    left_out = "note: earlier lines are left out: --lines N or --lines all shows them\n"
    assert cli(*told, "exp", "--rank", "0", "--lines", "2") == (0, "three\nhalf\n", left_out)
    (logs / "rank-1.log").write_text("".join(f"{n}\n" for n in range(30_000)))  # more than 64 KiB
    assert cli(*told, "--rank", "1")[1].split() == [str(n) for n in range(29_980, 30_000)]
    assert cli(*told, "--rank", "1", "--lines", "29999")[1].split()[0] == "1"
    code, out, err = cli(*told, "--rank", "1", "--lines", "all")
    assert len(out.splitlines()) == 30_000 and not err
    (logs / "rank-1.log").write_text("other\n")
    assert cli(*told, "--lines", "0") == (0, "", "")
    assert cli(*told, "--follow")[1].endswith("rank 1: other\nrank 0: half\n")
    assert "exp-aaaaaa has written nothing yet" in cli(*told, "--rank", "2")[2]
    for more, says in (
        (["run-b"], "was started by `fleet run`"),
        (["--rank", "3"], "no rank 3 there"),
        (["exp9"], "known jobs: run-bbbbbb, exp-aaaaaa"),
    ):
        code, _, err = cli(*told, *more)
        assert code == 2 and says in err


@linux
def test_a_plain_command_has_no_logs_and_one_row_however_many_lines_it_has(
    cli: Cli, job: Callable[..., None]
) -> None:
    command = ("sh", "-c", "echo here\nexit 0")
    assert cli("fleet", "run", "--hosts", "localhost:cpu", "--", *command)[:2] == (0, "here\n")
    head, row = cli("fleet", "ps", "--all", "--hosts", "localhost")[1].splitlines()
    assert head.startswith("job") and "sh -c" in row and "exit 0" in row
    code, _, err = cli("fleet", "logs", "--hosts", "localhost")
    assert code == 2 and "no known run on these hosts" in err
    code, _, err = cli("fleet", "logs", "run", "--hosts", "localhost")
    assert code == 2 and "was started by `fleet run`" in err


@linux
def test_a_fleet_that_needs_long_to_save_is_waited_for(
    cli: Cli, job: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet.yaml").write_text("grace_s: 300\nhosts: [localhost]\n")
    job("exp-aaaaaa", began_s=1.0, runs=True)
    waited: list[tuple[float, float]] = []

    def end_job(self: Remote, request: str, timeout_s: float = 0, **arguments: Any) -> Any:
        if request != "end_job":
            return ask(self, request, **arguments)
        waited.append((arguments["deadline_s"], timeout_s))
        return JobEnd(found=True, left=False)

    ask = Remote.ask
    monkeypatch.setattr(Remote, "ask", end_job)  # a real wait would last for the grace time, five minutes
    assert cli("fleet", "stop", "--fleet", str(tmp_path / "fleet.yaml"))[0] == 0
    assert cli("fleet", "stop", "--hosts", "localhost")[0] == 0
    assert waited == [(310.0, 320.0), (40.0, 50.0)]


@linux
def test_a_command_that_is_not_there_is_named(cli: Cli, job: Callable[..., None], tmp_path: Path) -> None:
    started = ("fleet", "run", "--hosts", "localhost:cpu", "--")
    code, _, err = cli(*started, "nosuchcmd", "-v")
    assert code == 127 and "localhost: there is no command nosuchcmd" in err
    (tmp_path / "file").touch()
    code, _, err = cli(*started, str(tmp_path / "file"))
    assert code == 126 and "file cannot be started: Permission denied" in err


# -- hosts that are not well ---------------------------------------------------------------------------------


class FakeHost(Remote):
    """Has one file, and one job or no answer."""

    def __init__(self, name: str, *, file: bytes = b"", well: bool = True) -> None:
        super().__init__(Host(name, "cpu"))
        self.file, self.well = file, well
        self.piece_bytes, self.given = 7, 0

    def ask(self, request: str, timeout_s: float = 0, **arguments: Any) -> Any:
        if not self.well:
            raise ClusterError(f"{self.name} is lost")
        if request == "list_jobs":
            job = {"job": "exp-aaaaaa", "title": "", "folder": "", "node": 0, "ranks": [0, 1], "runs": True}
            return answer_of(request, [{**job, "began_s": 1.0, "ended_s": 0.0, "code": None}])
        size, offset = len(self.file), arguments["offset"]
        begin = offset if offset >= 0 else max(0, size + offset)
        piece = self.file[begin : begin + self.piece_bytes]  # a host gives a piece at a time
        self.given += len(piece)
        data = base64.b64encode(piece).decode()
        return answer_of(request, {"offset": begin, "data": data, "size": size})


@linux
def test_a_host_that_is_lost_while_its_logs_are_read_is_said(
    cli: Cli, job: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job("exp-aaaaaa", began_s=1.0, folder=str(tmp_path), ranks=2)
    ask = Remote.ask

    def lose(self: Remote, request: str, timeout_s: float = 30, **arguments: Any) -> Any:
        if request == "read_piece":
            self.close()
        return ask(self, request, timeout_s, **arguments)

    monkeypatch.setattr(Remote, "ask", lose)  # the connection must break between two requests of the command
    for more in ([], ["--follow"]):
        code, _, err = cli("fleet", "logs", "--hosts", "localhost", *more)
        assert code == 4 and err.count("ClusterError: localhost is lost") == 1 and "nothing yet" not in err


def test_a_host_that_does_not_answer_hides_no_other() -> None:
    well, ill = FakeHost("a"), FakeHost("b", well=False)
    found, lost = jobs_of([ill, well])
    assert [remote.name for remote, _ in found] == ["a"]
    assert [problem.what for problem in lost.values()] == ["b is lost"]


def test_a_log_is_read_in_whole_lines_and_to_its_end() -> None:
    host = FakeHost("a", file="first\nsecönd\nhal".encode())
    log = Log(host, "log")
    assert list(log.lines(to_end=False)) == [b"first", "secönd".encode()]
    assert list(log.lines(to_end=False)) == []
    host.file += b"f\nlast"
    assert list(log.lines(to_end=True)) == [b"half", b"last"]
    assert list(log.lines(to_end=True)) == []


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("wanted", [0, 1, 2, 9, 10, 11, 100_000])
def test_the_last_lines_of_a_log_are_found_however_long_they_are(
    monkeypatch: pytest.MonkeyPatch, wanted: int, end: str
) -> None:
    for name, size in (("LAST_BYTES", 7), ("PIECE_BYTES", 17)):  # in several pieces of the host's
        monkeypatch.setattr(f"yolofleet.fleet.launch.jobs_on_hosts.{name}", size)
    lines = ["", "b" * 30, "c", "", "d" * 5, "e" * 18, "f", "g" * 17, "", "h"]
    log = Log(FakeHost("a", file=("\n".join(lines) + end).encode()), "log")
    assert log.skip_to_last(wanted) == (wanted < 10)
    found = [text.decode() for text in log.lines(to_end=True)]
    assert found == (lines[-wanted:] if wanted else [])


def test_of_a_long_log_as_much_is_read_as_is_shown_and_never_all_at_once() -> None:
    host = FakeHost("a", file=b"".join(b"%099d\n" % n for n in range(50_000)))
    host.piece_bytes = 1 << 20
    log = Log(host, "log")
    assert log.skip_to_last(20)
    assert [int(text) for text in log.lines(to_end=True)] == [*range(49_980, 50_000)]
    assert host.given < 1 << 17
    log = Log(host, "log")
    assert log.skip_to_last(15_000) and len(list(log.lines(to_end=True))) == 15_000
    endless = FakeHost("a", file=b"x" * (5 << 20))
    endless.piece_bytes = 1 << 20
    assert max(map(len, Log(endless, "log").lines(to_end=True))) <= 2 << 20


def test_records_of_long_runs_look_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record, link = jobs.folder() / "j1.json", jobs.folder() / "link"
    record.touch()
    (tmp_path / "elsewhere").touch()
    link.symlink_to(tmp_path / "elsewhere")
    for path in (record, tmp_path / "elsewhere"):
        os.utime(path, (0, 0))
    jobs.keep()
    assert record.stat().st_mtime > 0 and (tmp_path / "elsewhere").stat().st_mtime == 0
