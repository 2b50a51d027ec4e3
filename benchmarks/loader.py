"""Training images per second of the loader on real data, on one core; beside YOLOv5's loader if there is one.

    python benchmarks/loader.py --data coco128.yaml [--rival DIR --rival-python PYTHON]
    python benchmarks/loader.py --data coco128.yaml --bytes
    python benchmarks/loader.py --data nuclei.yaml --masks

Each cell is the CPU time of making all images of the training split one by one, with the default recipe, from images
in memory (cached) or from files (not cached). DIR holds a checkout of YOLOv5, or a package of it; it is run in PYTHON's
environment and not read. Both take turns in the same run, and medians over the turns are printed. *decode* is the part
that no loader avoids without a cache: reading and decoding the images that the samples see. ``--bytes`` counts what is read
and decoded for a sample instead, where whole images are decoded and where only the parts that are seen are. ``--masks`` compares
labels with masks and labels with boxes alone, each with the target assignment of yolov5n, which rasterises the masks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

IMAGES = 10  # of a micro-batch, for the target assignment
RIVAL = """
import json, sys, time
import cv2
from importlib import import_module
sys.path.insert(0, {folder!r})
Set = import_module({module!r}).LoadImagesAndLabels
cv2.setNumThreads(1)
hyp = dict(mosaic=1.0, mixup=0.0, copy_paste=0.0, degrees=0.0, translate=0.1, scale=0.5, shear=0.0, perspective=0.0,
           hsv_h=0.015, hsv_s=0.7, hsv_v=0.4, flipud=0.0, fliplr=0.5)
data = Set({images!r}, {img}, 16, augment=True, hyp=hyp, cache_images={cache!r})
data[0]
print("ready", flush=True)
for _ in sys.stdin:
    began = time.process_time()
    for i in range(len(data)):
        data[i]
    print(json.dumps(len(data) / (time.process_time() - began)), flush=True)
