"""Images per second on one GPU: the training step beside the bare network, and whole runs with their loader.

    python benchmarks/gpu.py                      # about three minutes
    python benchmarks/gpu.py --models yolov5s --img 640 --micro-batch 16 --batch 64

*step* is ``train_step`` on ready micro-batches in page-locked memory: copy to the GPU, forward, loss, backward, clipping,
SGD, moving average, batch-norm statistics. *bare* is forward, backward and SGD of the same network on a batch that is on
the GPU already, with a trivial loss and gradients accumulated over as many micro-batches. Both use the same number
format, channels-last and cuDNN's benchmark, except that exact sums use deterministic kernels. Values are medians of
``ROUNDS`` rounds, with step and bare in turn.

*run* is ``yolofleet train`` on generated pictures: the rate that the command reports, without the first steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from yolofleet import devices
from yolofleet.config.recipe import load_recipe
from yolofleet.config.schema import TrainConfig
from yolofleet.data.loader import MicroBatch
from yolofleet.datasets.shapes import make_shapes
from yolofleet.families import build_model, family_of
from yolofleet.models.description import describe
from yolofleet.models.precision import autocast
from yolofleet.parallel.process import set_kernels
from yolofleet.parallel.replicas import Replicas
from yolofleet.parallel.world import World
from yolofleet.report.clock import Clock
from yolofleet.train.schedule import StepPlan
from yolofleet.train.state import TrainState
from yolofleet.train.step import train_step

CLASSES, LABELS = 80, 8  # labels of an image
WARM_UP, STEPS, ROUNDS = 6, 8, 5
CASES = [("fp16", False), ("bf16", False), ("fp32", False), ("fp16", True)]  # number format, exact sums


class Ours:
    """The training step of a network without the other parts of a run."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        img: int,
        micro_batch: int,
        batch: int,
        precision: str,
        exact: bool,
    ) -> None:
        description = describe(name)
        family = family_of(description)
        self.recipe = load_recipe(family.recipe_name).value
        self.world, self.batch, self.precision = World.single(device), batch, precision
        model = cast(Any, build_model(description, CLASSES).to(device)).to(memory_format=torch.channels_last)
        self.loss = family.loss(model, self.recipe, img).at(0.9)  # PP-YOLOE's aligned assigner
        replicas = Replicas.build(
            model.train(), [device], self.world, reduce="exact" if exact else "fast", synced=False
        )
        self.state = TrainState.build(
            replicas, self.recipe, optimizer="SGD", weight_decay=5e-4, precision=precision
        )
        self.share = [self._micro_batch(n, micro_batch, img) for n in range(batch // micro_batch)]

    def _micro_batch(self, number: int, images: int, img: int) -> MicroBatch:
        rng = np.random.default_rng(number)
        pixels = torch.from_numpy(rng.integers(0, 256, (images, img, img, 3), dtype=np.uint8))
        labels = np.zeros((LABELS * images, 6), np.float32)
        labels[:, 0] = np.repeat(np.arange(images), LABELS)
        labels[:, 1] = rng.integers(0, CLASSES, len(labels))
        labels[:, 2:] = rng.uniform(0.2, 0.6, (len(labels), 4))
        targets = self.loss.match(labels, images, (img, img))
        batch = MicroBatch(0, number, pixels.permute(0, 3, 1, 2), labels, targets)
        return batch.pin_memory() if devices.can_pin(self.world.device) else batch

    def step(self) -> None:
        plan = StepPlan(self.state.step, self.state.step * self.batch, self.batch, 1e-5, 1e-5, 0.9)
        train_step(
            self.state,
            plan,
            [self.share],
            self.loss,
            self.world,
            Clock(),
            total_micro_batches=len(self.share),
            precision=self.precision,
            clip_norm=10.0,
        )


class Bare:
    """Forward, backward and SGD of the same network, nothing else."""

    def __init__(
        self, name: str, device: torch.device, img: int, micro_batch: int, batch: int, precision: str
    ) -> None:
        self.passes, self.precision = batch // micro_batch, precision
        self.net = cast(Any, build_model(describe(name), CLASSES).to(device).train())
        self.net.to(memory_format=torch.channels_last)
        self.sgd = torch.optim.SGD(
            self.net.parameters(), lr=1e-6, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
        )
        self.images = torch.rand(micro_batch, 3, img, img, device=device).to(
            memory_format=torch.channels_last
        )

    def step(self) -> None:
        for _ in range(self.passes):
            with autocast(self.precision, self.images.device):
                outputs = self.net(self.images)
            torch.stack([t.float().sum() for t in tensors_of(outputs)]).sum().mul(1e-6).backward()
        self.sgd.step()
        self.sgd.zero_grad()


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return all floating-point tensors of a network's output that have a gradient."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.requires_grad else []
    return [t for part in outputs for t in tensors_of(part)]


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the wall seconds of one call, from ``STEPS`` calls."""
    devices.synchronize(device)
    began_s = time.perf_counter()
    for _ in range(STEPS):
        work()
    devices.synchronize(device)
    return (time.perf_counter() - began_s) / STEPS


def step_row(
    name: str, device: torch.device, img: int, micro_batch: int, batch: int, precision: str, exact: bool
) -> str:
    """Measure one case; return a row of the table."""
    set_kernels(TrainConfig(reduce="exact" if exact else "fast"))
    if not devices.is_host(device):
        torch.cuda.reset_peak_memory_stats(device)
    ours = Ours(name, device, img, micro_batch, batch, precision, exact)
    for _ in range(WARM_UP):
        ours.step()
    devices.synchronize(device)
    peak_gib = devices.peak_memory_bytes(device) / 2**30
    torch.use_deterministic_algorithms(False)
    set_kernels(TrainConfig())
    bare = Bare(name, device, img, micro_batch, batch, precision)
    for _ in range(WARM_UP):
        bare.step()
    rounds = []
    for _ in range(ROUNDS):
        if exact:
            set_kernels(TrainConfig(reduce="exact"))
        ours_s = seconds(ours.step, device)
        if exact:
            torch.use_deterministic_algorithms(False)
            set_kernels(TrainConfig())
        rounds.append((ours_s, seconds(bare.step, device)))
    ours_s, bare_s = (median(column) for column in zip(*rounds, strict=True))
    return (
        f"| {name} | {img} | {batch} / {micro_batch} | {precision}{' exact' if exact else ''} | "
        f"{batch / ours_s:,.0f} | {batch / bare_s:,.0f} | {bare_s / ours_s:.2f} | {peak_gib:.1f} |"
    )


def run_row(folder: Path, data: Path, device: str, model: str, img: int, batch: int, *more: str) -> str:
    """Train with the command; return a row of the table."""
    name = "-".join([model, *more]).replace("--", "").replace(" ", "")
    size = ["--img", str(img), "--batch", str(batch), "--nominal-batch", str(batch), "--epochs", "4"]
    quiet = ["--val-period", "0", "--no-plots", "--no-autoanchor", "--cache", "ram", "--device", device]
    command = [sys.executable, "-m", "yolofleet", "train", "--data", str(data), "--model", model]
    done = subprocess.run(
        [*command, *size, *quiet, *more, "--project", str(folder), "--name", name],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"| {model} | {img} | {batch} | {' '.join(more)} | failed: {done.stderr.strip()[-300:]} |"
    with (folder / name / "results.csv").open() as file:
        rows = list(csv.DictReader(file))[1:]  # the first epoch decodes
    rate = median(float(row["images_per_s"]) for row in rows)
    data_share = median(float(row["data_share"]) for row in rows)
    took = json.loads((folder / name / "results.json").read_text())["seconds"]
    return (
        f"| {model} | {img} | {batch} | {' '.join(more)} | {rate:,.0f} | {100 * data_share:.0f} % | "
        f"{took['start']:.1f} | {took['evaluate']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["yolov5n", "yolov5s", "yolov3", "ppyoloe-s"])
    parser.add_argument("--img", type=int, default=640, help="pixels")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--device", default="0", help="number of the GPU")
    parser.add_argument(
        "--images", type=int, default=1024, help="of the generated data set; 0: no whole runs"
    )
    asked = parser.parse_args()
    device = devices.device_of(asked.device, 0)
    devices.select(device)
    print(f"{devices.name_of(device)}, torch {torch.__version__}\n")
    print("| network | px | batch / micro-batch | format | step img/s | bare img/s | ratio | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.models:
        for precision, exact in CASES:
            print(
                step_row(name, device, asked.img, asked.micro_batch, asked.batch, precision, exact),
                flush=True,
            )
            torch.cuda.empty_cache()
    if not asked.images:
        return
    print("\n| network | px | batch | options | run img/s | waiting for data | start s | last validation s |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = make_shapes(Path(folder, "data"), images=asked.images, val_images=128, img=asked.img, seed=0)
        for model in asked.models[:2]:
            for more in (["--workers", "8"], ["--workers", "15"], ["--workers", "15", "--reduce", "exact"]):
                print(
                    run_row(Path(folder), data, asked.device, model, asked.img, asked.batch, *more),
                    flush=True,
                )


if __name__ == "__main__":
    main()
