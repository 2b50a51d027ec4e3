"""Check on one GPU that the parts of a training reach their floors; exit code 1 if one is missed.

    make bench-gpu
    python benchmarks/gpu.py --models yolov5s --img 640 --batch 64 --micro-batch 16

For each network and number format it runs ``yolofleet bench train`` on generated pictures, from an image cache in memory,
with as many loader processes as the command chooses. It has never run on a GPU, so the floors are goals, not
measurements. Exact sums use deterministic kernels, also in the bare network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from yolofleet import devices
from yolofleet.datasets.shapes import make_shapes

CASES = {  # number format, or exact sums -> settings
    "fp16": ["--precision", "fp16"],
    "bf16": ["--precision", "bf16"],
    "fp32": ["--precision", "fp32"],
    "fp16 exact": ["--precision", "fp16", "--reduce", "exact"],
}
FLOORS = {  # ratio -> its floor
    "loader / step": 0.95,
    "loop / bare network": 0.97,
    "whole run / slower part": 0.95,
    "validation / its forward passes": 0.5,
    "checkpoint / one write": 0.1,  # it is also read back and compared
}
EXACT_FLOORS = {**FLOORS, "loop / bare network": 0.85}  # integer sums cost up to 14 % on CPUs
NO_GPU = 2  # exit code


def ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of ``FLOORS`` from the JSON of ``yolofleet bench train``."""
    parts = {part["name"]: part for part in figures["parts"]}
    return {
        "loader / step": parts["loader"]["rate"] / parts["step"]["rate"],
        "loop / bare network": figures["loop_of_bare_network"],
        "whole run / slower part": parts["whole run"]["share"],
        "validation / its forward passes": parts["validation"]["share"],
        "checkpoint / one write": parts["checkpoint"]["share"],
    }


def missed(found: Mapping[str, float], floors: Mapping[str, float]) -> list[str]:
    """Return a text for each ratio under its floor."""
    return [f"{name} {found[name]:.2f} < {floor}" for name, floor in floors.items() if found[name] < floor]


def measured(data: Path, asked: argparse.Namespace, model: str, case: list[str]) -> dict[str, Any]:
    """Run ``yolofleet bench train``; return its JSON.

    Raises:
        SystemExit: the command failed; it has said why.
    """
    size = [
        "--img",
        asked.img,
        "--batch",
        asked.batch,
        "--nominal-batch",
        asked.batch,
        "--micro-batch",
        asked.micro_batch,
    ]
    where = ["--device", asked.device, "--cache", "ram", "--steps", asked.steps, "--json", "-", *case]
    command = [
        sys.executable,
        "-m",
        "yolofleet",
        "bench",
        "train",
        "--data",
        data,
        "--model",
        model,
        *size,
        *where,
    ]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["yolov5n", "yolov5s", "yolov3", "ppyoloe-s"])
    parser.add_argument("--img", type=int, default=640, help="pixels")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each part")
    parser.add_argument("--device", default="0", help="number of the GPU")
    parser.add_argument("--images", type=int, default=1024, help="of the generated data set")
    asked = parser.parse_args()
    if not devices.accelerator():
        print(
            f"this check needs a GPU, and torch {torch.__version__} finds none; `yolofleet doctor` may say why. "
            "`yolofleet bench train` measures a CPU.",
            file=sys.stderr,
        )
        raise SystemExit(NO_GPU)
    print(f"{devices.name_of(devices.device_of(asked.device, 0))}, torch {torch.__version__}\n")
    print(
        f"| network | format | step img/s | {' | '.join(FLOORS)} | binds | peak MiB |\n|{'---|' * (len(FLOORS) + 5)}"
    )
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_shapes(Path(folder, "data"), images=asked.images, val_images=128, img=asked.img, seed=0)
        for model in asked.models:
            for name, case in CASES.items():
                figures = measured(data, asked, model, case)
                found = ratios(figures)
                step = next(part["rate"] for part in figures["parts"] if part["name"] == "step")
                cells = [model, name, f"{step:,.0f}", *(f"{found[ratio]:.2f}" for ratio in FLOORS)]
                print(
                    f"| {' | '.join(cells)} | {figures['binds']} | {figures['device_memory_mib']:,.0f} |",
                    flush=True,
                )
                floors = EXACT_FLOORS if "exact" in name else FLOORS
                problems += [f"{model}, {name}: {text}" for text in missed(found, floors)]
    if problems:
        print("\nfloors missed:\n  " + "\n  ".join(problems), file=sys.stderr)
        raise SystemExit(1)
    print("\nall floors are reached")


if __name__ == "__main__":
    main()