"""


def ours(path: str, img: int, cached: bool, model: str = "") -> None:
    """Answer each line on standard input with images per second, with the target assignment of a model if there is one."""
    import cv2
    import numpy as np

    from yolofleet.config.schema import Recipe
    from yolofleet.data.datasets.index import build_index
    from yolofleet.data.datasets.sources import load_dataset
    from yolofleet.data.input.cache import ImageCache
    from yolofleet.data.input.sample import TrainSamples
    from yolofleet.families.build import build_model, family_loss
    from yolofleet.families.networks.description import describe
    from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
    from yolofleet.support.system.proc import reuse_freed_memory
    from yolofleet.tasks.masks.task import MASKS

    cv2.setNumThreads(1)
    reuse_freed_memory()  # as in a loader process
    masks = model.endswith("-seg")
    index = build_index(load_dataset(path), "train", masks=masks)
    cache = ImageCache(index, img, "ram" if cached else "none", quick=True)
    labels = MASKS.labels if masks else None
    samples = TrainSamples(index, cache, Recipe(), img=img, seed=0, epochs=1000, labels=labels)
    hyperparameters = Yolov5Hyperparameters()
    match = (
        family_loss(build_model(describe(model), len(index.names)), hyperparameters, img).match
        if model
        else None
    )
    out = np.empty((img, img, 3), np.uint8)
    for image in range(len(index)):
        cache.get(image)
    print("ready", flush=True)
    for epoch, _ in enumerate(sys.stdin):
        began_s = time.process_time()
        found = []
        for position in range(len(index)):
            found.append(samples.sample(epoch, position, out)[1])
            if match is not None and len(found) == IMAGES:
                match(samples.no_labels.of_images(found), IMAGES, (img, img), [(0, epoch, position)] * IMAGES)
                found.clear()
        print(json.dumps(len(index) / (time.process_time() - began_s)), flush=True)
    cache.close()


def count_bytes(path: str, img: int) -> tuple[float, float, float]:
    """Return kilobytes of a sample, means of an epoch: files read, pixels of whole images, pixels of the parts."""
    import numpy as np

    from yolofleet.config.schema import Recipe
    from yolofleet.data.datasets.index import build_index
    from yolofleet.data.datasets.sources import load_dataset
    from yolofleet.data.geometry.view import Part
    from yolofleet.data.images import decode
    from yolofleet.data.input.cache import ImageCache
    from yolofleet.data.input.sample import TrainSamples

    sums, decode_part, decode_whole = np.zeros(3), decode._decode_part, decode.decode_image

    def counted_part(data: bytes, header: Any, reduction: int, seen: Part) -> np.ndarray | None:
        part = decode_part(data, header, reduction, seen)
        if part is not None:
            height, width = part.shape[:2]
            x1, y1, x2, y2 = np.clip(seen, 0, [width, height] * 2)
            sums[2] += 3 * int(x2 - x1) * int(y2 - y1) - part.nbytes
        return part

    def counted_whole(data: bytes, *place: Any, **more: Any) -> np.ndarray:
        image = decode_whole(data, *place, **more)
        sums[:] += len(data), image.nbytes, image.nbytes
        return image

    index = build_index(load_dataset(path), "train")
    samples = TrainSamples(
        index, ImageCache(index, img, "none", quick=True), Recipe(), img=img, seed=0, epochs=1000
    )
    vars(decode).update(_decode_part=counted_part, decode_image=counted_whole)
    for position in range(len(index)):
        samples.sample(0, position, np.empty((img, img, 3), np.uint8))
    read, whole, parts = (sums / len(index) / 1000).tolist()
    return read, whole, parts


def images_of(path: str) -> str:
    """Return the folder of the training images."""
    from yolofleet.data.datasets.index import build_index
    from yolofleet.data.datasets.sources import load_dataset

    return str(Path(build_index(load_dataset(path), "train").path(0)).parent)


class Program:
    """A process that measures once for each line that it gets."""

    def __init__(self, argv: list[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "false"}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(argv, **streams, text=True, env=environment)  # type: ignore[call-overload]
        assert self.process.stdout and self.process.stdin
        for line in self.process.stdout:
            if line == "ready\n":
                return
        raise SystemExit(f"{argv[0]} ended before it was ready")

    def measure(self) -> float:
        """Return images per second."""
        assert self.process.stdout and self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--img", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rival", help="folder to import YOLOv5 from")
    parser.add_argument("--rival-module", default="utils.dataloaders")
    parser.add_argument("--rival-python", default=sys.executable)
    parser.add_argument("--masks", action="store_true", help="compare labels with masks and with boxes alone")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)  # be the process that measures
    parser.add_argument("--bytes", action="store_true", help="count bytes of a sample instead")
    asked = parser.parse_args()
    if asked.serve:
        return ours(asked.data, int(asked.serve[0]), asked.serve[1] == "cached", asked.serve[2])
    if asked.bytes:
        print("| px | files read, kB | whole images, kB | parts, kB | parts / whole |\n|---|---|---|---|---|")
        for img in asked.img:
            read, whole, parts = count_bytes(asked.data, img)
            print(f"| {img} | {read:.0f} | {whole:.0f} | {parts:.0f} | {parts / whole:.2f} |")
        return
    first, second = ("masks", "boxes") if asked.masks else ("ours", "YOLOv5")
    print(f"| px | images | {first}, images/s | {second}, images/s | ratio |\n|---|---|---|---|---|")
    for img in asked.img:
        for cached in (True, False):
            word = "cached" if cached else "files"
            serve = [sys.executable, __file__, "--data", asked.data, "--serve", str(img), word]
            models = ["yolov5n-seg", "yolov5n"] if asked.masks else [""]
            programs = [Program([*serve, model]) for model in models]
            if asked.rival:
                code = RIVAL.format(
                    folder=asked.rival,
                    module=asked.rival_module,
                    images=images_of(asked.data),
                    img=img,
                    cache="ram" if cached else None,
                )
                programs.append(Program([asked.rival_python, "-c", code]))
            turns = [[program.measure() for program in programs] for _ in range(asked.turns)]
            rates = [median(each) for each in zip(*turns, strict=True)]
            for program in programs:
                program.close()
            theirs = f"{rates[1]:.1f} | {rates[0] / rates[1]:.2f}" if len(rates) > 1 else " | "
            print(f"| {img} | {word} | {rates[0]:.1f} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
