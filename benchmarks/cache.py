"""Milliseconds of CPU time to get an image at training size, by the kind of cache, and how far JPEGs are from the pixels.

    python benchmarks/cache.py --data coco128.yaml

The training images are decoded from their files, then read again from a cache that holds all: decoded in memory, on
disk (mapped, so the page cache has it), and as JPEGs. *difference* is the mean over all colours, of 255 levels.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import closing
from statistics import median

import cv2
import numpy as np

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.input.cache import ImageCache


def read_ms(cache: ImageCache, turns: int) -> float:
    """Return the median over the turns of the time for an image whose pixels are all read."""
    took = []
    for _ in range(turns):
        began_s = time.process_time()
        for image in range(len(cache.index)):
            cache.get(image).max()
        took.append((time.process_time() - began_s) / len(cache.index) * 1e3)
    return median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--img", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    cv2.setNumThreads(1)
    index = build_index(load_dataset(asked.data), "train")
    print("| px | cache | ms an image | KB an image | difference |\n|---|---|---|---|---|")
    for img in asked.img:
        files = ImageCache(index, img, "none", quick=True)
        pixels = [files.get(image) for image in range(len(index))]
        for mode in ("none", "ram", "disk", "jpeg"):
            with closing(ImageCache(index, img, mode, quick=True)) as cache:
                apart = [
                    np.abs(cache.get(image).astype(np.int16) - pixels[image]).mean()
                    for image in range(len(index))
                ]
                stored = cache._file.states[:, 1].mean() / 1e3 if cache._file is not None else 0
                took = read_ms(cache, asked.turns)
                print(f"| {img} | {mode} | {took:.2f} | {stored:.0f} | {np.mean(apart):.2f} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["YOLOFLEET_CACHE"] = folder
        main()
