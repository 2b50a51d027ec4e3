"""Who may read a board, who may ask runs, and what its streams send."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from board_runs import Served, grow, publish, served
from commands import wait_until
from report_runs import made_run

from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.http_server import names_of

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yolofleet.runs.board.server.PERIOD_S", 0.2)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = made_run(tmp_path / "runs" / "exp <b>", None, finished=False)
    publish(made)
    return made


@pytest.fixture
def board(folder: RunFolder) -> Iterator[Served]:
    with served([folder.path.parent], ["save"]) as made:
        yield made


def paths(board: Served, folder: RunFolder) -> list[str]:
    run = f"/runs/{board.id_of(folder)}"
    return ["/", run, f"{run}/progress", f"{run}/figures", f"{run}/updates", "/updates", "/nowhere"]


def carried(body: bytes) -> dict[str, Any]:
    """The values that a page carries. A browser ends the element at the first ``</script``, in any case of letters."""
    text = body.decode()
    data = re.search(
        r'<script id="data" type="application/json">(.*?)</script', text, re.DOTALL | re.IGNORECASE
    )
    assert data is not None and re.findall("<b>|<img|<!--", text) == []
    found: dict[str, Any] = json.loads(data[1])
    return found


@pytest.mark.parametrize(
    "name", ["exp <b>", "</ScRipt><img src=x onerror=alert(1)>", "<!--<script>", "a\"&'"]
)
def test_a_page_carries_its_values_when_it_arrives(tmp_path: Path, name: str) -> None:
    folder = made_run(tmp_path / "runs" / name.replace("/", "\N{FULLWIDTH SOLIDUS}"), None, finished=False)
    publish(folder)
    folder.log(0).write_text(f"{name}\n")
    with served([tmp_path / "runs"]) as board:
        status, headers, body = board.ask("/")
        now = carried(body)["now"]
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        stream = Stream(board, "/updates")
        assert now == stream.next() and [row["state"] for row in now["rows"]] == ["running"]
        stream.close()
        run = f"/runs/{board.id_of(folder)}"
        now = carried(board.ask(run)[2])["now"]
        stream = Stream(board, f"{run}/updates")
        assert now == stream.next() and now["row"]["line"] and now["progress"]
        stream.close()


def test_nobody_reads_without_the_token(board: Served, folder: RunFolder) -> None:
    for path in paths(board, folder):
        for token in ("", "wrong", board.board.token[:-1], "ü" * 43):
            status, _, body = board.ask(path, token=token.encode().decode("latin-1"))
            assert status == 401 and b"yolofleet board" in body and b"exp" not in body, path
    assert board.ask(f"/?token={board.board.token[:-1]}", token="")[0] == 401
    assert board.ask(f"/updates?token={board.board.token}", token="")[0] == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(board: Served) -> None:
    status, headers, _ = board.ask(f"/?token={board.board.token}", token="")
    assert status == 303 and headers["location"] == "/"
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie
    status, headers, body = board.ask("/")
    assert status == 200 and board.board.token.encode() not in body
    assert board.board.token not in repr(board.board)


def test_the_page_of_a_run_can_be_opened_by_its_address(board: Served, folder: RunFolder) -> None:
    page = f"/runs/{board.id_of(folder)}"
    status, _, body = board.ask(page, token="")  # a bookmark, in a browser without the cookie
    assert status == 401 and b"add its ?token=" in body
    status, headers, _ = board.ask(f"{page}?token={board.board.token}", token="")
    assert status == 303 and headers["location"] == page and "set-cookie" in headers
    for _ in range(2):  # the page, and a reload
        assert board.ask(page)[0] == 200
    for other in (f"{page}/progress", f"{page}/updates", "//example.org", "/runs/../x"):
        assert board.ask(f"{other}?token={board.board.token}", token="")[0] == 401, other


def test_every_answer_has_the_headers(board: Served, folder: RunFolder) -> None:
    for path in [path for path in paths(board, folder) if "updates" not in path]:
        for token in (None, ""):
            headers = board.ask(path, token=token)[1]
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer" and headers["x-frame-options"] == "DENY"
            assert "server" not in headers


def test_other_names_and_other_sites_are_refused(board: Served) -> None:
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1",
        "localhost.",
        "[::1",
    ):
        assert board.ask("/", Host=host)[0] in (400, 421), host
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1:9"):  # a tunnel of ssh may have another port
        assert board.ask("/", Host=host)[0] == 200, host
    for origin in ("http://evil.example", "null", f"https://{board.host}", "http://127.0.0.1"):
        assert board.ask("/", Origin=origin)[0] == 403, origin
    assert board.ask("/", Origin=f"http://{board.host}")[0] == 200


def test_a_request_to_a_run_needs_permission_origin_and_token(board: Served, folder: RunFolder) -> None:
    run = f"/runs/{board.id_of(folder)}"
    assert board.ask(f"{run}/stop", "POST")[0] == 403, "--allow has only save"
    assert board.ask(f"{run}/save", "POST", token="")[0] == 401
    assert board.ask(f"{run}/save", "POST", Origin="http://evil.example")[0] == 403
    connection = http.client.HTTPConnection(board.host)
    connection.request("POST", f"{run}/save", headers={"Cookie": f"{board.board.cookie}={board.board.token}"})
    assert connection.getresponse().status == 403, "a browser always sends Origin with POST"
    connection.close()
    assert board.ask(f"{run}/save")[0] == 404, "GET changes nothing"
    assert not folder.request("save").exists()
    assert board.ask(f"{run}/save", "POST")[0] == 204 and folder.request("save").is_file()
    publish(folder, "ended")
    status, _, body = board.ask(f"{run}/save", "POST")
    assert status == 409 and b"ended" in body
    assert board.ask("/runs/nowhere/save", "POST")[0] == 404
    assert board.ask(f"{run}/../../save", "POST")[0] == 404


def test_only_known_parts_are_served(board: Served, folder: RunFolder) -> None:
    run = f"/runs/{board.id_of(folder)}"
    for path in (
        f"{run}/config.yaml",
        f"{run}/..%2f..%2fconfig.yaml",
        f"{run}/progress/..",
        "/../../etc/passwd",
        "/runs/%2e%2e/progress",
        f"/runs/{quote(folder.path.name)}/progress",
        "//etc/passwd",
    ):
        assert board.ask(path)[0] == 404, path
    assert board.ask("/", "PUT", Origin=f"http://{board.host}")[0] == 405


def test_names_reach_the_page_as_data(board: Served, folder: RunFolder) -> None:
    page = board.ask(f"/runs/{board.id_of(folder)}")[2].decode()
    assert "exp <b>" not in page and "exp &lt;b&gt;" in page and "exp \\u003cb>" in page
    values = json.loads(board.ask(f"/runs/{board.id_of(folder)}/progress")[2])
    assert values["curves"]["epoch"] == [1, 2, 3, 4, 5, 6] and values["settings"]["settings"]


class Stream:
    """A stream of server-sent events."""

    def __init__(self, board: Served, path: str) -> None:
        self.connection = http.client.HTTPConnection(board.host, timeout=900)
        self.connection.request("GET", path, headers={"Cookie": f"{board.board.cookie}={board.board.token}"})
        self.answer = self.connection.getresponse()
        assert self.answer.getheader("content-type", "").startswith("text/event-stream")

    def next(self) -> dict:
        while True:
            line = self.answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_a_stream_sends_values_when_they_have_changed(board: Served, folder: RunFolder) -> None:
    stream, runs = Stream(board, f"/runs/{board.id_of(folder)}/updates"), Stream(board, "/updates")
    first, (row,) = stream.next(), runs.next()["rows"]
    assert first["row"] == row and row["epoch"] == 130
    publish(folder, epoch=131)
    second = stream.next()
    assert second["row"]["epoch"] == 131 and second["progress"] == first["progress"]
    grow(folder, 7)
    third = stream.next()
    assert third["progress"] != first["progress"] and third["figures"] == first["figures"]
    made_run(folder.path.parent / "new", None)
    wait_until(lambda: len(runs.next()["rows"]) == 2)
    folder.path.rename(folder.path.parent.parent / "away")
    wait_until(lambda: not stream.next()["row"])
    stream.close()
    runs.close()


def test_a_silent_stream_has_heartbeats_and_ends_with_the_board(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolofleet.runs.board.server.HEARTBEAT_S", 0.0)
    with served([folder.path.parent]) as board:
        stream = Stream(board, "/updates")
        stream.next()
        lines = [stream.answer.readline() for _ in range(6)]
        assert lines.count(b": heartbeat\n") >= 2 and not any(line.startswith(b"data") for line in lines)
    assert b"data" not in stream.answer.read()
    stream.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n"]
)
def test_connections_without_a_request_lock_nobody_out(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("yolofleet.support.http_server.HEADER_S", 1.0)
    with served([folder.path.parent]) as board, ExitStack() as stack:
        stream = Stream(board, "/updates")  # longer than HEADER_S
        host, port = board.host.split(":")
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(110)]
        for connection in silent:
            connection.sendall(sent)
        wait_until(lambda: board.ask("/")[0] == 200)
        for connection in silent:
            connection.settimeout(900)
            while connection.recv(4096):
                pass
        publish(folder, epoch=131)
        wait_until(lambda: stream.next()["rows"][0]["epoch"] == 131)
        stream.close()


STALL = """
import selectors, socket, sys
address = sys.argv[1].split(":")
chosen = selectors.DefaultSelector()

