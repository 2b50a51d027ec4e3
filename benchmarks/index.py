"""Seconds to read, check and store the labels of a data set, and to find them again.

    python benchmarks/index.py --images 20000 --processes 4

The images are links to one small JPEG with 7 labels each, in a temporary folder; no image is decoded for the
index. With ``--processes``, so many at once: with the cache of one machine, of which one builds the index, and with a
cache each. Then the file of flat arrays that 2,000,000 images with 10 labels each would have, and what a process
pays to look into it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.datasets.sources import DatasetSpec, load_dataset


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
        image_ids=np.arange(images),
        sizes_wh=np.full((images, 2), 640, np.int32),
        offsets=np.arange(images + 1, dtype=np.int64) * 10,
        classes=np.zeros(labels, np.int32),
        boxes_cxcywh_unit=np.full((labels, 4), 0.5, np.float32),
        crowd=np.zeros(labels, bool),
        area_px=np.ones(labels),
    )


def build(spec: DatasetSpec, cache: str) -> None:
    os.environ["YOLOFLEET_CACHE"] = cache
    build_index(spec, "train")


def together(spec: DatasetSpec, caches: list[str]) -> float:
    """Seconds until every one of these processes has its index."""
    processes = [multiprocessing.Process(target=build, args=(spec, cache)) for cache in caches]
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
    parser.add_argument("--large", type=int, default=0, help="images of the large index; 2000000")
    asked = parser.parse_args()
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
            print(f"{asked.processes} processes at once: {one_s:.2f} s, with a cache each {each_s:.2f} s")
        if asked.large:
            file = Path(folder) / "large.arrays"
            large_index(asked.large).save(file)
            mapped = DataIndex.load(file)
            assert mapped is not None
            sent = pickle.dumps(mapped)  # what a loader process gets
            began_s = time.perf_counter()
            for image in np.random.default_rng(0).integers(0, asked.large, 20_000):
                mapped.labels(image)
            each_us = (time.perf_counter() - began_s) / 20_000 * 1e6
            size = file.stat().st_size / 2**20
            print(f"{asked.large} images x 10 labels: {size:.0f} MiB on disk, mapped by every process,")
            print(f"  {len(sent)} bytes sent to a loader process, {each_us:.1f} us for one image's labels")


if __name__ == "__main__":
    main()
