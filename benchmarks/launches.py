"""Operations that the host launches in a step of 64 images, in passes of one and of eight micro-batches.

Counted on the CPU; on a GPU each is a kernel, or a few. Views and bare allocations do not count.

    python benchmarks/launches.py [--precision bf16]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "unit" / "train")]

from small_training import small_run  # noqa: E402
from test_launches import Launches  # noqa: E402

IMAGES, MICRO_BATCH, IMG = 64, 8, 64
MODELS = [
    ("yolov5n", 0.0),
    ("yolov5s", 0.0),
    ("yolov5l", 0.0),
    ("yolov3", 0.0),
    ("ppyoloe-s", 0.0),
    ("ppyoloe-s", 0.9),
]


def launches(model: str, progress: float, precision: str, per_pass: int) -> int:
    """Return the operations of the second step; ``progress``: fraction of the run, decides PP-YOLOE's assigner."""
    run = small_run(
        model, images=IMAGES, micro_batch=MICRO_BATCH, img=IMG, precision=precision, per_pass=per_pass
    )
    run.progress = progress
    run.do(1)
    shares = run.micro_batches(1)
    with Launches() as counted:
        run.do(1, shares=shares)
    return counted.count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    precision = parser.parse_args().precision
    print(f"{precision}, {IMAGES} images     8 passes   1 pass")
    for model, progress in MODELS:
        assigner = "" if not model.startswith("pp") else " aligned" if progress else " ATSS"
        counts = [launches(model, progress, precision, per_pass) for per_pass in (1, 8)]
        print(f"{model + assigner:<20} {counts[0]:>8} {counts[1]:>8}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
