"""The stage of speed: ``yolofleet bench train`` on networks of several sizes, as a table beside goals, which are estimates.

    python tests/gpu/speed.py

A missed goal is no failure. Without a GPU one measurement of the smallest size tries the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from yolofleet.support import devices
from yolofleet.support.terminal import duration

COCO_IMAGES, COCO_VAL_IMAGES = 118_287, 5_000
LARGE_GIB = 15.0  # of a device that can take micro-batches of 16 images of the largest network
FLOORS = {  # ratio -> its goal
    "loader / step": 0.95,
    "loop / bare network": 0.97,
    "whole run / slower part": 0.95,
    "validation / its forward passes": 0.5,
    "checkpoint / one write": 0.1,  # it is also read back and compared
}
EXACT_FLOORS = {**FLOORS, "loop / bare network": 0.85}  # integer sums cost up to 14 % on CPUs
RATES = {  # part of a device's name -> images/s of a step at 640 px in fp16: 80 % of what was measured, or estimates
    "H100": {"yolov5n": 1400, "yolov5s": 740, "yolov5l": 240},
    "H200": {"yolov5n": 2000, "yolov5s": 1400, "yolov5l": 470},
}
COLUMNS = ("network", "GPUs", "batch", "format", "step img/s", "run img/s", *FLOORS, "GiB", "COCO train", "COCO val", "goals missed")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement: images of a step of all GPUs, and more options of the command."""

    model: str
    batch: int = 64
    gpus: int = 1
    more: tuple[str, ...] = ()


ROWS = (
    *(Row(model) for model in ("yolov5n", "yolov5s", "yolov5l")),
    *(Row("yolov5l", 16 * gpus, gpus) for gpus in (1, 2, 4, 8)),  # 16 images a GPU
    *(Row("yolov5s", 512, gpus) for gpus in (1, 2, 4, 8)),
    Row("yolov5s", more=("--reduce", "exact")),
    *(Row("yolov5s", more=("--precision", precision)) for precision in ("fp32", "bf16")),
    *(Row(model) for model in ("yolov3", "ppyoloe-s")),
)


def figures_of(row: Row, folder: Path, *, micro_batch: int, on_gpus: bool) -> dict[str, Any]:
    """Return what ``yolofleet bench train --json`` writes.

    Raises:
        subprocess.CalledProcessError: the command failed; it has said why.
    """
    img, batch, micro_batch, steps = (640, row.batch, micro_batch, 60) if on_gpus else (64, 4, 2, 1)
    where = ",".join(map(str, range(row.gpus))) if on_gpus else "cpu"
    size = f"--img {img} --batch {batch} --nominal-batch {batch} --micro-batch {micro_batch} --steps {steps}"
    place = f"--device {where} --cache auto" + ("" if on_gpus else " --workers 0 --threads 1")
    precision = [] if "--precision" in row.more else ["--precision", "fp16" if on_gpus else "fp32"]
    data = f"shapes:{512 * min(row.gpus, 2)}" if on_gpus else "shapes:16"
    words = ["--data", data, "--model", row.model, *size.split(), *place.split(), *precision, *row.more]
    target = folder / "figures.json"
    argv = [sys.executable, "-m", "yolofleet", "bench", "train", *words]
    subprocess.run([*argv, "--json", str(target)], check=True, cwd=folder, stdout=sys.stderr)
    figures: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return figures


def cells_of(figures: Mapping[str, Any], gpus: int, name: str) -> tuple[str, ...]:
    """Return a row of the table.

    Args:
        name: of the first GPU, which decides the goals; "" without goals.
    """
    parts = {part["name"]: part for part in figures["parts"]}
    rates = {name: parts[name]["rate"] for name in ("loader", "step", "whole run", "validation")}
    setup, model = figures["setup"], figures["model"]
    is_exact = setup["reduce"] == "exact"
    found = {  # of FLOORS
        "loader / step": rates["loader"] / rates["step"],
        "loop / bare network": figures["loop_of_bare_network"],
        "whole run / slower part": parts["whole run"]["share"],
        "validation / its forward passes": parts["validation"]["share"],
        "checkpoint / one write": parts["checkpoint"]["share"],
    }
    missed = []
    if name:
        floors = EXACT_FLOORS if is_exact else FLOORS
        missed = [
            f"{what} {found[what]:.2f} < {floor}" for what, floor in floors.items() if found[what] < floor
        ]
        goal = gpus * next((goals for part, goals in RATES.items() if part in name), {}).get(model, 0)
        if (figures["img"], setup["precision"], is_exact) == (640, "fp16", False) and rates["step"] < goal:
            missed.append(f"step {rates['step']:,.0f} img/s < {goal:,}")
    return (
        *(model, str(gpus), str(setup["step_images"]), setup["precision"] + (" exact" if is_exact else "")),
        *(f"{rates['step']:,.0f}", f"{rates['whole run']:,.0f}", *(f"{found[what]:.2f}" for what in FLOORS)),
        f"{figures['device_memory_mib'] / 1024:.1f}",
        *(duration(COCO_IMAGES / rates["whole run"]), duration(COCO_VAL_IMAGES / rates["validation"])),
        "; ".join(missed),
    )


def show(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    count = devices.device_count()
    first = torch.device(devices.accelerator() or "cpu", 0)
    _, total = devices.memory_info(first) or (0, 0)
    micro_batch = 16 if not count or total / 2**30 >= LARGE_GIB else 4
    show(COLUMNS)
    show(["---"] * len(COLUMNS))
    with TemporaryDirectory() as temporary:
        for row in ROWS if count else ROWS[:1]:
            if row.gpus <= max(count, 1):
                figures = figures_of(row, Path(temporary), micro_batch=micro_batch, on_gpus=count > 0)
                show(cells_of(figures, row.gpus, devices.name_of(first) if count else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
