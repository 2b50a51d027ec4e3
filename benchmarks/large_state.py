"""How long steps stand still for the copies of a large state: yolov5x (about 1 GB) on two machines with a disk each.

The machines are network namespaces on this one and share its cores (Linux, root, openssh-server). The run has the
default settings for saving. The share is that of the time between the second epoch and the request to stop.

    python benchmarks/large_state.py [--minutes 8]
"""

from __future__ import annotations

import argparse
import csv
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "cluster"), str(TESTS)]

from commands import SMALL, small_shapes  # noqa: E402
from desk import Command, session_of  # noqa: E402
from machines import machines, missing  # noqa: E402

HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1")
LEFT_OUT = 2  # epochs, of the warm-up


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--model", default="yolov5x")
    asked = parser.parse_args()
    if missing():
        print(missing())
        return 1
    with TemporaryDirectory(prefix="yolofleet-state-") as made:
        folder = Path(made)
        for child in ("own", "tmp"):
            (folder / child).mkdir()
        data = small_shapes(folder)
        given = [*SMALL, "--model", asked.model, "--threads", "1", "--val-period", "0", "--epochs", "9999"]
        with machines(2, private=[folder / "own"], environment=session_of(folder)) as lab:
            command = Command(lab, folder / "own", "train", "--data", data, *given, *HOSTS)
            command.wait_for(rf"^epoch {LEFT_OUT}/")
            time.sleep(60 * asked.minutes)
            command.process.send_signal(signal.SIGINT)
            command.process.wait(300)
            table = lab.desk.run("cat", "runs/train/exp/results.csv").stdout
            rows = list(csv.DictReader(table.splitlines()))
            ends = [int(row["images"]) for row in rows]
            images = [after - before for before, after in pairwise(ends)][LEFT_OUT - 1 :]
            rows = rows[LEFT_OUT:]
            whole = sum(float(row["seconds"]) for row in rows)
            trained = [n / float(row["images_per_s"]) for n, row in zip(images, rows, strict=True)]
            pauses = [float(row["seconds"]) - took for took, row in zip(trained, rows, strict=True)]
            steps = sum(trained)
            print(
                f"{whole:.0f} s, of which steps stood still for {whole - steps:.1f} s = {1 - steps / whole:.2%}; "
                f"{sum(pause > 0.1 for pause in pauses)} pauses of more than 0.1 s, the longest {max(pauses):.1f} s"
            )
            for machine in lab.hosts:
                found = (
                    "sha256sum runs/train/exp/checkpoints/*.safetensors; du -sh runs/train/exp/checkpoints"
                )
                told = subprocess.run(
                    machine.argv("sh", "-c", found),
                    cwd=folder / "own",
                    capture_output=True,
                    text=True,
                    check=False,
                )
                print(f"{machine.name}: {told.stdout}{told.stderr}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
