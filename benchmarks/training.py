"""Time trainings of yolofleet and YOLOv5, in turns, on one device: seconds of an epoch, and of the whole command.

    python benchmarks/training.py --data shapes/data.yaml --rival-python RIVAL/bin/python --device 0 --batch 64 --models yolov5n yolov5s

Both train from random weights and hold decoded images in memory. The seconds of an epoch are the median time between two new
rows of results.csv, without the first epoch. yolofleet does not validate, and YOLOv5 validates on one image, because it cannot
train without.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import rival
import yaml


def timed(command: list[str], variables: dict[str, str], folder: Path) -> tuple[float, list[float]]:
    """Run a training in ``folder/run``; return the seconds of the command and those of each epoch after the first.

    Raises:
        RuntimeError: the command failed.
    """
    table = folder / "run" / "results.csv"
    ends_s: list[float] = []
    began_at_s = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        child = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        while child.poll() is None:
            lines = table.read_bytes().count(b"\n") if table.exists() else 0
            rows = max(lines - 1, 0)  # the first line has the names of the columns
            ends_s += [time.monotonic()] * (rows - len(ends_s))
            time.sleep(0.005)
    whole_s = time.monotonic() - began_at_s
    if child.returncode:
        tail = (folder / "log.txt").read_text(errors="replace").splitlines()[-8:]
        raise RuntimeError("\n  ".join([f"exit status {child.returncode}", *tail]))
    return whole_s, [after - before for before, after in pairwise(ends_s)]


def training(
    program: str, model: str, folder: Path, args: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a training into ``folder/run``, and its variables."""
    size = f"--img {args.img} --epochs {args.epochs} --device {args.device} --cache ram --project {folder} --name run"
    data = args.data.resolve()
    if program == "YOLOv5":
        head = rival.train_command(args.rival_python, data, folder, model=model, batch=args.batch)
        variables = rival.environment(args.rival_python, folder)
        return [*head, "--workers", str(args.workers), *size.split()], {**os.environ, **variables}
    ours = f"-m yolofleet train --model {model} --batch {args.batch} --val-period 0 --no-plots {size}"
    return [sys.executable, *ours.split(), "--data", str(data)], dict(os.environ)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="YAML file of the data set")
    parser.add_argument("--rival-python", help="Python of an environment with yolov5 7.0.14")
    parser.add_argument("--device", default="cpu", help="of both programs")
    parser.add_argument("--models", nargs="+", default=["yolov5n"])
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8, help="loader processes of YOLOv5; ours: automatic")
    args = parser.parse_args()
    pictures = args.data.resolve().parent / yaml.safe_load(args.data.read_text())["train"]
    images = sum(1 for path in pictures.iterdir() if path.suffix in (".jpg", ".png"))
    print(f"{images} images of {args.img} px, steps of {args.batch}, {args.epochs} epochs, {args.device}")
    print("| network | program | whole command, s | epoch, s | images/s |\n|---|---|---|---|---|", flush=True)
    for model in args.models:
        figures: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.turns):
            for program in ("yolofleet", "YOLOv5")[: 2 if args.rival_python else 1]:
                with tempfile.TemporaryDirectory() as name:
                    try:
                        whole_s, epochs_s = timed(
                            *training(program, model, Path(name), args), folder=Path(name)
                        )
                    except RuntimeError as problem:
                        print(f"{model} {program} FAILED: {problem}", flush=True)
                        continue
                figures.setdefault(program, []).append((whole_s, median(epochs_s)))
        for program, found in figures.items():
            whole_s, epoch_s = (median(column) for column in zip(*found, strict=True))
            row = f"| {model} | {program} | {whole_s:.1f} | {epoch_s:.2f} | {images / epoch_s:,.0f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
