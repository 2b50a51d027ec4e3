"""Measure how much faster `yolofleet tune` is with two trials side by side, and what it gains over the default recipe.

    python benchmarks/tune.py --weights yolov5n.pt --epochs 6
    python benchmarks/tune.py --weights yolov5n.pt --data bccd/data.yaml --img 160 --epochs 8 --only 1 --seeds 1 2 3

The same study runs on one CPU process and on two, each trial on one thread. Both must have the same trials. On a machine with
two free cores the ratio should be at least 1.8. With --seeds, the default recipe and the best one are trained again with seeds
that the study did not use, for as many epochs as a trial.
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


def yolofleet(verb: str, folder: Path, args: argparse.Namespace, *more: str) -> None:
    """Run a training or a study of trainings with the shared settings."""
    model = ["--weights", args.weights] if args.weights else ["--model", "yolov5n"]
    data = args.data or str(folder / "shapes" / "data.yaml")
    command = [
        *(sys.executable, "-m", "yolofleet", verb, "--data", data, *model),
        *("--img", str(args.img), "--batch", "16", "--nominal-batch", "16", "--micro-batch", "8"),
        *("--epochs", str(args.epochs), "--val-period", "0", "--save-period", "0"),
        *("--workers", "0", "--threads", "1", "--no-plots", "--reduce", "exact"),
        *("--project", str(folder), *more),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def run(folder: Path, args: argparse.Namespace, processes: int) -> tuple[float, list[dict[str, str]]]:
    """Run the study; return its seconds, and the rows of its trials without theirs."""
    study = ["--trials", str(args.trials), "--generation", str(args.generation), "--no-prune"]
    study += ["--space", str(folder / "space.yaml")]
    study += ["--device", f"cpu:{processes}", "--name", f"on-{processes}"]
    began_at_s = time.monotonic()
    yolofleet("tune", folder, args, *study)
    elapsed_s = time.monotonic() - began_at_s
    with (folder / f"on-{processes}" / "trials.csv").open() as file:
        rows = [
            {name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)
        ]
    return elapsed_s, rows


def compare(folder: Path, args: argparse.Namespace, best: Path) -> None:
    """Train with the default recipe and with the best one, with seeds that the study did not use."""
    for seed in args.seeds:
        figures = []
        for name, recipe in (("default", []), ("best", ["--recipe", str(best)])):
            run_name = f"{name}-{seed}"
            yolofleet(
                "train", folder, args, "--seed", str(seed), "--device", "cpu", "--name", run_name, *recipe
            )
            metrics = json.loads((folder / run_name / "results.json").read_text())["metrics"]
            figures.append(f"{name} {metrics['mAP50']:.3f} / {metrics['mAP50-95']:.3f}")
        print(f"seed {seed}, mAP50 / mAP50-95: {', '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="", help="start weights; default: yolov5n from scratch")
    parser.add_argument("--data", default="", help="data set; default: generated shapes")
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="compare the best recipe with these")
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
        if args.data:
            args.data = str(Path(args.data).resolve())
        make = ["data", "make", "shapes", "--out", str(folder / "shapes"), "--img", str(args.img)]
        make += ["--images", str(args.images), "--val-images", "32"]
        if not args.data:
            subprocess.run([sys.executable, "-m", "yolofleet", *make], check=True, capture_output=True)
        runs = {count: run(folder, args, count) for count in ([args.only] if args.only else [1, 2])}
        for count, (seconds, _) in runs.items():
            print(f"{args.trials} trials of {args.epochs} epochs on {count} process(es): {seconds:.1f} s")
        if len(runs) == 2:
            (one_s, one), (two_s, two) = runs.values()
            print(f"ratio {one_s / two_s:.2f}; the trials are {'the same' if one == two else 'DIFFERENT'}")
        study = folder / f"on-{max(runs)}"
        found = json.loads((study / "results.json").read_text())
        best, default = found["best"], found["recipe_fitness"]
        print(
            f"fitness of the default recipe {default:.4f}, of the best trial {best['fitness']:.4f}: {best['values']}",
            flush=True,
        )
        compare(folder, args, study / "best.yaml")


if __name__ == "__main__":
    main()