def connect():
    one = socket.create_connection(address)
    chosen.register(one, selectors.EVENT_READ)

for _ in range(450):
    connect()
print("connected", flush=True)
while True:
    for key, _ in chosen.select():
        try:
            is_closed = not key.fileobj.recv(4096)
        except OSError:
            is_closed = True
        if is_closed:
            chosen.unregister(key.fileobj)
            key.fileobj.close()
            connect()
"""


def test_silent_connections_that_come_again_do_not_lock_the_owner_out(board: Served) -> None:
    with subprocess.Popen([sys.executable, "-c", STALL, board.host], stdout=subprocess.PIPE) as stall:
        try:
            assert stall.stdout is not None and stall.stdout.readline() == b"connected\n"
            for _ in range(15):
                assert board.ask("/")[0] == 200
                stream = Stream(board, "/updates")
                assert stream.next()["rows"]
                stream.close()
                time.sleep(0.2)  # some of the connections reach HEADER_S
            assert stall.poll() is None
        finally:
            stall.kill()


def test_connections_with_the_token_have_a_limit_of_their_own(
    board: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolofleet.runs.board.server.MOST_CONNECTIONS", 2)
    streams = [Stream(board, "/updates") for _ in range(2)]
    status, _, why = board.ask("/")
    assert status == 503 and b"close some pages" in why
    assert board.ask("/", token="")[0] == 401
    streams[0].close()
    wait_until(lambda: board.ask("/")[0] == 200)
    streams[1].close()


def test_names_of_an_address() -> None:
    assert names_of("127.0.0.1") == (["localhost", "127.0.0.1", "127.0.0.1"], False)
    names, any_address = names_of("0.0.0.0")
    assert any_address and "localhost" in names
    assert "10.1.2.3" in names_of("10.1.2.3")[0] and not names_of("10.1.2.3")[1]
