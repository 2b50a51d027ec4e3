"""CPU milliseconds of one training sample, from cached images to pixels and labels, on one core.

    python benchmarks/augment.py

*crop* is the default recipe: without rotation, shear and perspective the mosaic is a crop and a resize of what
is seen. *warp* is the same recipe with a rotation, as the general path. Images are random, 4:3, in memory.

Then the default recipe with changes of single images, in turns with the default recipe; those of albumentations only if it is installed.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from statistics import median

import cv2
import numpy as np

from yolofleet.config.schema import Recipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import TrainSamples

IMAGES, LABELS = 64, 10
CHANGES = {"copy_paste: 0.1": Recipe(copy_paste=0.1), "cutout: 0.5": Recipe(cutout=0.5)}
if find_spec("albumentations"):
    transforms = tuple(f"{name} p=0.01" for name in ("Blur", "MedianBlur", "ToGray", "CLAHE"))
    CHANGES["four transforms of albumentations"] = Recipe(albumentations=transforms)


class Pictures:
    """Stands for an index and a cache."""

    def __init__(self, img: int) -> None:
        rng = np.random.default_rng(0)
        coarse = rng.integers(0, 256, (IMAGES, img * 3 // 32, img // 8, 3), np.uint8)
        self.images = [cv2.resize(small, (img, img * 3 // 4)) for small in coarse]
        boxes = rng.uniform(0.1, 0.9, (IMAGES, LABELS, 4)) * (1, 1, 0.3, 0.3)
        classes = rng.integers(0, 80, (IMAGES, LABELS))
        self.truth = [Shapes.of_image(*mine) for mine in zip(classes, boxes, strict=True)]

    def __len__(self) -> int:
        return IMAGES

    def get(self, image: int, seen: object = None, /) -> np.ndarray:
        return self.images[image]

    def labels(self, image: int, /) -> Shapes:
        return self.truth[image]

    def outlines(self, image: int, /) -> list[list[np.ndarray]]:
        """Ellipses with 25 points in all boxes."""
        angles = np.arange(25) * (2 * np.pi / 25)
        ellipse = np.column_stack([np.cos(angles), np.sin(angles)]) / 2
        return [[(box[:2] + ellipse * box[2:]).clip(0, 1)] for box in self.truth[image].boxes]


def sample_ms(recipe: Recipe, img: int, samples: int) -> float:
    """Median CPU milliseconds."""
    pictures = Pictures(img)
    made = TrainSamples(pictures, pictures, recipe, img=img, seed=0, epochs=1000)
    out, seconds = np.empty((img, img, 3), np.uint8), []
    for number in range(samples):
        began_s = time.process_time()
        made.sample(*divmod(number, IMAGES), out=out)
        seconds.append(time.process_time() - began_s)
    return 1e3 * median(seconds[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=400)
    samples = parser.parse_args().samples
    cv2.setNumThreads(1)
    print("training sample, mosaic + colour + flip, one core")
    for img in (320, 640):
        crop, warp = sample_ms(Recipe(), img, samples), sample_ms(Recipe(degrees=5), img, samples)
        print(f"  {img} px: crop {crop:.2f} ms, warp {warp:.2f} ms = {warp / crop:.1f} times as long")
    turns = [
        {name: sample_ms(recipe, 640, samples) for name, recipe in {"": Recipe(), **CHANGES}.items()}
        for _ in range(3)
    ]
    for name in CHANGES:
        ratio = median(turn[name] / turn[""] for turn in turns)
        ms = median(turn[name] for turn in turns)
        print(f"  640 px, crop, with {name}: {ms:.2f} ms = {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
