"""The seconds of each kind of request to a board, over 20 made-up runs of 300 epochs, of which one goes on.

Each run is asked for its page and its values before anything of it is kept, and again. The first run gets another epoch in
between, as during a training.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from board_runs import grow, many_runs, publish, served  # (tests/)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["YOLOFLEET_CACHE"] = f"{temporary}/cache"
        runs = many_runs(Path(temporary), 20, 300)
        seconds: dict[str, list[float]] = {}
        with served([Path(temporary, "runs")]) as board:

            def ask(kind: str, path: str) -> None:
                began_s = time.perf_counter()
                status, _, body = board.ask(path)
                seconds.setdefault(kind, []).append(time.perf_counter() - began_s)
                assert status == 200 and body, path

            for turn in ("first", "again"):
                for run in runs:
                    address = f"/runs/{board.id_of(run)}"
                    ask("list", "/")
                    ask("page of a run", address)
                    for part in ("progress", "figures"):
                        ask(f"{part}, {turn}", f"{address}/{part}")
            address = f"/runs/{board.id_of(runs[0])}"
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
