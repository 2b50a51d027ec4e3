"""How much the micro-batch changes the gradient of a step: of 8 images, in micro-batches of 1, 2 and 4 beside one of 8.

    python benchmarks/micro_batches.py [--models rfdetr-n dfine-n yolov5n] [--img 192]

The figure is the norm of the difference in parts of the gradient's norm, in fp32, for random weights and images. Every loss
is divided by the counts of the whole step, so what is left are the statistics of batch normalisation, and rounding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.networks.description import describe

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from small_training import CLASSES, images_and_labels

IMAGES = 8


def gradient(name: str, img: int, micro_batch: int) -> Tensor:
    """Return the gradient of all parameters for one step."""
    model = build_model(describe(name), CLASSES, seed=1).train()
    recipe = recipe_of(load_recipe(), family_of(model.description), model.description).value
    loss, parts = family_loss(model, recipe, img), [images_and_labels(1, img, seed=i) for i in range(IMAGES)]
    images = torch.cat([image for image, _ in parts]).float() / 255
    labels = [one for _, of_image in parts for one in of_image]
    counts = np.zeros(len(loss.terms), np.int64)
    batches = []
    for first in range(0, IMAGES, micro_batch):
        keys = [(0, 0, i) for i in range(first, first + micro_batch)]
        shapes = Shapes.of_images(labels[first : first + micro_batch])
        targets = loss.match(shapes, micro_batch, (img, img), keys)
        counts += targets.counts
        batches.append((images[first : first + micro_batch], targets))
    for x, targets in batches:
        raws = model(x, targets) if model.reads_targets else model(x)
        (loss.sums(raws, targets) * loss.gains / torch.from_numpy(counts).clamp(min=1)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["rfdetr-n", "dfine-n", "yolov5n"])
    parser.add_argument("--img", type=int, default=192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {args.img} px | 1 | 2 | 4 |\n|---|---|---|---|")
    for name in args.models:
        whole = gradient(name, args.img, IMAGES)
        parts = [float((gradient(name, args.img, m) - whole).norm() / whole.norm()) for m in (1, 2, 4)]
        print(f"| {name} | " + " | ".join(f"{part:.1e}" for part in parts) + " |", flush=True)


if __name__ == "__main__":
    main()
