"""What it costs to know that a data set has not changed: listing at the start, comparison at a resume, digests of contents.

    python benchmarks/same_data.py --images 100000 --kb 12

The images are small JPEGs, made once in --folder. CPU and wall seconds; the files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np

from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.datasets.listing import Listing, compare, copy_id, is_same_content, paths_of, reading_contents
from yolofleet.datasets.sources import load_dataset


def make(folder: Path, images: int, kb: int) -> None:
    """Write images with a label each, 1 % of them for validation; each has other bytes."""
    jpeg = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8))[1].tobytes()
    for number in range(images):
        split = "train" if number % 100 else "val"
        for kind, suffix in (("images", ".jpg"), ("labels", ".txt")):
            path = folder / kind / split / f"{number:07d}{suffix}"
            if not number // 100:
                path.parent.mkdir(parents=True, exist_ok=True)
            content = jpeg + number.to_bytes(4, "little") + bytes(max(0, 1000 * kb - len(jpeg) - 4))
            path.write_bytes(content if kind == "images" else b"0 0.5 0.5 0.5 0.5\n")
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [thing]\n")


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    print(f"{what:58s} {time.perf_counter() - wall_s:7.2f} s wall {time.process_time() - cpu_s:7.2f} s CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--kb", type=int, default=12, help="size of an image file")
    parser.add_argument("--folder", type=Path, default=Path("same_data"))
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    os.environ["YOLOFLEET_CACHE"] = str(folder / "cache")
    if not (folder / "data.yaml").exists():
        make(folder, arguments.images, arguments.kb)
    spec = load_dataset(str(folder))
    splits: list[DataIndex] = []
    for what in ("build the index", "find the index again, with a stat of each file"):
        with timed(what):
            splits = [build_index(spec, split) for split in ("train", "val")]
    with timed("id of the copy, at each start"):
        copy_id(splits)
    with timed("listing, written at each start"):
        listing = Listing.of(splits, spec.root, folder / "listing.json")
        text = listing.text()
    print(f"{'size of the listing':58s} {len(text) / 1e6:7.1f} MB")
    paths = paths_of(splits)
    with timed("digests of all contents, one thread at full speed"):
        digests = [is_same_content(path, "0" * 32) for path in paths]
    with timed("digests of all contents, 8 threads (a resume, other times)"), ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(is_same_content, paths, ["0" * 32] * len(paths)))
    assert not any(digests)
    with timed("compare the names, sizes and times of two listings"):
        compare(listing, Listing.of_text(text.encode()) or listing)
    with (
        timed("digests beside a training (the thread waits 75 %)"),
        reading_contents(listing, folder / "listing.json", splits),
    ):
        while not all(listing.contents):
            time.sleep(0.1)
    with timed("listing with digests from the cache, at a later start"):
        Listing.of(splits, spec.root, folder / "listing.json").text()


if __name__ == "__main__":
    main()
