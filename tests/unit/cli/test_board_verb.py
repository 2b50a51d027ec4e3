"""`yolofleet board`: its address, its end, and what it refuses."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from board_runs import publish
from commands import environment
from report_runs import made_run

from yolofleet.cli import main
from yolofleet.runs.board import server
from yolofleet.support.errors import install_hint
from yolofleet.support.listener import open_listener

START_S = 900


class NoServer:
    """Ends at once, as by Ctrl-C."""

    def run(self, sockets: object) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "server_of", lambda board: NoServer())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    publish(made_run(tmp_path / "runs" / "train" / "exp", None, finished=False))
    return tmp_path / "runs"


def test_the_command_prints_one_address_and_ends_at_ctrl_c(runs: Path) -> None:
    argv = [sys.executable, "-m", "yolofleet", "board", "--port", "0"]
    board = subprocess.Popen(
        argv,
        cwd=runs.parent,
        env=environment(runs.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert board.stdout is not None
        found = re.fullmatch(r"http://(127\.0\.0\.1:\d+)(/\?token=([\w-]{43}))\n", board.stdout.readline())
        assert found
        if sys.platform == "linux":
            own = Path(f"/proc/{board.pid}")
            assert found[3] not in (own / "cmdline").read_text() + (own / "environ").read_text()
        connection = http.client.HTTPConnection(found[1], timeout=START_S)
        connection.request("GET", found[2])
        assert connection.getresponse().status == 303
        connection.close()
    finally:
        board.send_signal(signal.SIGINT)
        out, err = board.communicate(timeout=START_S)
    assert board.returncode == 0 and out == ""
    assert "1 run below the folder runs; " in err and "the board has ended" in err and found[3] not in err
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert not [path for path in files if found[3].encode() in path.read_bytes()]


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("places", "page"), [(["train/exp"], "runs/"), (["train"], ""), (["train/exp"] * 2, "")]
)
def test_the_address_of_one_run_opens_its_page(
    runs: Path,
    places: list[str],
    page: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    assert main(["board", *places, "--port", "0"]) == 0
    out, err = capsys.readouterr()
    pattern = r"http://127\.0\.0\.1:\d+/" + page + ("[0-9a-f]{16}" if page else "") + r"\?token=[\w-]{43}\n"
    assert re.fullmatch(pattern, out), out
    assert ("the run train/exp; Ctrl-C" if page else "1 run below the folder") in err


@pytest.mark.usefixtures("no_server")
def test_a_board_that_listens_on_other_addresses_warns(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", "--host", "0.0.0.0", "--port", "0", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert "warning: the board listens on 0.0.0.0, without encryption" in err and "ssh -t -L" in err
    assert out.startswith("http://127.0.0.1:")


@pytest.mark.usefixtures("no_server")
def test_a_busy_default_port_moves_on_to_a_free_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_listener("127.0.0.1") as taken:
        busy = taken.getsockname()[1]
        monkeypatch.setattr("yolofleet.cli.board.PORT", busy)
        assert main(["board", str(runs)]) == 0
        out, err = capsys.readouterr()
        used = out.partition("/?")[0].rpartition(":")[2]
        assert used != str(busy)
        assert f"note: port {busy} is in use, so the board listens on port {used}" in err
        monkeypatch.setattr("yolofleet.cli.board.MORE_PORTS", 1)  # none of them is free
        assert main(["board", str(runs)]) == 0
        assert f":{busy}/" not in capsys.readouterr().out
    assert main(["board", str(runs), "--port", "0"]) == 0
    assert "in use" not in capsys.readouterr().err


def test_what_cannot_be_shown_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    with open_listener("127.0.0.1") as taken:
        port = str(taken.getsockname()[1])
        assert main(["board", str(runs), "--port", port]) == 2
        assert "leave out --port, which takes a free port" in capsys.readouterr().err
    for words, says in (
        (["board"], "runs is not a folder"),
        (["board", "nowhere"], "nowhere is not a folder"),
        (["board", ".", "--allow", "stop,kill"], "--allow kill is not a request to a run"),
        (["board", ".", "--host", "example.org"], "--host example.org is not an IPv4 address"),
        (["board", ".", "--host", "192.0.2.1"], "the board cannot listen on 192.0.2.1:8642"),
        (["board", ".", "--port", "70000"], "70000"),
    ):
        assert main(words) == 2, words
        assert says in capsys.readouterr().err, words


def test_a_missing_package_names_the_command(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("yolofleet.cli.board.find_spec", lambda name: None)
    assert main(["board", str(runs)]) == 2
    assert install_hint("board") in capsys.readouterr().err


def test_the_command_line_does_not_import_the_server(runs: Path) -> None:
    script = "import sys; from yolofleet.cli.app import APP; APP.get_command(None, 'board'); print('starlette' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout == "False\n", done.stderr
