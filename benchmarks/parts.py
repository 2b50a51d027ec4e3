"""Milliseconds of small parts on one core: loss, non-maximum suppression, `--help`.

python benchmarks/parts.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from yolofleet.data.geometry.nms import nms
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss


def cpu_ms(work: Callable[[], object], times: int) -> float:
    """Median CPU milliseconds; the first call is left out."""
    seconds = []
    for _ in range(times + 1):
        began_s = time.process_time()
        work()
        seconds.append(time.process_time() - began_s)
    return 1e3 * median(seconds[1:])


def loss_ms(img: int, batch: int) -> float:
    """Value and gradient of the loss alone, 10 labels an image, three classes."""
    model = build_model(describe("yolov5n"), 3)
    assert model.anchors_px is not None
    cast(Any, model).to(memory_format=torch.channels_last)  # torch's stub does not know it
    loss = Yolov5Loss(
        anchors_px=model.anchors_px, strides=model.strides, nc=3, recipe=Yolov5Hyperparameters(), img=img
    )
    rng = np.random.default_rng(0)
    parts = [Shapes.of_image(rng.integers(0, 3, 10), rng.uniform(0.05, 0.5, (10, 4))) for _ in range(batch)]
    with torch.no_grad():
        raws = model(torch.rand(batch, 3, img, img).to(memory_format=torch.channels_last))
    raws = [raw.requires_grad_() for raw in raws]
    targets = loss.match(Shapes.of_images(parts), batch, (img, img))
    return cpu_ms(lambda: loss.sums(raws, targets).sum().backward(), 20)


def nms_ms(boxes: torch.Tensor, classes: int) -> float:
    """At most 300 kept, IoU 0.6."""
    pick = torch.Generator().manual_seed(1)
    scores = torch.rand(len(boxes), generator=pick)
    groups = torch.randint(0, classes, (len(boxes),), generator=pick)
    return cpu_ms(lambda: nms(boxes, scores, 0.6, groups=groups, max_det=300), 5)


def scattered(count: int) -> torch.Tensor:
    pick = torch.Generator().manual_seed(0)
    centre = torch.rand(count, 2, generator=pick) * 640
    half = torch.rand(count, 2, generator=pick) * 50 + 2
    return torch.cat((centre - half, centre + half), 1)


def clustered(count: int, clusters: int) -> torch.Tensor:
    """Nearly ``max_det`` objects with many boxes each: every box has to be looked at."""
    pick = torch.Generator().manual_seed(0)
    centres = torch.rand(clusters, 2, generator=pick) * 640
    centre = centres[torch.randint(0, clusters, (count,), generator=pick)]
    return torch.cat((centre - 12, centre + 12), 1) + torch.rand(count, 4, generator=pick) * 2


def help_s() -> float:
    """CPU seconds of `yolofleet --help`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        subprocess.run([sys.executable, "-m", "yolofleet", "--help"], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5


def main() -> None:
    torch.set_num_threads(1)
    print("parts, one core, CPU time")
    print(f"  loss, value and gradient, 320 px, 16 images    {loss_ms(320, 16):6.1f} ms")
    print(f"  NMS, 30,000 boxes all over, 80 classes         {nms_ms(scattered(30_000), 80):6.1f} ms")
    print(f"  NMS, 30,000 boxes all over, 1 class            {nms_ms(scattered(30_000), 1):6.1f} ms")
    print(f"  NMS, 30,000 boxes on 290 objects, 1 class      {nms_ms(clustered(30_000, 290), 1):6.1f} ms")
    print(f"  yolofleet --help                               {1e3 * help_s():6.0f} ms")


if __name__ == "__main__":
    main()
