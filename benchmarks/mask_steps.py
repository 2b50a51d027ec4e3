"""A training step of networks with masks beside the networks of the same name that find boxes.

    python benchmarks/mask_steps.py [--models yolov5n dfine-n] [--img 640] [--images 2] [--rounds 10]

A step is the matching with the rasters of masks, the forward pass, the loss and the backward pass, without an optimizer: one core,
fp32, channels-last memory. Each image has 7 labels, of which each has an octagon as its mask. Both networks take turns. The
figure is the median of the ratios of two steps that follow each other, in CPU time.
"""

from __future__ import annotations

import argparse
from statistics import median

import numpy as np
import torch
from detr import labels_of, our_step, seconds_of

from yolofleet.data.geometry.mask_shapes import MaskShapes

TURN = np.arange(8) * np.pi / 4
OCTAGON = np.column_stack([np.cos(TURN), np.sin(TURN)]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["yolov5n", "dfine-n"])
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.rand(args.images, 3, args.img, args.img, generator=torch.Generator().manual_seed(0))
    labels = [
        MaskShapes.of_image(
            one.classes, one.boxes, [[(OCTAGON * box[2:] + box[:2]).astype(np.float32)] for box in one.boxes]
        )
        for one in labels_of(args.images)
    ]
    for name in args.models:
        steps = [our_step(each, images, labels, torch.float32) for each in (name, f"{name}-seg")]
        taken = [[seconds_of(step, on_gpu=False) for step in steps] for _ in range(1 + args.rounds)][1:]
        boxes, masks = (1000 * median(column) for column in zip(*taken, strict=True))
        ratio = median(mask / box for box, mask in taken)
        print(
            f"{name}, {args.images} images of {args.img} px: boxes {boxes:.0f} ms, masks {masks:.0f} ms, {ratio:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
