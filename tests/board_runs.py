"""Runs that seem to go on, and a board that shows them: for the tests of the board, and for its picture in the docs.

``python tests/board_runs.py docs/board.png`` draws the picture of a real training.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from browser import browser

pytest.importorskip("uvicorn", reason="the extra yolofleet[board] is not installed")

from yolofleet.runs.board.runs import Runs
from yolofleet.runs.board.server import Board, server_of
from yolofleet.runs.rank_status import RankStatus, write_status
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import write_text
from yolofleet.support.listener import open_listener

END_S = 900
SHOWN_EPOCHS = 18  # in the picture


def publish(folder: RunFolder, state: str = "running", **values: object) -> None:
    """Write the status of a run, as rank 0 does."""
    known = {
        "epoch": 130,
        "epochs": 300,
        "step": 1300,
        "share": 0.43,
        "rate_img_s": 412.3,
        "ranks": 2,
        "host": "node-a",
    }
    known |= {"ends_at_s": time.time() + 5400, "phase": "compute", "why": "", "time": time.time()}
    write_text(folder.status, json.dumps({"state": state, **known, **values}))


def report_ranks(folder: RunFolder, count: int = 4, **values: object) -> None:
    """Write what the ranks do now, as rank 0 does: rank 1 is the slowest.

    Args:
        values: of rank 0.
    """
    ranks = [
        RankStatus(
            rank,
            f"node-{'ab'[rank // 2 % 2]}",
            f"cuda:{rank % 2}",
            "compute",
            1300,
            0.2,
            110.0,
            0.02 if rank == 1 else 0.3,
            5.2,
            61.0,
        )
        for rank in range(count)
    ]
    write_status(folder.ranks, [replace(ranks[0], **values), *ranks[1:]])  # type: ignore[arg-type]


def grow(folder: RunFolder, epoch: int) -> None:
    """Let a run finish one more epoch."""
    rows = folder.results_csv.read_text().splitlines()
    cells = rows[-1].split(",")
    rows.append(",".join([str(epoch), *cells[1:]]))
    write_text(folder.results_csv, "\n".join(rows) + "\n")
    last = [json.loads(line) for line in folder.events(0).read_text().splitlines() if '"phases"' in line][-1]
    last |= {"epoch": epoch, "time": last["time"] + 10}
    with folder.events(0).open("a") as file:
        file.write(json.dumps(last) + "\n")


@dataclass(frozen=True)
class Served:
    """A board that answers.

    Attributes:
        host: address and port.
    """

    board: Board
    host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}/?token={self.board.token}"

    def ask(
        self, path: str, method: str = "GET", *, token: str | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request with the cookie, and return status, headers and body.

        Args:
            token: instead of the right one; "" = no cookie.
            headers: by name, with _ for -.
        """
        connection = http.client.HTTPConnection(self.host, timeout=END_S)
        token = self.board.token if token is None else token
        sent = {"Cookie": f"{self.board.cookie}={token}"} if token else {}
        if method == "POST":
            sent["Origin"] = f"http://{self.host}"
        sent |= {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            connection.request(method, path, headers=sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def id_of(self, folder: RunFolder) -> str:
        path = str(folder.path.resolve())
        return next(row["id"] for row in self.board.runs.rows() if row["folder"] == path)


@contextmanager
def served(
    places: Sequence[Path], allow: Sequence[str] = (), before: Served | None = None
) -> Iterator[Served]:
    """Serve a board from a thread for the block.

    Args:
        before: an earlier board, whose address and token this one has.
    """
    board = Board(Runs(places), allow)
    port = 0
    if before is not None:
        board.token, board.cookie = before.board.token, before.board.cookie
        port = int(before.host.rpartition(":")[2])
    board.runs.look()
    listener = open_listener("127.0.0.1", port)
    server = server_of(board)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline_s = time.monotonic() + END_S
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield Served(board, f"127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(END_S)
        listener.close()
    assert not thread.is_alive()


def trained(folder: Path, picture: Path, size: Sequence[str]) -> None:
    """Draw the page of a training on the built-in shapes, on two processes, while it goes on."""

    def yolofleet(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "yolofleet", *words]
        return subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)

    assert yolofleet("data", "make", "shapes", "--out", "shapes", "--images", "640").wait() == 0
    options = [
        *("--model", "yolov5n", "--img", "96", "--batch", "16", "--nominal-batch", "16", "--epochs", "30")
    ]
    options += ["--device", "cpu:2"]
    run = RunFolder(folder / "runs" / "train" / "shapes")
    training = yolofleet("train", "--data", "shapes", *options, "--name", run.name)
    try:
        while not (
            run.results_csv.is_file() and len(run.results_csv.read_text().splitlines()) > SHOWN_EPOCHS
        ):
            assert training.poll() is None
            time.sleep(1)
        with served([run.path], ["stop", "save"]) as board, browser(folder) as started:
            started.show_as(*map(int, size[:2] or ("1180", "1220")), dark="dark" in size)
            started.open(board.url)
            started.open(f"http://{board.host}/runs/{board.id_of(run)}")
            time.sleep(5)
            started.picture(picture)
    finally:
        training.send_signal(signal.SIGINT)
        training.wait()


if __name__ == "__main__":  # python tests/board_runs.py PICTURE [WIDTH [HEIGHT [dark]]]
    picture, *size = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="yolofleet-") as own:
        os.environ["YOLOFLEET_CACHE"] = f"{own}/cache"
        trained(Path(own), Path(picture), size)
