"""Two devices in one process (DataParallel), in two processes (DistributedDataParallel's algorithm), and one process.

    python benchmarks/dataparallel.py [--data bccd/data.yaml] [--nominal-batch 64] [--img 320] [--steps 12] [--rounds 3]

Whole runs of ``yolofleet train``, by default on the built-in set, one thread a device, turn by turn; images per second of
the steps alone (no start-up, no validation), median of the rounds. Two independent runs at the same time are the limit of
two processes: their rates add up.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

WAYS = {
    "one process": ["--device", "cpu"],
    "two independent runs": ["--device", "cpu"],
    "two processes": ["--device", "cpu:2"],
    "two devices, one process": ["--device", "cpu:2", "--parallel", "dp"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="yolov5n")
    parser.add_argument("--data", help="default: the built-in set")
    parser.add_argument("--nominal-batch", default="16")
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    verb = [sys.executable, "-m", "yolofleet"]
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or f"{folder}/shapes/data.yaml"
        if not args.data:
            subprocess.run([*verb, "data", "make", "shapes", "--out", f"{folder}/shapes"], check=True)
        job = ["--data", data, "--model", args.model, "--img", str(args.img)]
        job += ["--batch", "16", "--nominal-batch", args.nominal_batch, "--micro-batch", "4"]
        # The first steps of a warm-up have 16 images.
        job += ["--max-steps", str(args.steps), "--set", "warmup_epochs=0"]
        job += ["--val-period", "0", "--no-plots", "--workers", "0", "--project", folder]

        def images_per_s(way: str, number: int) -> float:
            # two devices of one process share its threads, each then has one
            threads = "2" if "one process" in way and "two" in way else "1"
            names = [f"{way} {number} {run}" for run in range(2 if "independent" in way else 1)]
            runs = []
            for name in names:
                command = [*verb, "train", *job, *WAYS[way], "--threads", threads, "--name", name]
                runs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            if any([run.wait() for run in runs]):
                raise SystemExit(f"{way} failed")
            rates = []
            for name in names:
                with (Path(folder) / name / "results.csv").open(encoding="utf-8") as f:
                    rates.append(float(list(csv.DictReader(f))[-1]["images_per_s"]))
            return sum(rates)

        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(args.rounds):
            for way, speeds in found.items():
                speeds.append(images_per_s(way, number))
    alone = median(found["one process"])
    for way, speeds in found.items():
        print(f"{way:<26} {median(speeds):6.2f} images/s, {median(speeds) / alone:.2f} of one process")


if __name__ == "__main__":
    main()
