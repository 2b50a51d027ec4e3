"""Every built-in model: parameters, operations and time of one image on one core; the table of docs/models.md.

    python benchmarks/models.py [--img 640] [--rounds 3] [NAME ...]

As it is used for inference: batch normalisation folded in, channels-last, fp32, decoding included, batch 1. Without
suppression, whose time depends on the picture. CPU time, so that neighbours matter less.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from yolofleet.families.build import build_model
from yolofleet.families.networks.cost import gflops
from yolofleet.families.networks.description import describe, preset_names
from yolofleet.families.networks.detector import fuse


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=preset_names())
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| model | parameters | GFLOPs at {args.img} px | CPU ms an image |\n|---|---|---|---|")
    for name in args.names:
        model = build_model(describe(name), 80)
        parameters = sum(p.numel() for p in model.parameters())
        fused = fuse(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.rand(1, 3, args.img, args.img).contiguous(memory_format=torch.channels_last)
        seconds = []
        with torch.inference_mode():
            for _ in range(1 + args.rounds):
                began = time.process_time()
                fused.decode(fused(images))
                seconds.append(time.process_time() - began)
        ms = 1000 * median(seconds[1:])
        print(f"| {name} | {parameters:,} | {gflops(fused, args.img):.1f} | {ms:.0f} |", flush=True)


if __name__ == "__main__":
    main()
