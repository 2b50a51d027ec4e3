"""Operations that the host launches in a step of 64 images, in passes of one and of eight micro-batches.

Counted on the CPU; on a GPU each is a kernel, or a few. Views and bare allocations do not count. The last column counts
batch norm as Triton's kernels, two in each direction, and all else as before.

    python benchmarks/launches.py [--precision bf16]
    python benchmarks/launches.py --precision fp32 --images 8 --models dfine-n rfdetr-n    # the first column: one pass
    python benchmarks/launches.py --kinds yolov5n        # each operation of one network
    python benchmarks/launches.py --simulated dfine-n    # a step of 4 x 640 px on the simulated device: also its memory
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

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
    ("rfdetr-n", 0.0),
]


def launches(
    model: str, progress: float, precision: str, per_pass: int, triton: bool = False, images: int = IMAGES
) -> Launches:
    """Return the operations of the second step; ``progress``: fraction of the run, decides PP-YOLOE's assigner."""
    run = small_run(
        model, images=images, micro_batch=MICRO_BATCH, img=IMG, precision=precision, per_pass=per_pass
    )
    run.progress = progress
    run.do(1)
    shares, counted = run.micro_batches(1), Launches()
    if triton:
        counted.as_triton(run)
    with counted:
        run.do(1, shares=shares)
    return counted


def on_simulated_device(model: str) -> tuple[int, int, int]:
    """Return the operations of a step of 4 images of 640 px in fp32, and the bytes that are in use before it and at its peak."""
    sys.path.insert(0, str(TESTS / "accelerator"))
    import miniature  # a process keeps the accelerator that it installs

    class Device(miniature.Device):
        def take(self, *block: Any) -> bool:
            self.used_bytes()  # the class counts freed blocks too, until memory is short
            return super().take(*block)

    accelerator = miniature.install()
    device = accelerator.devices[0] = Device()
    run = small_run(model, (f"{miniature.NAME}:0",), images=4, micro_batch=4, img=640)
    run.do(1)
    accelerator.launches.clear()
    before = device.peak_bytes = device.used_bytes()
    run.do(1)
    return sum(accelerator.launches.values()), before, device.peak_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--kinds", metavar="MODEL", help="print the number of each operation of this network")
    parser.add_argument("--simulated", metavar="MODEL")
    parser.add_argument("--models", nargs="+", default=[model for model, _ in MODELS])
    parser.add_argument("--images", type=int, default=IMAGES, help="a multiple of 8")
    args = parser.parse_args()
    if args.simulated:
        found = on_simulated_device(args.simulated)
        print(
            f"{args.simulated}: {found[0]:,} launches, {found[1] / 1e6:.0f} MB before the step, {found[2] / 1e6:.0f} MB at its peak"
        )
        return 0
    columns = ((1, False), (8, False), (8, True))
    names = ("8 passes", "1 pass", "with Triton")
    if args.kinds:
        counted = [launches(args.kinds, 0.0, args.precision, *column) for column in columns]
        print(f"{args.kinds + ', ' + args.precision:<36}" + "".join(f"{name:>13}" for name in names))
        kinds = {kind for found in counted for kind in found.kinds}
        for kind in sorted(kinds, key=lambda kind: -counted[1].kinds[kind]):
            print(f"{kind:<36}" + "".join(f"{found.kinds[kind]:>13}" for found in counted))
        return 0
    print(f"{f'{args.precision}, {args.images} images':<24}" + "".join(f"{name:>13}" for name in names))
    for model, progress in (row for row in MODELS if row[0] in args.models):
        assigner = "" if not model.startswith("pp") else " aligned" if progress else " ATSS"
        counts = [
            launches(model, progress, args.precision, *column, images=args.images).count for column in columns
        ]
        print(f"{model + assigner:<24}" + "".join(f"{count:>13,}" for count in counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
