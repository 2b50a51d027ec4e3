"""Training images per second of one and of two loader processes, wall time, in turns.

    python benchmarks/loader_processes.py --data bccd/data.yaml

The main process only receives the micro-batches, so two processes need two free cores.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np

from yolofleet.config.schema import Recipe
from yolofleet.datasets.index import build_index
from yolofleet.datasets.sources import load_dataset
from yolofleet.input.cache import ImageCache
from yolofleet.input.loader import MicroBatchKey, train_loader
from yolofleet.input.sample import TrainSamples

MICRO_BATCH = 16
PREFETCH = 4


class Unmatched:
    """The targets of a network without labels."""

    counts = np.zeros(1, np.int64)


def no_match(_labels: np.ndarray, _images: int, _size_hw: tuple[int, int]) -> Any:
    return Unmatched()


def images_per_s(samples: TrainSamples, epoch: int, workers: int, micro_batches: int) -> float:
    """Return the rate of a new loader after what it prepares ahead."""
    warm_up = 2 * workers * PREFETCH
    keys = [
        MicroBatchKey(
            step, 0, tuple((epoch, (step * MICRO_BATCH + i) % len(samples)) for i in range(MICRO_BATCH))
        )
        for step in range(warm_up + micro_batches + workers * PREFETCH)
    ]
    with train_loader(samples, keys, no_match, workers=workers, prefetch=PREFETCH) as loader:
        for _ in range(warm_up):
            next(loader)
        began_s = time.perf_counter()
        for _ in range(micro_batches):
            next(loader)
        return micro_batches * MICRO_BATCH / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--img", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=60, help="that are measured in a turn")
    asked = parser.parse_args()
    index = build_index(load_dataset(asked.data), "train")
    print("| px | images | one process, images/s | two | ratio |\n|---|---|---|---|---|")
    for img in asked.img:
        for mode in ("ram", "none"):
            cache = ImageCache(index, img, mode, quick=True)
            if mode == "ram":
                for image in range(len(index)):
                    cache.get(image)
            samples = TrainSamples(index, cache, Recipe(), img=img, seed=0, epochs=1000)
            turns = [
                [images_per_s(samples, turn, workers, asked.micro_batches) for workers in (1, 2)]
                for turn in range(asked.turns)
            ]
            one, two = (median(each) for each in zip(*turns, strict=True))
            cache.close()
            print(
                f"| {img} | {'cached' if mode == 'ram' else 'files'} | {one:.0f} | {two:.0f} | {two / one:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
