"""Readers of files that somebody else made, each described once, and the kinds of damage that a file can have.

``tests/unit/test_damaged_files.py`` tries every pair of a reader and a kind of damage, and the content that
``tests/hostile.py`` has for some readers. The fuzzer (``tests/fuzz``) makes random
changes of the same good files (``tests/corpus.py``), and reads them with whole commands.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corpus import RECIPE, Corpus
from exported import small
from small_files import FLEET_FILE, TINY_YAML

from yolofleet.config.load import resolve_train
from yolofleet.config.recipe import load_recipe
from yolofleet.data.datasets.archive import unpack
from yolofleet.data.datasets.cocojson import parse_json
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.reader import LabelError
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.vocxml import read_annotation
from yolofleet.data.images.decode import read_image
from yolofleet.data.images.header import header_of_file
from yolofleet.families.networks.description import describe
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.weights.contents import contents
from yolofleet.families.weights.format import read_tensors
from yolofleet.families.weights.reader import read_weights
from yolofleet.fleet.doctor.log_files import read_log
from yolofleet.fleet.hosts.fleet import load_fleet
from yolofleet.inference.export.runtime import open_weights
from yolofleet.inference.predict.sources import Source
from yolofleet.runs.report.results import read_rows
from yolofleet.support.errors import CheckpointError, ConfigError, DataError, StorageError, YolofleetError

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """
    Attributes:
        good: a file or folder of the corpus, or a text; tests damage a copy.
        read: reads the copy.
        error: the only type of error that it may raise, or the only ones.
        file: the damaged file, if ``good`` is a folder.
        beside: other files of the corpus that it needs.
        junk: whether it must refuse bytes of another kind of file. A text may mean something in every form.
        drops: whether it returns the problem as a text instead, because the other files of a set are still of use.
        looks: whether what is no regular file counts as missing, so that no message names its kind.
        strict: whether it notices every changed byte, by a digest of the whole.
    """

    good: str
    read: Read
    error: type[Exception] | tuple[type[Exception], ...] = ConfigError
    file: str = ""
    beside: tuple[str, ...] = ()
    junk: bool = True
    drops: bool = False
    looks: bool = False
    strict: bool = False

    def copy(self, corpus: Corpus, folder: Path) -> Path:
        """Copy the good file into ``folder``; return the file that is to be damaged."""
        for name in self.beside:
            shutil.copy(corpus.get(name), folder)
        if "\n" in self.good:
            target = folder / "good.yaml"
            target.write_text(self.good)
            return target
        source, target = corpus.get(self.good), folder / Path(self.good).name
        if not source.is_dir():
            shutil.copy(source, target)
            return target
        shutil.copytree(source, target)
        return next(iter(sorted(target.glob(self.file))))


def problems_of(name: str, split: str, file: Path) -> str:
    """Index a split of the data set ``name`` in which ``file`` lies; return what the index says."""
    root = next(parent for parent in file.parents if parent.name == name)
    return " ".join(problem.what for problem in build_index(load_dataset(str(root)), split).problems)


def images_of(file: Path) -> None:
    """Read all images of a data set, which lies beside ``file``."""
    for split in ("train", "val"):
        index = build_index(load_dataset(str(file.parent)), split)
        for image in range(len(index)):
            read_image(index.path(image))


def problems_of_source(path: Path) -> str:
    source = Source(str(path))
    list(source)
    return " ".join(source.problems)


def unpacked(path: Path) -> None:
    unpack(path, path.parent / "out", strip="")


def header_or_image(path: Path) -> None:
    header_of_file(str(path))
    read_image(path)


weights = partial(Reader, read=read_weights, error=CheckpointError)
yaml = partial(Reader, junk=False)
READERS = {
    "torch": weights("module.pt"),
    "torch of one stream": weights("legacy.pt"),
    "weights": weights("best.safetensors", strict=True),
    "Darknet weights": weights("tiny.weights", beside=("tiny.cfg",)),
    "Paddle weights": Reader("ppyoloe.pdparams", lambda path: paddle.read(path, small("ppyoloe-s")), CheckpointError),
    "state of a run": Reader("run", read_tensors, CheckpointError, "checkpoints/step-*.safetensors", strict=True),
    "TorchScript": Reader("model.torchscript", lambda path: open_weights(str(path), trust=True), CheckpointError),
    "safetensors": Reader("plain.safetensors", contents, CheckpointError),
    "Darknet network": Reader("tiny.cfg", lambda path: describe(str(path))),
    "network": yaml(TINY_YAML, lambda path: describe(str(path))),
    "recipe": yaml(RECIPE, lambda path: load_recipe(str(path)), looks=True),
    "configuration": yaml("epochs: 3\ndevice: cpu\n", lambda path: resolve_train({"data": "d", "model": "yolov5n"}, config_file=str(path))),
    "fleet": yaml(FLEET_FILE, load_fleet),
    "data set": yaml("set", lambda path: load_dataset(str(path)), YolofleetError, "data.yaml", looks=True),
    "folder of a data set": yaml("set", lambda path: load_dataset(str(path.parent)), YolofleetError, "data.yaml"),
    "labels": Reader("set", partial(problems_of, "set", "train"), DataError, "labels/train/*0.txt", junk=False, drops=True),
    "list of images": Reader("listed", partial(problems_of, "listed", "train"), YolofleetError, "train.txt", junk=False, drops=True),
    "images of a data set": Reader("set", partial(problems_of, "set", "train"), DataError, "images/train/*0.*", drops=True),
    "index of shards": Reader("shards", lambda path: load_dataset(str(path.parent)), YolofleetError, "shards.jsonl", looks=True),
    "shard": Reader("shards", images_of, YolofleetError, "shard-00000.tar"),
    "labels of shards": Reader("shards", partial(problems_of, "shards", "train"), StorageError, "labels-00000.tar"),
    "COCO": Reader("coco", lambda path: parse_json(str(path)), DataError, "annotations/*train*.json"),
    "VOC": Reader("voc", lambda path: read_annotation(str(path)), LabelError, "Annotations/*.xml"),
    "masked": Reader("masked", partial(problems_of, "masked", "train"), DataError, "masks/train/*.png", drops=True),
    "labelme": Reader("labelme", partial(problems_of, "labelme", "train"), DataError, "train/*.json", junk=False, drops=True),
    "image": Reader("pictures/a.jpg", read_image, DataError),
    "part of an image": Reader("pictures/a.jpg", partial(read_image, seen=(5, 5, 9, 9)), DataError),
    "PNG": Reader("pictures/a.png", header_or_image, (DataError, OSError)),
    "TIFF": Reader("pictures/a.tiff", read_image, DataError),
    "WebP": Reader("pictures/a.webp", read_image, DataError),
    "video": Reader("videos/a.mp4", problems_of_source, DataError, drops=True, looks=True),
    "list of pictures": Reader("a.jpg\n", problems_of_source, YolofleetError, junk=False, looks=True),
    "zip": Reader("archives/a.zip", unpacked, (DataError, StorageError)),
    "tar": Reader("archives/a.tar", unpacked, (DataError, StorageError)),
    "tar.gz": Reader("archives/a.tar.gz", unpacked, (DataError, StorageError)),
    "log": Reader("a line of a log\n", read_log, junk=False),
    "results": Reader("epoch,step\n1,2\n", lambda path: str(read_rows(path)), StorageError, junk=False, drops=True, looks=True),
}  # fmt: skip

# -- what may lie in the place of a file


def link(target: str, path: Path) -> None:
    path.symlink_to(target)


def listener(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name[:100])
    finally:
        os.chdir(before)


def link_to_a_link(path: Path) -> None:
    (path.parent / "first").symlink_to("/dev/zero")
    path.symlink_to("first")


# name -> makes it, and a word of the message that refuses it; "" where systems differ
SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "named pipe"),
    "device": (partial(link, "/dev/zero"), "device"),
    "link to a link": (link_to_a_link, "device"),
    "link to nothing": (partial(link, "nowhere"), ""),
    "link to itself": (lambda path: path.symlink_to(path.name), ""),
    "socket": (listener, ""),
    "folder": (Path.mkdir, ""),
}

# -- other bytes

CUTS = (0.0, 0.02, 0.3, 0.6, 0.9, 0.999)
JUNK = {
    "text": b"I am another file\n" * 9,
    "zeros": bytes(400),
    "ones": b"\xff" * 400,
    "every byte": bytes(range(256)) * 3,
    "start of a zip": b"PK\x03\x04" + b"x" * 300,
    "start of a pickle": b"\x80\x02",
    "start of a picture": b"\x89PNG\r\n",
    "start of gzip": b"\x1f\x8b" + b"x" * 300,
    "huge header": (2**62).to_bytes(8, "little") + b"{",
    "pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "page of a server": b"<!doctype html><p>Not found</p>",
}


def changed(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield content that was cut off, and content with one changed byte at 24 places, most of them near its ends."""
    for cut in CUTS:
        yield f"cut at {cut:.1%}", content[: int(len(content) * cut)]
    yield "without its last byte", content[:-1]
    size = len(content)
    for at in {
        *range(0, min(size, 64), 8),
        *range(0, size, max(size // 8, 1)),
        *range(max(size - 64, 0), size, 8),
    }:
        yield f"byte {at} changed", content[:at] + bytes([content[at] ^ 0x81]) + content[at + 1 :]
    yield "twice", content + content
    yield "with NUL characters", content.replace(b"\n", b"\0") + b"\0"
    yield "nested deeply", content + b"\n" + b"[" * 50_000
    yield "control characters", content + b"\n\x1b[2J\x9b31m: \x1b]0;title\x07\n"
