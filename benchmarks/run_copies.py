"""What copies of a run cost its training: seconds of the same run with and without ``--checkpoint-to``, in turns.

The store is a server of S3 (moto) on this machine, behind a proxy that waits before each answer. So the copying process and the
server take time of the same cores as the training; a machine whose store is elsewhere pays less.

    python benchmarks/run_copies.py [--turns 5] [--epochs 30]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "tests/store"):
    sys.path.insert(0, str(ROOT / folder))

from server import BUCKET, proxy, s3_server  # noqa: E402

TRAIN = [
    "--model",
    "yolov5n",
    "--img",
    "320",
    "--batch",
    "16",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--workers",
    "0",
    "--no-plots",
    "--val-period",
    "0",
]


def seconds(folder: Path, name: str, epochs: int, *more: str) -> tuple[float, float, int]:
    """Train; return the seconds of all phases but the start, those of saving, and the number of states."""
    command = [
        sys.executable,
        "-m",
        "yolofleet",
        "train",
        "--data",
        "shapes:64",
        *TRAIN,
        "--epochs",
        str(epochs),
    ]
    subprocess.run([*command, "--name", name, *more], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    events = [
        json.loads(line) for line in (folder / "runs/train" / name / "events.jsonl").read_text().splitlines()
    ]
    spent = events[-1]["seconds"]
    saves = sum(event["kind"] == "checkpoint" for event in events)
    return sum(value for phase, value in spent.items() if phase != "start"), spent["checkpoint"], saves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--delay-s", type=float, default=0.05, help="before each answer of the store")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as made,
        s3_server(Path(made) / "log") as store,
        proxy(store) as (port, faults),
    ):
        folder = Path(made)
        os.environ.update(store.environment(port), YOLOFLEET_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1")
        faults.delay_s = options.delay_s
        plain, copied = [], []
        for turn in range(options.turns):
            plain.append(seconds(folder, f"plain{turn}", options.epochs))
            address = f"s3://{BUCKET}/runs/{turn}"
            copied.append(seconds(folder, f"copied{turn}", options.epochs, "--checkpoint-to", address))
        for name, rows in (("plain", plain), ("copied", copied)):
            whole, saving = (statistics.median(row[n] for row in rows) for n in (0, 1))
            print(
                f"{name}: {whole:.1f} s, of it {saving:.2f} s for saving; each turn: {[round(r[0], 1) for r in rows]}"
            )
        ratio = statistics.median(c[0] / p[0] for c, p in zip(copied, plain, strict=True))
        print(
            f"copied / plain: {ratio:.3f} (median of {options.turns} turns); objects written: {faults.counts['PUT object']}"
        )


if __name__ == "__main__":
    main()
