"""CPU time of the training thread with and without loggers, in turns; the machine may be shared.

    python benchmarks/loggers.py --log tensorboard,prometheus,wandb,mlflow,clearml,comet --rounds 5

An epoch has four steps of a small network, so a row comes far more often than in a real training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from yolofleet import Callback
from yolofleet.report.loggers.running import Loggers
from yolofleet.train.callbacks import StepEnd

OUT = "YOLOFLEET_BENCHMARK_OUT"
FIRST = 8  # measured step; the ones before warm up
RUN = {"name": "exp", "project": "train", "settings": {}, "resumed": False}


class ThreadTime(Callback):
    """Writes the CPU seconds of the training thread per step, with the reports of the epochs."""

    def step(self, step: StepEnd) -> None:
        if step.step == FIRST:
            self.began_s = time.thread_time()
        self.last = step.step

    def epoch(self, epoch: int, row: Mapping[str, float]) -> None:
        if self.last > FIRST:  # a row has been sent before each call
            Path(os.environ[OUT]).write_text(str((time.thread_time() - self.began_s) / (self.last - FIRST)))


def seconds_per_step(folder: Path, log: str, epochs: int) -> float:
    """Train once and return CPU seconds of the training thread."""
    arguments = [
        "--data",
        "shapes:32",
        "--model",
        "yolov5n",
        "--img",
        "160",
        "--batch",
        "8",
        "--nominal-batch",
        "8",
    ]
    arguments += [
        "--micro-batch",
        "8",
        "--epochs",
        str(epochs),
        "--val-period",
        "0",
        "--no-plots",
        "--save-period",
        "0",
    ]
    arguments += ["--save-minutes", "0", "--workers", "0", "--threads", "1", "--device", "cpu", "--log", log]
    arguments += ["--project", str(folder), "--callbacks", f"{Path(__file__).resolve()}:ThreadTime"]
    out = folder / "seconds.txt"
    done = subprocess.run(
        [sys.executable, "-m", "yolofleet", "train", *arguments],
        env={**os.environ, OUT: str(out)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return float(out.read_text())


def seconds_per_row(folder: Path, rows: int = 500) -> float:
    """Return CPU seconds of the training thread for one row of twenty values, to one logger."""
    loggers = Loggers(["prometheus"], {}, folder, RUN, print)
    row = {f"train/column{number}": number / 7 for number in range(20)}
    began_s = time.thread_time()
    for epoch in range(rows):
        loggers.row({"epoch": epoch, **row})
    elapsed_s = time.thread_time() - began_s
    loggers.close(finished=True)
    return elapsed_s / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", default="tensorboard,prometheus")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    given = parser.parse_args()
    times: dict[str, list[float]] = {"": [], given.log: []}
    with TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for log, found in times.items():
                found.append(seconds_per_step(Path(folder), log, given.epochs))
                print(
                    f"{log or 'without':60s} {found[-1] * 1e3:.2f} ms CPU of the training thread per step",
                    flush=True,
                )
        bare, logged = (statistics.median(found) for found in times.values())
        print(f"median: {bare * 1e3:.2f} without, {logged * 1e3:.2f} ms with: {logged / bare - 1:+.2%}")
        print(f"one row to one logger: {seconds_per_row(Path(folder)) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
