"""What loggers cost a training: runs with and without them in turns; the machine may be shared.

    python benchmarks/loggers.py --log tensorboard,wandb,mlflow,clearml,comet --rounds 5
    python benchmarks/loggers.py --log mlflow --answer-s 5 --rounds 3

An epoch has four steps of a small network, so a row comes far more often than in a real training. With ``--answer-s``,
``mlflow`` sends its rows to a server on this machine that waits so long before each answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet import Callback
from yolofleet.extend.callbacks import StepEnd
from yolofleet.report.loggers.running import Loggers

OUT = "YOLOFLEET_BENCHMARK_OUT"
FIRST = 8  # measured step; the ones before warm up
RUN = {"name": "exp", "project": "train", "settings": {}, "resumed": False}
SMALL = (
    "--data shapes:32 --model yolov5n --img 160 --batch 8 --nominal-batch 8 --micro-batch 4 --val-period 0 --no-plots "
    "--save-period 0 --save-minutes 0 --workers 0 --threads 1"
)
FIGURES = {
    "thread_ms": "CPU of the training thread of rank 0, ms a step",
    "step_ms": "wall, ms a step",
    "end_s": "from the last row to the end of the command, s",
    "run_s": "the whole command, s",
}


class StepTime(Callback):
    """Writes the milliseconds of a step, and when the last row was sent, with the reports of the epochs."""

    def step(self, step: StepEnd) -> None:
        if step.step == FIRST:
            self.began_s = time.thread_time(), time.perf_counter()
        self.last = step.step

    def epoch(self, epoch: int, row: Mapping[str, float]) -> None:
        if self.last > FIRST:  # a row has been sent before each call
            ended_s = time.thread_time(), time.perf_counter()
            thread_ms, step_ms = (
                1e3 * (end - begin) / (self.last - FIRST)
                for begin, end in zip(self.began_s, ended_s, strict=True)
            )
            values = {"thread_ms": thread_ms, "step_ms": step_ms, "last_row_s": time.time()}
            Path(os.environ[OUT]).write_text(json.dumps(values))


class Slow(BaseHTTPRequestHandler):
    """Waits, then sends the answer of the server behind it."""

    behind, answer_s = "", 0.0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.answer_s)
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        request = urllib.request.Request(self.behind + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request) as response:
                status, answer = 200, response.read()
        except urllib.error.HTTPError as problem:
            status, answer = problem.code, problem.read()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with suppress(OSError):  # the client's timeout may be shorter than this server's wait
            self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def slow_server(answer_s: float, behind: str) -> Iterator[str]:
    handler = type("Handler", (Slow,), {"answer_s": answer_s, "behind": behind})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as taken:
        address = f"http://127.0.0.1:{taken.server_port}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
    command += [
        "--port",
        address.rpartition(":")[2],
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
    ]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    server = subprocess.Popen(command, env=env, start_new_session=True, **quiet)  # type: ignore[call-overload]
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "the MLflow server has ended"
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def trained(folder: Path, device: str, epochs: int, logs: list[str]) -> dict[str, float]:
    """Train once and return ``FIGURES``."""
    out = folder / "figures.json"
    callback = ["--callbacks", f"{Path(__file__).resolve()}:StepTime", "--project", str(folder)]
    began_s = time.time()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "yolofleet", "train", *SMALL.split(), "--epochs", str(epochs)),
            *("--device", device, *callback, *logs),
        ],
        env={**os.environ, OUT: str(out)},
        capture_output=True,
        text=True,
    )
    ended_s = time.time()
    assert done.returncode == 0, done.stdout + done.stderr
    lost = [line for line in (done.stdout + done.stderr).splitlines() if "--log " in line and "rows" in line]
    print(*lost, sep="\n", end="\n" if lost else "")
    found: dict[str, float] = json.loads(out.read_text())
    return found | {"end_s": ended_s - found["last_row_s"], "run_s": ended_s - began_s}


def seconds_per_row(folder: Path, rows: int = 500) -> float:
    """Return CPU seconds of the training thread for one row of twenty values, to one logger."""
    loggers = Loggers(["tensorboard"], {}, folder, RUN, print)
    row = {f"train/column{number}": number / 7 for number in range(20)}
    began_s = time.thread_time()
    for epoch in range(rows):
        loggers.row({"epoch": epoch, **row})
    elapsed_s = time.thread_time() - began_s
    loggers.close(finished=True)
    return elapsed_s / rows


@contextmanager
def servers_for(names: list[str], answer_s: float, folder: Path) -> Iterator[list[str]]:
    """Yield the options that name slow servers; none without ``answer_s``."""
    if not answer_s or "mlflow" not in names:
        yield []
        return
    with mlflow_server(folder) as real, slow_server(answer_s, real) as mlflow:
        yield ["--log-server", f"mlflow={mlflow}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", default="tensorboard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="cpu:2 leaves the loggers no free core of two")
    parser.add_argument("--answer-s", type=float, default=0.0)
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with servers_for(given.log.split(","), given.answer_s, folder) as servers:
            variants = {"without": [], "with": ["--log", given.log, *servers]}
            found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            for number in range(given.rounds):
                for name in list(variants)[:: -1 if number % 2 else 1]:
                    found[name].append(trained(folder, given.device, given.epochs, variants[name]))
                    figures = ", ".join(f"{found[name][-1][figure]:.2f} {figure}" for figure in FIGURES)
                    print(f"{name:8s} {figures}", flush=True)
        print(f"medians of {given.rounds} turns, with {given.log}")
        for figure, meaning in FIGURES.items():
            bare, logged = (statistics.median(run[figure] for run in runs) for runs in found.values())
            ratio = statistics.median(
                on[figure] / off[figure] for off, on in zip(*found.values(), strict=True)
            )
            print(f"{meaning}: {bare:.2f} without, {logged:.2f} with; median of the ratios {ratio:.3f}")
        print(f"one row to one logger: {seconds_per_row(folder) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
