"""Measure how much faster `yolofleet tune` is with two trials side by side, and what it gains over the default recipe.

    python benchmarks/tune.py --weights yolov5n.pt --epochs 6

The same study runs on one CPU process and on two, each trial on one thread. Both must have the same trials. On a machine with
two free cores the ratio should be at least 1.8.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SPACE = (
    "lr0: [0.001, 0.1, log]\nmomentum: [0.6, 0.98]\nwarmup_epochs: [0, 3]\nmosaic: [0, 1]\nscale: [0, 0.9]\n"
)


def run(folder: Path, args: argparse.Namespace, processes: int) -> tuple[float, list[dict[str, str]]]:
    """Run the study; return its seconds, and the rows of its trials without theirs."""
    model = ["--weights", args.weights] if args.weights else ["--model", "yolov5n"]
    command = [
        *(sys.executable, "-m", "yolofleet", "tune", "--data", str(folder / "shapes" / "data.yaml"), *model),
        *("--img", str(args.img), "--batch", "16", "--nominal-batch", "16", "--micro-batch", "8"),
        *("--epochs", str(args.epochs), "--trials", str(args.trials), "--generation", str(args.generation)),
        *("--space", str(folder / "space.yaml"), "--no-prune", "--val-period", "0", "--save-period", "0"),
        *("--device", f"cpu:{processes}", "--workers", "0", "--threads", "1"),
        *("--project", str(folder), "--name", f"on-{processes}"),
    ]
    began_at_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    elapsed_s = time.monotonic() - began_at_s
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    with (folder / f"on-{processes}" / "trials.csv").open() as file:
        rows = [
            {name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)
        ]
    return elapsed_s, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="", help="start weights; default: yolov5n from scratch")
    parser.add_argument("--img", type=int, default=128)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--generation", type=int, default=6)
    parser.add_argument("--only", type=int, choices=(1, 2), help="run on so many processes only")
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "space.yaml").write_text(SPACE)
        make = ["data", "make", "shapes", "--out", str(folder / "shapes"), "--img", str(args.img)]
        make += ["--images", str(args.images), "--val-images", "32"]
        subprocess.run([sys.executable, "-m", "yolofleet", *make], check=True, capture_output=True)
        runs = {count: run(folder, args, count) for count in ([args.only] if args.only else [1, 2])}
        for count, (seconds, _) in runs.items():
            print(f"{args.trials} trials of {args.epochs} epochs on {count} process(es): {seconds:.1f} s")
        if len(runs) == 2:
            (one_s, one), (two_s, two) = runs.values()
            print(f"ratio {one_s / two_s:.2f}; the trials are {'the same' if one == two else 'DIFFERENT'}")
        found = json.loads((folder / f"on-{max(runs)}" / "results.json").read_text())
        best, default = found["best"], found["recipe_fitness"]
        print(
            f"fitness of the default recipe {default:.4f}, of the best trial {best['fitness']:.4f}: {best['values']}"
        )


if __name__ == "__main__":
    main()
