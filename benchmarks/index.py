"""Seconds to read, check and store the labels of a data set, and to find them again.

    python benchmarks/index.py --images 20000 --processes 4

The images are links to one small JPEG with 7 labels each, in a temporary folder; no image is decoded for the
index. With ``--processes``, so many at once: with the cache of one machine, of which one builds the index, and with a
cache each: processes of their own, or ranks of one run, which divide the files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.distributed as dist

from yolofleet.data.datasets import scan
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import DatasetSpec, load_dataset
from yolofleet.data.images.header import ImageHeader
from yolofleet.training.parallel.world import World

LINKS = 20_000  # of one file; file systems have limits


def make_set(root: Path, images: int, val_images: int = 0) -> Path:
    """Write images of 64 px, which are links to a few files, with seven labels each; return the YAML file.

    Without ``val_images``, the training split is the validation split, too.
    """
    rng = np.random.default_rng(0)
    for number in range(images + val_images):
        split = "train" if number < images else "val"
        image, label = (root / kind / split / f"{number:012}" for kind in ("images", "labels"))
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        if number % LINKS == 0:
            cv2.imwrite(str(one := root / f"one-{number}.jpg"), rng.integers(0, 255, (64, 64, 3), np.uint8))
        os.link(one, image.with_suffix(".jpg"))
        rows = [f"{i % 3} " + " ".join(f"{v:.6f}" for v in rng.uniform(0.2, 0.4, 4)) for i in range(7)]
        label.with_suffix(".txt").write_text("\n".join(rows))
    val = "val" if val_images else "train"
    (root / "data.yaml").write_text(f"train: images/train\nval: images/{val}\nnames: [a, b, c]\n")
    return root / "data.yaml"


def build(spec: DatasetSpec, cache: str, rank: int, size: int, meet: str) -> None:
    os.environ["YOLOFLEET_CACHE"] = cache
    world = None
    if meet:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
        world = World(rank, size, rank, size, torch.device("cpu"))
    build_index(spec, "train", ranks=world)
    if world is not None:
        world.close()


def together(spec: DatasetSpec, caches: list[str], meet: str = "") -> float:
    """Seconds until every one of these processes has its index.

    Args:
        meet: file of the rendezvous, if they are the ranks of one run.
    """
    processes = [
        multiprocessing.Process(target=build, args=(spec, cache, rank, len(caches), meet))
        for rank, cache in enumerate(caches)
    ]
    began_s = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=1, help="that need the index at once")
    parser.add_argument("--latency-ms", type=float, default=0, help="to open an image, as on a network disk")
    asked = parser.parse_args()
    if asked.latency_ms:
        header_of_file = scan.header_of_file

        def late(path: str) -> ImageHeader | None:
            time.sleep(asked.latency_ms / 1e3)
            return header_of_file(path)

        scan.header_of_file = late
    with tempfile.TemporaryDirectory() as folder:
        os.environ["YOLOFLEET_CACHE"] = f"{folder}/cache"
        spec = load_dataset(str(make_set(Path(folder) / "set", asked.images)))
        for what in ("built", "found again"):
            began_s = time.perf_counter()
            index = build_index(spec, "train")
            print(f"index of {len(index)} images {what} in {time.perf_counter() - began_s:.2f} s")
        if asked.processes > 1:
            one_s = together(spec, [f"{folder}/one"] * asked.processes)
            each_s = together(spec, [f"{folder}/each-{rank}" for rank in range(asked.processes)])
            caches = [f"{folder}/run-{rank}" for rank in range(asked.processes)]
            shared_s = together(spec, caches, f"{folder}/meet")
            print(
                f"{asked.processes} processes at once: {one_s:.2f} s, with a cache each {each_s:.2f} s, "
                f"with a cache each as ranks of one run {shared_s:.2f} s"
            )


if __name__ == "__main__":
    main()
