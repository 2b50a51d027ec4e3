"""A training step of D-FINE and RT-DETRv2 beside Hugging Face's transformers: the same networks, images and labels.

    python benchmarks/detr.py [--models dfine-n rtdetrv2-r18] [--img 320] [--images 2] [--rounds 5]

A step is the forward pass with denoising queries, the matching, the loss and the backward pass, on one core in fp32, without
an optimizer. Both programs take turns; the figure is the ratio of the medians of their CPU times. Both have random weights,
so the numbers of operations are those of a training, and the values of the losses are not compared here
(tests/parity does that).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from yolofleet.config.schema import Recipe
from yolofleet.families.build import build_model, family_loss
from yolofleet.families.networks.description import describe

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "parity"))
CLASSES, LABELS = 80, 7  # of an image; COCO has 7.3


def labels_of(images: int) -> np.ndarray:
    """Return rows image, class, cx, cy, w, h."""
    rng = np.random.default_rng(0)
    count = images * LABELS
    return np.column_stack(
        [
            np.repeat(np.arange(images), LABELS),
            rng.integers(0, CLASSES, count),
            rng.uniform(0.3, 0.7, (count, 2)),
            rng.uniform(0.05, 0.4, (count, 2)),
        ]
    ).astype(np.float32)


def our_step(name: str, images: torch.Tensor, labels: np.ndarray) -> Callable[[], None]:
    model = build_model(describe(name), CLASSES).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loss = family_loss(model, Recipe(), images.shape[3])
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        targets = loss.match(labels, len(images), (images.shape[2], images.shape[3]))
        sums = loss.sums(model(images, targets), targets)
        (sums * loss.gains / torch.from_numpy(targets.counts)).sum().backward()
        model.zero_grad()

    return step


def their_step(name: str, images: torch.Tensor, labels: np.ndarray) -> Callable[[], None]:
    from test_detr_parity import theirs

    model = theirs(describe(name), CLASSES).train()
    wanted = [
        {
            "class_labels": torch.from_numpy(labels[labels[:, 0] == i, 1]).long(),
            "boxes": torch.from_numpy(labels[labels[:, 0] == i, 2:]),
        }
        for i in range(len(images))
    ]

    def step() -> None:
        model(pixel_values=images, labels=wanted).loss.backward()
        model.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["dfine-n", "rtdetrv2-r18"])
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.rand(args.images, 3, args.img, args.img, generator=torch.Generator().manual_seed(0))
    labels = labels_of(args.images)
    for name in args.models:
        steps = {
            "yolofleet": our_step(name, images, labels),
            "transformers": their_step(name, images, labels),
        }
        seconds: dict[str, list[float]] = {program: [] for program in steps}
        for _ in range(1 + args.rounds):
            for program, step in steps.items():
                began = time.process_time()
                step()
                seconds[program].append(time.process_time() - began)
        ours, other = (median(taken[1:]) for taken in seconds.values())
        print(
            f"{name}, {args.images} images of {args.img} px: {ours:.3f} / {other:.3f} s = {other / ours:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
