"""The seconds of each kind of request to a board, over 20 made-up runs of 300 epochs, of which one goes on.

Each run is asked for its page and its values before anything of it is kept, and again. The first run gets another epoch in
between, as during a training.
"""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from board_runs import grow, many_runs, publish  # (tests/)

from yolofleet.report.board.runs import Run


@contextmanager
def served(folder: Path) -> Iterator[Callable[[str], tuple[int, bytes]]]:
    """Start `yolofleet board` for the block, and give a function that asks for a path and returns status and body."""
    command = [sys.executable, "-m", "yolofleet", "board", "--port", "0", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())

        def ask(path: str, cookie: str = "") -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(address.netloc)
            connection.request("GET", path, headers={"Cookie": cookie})
            answer = connection.getresponse()
            return answer.status, answer.getheader("Set-Cookie", "").encode() or answer.read()

        try:
            cookie = ask(f"/?{address.query}")[1].decode().partition(";")[0]
            yield lambda path: ask(path, cookie)
        finally:
            process.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["YOLOFLEET_CACHE"] = f"{temporary}/cache"
        runs = many_runs(Path(temporary), 20, 300)
        seconds: dict[str, list[float]] = {}
        with served(Path(temporary, "runs")) as get:

            def ask(kind: str, path: str) -> None:
                began_s = time.perf_counter()
                status, body = get(path)
                seconds.setdefault(kind, []).append(time.perf_counter() - began_s)
                assert status == 200 and body, path

            for turn in ("first", "again"):
                for run in runs:
                    address = f"/runs/{Run(run.path.resolve(), run.path.name).id}"
                    ask("list", "/")
                    ask("page of a run", address)
                    for part in ("progress", "figures"):
                        ask(f"{part}, {turn}", f"{address}/{part}")
            address = f"/runs/{Run(runs[0].path.resolve(), runs[0].path.name).id}"
            for epoch in range(301, 321):
                grow(runs[0], epoch)
                publish(runs[0], epoch=epoch)
                time.sleep(1.1)  # until the board looks again
                ask("page of a run", address)
                ask("progress, after an epoch", f"{address}/progress")
        for kind, found in seconds.items():
            print(
                f"{kind}: median {statistics.median(found) * 1e3:.1f} ms, worst {max(found) * 1e3:.1f} ms of {len(found)}"
            )


if __name__ == "__main__":
    main()
