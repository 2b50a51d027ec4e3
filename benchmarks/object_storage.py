"""A data set in a bucket over a slow link: how much of the link is used, and what an epoch costs once the files are here.

    python benchmarks/object_storage.py --images 5000 --rate 100mbit --delay-ms 20 --turns 5

Two machines in network namespaces (Linux, root, iproute2, openssh-server; ``make test-store`` installs the server). One holds
the store, sends with that rate, and waits before each answer; the other one reads. The link is measured with one large
object. Then, with an empty cache: the index of both splits, and the loader alone over an epoch of mosaics whose files are
absent; the seconds from a command to its first step; each from shards and from files; and in turns an epoch of the loader
from the mirror and from the local disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "store"), str(TESTS / "cluster"), str(TESTS)]
IMG = 320
LINK_BYTES = 32 << 20
FIRST_STEP = """
import os
from yolofleet import Callback

class End(Callback):
    def step(self, step):
        os._exit(0)  # the time of the command is that of its first step
"""
SHARD_BYTES = 16 << 20  # moto copies a whole object for each part that is read


def make_set(folder: Path, images: int) -> Path:
    """Write JPEGs of 640 x 480 px, all different, with three labels each."""
    rng = np.random.default_rng(0)
    for number in range(images):
        split = "train" if number % 10 else "val"
        image, label = (folder / kind / split / f"{number:06d}" for kind in ("images", "labels"))
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        small = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        pixels = cv2.resize(small, (640, 480), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(image.with_suffix(".jpg")), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])
        boxes = rng.uniform(0.2, 0.4, (3, 4)).round(4).tolist()
        label.with_suffix(".txt").write_text("".join(f"0 {' '.join(map(str, box))}\n" for box in boxes))
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [thing]\n")
    return folder / "data.yaml"


# -- on the machine that reads -----------------------------------------------------------------------------------


def read(what: str, data: str) -> None:
    """Print the seconds and bytes of one measurement as JSON."""
    from yolofleet.data.datasets.index import build_index
    from yolofleet.data.datasets.sources import load_dataset
    from yolofleet.storage.object_store import ObjectStore

    began_s = time.monotonic()
    if what == "link":
        root, _, key = data.rpartition("/")
        store = ObjectStore(root)
        objects, _ = store.listing()
        began_s = time.monotonic()
        store.read({key: objects[key]})
        print(json.dumps({"s": time.monotonic() - began_s, "bytes": objects[key].size}))
        return
    if what == "index":
        bytes_read = 0
        for split in ("train", "val"):
            index = build_index(load_dataset(data), split)
            bytes_read += int(index.stamps[:, 0].sum())
        print(json.dumps({"s": time.monotonic() - began_s, "bytes": bytes_read}))
        return
    if what == "first step":
        with TemporaryDirectory() as folder:
            (Path(folder) / "end.py").write_text(FIRST_STEP)
            words = f"--model yolov5n --img {IMG} --batch 16 --nominal-batch 16 --threads 1 --device cpu --no-plots --restarts 0"
            command = [sys.executable, "-m", "yolofleet", "train", "--data", data, *words.split()]
            command += ["--callbacks", "end.py:End"]
            subprocess.run(command, cwd=folder, stdout=sys.stderr, check=False)
        print(json.dumps({"s": time.monotonic() - began_s, "bytes": 0}))
        return
    spec = load_dataset(data)
    index = build_index(spec, "train")
    if what == "absent":
        forget(Path(index.path(0)))
    print(json.dumps({"s": epoch_s(index), "bytes": int(index.stamps[:, 0].sum())}))


def forget(path: Path) -> None:
    """Make the contents of a mirror absent."""
    from yolofleet.storage.mirror import Mirror, _files_of

    mirror = Mirror.of(str(path))
    assert mirror is not None
    for file in list(_files_of(mirror.tree)):
        about = os.stat(file)  # noqa: PTH116
        mirror._make_absent(file, about.st_size, about.st_mtime_ns)


def epoch_s(index) -> float:
    """Return the seconds of an epoch of samples in one loader process."""
    from yolofleet.config.recipe import load_recipe
    from yolofleet.data.input.cache import ImageCache
    from yolofleet.data.input.sample import MicroBatchKey, TrainSamples, train_loader

    recipe = load_recipe("scratch-low").value
    samples = TrainSamples(
        index, ImageCache(index, IMG, "none", quick=True), recipe, img=IMG, seed=0, epochs=300
    )
    keys = [
        MicroBatchKey(0, at, tuple((0, n) for n in range(at, min(at + 16, len(index)))))
        for at in range(0, len(index), 16)
    ]
    began_s = time.monotonic()
    with train_loader(samples, keys, lambda *_: None, workers=2) as loader:
        for _ in loader:
            pass
    return time.monotonic() - began_s


# -- on this machine ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay-ms", type=int, default=20, help="before each answer of the store")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(*options.read)
        return
    with TemporaryDirectory(prefix="yolofleet-store-") as folder:
        measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    import server
    from machines import machines

    from yolofleet.data.datasets.pack import shard

    os.environ["YOLOFLEET_CACHE"] = str(folder / "packing")
    data = make_set(folder / "files", options.images)
    shard(str(data), str(folder / "shards"), SHARD_BYTES, lambda *_: None)
    (folder / "large").mkdir()
    (folder / "large" / "object").write_bytes(os.urandom(LINK_BYTES))

    with machines(2) as lab:
        client, store = lab.hosts
        command = [sys.executable, server.__file__, store.address, str(folder / "log"), str(options.delay_ms)]
        names = [str(folder / name) for name in ("large", "shards", "files")]
        process = subprocess.Popen(
            store.argv(*command, *names), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout and process.stdin
        made = json.loads(process.stdout.readline())

        store.limit_rate(options.rate)
        access = server.Store(store.address, made["port"], made["key"], made["secret"]).environment()

        def run(what: str, address: str, cache: str) -> dict[str, float]:
            env = os.environ | access | {"YOLOFLEET_CACHE": str(folder / cache), "OMP_NUM_THREADS": "1"}
            env["YOLOFLEET_OFFLINE"] = "0"
            words = client.argv(sys.executable, __file__, "--read", what, address)
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found: dict[str, float] = json.loads(done.stdout)
            return found

        def show(what: str, found: dict[str, float], link: float = 0.0) -> float:
            rate = found["bytes"] / found["s"] / 1e6
            share = f", {rate / link:.0%} of the link" if link else ""
            sizes = f"{found['bytes'] / 1e6:.0f} MB in {found['s']:.1f} s, {rate:.2f} MB/s"
            print(f"{what}: {sizes}{share}", flush=True)
            return rate

        link = show("link, one object", run("link", "s3://bucket/large/object", "a"))
        show("index from shards", run("index", "s3://bucket/shards", "b"), link)
        show("loader, all files absent, shards", run("absent", "s3://bucket/shards", "b"), link)
        show("index from files", run("index", "s3://bucket/files", "c"), link)
        show("loader, all files absent, files", run("absent", "s3://bucket/files", "c"), link)
        places = {"shards": "s3://bucket/shards", "files": "s3://bucket/files", "the local disk": str(data)}
        for form, address in places.items():
            first = run("first step", address, f"first {form}")["s"]
            print(f"first step of a training from {form}: after {first:.1f} s", flush=True)
        ratios, seconds = [], []
        run("epoch", str(data), "d")
        for _ in range(options.turns):
            mirror, disk = run("epoch", "s3://bucket/shards", "b"), run("epoch", str(data), "d")
            ratios.append(mirror["s"] / disk["s"])
            seconds.append((mirror["s"], disk["s"]))
        print("an epoch, mirror and disk:", *(f"{a:.1f}/{b:.1f}" for a, b in seconds), "s")
        print(f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        process.stdin.close()
        process.wait()
    shutil.rmtree(folder / "packing", ignore_errors=True)


if __name__ == "__main__":
    main()
