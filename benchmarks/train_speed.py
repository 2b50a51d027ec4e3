"""Images per second of `yolofleet train` against the bare network, on one core.

    python benchmarks/train_speed.py --data shapes --img 320 --steps 12

*full* is the whole training loop of the command: samples from the RAM cache (mosaic, colour, flips), target
matching, forward, loss, backward, clipping, SGD, moving average, batch-norm statistics, clock and progress.
*bare* is forward, backward and SGD of the same network on a ready batch, channels-last, with a trivial loss.
Each training step is followed by a bare step on the same images, so both see the same neighbours on a shared
machine. Start-up, the first steps, validation and checkpoints are left out. Times are CPU seconds of this one
thread (wall seconds are printed too); medians over the steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from yolofleet import worker
from yolofleet.config.load import resolve_train
from yolofleet.data.loader import MicroBatch, train_loader
from yolofleet.data.sample import TrainSamples
from yolofleet.datasets.index import build_index
from yolofleet.datasets.sources import load_dataset
from yolofleet.families import build_model
from yolofleet.models.description import describe
from yolofleet.report.folder import RunFolder

WARM_UP = 3  # steps: allocation, kernel choice


class Enough(Exception):
    """Ends the run where the measurement does, before its last validation."""


class Bare:
    """Forward, backward and SGD of the same network, nothing else."""

    def __init__(self, model: str, nc: int) -> None:
        self.net = build_model(describe(model), nc).train()
        cast(Any, self.net).to(memory_format=torch.channels_last)  # torch's stub does not know it
        self.sgd = torch.optim.SGD(
            self.net.parameters(), lr=1e-6, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
        )

    def step(self, images: torch.Tensor) -> None:
        raws = self.net(images)
        torch.stack([raw.sum() for raw in raws]).sum().mul(1e-6).backward()
        self.sgd.step()
        self.sgd.zero_grad()


class Interleaved:
    """The run's loader; between two steps of the run it times one of ``bare``.

    A step of the run lasts from the moment its micro-batch is asked for until the next one is.
    """

    def __init__(self, batches: Any, bare: Bare, steps: int) -> None:
        self.batches, self.bare, self.left = batches, bare, steps + WARM_UP
        self.seconds: dict[str, list[tuple[float, float]]] = {"data": [], "full": [], "bare": []}
        self.last: MicroBatch | None = None
        self.began = (0.0, 0.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self.last is not None:
            self._charge("full", self.began)
            images = self.last.images.float().div_(255)
            began = now()
            self.bare.step(images)
            self._charge("bare", began)
            self.left -= 1
        if not self.left:
            raise Enough
        self.began = now()
        self.last = next(self.batches)
        self._charge("data", self.began)
        return self.last

    def _charge(self, what: str, began: tuple[float, float]) -> None:
        cpu_s, wall_s = now()
        self.seconds[what].append((cpu_s - began[0], wall_s - began[1]))

    def close(self) -> None:
        self.batches.close()


def now() -> tuple[float, float]:
    """CPU seconds of this process, wall seconds."""
    return time.process_time(), time.perf_counter()


def measure(data: str, model: str, img: int, batch: int, steps: int) -> dict[str, tuple[float, float]]:
    """Median (CPU, wall) seconds of a step of ``batch`` images: "data", "full", "bare"."""
    bare = Bare(model, len(build_index(load_dataset(data), "train").names))
    made: list[Interleaved] = []

    def loader(samples: TrainSamples, *rest: Any, **settings: Any) -> Interleaved:
        for image in range(len(samples)):  # fill the RAM cache: decoding is of the first epoch only
            samples.cache.get(image)
        made.append(Interleaved(train_loader(samples, *rest, **settings), bare, steps))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        size = {"img": img, "batch": batch, "micro_batch": batch, "nominal_batch": batch, "epochs": 1000}
        quiet = {"val_period": 0, "save_period": 0, "save_minutes": 0, "plots": False, "autoanchor": False}
        where = {"device": "cpu", "threads": 1, "workers": 0, "cache": "ram", "project": folder}
        config, recipe = resolve_train(
            {"data": data, "model": model, **size, **quiet, **where}, source="benchmark"
        )
        worker.train_loader = loader  # type: ignore[assignment]
        try:
            worker.run(config, recipe, RunFolder(Path(folder)))
        except Enough:
            pass
        finally:
            worker.train_loader = train_loader
    return {
        what: (median(cpu for cpu, _ in rows[WARM_UP:]), median(wall for _, wall in rows[WARM_UP:]))
        for what, rows in made[0].seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", default="shapes", help="as of yolofleet train")
    parser.add_argument("--model", default="yolov5n")
    parser.add_argument("--img", type=int, default=320, help="pixels")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, one micro-batch")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = measure(**vars(asked))
    print(f"\n{asked.model}, {asked.data}, {asked.img} px, {asked.batch} images a step, one core")
    for what, (cpu_s, wall_s) in found.items():
        print(f"  {what}  {asked.batch / cpu_s:7.1f} img/s CPU  {asked.batch / wall_s:7.1f} img/s wall")
    print(f"  full / bare = {found['bare'][0] / found['full'][0]:.3f} of the bare network's speed (CPU)")


if __name__ == "__main__":
    main()
