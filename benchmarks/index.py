"""Seconds to read, check and store the labels of a data set, and to find them again.

    python benchmarks/index.py --images 20000 --processes 4

The images are links to one small JPEG with 7 labels each, in a temporary folder; no image is decoded for the
index. With ``--processes``, so many at once: with the cache of one machine, of which one builds the index, and with a
cache each: processes of their own, or ranks of one run, which divide the files. With ``--large 2000000``, the file of flat arrays that so many images with 10 labels each would have: how
long the next start takes to find it, and what loader processes pay in time and private memory to look into it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.distributed as dist

from yolofleet.config.schema import Recipe
from yolofleet.datasets import scan
from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.datasets.sources import DatasetSpec, load_dataset
from yolofleet.images.header import ImageHeader
from yolofleet.input.cache import ImageCache
from yolofleet.input.loader import Loader
from yolofleet.input.sample import TrainSamples
from yolofleet.parallel.world import World


def make_set(root: Path, images: int) -> Path:
    for kind in ("images", "labels"):
        (root / kind / "train").mkdir(parents=True)
    cv2.imwrite(str(root / "one.jpg"), np.zeros((64, 64, 3), np.uint8))
    rng = np.random.default_rng(0)
    for number in range(images):
        os.link(root / "one.jpg", root / "images" / "train" / f"{number:06}.jpg")
        rows = [f"{i % 3} " + " ".join(f"{v:.6f}" for v in rng.uniform(0.2, 0.4, 4)) for i in range(7)]
        (root / "labels" / "train" / f"{number:06}.txt").write_text("\n".join(rows))
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [a, b, c]\n")
    return root / "data.yaml"


def large_index(images: int) -> DataIndex:
    names = [f"/data/images/train/patch{k % 50}/{k:09d}.jpg".encode() for k in range(images)]
    ends = np.cumsum([0, *map(len, names)])
    labels = images * 10
    return DataIndex(
        key="k",
        digest="d",
        split="train",
        names=("a",),
        path_bytes=np.frombuffer(b"".join(names), np.uint8),
        path_offsets=ends.astype(np.int64),
        stamps=np.full((images, 2), 1 << 17),
        image_ids=np.arange(images),
        sizes_wh=np.full((images, 2), 640, np.int32),
        offsets=np.arange(images + 1, dtype=np.int64) * 10,
        classes=np.zeros(labels, np.int32),
        boxes_cxcywh_unit=np.full((labels, 4), 0.5, np.float32),
        crowd=np.zeros(labels, bool),
        area_px=np.ones(labels),
        polygon_offsets=np.zeros(1, np.int64),
        point_offsets=np.zeros(1, np.int64),
        points=np.zeros((0, 2), np.uint16),
    )


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


class Looks:
    """Looks up what a sample needs of the index, as a loader process: for 64 samples at a time, a mosaic each."""

    def __init__(self, index: DataIndex) -> None:
        cache = ImageCache(index, 640, "none")
        self.samples = TrainSamples(index, cache, Recipe(), img=640, seed=0, epochs=100)
        self.index = index
        self.rng = np.random.default_rng(os.getpid())

    def __call__(self, key: tuple[int, int]) -> tuple[int, float]:
        """Return this process and the seconds a sample took, without those of a new epoch's order."""
        epoch, first = key
        self.samples.orders.image_of(epoch, first)
        began_s = time.perf_counter()
        for position in range(first, first + 64):
            images = [
                self.samples.orders.image_of(epoch, position),
                *self.rng.integers(0, len(self.index), 3).tolist(),
            ]
            for image in images:
                self.index.labels(image)
                self.index.path(image)
                self.index.sizes_wh[image].tolist()
        return os.getpid(), (time.perf_counter() - began_s) / 64


def private_bytes(process: int | str) -> tuple[int, int]:
    """Return the private memory of a process: written pages, and pages of files that no other process has mapped."""
    fields = dict(
        line.split(":") for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    )
    dirty, clean = (int(fields[name].split()[0]) * 1024 for name in ("Private_Dirty", "Private_Clean"))
    return dirty, clean


def large(file: Path, images: int) -> None:
    """Store an index of that size; print what the next start and two loader processes pay."""
    large_index(images).save(file)
    began_s = time.perf_counter()
    index = DataIndex.load(file)
    found_s = time.perf_counter() - began_s
    assert index is not None
    print(
        f"{images} images x 10 labels: {file.stat().st_size / 2**20:.0f} MiB on disk, mapped by every process,"
    )
    print(
        f"  found and checked by the next start in {found_s:.2f} s, {len(pickle.dumps(index))} bytes when pickled"
    )
    # four epochs one after the other; 200 x 64 samples of each
    keys = [(epoch, first) for epoch in range(4) for first in range(0, min(images, 12_800) - 63, 64)]
    most: dict[int, tuple[int, int]] = {}
    looks, ended = Looks(index), threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            for process in multiprocessing.active_children():
                try:
                    most[process.pid or 0] = max(
                        most.get(process.pid or 0, (0, 0)), private_bytes(process.pid or 0)
                    )
                except (OSError, ValueError, KeyError):
                    continue  # it has just ended

    with Loader(looks, keys, workers=2, prefetch=2, pin_memory=False) as loader:
        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds: list[float] = []
        at_end = {}
        for process, took_s in loader:
            seconds.append(took_s)
            at_end[process] = private_bytes(process)
        ended.set()
        watcher.join()
    for process, (dirty, clean) in at_end.items():
        print(
            f"  loader process: {(dirty + clean) / 1e6:.0f} MB private after 4 epochs ({dirty / 1e6:.0f} MB written, "
            f"{clean / 1e6:.0f} MB of files), at most {sum(most[process]) / 1e6:.0f} MB"
        )
    print(f"  {np.median(seconds) * 1e3:.3f} ms of index time a sample (4 images: labels, path, size)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=1, help="that need the index at once")
    parser.add_argument("--large", type=int, default=0, help="images of the large index; 2000000")
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
            shared_s = together(
                spec, [f"{folder}/run-{rank}" for rank in range(asked.processes)], f"{folder}/meet"
            )
            print(
                f"{asked.processes} processes at once: {one_s:.2f} s, with a cache each {each_s:.2f} s, "
                f"with a cache each as ranks of one run {shared_s:.2f} s"
            )
        if asked.large:
            large(Path(folder) / "large.arrays", asked.large)


if __name__ == "__main__":
    main()
