"""The demo's job at half length on several fleets, fast sums: is the difference between fleets more than that
between seeds?

    python benchmarks/fleet_accuracy.py [--epochs 12] [--seeds 5] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = [
    "--model",
    "yolov5n",
    "--recipe",
    "demo",
    "--img",
    "160",
    "--batch",
    "16",
    "--nominal-batch",
    "16",
    "--micro-batch",
    "4",
    "--no-plots",
]
FLEETS = {
    "2 processes": ["--device", "cpu:2"],
    "3 processes": ["--device", "cpu:3"],
    "4 processes": ["--device", "cpu:4"],
    "2 processes, shares 3,1": ["--device", "cpu:2", "--shares", "3,1"],
    "2 processes, exact sums": ["--device", "cpu:2", "--reduce", "exact"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="fleet-accuracy-"))
    verb = [sys.executable, "-m", "yolofleet"]
    if not (out / "shapes").exists():
        subprocess.run([*verb, "data", "make", "shapes", "--out", str(out / "shapes")], check=True)

    def accuracy(name: str, *more: str) -> float:
        results = out / "runs" / name / "results.json"
        if not results.exists():
            data = ["--data", str(out / "shapes" / "data.yaml"), "--epochs", str(args.epochs)]
            place = ["--project", str(out / "runs"), "--name", name, "--exist-ok"]
            command = [*verb, "train", *JOB, *data, *place, *more]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(results.read_text())["metrics"]
        print(f"{name:<26} mAP50 {found['mAP50']:.4f}  mAP50-95 {found['mAP50-95']:.4f}", flush=True)
        return float(found["mAP50-95"])

    one = [accuracy(f"seed {s}", "--device", "cpu", "--seed", str(s)) for s in range(args.seeds)]
    mean, spread = statistics.mean(one), statistics.stdev(one)
    allowed = max(3 * spread, 0.03)
    print(
        f"1 process, {args.seeds} seeds: mean {mean:.4f}, standard deviation {spread:.4f}; allowed +-{allowed:.4f}"
    )
    for name, more in FLEETS.items():
        off = accuracy(name, *more, "--seed", "0") - mean
        print(f"  {name}: {off:+.4f} {'ok' if abs(off) <= allowed else 'TOO FAR'}")


if __name__ == "__main__":
    main()
