"""Short runs of the command line on GPUs, and what they ended with."""

from __future__ import annotations

import csv
from pathlib import Path

from commands import YOLOV5N, results, train_args, yolofleet

LONG = ("--epochs", "12", "--val-period", "0")  # 30 steps
SHORT = ("--epochs", "100", "--max-steps", "6", "--val-period", "0")
EXACT = ("--reduce", "exact")


def losses(folder: Path, name: str) -> float:
    """Return the sum of all loss terms of the last epoch."""
    with (folder / "runs/train" / name / "results.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    return sum(float(value) for key, value in row.items() if key.startswith("train/"))


def trained(folder: Path, name: str, data: Path | str, *more: str) -> dict:
    yolofleet(folder, *train_args(data, *YOLOV5N, "--name", name, *more))
    return results(folder / "runs/train" / name)


def bits(folder: Path, name: str, data: Path | str, *more: str) -> str:
    """Train with exact sums; return the SHA-256 of the weights."""
    return str(trained(folder, name, data, *SHORT, *EXACT, *more)["weights_sha256"])
