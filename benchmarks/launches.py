"""Operations that the host launches in a step of 64 images, in passes of one and of eight micro-batches.

Counted on the CPU; on a GPU each is a kernel, or a few. Views and bare allocations do not count. The last column counts
batch norm as Triton's kernels, two in each direction, and all else as before.

    python benchmarks/launches.py [--precision bf16]
    python benchmarks/launches.py --kinds yolov5n        # each operation of one network
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
    ("dfine-n", 0.0),
    ("rtdetrv2-r18", 0.0),
]


def launches(model: str, progress: float, precision: str, per_pass: int, triton: bool = False) -> Launches:
    """Return the operations of the second step; ``progress``: fraction of the run, decides PP-YOLOE's assigner."""
    run = small_run(
        model, images=IMAGES, micro_batch=MICRO_BATCH, img=IMG, precision=precision, per_pass=per_pass
    )
    run.progress = progress
    run.do(1)
    shares, counted = run.micro_batches(1), Launches()
    if triton:
        counted.as_triton(run)
    with counted:
        run.do(1, shares=shares)
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--kinds", metavar="MODEL", help="print the number of each operation of this network")
    args = parser.parse_args()
    columns = ((1, False), (8, False), (8, True))
    names = ("8 passes", "1 pass", "with Triton")
    if args.kinds:
        counted = [launches(args.kinds, 0.0, args.precision, *column) for column in columns]
        print(f"{args.kinds + ', ' + args.precision:<36}" + "".join(f"{name:>13}" for name in names))
        kinds = {kind for found in counted for kind in found.kinds}
        for kind in sorted(kinds, key=lambda kind: -counted[1].kinds[kind]):
            print(f"{kind:<36}" + "".join(f"{found.kinds[kind]:>13}" for found in counted))
        return 0
    print(f"{f'{args.precision}, {IMAGES} images':<24}" + "".join(f"{name:>13}" for name in names))
    for model, progress in MODELS:
        assigner = "" if not model.startswith("pp") else " aligned" if progress else " ATSS"
        counts = [launches(model, progress, args.precision, *column).count for column in columns]
        print(f"{model + assigner:<24}" + "".join(f"{count:>13,}" for count in counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
